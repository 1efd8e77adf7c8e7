//! Records that were set aside: what there is, and what each of them holds.

use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use baton_protocol::dead_letter::Cause;
use baton_protocol::lifecycle::Word as _;
use baton_protocol::lifecycle::delivery::{Event, LIFECYCLE, State};
use serde::Serialize;
use serde_json::json;
use sqlx::PgConnection;

use super::{Error, Stopped, transition, with_cause};

/// Which records. An empty one means all that are not settled.
#[derive(Debug, Clone, Default)]
pub struct Filter {
    /// Of this consumer.
    pub consumer: Option<String>,
    /// Of this topic.
    pub topic: Option<String>,
    /// With this record key.
    pub key: Option<Vec<u8>>,
    /// Given up for this cause.
    pub cause: Option<Cause>,
    /// In this state.
    pub state: Option<State>,
    /// That failed first longer ago than this.
    pub older_than: Option<Duration>,
    /// With one of these ids.
    pub ids: Vec<i64>,
    /// That bring this idempotency key.
    pub idempotency_key: Option<String>,
}

impl Filter {
    /// Whether it picks out nothing.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        let Self { consumer, topic, key, cause, state, older_than, ids, idempotency_key } = self;
        consumer.is_none()
            && topic.is_none()
            && key.is_none()
            && cause.is_none()
            && state.is_none()
            && older_than.is_none()
            && ids.is_empty()
            && idempotency_key.is_none()
    }

    /// Those that are settled are shown to whoever asks for them.
    fn states(&self) -> Option<Vec<&'static str>> {
        match self.state {
            Some(state) => Some(vec![state.as_str()]),
            None if !self.ids.is_empty() || self.idempotency_key.is_some() => None,
            None => {
                let unsettled = |state: &State| state.is_parked() && !LIFECYCLE.is_terminal(*state);
                Some(State::ALL.iter().copied().filter(unsettled).map(State::as_str).collect())
            }
        }
    }

    /// As an audit row tells it.
    pub(super) fn told(&self) -> serde_json::Value {
        let mut told = serde_json::Map::new();
        let mut tell = |name: &str, value: Option<serde_json::Value>| {
            told.extend(value.map(|value| (name.to_owned(), value)));
        };
        tell("consumer", self.consumer.as_ref().map(|text| json!(text)));
        tell("topic", self.topic.as_ref().map(|text| json!(text)));
        tell(
            "key",
            self.key.as_ref().map(|key| json!(String::from_utf8_lossy(key).replace('\0', "\u{fffd}"))),
        );
        tell("cause", self.cause.map(|cause| json!(cause.as_str())));
        tell("state", self.state.map(|state| json!(state.as_str())));
        tell("older_than_seconds", self.older_than.map(|span| json!(span.as_secs_f64())));
        tell("ids", (!self.ids.is_empty()).then(|| json!(self.ids)));
        tell("idempotency_key", self.idempotency_key.as_ref().map(|text| json!(text)));
        told.into()
    }
}

/// A record that was set aside.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Parked {
    /// By which commands name it. Within a key, the order.
    pub id: i64,
    /// The consumer that set it aside.
    pub consumer: String,
    /// The topic that it was read from.
    pub topic: String,
    /// Its key as text; null where it has none, or one that is no text.
    pub key: Option<String>,
    /// A key that is no text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key_base64: Option<String>,
    /// Its offset within the partition.
    pub position: i64,
    /// The partition that it was read from.
    pub partition: i32,
    /// Where it stands: `retrying`, `blocked`, `dead`, `done` or `discarded`.
    pub state: String,
    /// Why it was given up: as in `dlt-cause`.
    pub cause: Option<String>,
    /// What was said last.
    pub error: Option<String>,
    /// How many attempts were made.
    pub attempts: i32,
    /// RFC 3339, UTC.
    pub first_failed_at: String,
    /// RFC 3339, UTC.
    pub last_failed_at: Option<String>,
    /// RFC 3339, UTC.
    pub next_attempt_at: Option<String>,
    /// When it was done or discarded, RFC 3339, UTC.
    pub settled_at: Option<String>,
    /// Seconds since the first failure.
    pub age_seconds: f64,
    /// Raised whenever somebody takes it to try it.
    pub generation: i64,
    /// Who tries it, or last tried it and did not come to say how it ended.
    pub owner: Option<String>,
    /// Below zero: run out. Null: nobody tries it.
    pub lease_left_seconds: Option<f64>,
    /// The scope of its idempotency key.
    pub scope: String,
    /// The key that it is deduplicated by.
    pub idempotency_key: String,
    /// The first of its key that it waits for.
    pub behind: Option<i64>,
    /// Whether `requeue` takes it.
    pub can_run_again: bool,
    /// Null while it is being tried, and when it is settled.
    pub stopped: Option<Stopped>,
}

#[derive(sqlx::FromRow)]
pub(super) struct Row {
    pub(super) id: i64,
    consumer: String,
    topic: String,
    key: Option<Vec<u8>>,
    partition: i32,
    offset: i64,
    state: String,
    cause: Option<String>,
    error: Option<String>,
    attempts: i32,
    first_failed_at: String,
    last_failed_at: Option<String>,
    next_attempt_at: Option<String>,
    settled_at: Option<String>,
    age_seconds: f64,
    owner: Option<String>,
    generation: i64,
    lease_left_seconds: Option<f64>,
    scope: String,
    idempotency_key: String,
    behind: Option<i64>,
}

impl Row {
    pub(super) fn is_being_tried(&self) -> bool {
        self.lease_left_seconds.is_some_and(|left| left > 0.0)
    }

    fn stopped(&self) -> Option<Stopped> {
        let state = State::of_word(&self.state)?;
        let why = || with_cause(self.cause.as_deref(), self.error.as_deref());
        let (from, event, why) = match state {
            State::Retrying if self.is_being_tried() => return None,
            State::Retrying if self.lease_left_seconds.is_some() => {
                let who = self.owner.as_deref().unwrap_or("nobody");
                (
                    State::Retrying,
                    Event::Applied,
                    format!("{who} took it and did not come to say how it ended"),
                )
            }
            State::Retrying if self.generation == 0 => (State::Received, Event::Postponed, why()),
            State::Retrying => (State::Retrying, Event::Postponed, why()),
            State::Blocked => {
                let head = self.behind.map_or_else(|| "nothing".to_owned(), |head| head.to_string());
                (State::Received, Event::Queued, format!("it waits behind {head} of its key"))
            }
            State::Dead if self.generation == 0 => (State::Received, Event::GivenUp, why()),
            State::Dead => (State::Retrying, Event::GivenUp, why()),
            State::Received | State::Done | State::Discarded => return None,
        };
        let transition = transition(&LIFECYCLE, from, event);
        Some(Stopped { transition, generation: self.generation, why })
    }
}

impl From<Row> for Parked {
    fn from(row: Row) -> Self {
        let can_run_again = State::of_word(&row.state)
            .is_some_and(|state| state.next(Event::Requeued).is_ok() && !row.is_being_tried());
        let stopped = row.stopped();
        let (key, key_base64) = match row.key.map(String::from_utf8) {
            None => (None, None),
            Some(Ok(key)) => (Some(key), None),
            Some(Err(no_text)) => (None, Some(STANDARD.encode(no_text.as_bytes()))),
        };
        Self {
            id: row.id,
            consumer: row.consumer,
            topic: row.topic,
            key,
            key_base64,
            position: row.offset,
            partition: row.partition,
            state: row.state,
            cause: row.cause,
            error: row.error,
            attempts: row.attempts,
            first_failed_at: row.first_failed_at,
            last_failed_at: row.last_failed_at,
            next_attempt_at: row.next_attempt_at,
            settled_at: row.settled_at,
            age_seconds: row.age_seconds,
            generation: row.generation,
            owner: row.owner,
            lease_left_seconds: row.lease_left_seconds,
            scope: row.scope,
            idempotency_key: row.idempotency_key,
            behind: row.behind,
            can_run_again,
            stopped,
        }
    }
}

/// What was set aside, in order.
///
/// # Errors
///
/// [`Error::Read`].
///
/// # Cancel safety
///
/// Reads only; the connection must be closed if the future is dropped.
pub async fn list(connection: &mut PgConnection, filter: &Filter) -> Result<Vec<Parked>, Error> {
    let rows = rows(connection, filter).await?;
    Ok(rows.into_iter().map(Parked::from).collect())
}

pub(super) async fn rows(connection: &mut PgConnection, filter: &Filter) -> Result<Vec<Row>, Error> {
    sqlx::query_as(include_str!("../../queries/operate_parked.sql"))
        .bind(&filter.consumer)
        .bind(&filter.topic)
        .bind(&filter.key)
        .bind(filter.cause.map(Cause::as_str))
        .bind(filter.states())
        .bind(filter.older_than.map(|span| span.as_secs_f64()))
        .bind((!filter.ids.is_empty()).then_some(&filter.ids))
        .bind(&filter.idempotency_key)
        .fetch_all(connection)
        .await
        .map_err(Error::Read)
}

/// What a record holds.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Content {
    /// None: a tombstone.
    pub payload: Option<Vec<u8>>,
    /// In order; a value may be null.
    pub headers: Vec<(String, Option<Vec<u8>>)>,
}

/// Bytes in JSON, as `outbox.message.headers` has them: a text, `null`, or `{"base64": "…"}` where they are no text.
#[must_use]
pub fn text_or_base64(bytes: Option<&[u8]>) -> serde_json::Value {
    match bytes.map(|bytes| std::str::from_utf8(bytes).map_err(|_| bytes)) {
        None => serde_json::Value::Null,
        Some(Ok(text)) => json!(text),
        Some(Err(bytes)) => json!({"base64": STANDARD.encode(bytes)}),
    }
}

/// What the record with that id holds; none where there is no such record.
///
/// # Errors
///
/// [`Error::Read`].
///
/// # Cancel safety
///
/// Reads only; the connection must be closed if the future is dropped.
pub async fn content(connection: &mut PgConnection, id: i64) -> Result<Option<Content>, Error> {
    let row: Option<(Option<Vec<u8>>, String)> =
        sqlx::query_as(include_str!("../../queries/operate_record.sql"))
            .bind(id)
            .fetch_optional(connection)
            .await
            .map_err(Error::Read)?;
    let Some((payload, stored)) = row else { return Ok(None) };
    let unreadable = |error| Error::Read(sqlx::Error::Decode(error));
    let stored: Vec<(String, Option<String>)> =
        serde_json::from_str(&stored).map_err(|error| unreadable(error.into()))?;
    let decoded = stored.into_iter().map(|(name, value)| {
        let value = value.map(|value| STANDARD.decode(value)).transpose();
        value.map(|value| (name, value)).map_err(|error| unreadable(error.into()))
    });
    Ok(Some(Content { payload, headers: decoded.collect::<Result<_, _>>()? }))
}

//! What operators do about messages that are set aside: list, requeue, discard; and pausing a topic.
//!
//! Every command that changes something is one statement, which writes its row of the audit table too: there is no change without
//! one, and none that is done by half. It needs no lease and waits for no relay: rows are changed by the state they are in, so an
//! operator and a relay that settles the same message race safely. The shard's owner notices within a second.
//!
//! ```text
//! retrying, dead ── requeue ──▶ retrying, due now, with a new budget
//! retrying, blocked, paused, dead ── discard ──▶ discarded; the next of the key is retrying
//! paused ── resume ──▶ retrying; the attempts stay as they are
//! ```

use std::time::Duration;

use baton_protocol::lifecycle::Word as _;
use baton_protocol::lifecycle::message::{Cause, Event, LIFECYCLE, State};
use serde::Serialize;
use sqlx::postgres::PgConnection;
use uuid::Uuid;

use crate::database::{Error, answer};
use crate::refusal;

/// How long a command may take: one may change as many rows as shards may set aside.
const PATIENCE: Duration = Duration::from_secs(300);

/// Which messages are meant. What is not set restricts nothing.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Filter {
    /// These messages.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub ids: Vec<Uuid>,
    /// Of this topic.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub topic: Option<String>,
    /// Of this key.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// For this cause, as one word.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cause: Option<String>,
    /// In this state, as one word.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub state: Option<String>,
    /// First set aside so long ago at least, in seconds.
    #[serde(skip_serializing_if = "Option::is_none", rename = "older_than_seconds")]
    pub older_than: Option<f64>,
}

impl Filter {
    /// Whether it restricts nothing.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    fn some_ids(&self) -> Option<&[Uuid]> {
        (!self.ids.is_empty()).then_some(&self.ids)
    }
}

/// A message that is set aside, or was. Times are RFC 3339 in UTC.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Item {
    /// The message.
    pub id: Uuid,
    /// Its topic.
    pub topic: String,
    /// Its key; null when it has none.
    pub key: Option<String>,
    /// Its position in the outbox.
    pub position: i64,
    /// The shard that it belongs to.
    pub shard: i16,
    /// Where it stands, as one word.
    pub state: String,
    /// Why, as one word; null for one that only waits behind another.
    pub cause: Option<String>,
    /// What Kafka said, or the check before it.
    pub error: Option<String>,
    /// How often it was tried.
    pub attempts: i32,
    /// When it was enqueued.
    pub created_at: String,
    /// When it was set aside.
    pub first_failed_at: String,
    /// When it was refused last.
    pub last_failed_at: Option<String>,
    /// When it is tried next, if it is.
    pub next_attempt_at: Option<String>,
    /// That of the lease under which it was changed last.
    pub generation: i64,
    /// Whether `requeue` takes it.
    pub can_run_again: bool,
    /// Which transition does not come about; null for one that is settled.
    pub transition: Option<String>,
    /// What an operator can do about it.
    pub advice: Option<String>,
    /// The first one of its key, if it waits behind that.
    pub behind: Option<Uuid>,
    /// Seconds since it was set aside.
    pub age_seconds: f64,
}

#[derive(sqlx::FromRow)]
struct ItemRow {
    id: Uuid,
    topic: String,
    key: Option<String>,
    position: i64,
    shard: i16,
    state: String,
    cause: Option<String>,
    error: Option<String>,
    attempts: i32,
    created_at: String,
    first_failed_at: String,
    last_failed_at: Option<String>,
    next_attempt_at: Option<String>,
    generation: i64,
    behind: Option<Uuid>,
    age_seconds: f64,
}

impl From<ItemRow> for Item {
    fn from(row: ItemRow) -> Self {
        let state = State::of_word(&row.state);
        let cause = row.cause.as_deref().and_then(Cause::of_word);
        Self {
            can_run_again: state.is_some_and(|state| state.next(Event::Requeued).is_ok()),
            transition: state.and_then(stopped_at),
            advice: state.and_then(|state| advice(state, cause, row.behind)),
            id: row.id,
            topic: row.topic,
            key: row.key,
            position: row.position,
            shard: row.shard,
            state: row.state,
            cause: row.cause,
            error: row.error,
            attempts: row.attempts,
            created_at: row.created_at,
            first_failed_at: row.first_failed_at,
            last_failed_at: row.last_failed_at,
            next_attempt_at: row.next_attempt_at,
            generation: row.generation,
            behind: row.behind,
            age_seconds: row.age_seconds,
        }
    }
}

/// Which transition does not come about.
fn stopped_at(state: State) -> Option<String> {
    let (from, event) = match state {
        State::Retrying | State::Dead => (State::Retrying, Event::Acknowledged),
        State::Blocked => (State::Blocked, Event::Unblocked),
        State::Paused => (State::Paused, Event::Resumed),
        State::Pending | State::Published | State::Discarded => return None,
    };
    Some(format!("{from} → {}", LIFECYCLE.next(from, event).ok()?))
}

fn advice(state: State, cause: Option<Cause>, behind: Option<Uuid>) -> Option<String> {
    match (state, cause, behind) {
        (State::Blocked, _, Some(behind)) => Some(format!("settle the one that it waits behind: {behind}")),
        (State::Paused, ..) => Some("resume the topic: baton resume --topic …".to_owned()),
        (State::Dead, Some(cause), _) => {
            Some(format!("{}; then requeue it, or discard it", refusal::advice(cause)))
        }
        (State::Retrying, Some(cause), _) if cause != Cause::Paused => {
            Some(refusal::advice(cause).to_owned())
        }
        _ => None,
    }
}

/// How many messages there are of one state and cause.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, sqlx::FromRow)]
#[non_exhaustive]
pub struct Count {
    /// The state, as one word.
    pub state: String,
    /// The cause, as one word.
    pub cause: Option<String>,
    /// How many.
    pub count: i64,
}

/// Binds a filter's six parameters.
macro_rules! filtered {
    ($query:expr, $filter:expr) => {
        $query
            .bind($filter.some_ids().map(<[Uuid]>::to_vec))
            .bind($filter.topic.as_deref())
            .bind($filter.key.as_deref())
            .bind($filter.cause.as_deref())
            .bind($filter.state.as_deref())
            .bind($filter.older_than)
    };
}

/// The messages that a filter means, in the order in which they were set aside, `limit` at most. Settled ones only where their state or
/// their id is asked for.
///
/// # Errors
/// When the database fails or the outbox is not migrated.
///
/// # Cancel safety
/// Reads only; the connection must be closed if the future is dropped.
pub async fn list(connection: &mut PgConnection, filter: &Filter, limit: u32) -> Result<Vec<Item>, Error> {
    let asked = sqlx::query_as(include_str!("../queries/parked_list.sql"));
    let asked = filtered!(asked, filter).bind(i64::from(limit)).fetch_all(connection);
    let rows: Vec<ItemRow> = answer("listing what is parked", PATIENCE, asked).await?;
    Ok(rows.into_iter().map(Item::from).collect())
}

/// How many unsettled messages a filter means, by state and cause.
///
/// # Errors
/// When the database fails or the outbox is not migrated.
///
/// # Cancel safety
/// Reads only; the connection must be closed if the future is dropped.
pub async fn count(connection: &mut PgConnection, filter: &Filter) -> Result<Vec<Count>, Error> {
    let asked = sqlx::query_as(include_str!("../queries/parked_count.sql"));
    let asked = filtered!(asked, filter).fetch_all(connection);
    let rows: Vec<(String, Option<String>, i64)> = answer("counting what is parked", PATIENCE, asked).await?;
    Ok(rows.into_iter().map(|(state, cause, count)| Count { state, cause, count }).collect())
}

/// Has the messages that a filter means tried once more, now, with a new budget: those that are retrying or dead. How many.
///
/// # Errors
/// When the database fails, the outbox is not migrated, or the role is no `baton_operator`. Nothing is changed then.
///
/// # Cancel safety
/// One statement: dropped, it is done or it is not.
pub async fn requeue(connection: &mut PgConnection, filter: &Filter) -> Result<i64, Error> {
    let asked = sqlx::query_scalar(include_str!("../queries/parked_requeue.sql"));
    let asked = filtered!(asked, filter).bind(told(filter)).fetch_one(connection);
    answer("requeueing what is parked", PATIENCE, asked).await
}

/// Gives the messages that a filter means up for good; the next of each key is tried. How many.
///
/// # Errors
/// When the database fails, the outbox is not migrated, or the role is no `baton_operator`. Nothing is changed then.
///
/// # Cancel safety
/// One statement: dropped, it is done or it is not.
pub async fn discard(connection: &mut PgConnection, filter: &Filter) -> Result<i64, Error> {
    let asked = sqlx::query_scalar(include_str!("../queries/parked_discard.sql"));
    let asked = filtered!(asked, filter).bind(told(filter)).fetch_one(connection);
    answer("discarding what is parked", PATIENCE, asked).await
}

fn told(filter: &Filter) -> String {
    serde_json::to_string(filter).unwrap_or_else(|_| "{}".to_owned())
}

/// What pausing a topic did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pause {
    /// Relays notice within a second or two; what they have handed to Kafka by then goes.
    Paused,
    /// It was paused before.
    AlreadyPaused,
}

/// Pauses a topic: its messages are set aside, in order, until it is resumed.
///
/// # Errors
/// When the database fails, the outbox is not migrated, or the role is no `baton_operator`. Nothing is changed then.
///
/// # Cancel safety
/// One statement: dropped, it is done or it is not.
pub async fn pause(connection: &mut PgConnection, topic: &str) -> Result<Pause, Error> {
    let asked =
        sqlx::query_scalar(include_str!("../queries/topic_pause.sql")).bind(topic).fetch_one(connection);
    let paused: i64 = answer("pausing a topic", PATIENCE, asked).await?;
    Ok(if paused == 0 { Pause::AlreadyPaused } else { Pause::Paused })
}

/// What resuming a topic did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Resume {
    /// So many messages waited for it, and are published in the order of their keys.
    Resumed {
        /// Those behind the first of a key included.
        waiting: i64,
    },
    /// It was not.
    NotPaused,
}

/// Resumes a topic.
///
/// # Errors
/// When the database fails, the outbox is not migrated, or the role is no `baton_operator`. Nothing is changed then.
///
/// # Cancel safety
/// One statement: dropped, it is done or it is not.
pub async fn resume(connection: &mut PgConnection, topic: &str) -> Result<Resume, Error> {
    let asked = sqlx::query_as(include_str!("../queries/topic_resume.sql")).bind(topic).fetch_one(connection);
    let (was_paused, waiting): (bool, i64) = answer("resuming a topic", PATIENCE, asked).await?;
    Ok(if was_paused { Resume::Resumed { waiting } } else { Resume::NotPaused })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_each_state_it_is_said_which_transition_stopped_and_whether_it_can_run_again() {
        let of = |state: State| (stopped_at(state), state.next(Event::Requeued).is_ok());
        assert_eq!(of(State::Retrying), (Some("retrying → published".to_owned()), true));
        assert_eq!(of(State::Dead), (Some("retrying → published".to_owned()), true));
        assert_eq!(of(State::Blocked), (Some("blocked → retrying".to_owned()), false));
        assert_eq!(of(State::Paused), (Some("paused → retrying".to_owned()), false));
        assert_eq!(of(State::Published), (None, false));
        assert_eq!(of(State::Discarded), (None, false));
    }

    #[test]
    fn what_an_operator_asked_for_is_told_without_what_he_did_not() {
        let filter = Filter { topic: Some("orders".to_owned()), older_than: Some(60.0), ..Filter::default() };
        assert_eq!(told(&filter), r#"{"topic":"orders","older_than_seconds":60.0}"#);
        assert!(!filter.is_empty() && Filter::default().is_empty());
    }
}

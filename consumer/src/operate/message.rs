//! What consumers know of one idempotency key.

use baton_protocol::lifecycle::lease::{Event, LIFECYCLE, State};
use serde::Serialize;
use serde_json::value::RawValue;
use sqlx::PgConnection;

use super::{Error, Stopped, transition, with_cause};

/// One consumer's row of one key in one scope.
#[derive(Debug, Serialize)]
#[non_exhaustive]
pub struct Known {
    /// The consumer.
    pub consumer: String,
    /// What separates keys that mean different things; by default the topic and the type.
    pub scope: String,
    /// The idempotency key.
    pub key: String,
    /// As it is stored: `in_progress`, `done` or `dead`.
    pub state: String,
    /// Who has, or last had, a lease on it; null where it is owned by its transaction.
    pub owner: Option<String>,
    /// Raised by every claim of a lease and by every requeue.
    pub generation: i64,
    /// Below zero: run out. Null: no lease.
    pub lease_left_seconds: Option<f64>,
    /// How many attempts were made.
    pub attempts: i32,
    /// What the handler left, if anything.
    pub outcome: Option<Box<RawValue>>,
    /// Why it is dead: as in `dlt-cause`.
    pub cause: Option<String>,
    /// What was said then.
    pub error: Option<String>,
    /// The topic of the record that brought it; null where no record did.
    pub topic: Option<String>,
    /// Its partition.
    pub partition: Option<i32>,
    /// Its offset.
    pub offset: Option<i64>,
    /// Its timestamp, RFC 3339 in UTC.
    pub record_time: Option<String>,
    /// When it was first claimed, RFC 3339 in UTC.
    pub created_at: String,
    /// When it was done or given up, RFC 3339 in UTC.
    pub finished_at: Option<String>,
    /// Null while it is being run, and when it is done.
    pub stopped: Option<Stopped>,
    /// Whether it can, or will, be run again.
    pub can_run_again: bool,
    /// How.
    pub how: Option<String>,
}

#[derive(sqlx::FromRow)]
struct Row {
    consumer: String,
    scope: String,
    key: String,
    state: String,
    owner: Option<String>,
    generation: i64,
    lease_left_seconds: Option<f64>,
    attempts: i32,
    outcome: Option<String>,
    cause: Option<String>,
    error: Option<String>,
    topic: Option<String>,
    partition: Option<i32>,
    offset: Option<i64>,
    record_time: Option<String>,
    created_at: String,
    finished_at: Option<String>,
}

/// What the consumers, or one of them, know of `key`, in order of consumer and scope.
///
/// # Errors
///
/// [`Error::Read`].
///
/// # Cancel safety
///
/// Reads only; the connection must be closed if the future is dropped.
pub async fn known(
    connection: &mut PgConnection,
    key: &str,
    consumer: Option<&str>,
) -> Result<Vec<Known>, Error> {
    let rows: Vec<Row> = sqlx::query_as(include_str!("../../queries/operate_message.sql"))
        .bind(key)
        .bind(consumer)
        .fetch_all(connection)
        .await
        .map_err(Error::Read)?;
    Ok(rows.into_iter().map(Known::of).collect())
}

/// Where it stands, in the words of the lifecycle, and of its row alone.
fn state_of(row: &Row) -> Option<State> {
    match (row.state.as_str(), row.lease_left_seconds) {
        ("done", _) => Some(State::Done),
        ("dead", _) => Some(State::Dead),
        ("in_progress", Some(left)) if left > 0.0 => Some(State::Held),
        ("in_progress", Some(_)) => Some(State::Expired),
        ("in_progress", None) => Some(State::Free),
        _ => None,
    }
}

impl Known {
    fn of(row: Row) -> Self {
        let (stopped, how) = told(&row);
        // What a handler left is JSON; what is not would be another version's.
        let outcome = row.outcome.and_then(|text| RawValue::from_string(text).ok());
        Self {
            consumer: row.consumer,
            scope: row.scope,
            key: row.key,
            state: row.state,
            owner: row.owner,
            generation: row.generation,
            lease_left_seconds: row.lease_left_seconds,
            attempts: row.attempts,
            outcome,
            cause: row.cause,
            error: row.error,
            topic: row.topic,
            partition: row.partition,
            offset: row.offset,
            record_time: row.record_time,
            created_at: row.created_at,
            finished_at: row.finished_at,
            stopped,
            can_run_again: how.is_some(),
            how,
        }
    }
}

/// Which transition stopped it and why, and how it can be run again.
fn told(row: &Row) -> (Option<Stopped>, Option<String>) {
    let stopped = |transition, why| Some(Stopped { transition, generation: row.generation, why });
    match state_of(row) {
        Some(State::Dead) => {
            let from = if row.owner.is_some() { State::Held } else { State::Free };
            let why = with_cause(row.cause.as_deref(), row.error.as_deref());
            let how = "where a record of it was set aside, `baton inbox parked requeue`; else by a replay of its dead letter";
            (stopped(transition(&LIFECYCLE, from, Event::Buried), why), Some(how.to_owned()))
        }
        Some(State::Expired) => {
            let ago = row.lease_left_seconds.map_or(0.0, |left| -left);
            let why = format!(
                "its lease, of {}, is over since {ago:.1}s",
                row.owner.as_deref().unwrap_or("nobody")
            );
            let how = "by itself: the next claim asks whether it took effect, and runs it if not";
            (stopped(transition(&LIFECYCLE, State::Held, Event::Expired), why), Some(how.to_owned()))
        }
        Some(State::Free) if row.owner.is_none() && row.attempts == 0 => {
            let why = "an operator requeued it, and it has not been run since".to_owned();
            let how = "by itself, when its record's turn comes";
            (stopped(transition(&LIFECYCLE, State::Dead, Event::Requeued), why), Some(how.to_owned()))
        }
        Some(State::Free) => {
            let why =
                "its action ended the transaction itself: whether it took effect is not known".to_owned();
            (stopped(transition(&LIFECYCLE, State::Free, Event::Claimed), why), None)
        }
        Some(State::Held | State::Done) | None => (None, None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(state: &str, owner: Option<&str>, left: Option<f64>, attempts: i32) -> Row {
        Row {
            consumer: "billing".to_owned(),
            scope: "s".to_owned(),
            key: "k".to_owned(),
            state: state.to_owned(),
            owner: owner.map(str::to_owned),
            generation: 4,
            lease_left_seconds: left,
            attempts,
            outcome: None,
            cause: (state == "dead").then(|| "exhausted".to_owned()),
            error: (state == "dead").then(|| "card declined".to_owned()),
            topic: None,
            partition: None,
            offset: None,
            record_time: None,
            created_at: String::new(),
            finished_at: None,
        }
    }

    #[test]
    fn each_state_says_which_transition_stopped_it_and_whether_it_can_be_run_again() {
        let told = |row: Row| {
            let (stopped, how) = told(&row);
            (stopped.map(|stopped| stopped.transition), how.is_some())
        };
        let expected = |transition: &str, again| (Some(transition.to_owned()), again);
        assert_eq!(told(row("dead", None, None, 1)), expected("free → dead (buried)", true));
        assert_eq!(told(row("dead", Some("a/1"), None, 1)), expected("held → dead (buried)", true));
        assert_eq!(
            told(row("in_progress", Some("a/1"), Some(-2.0), 1)),
            expected("held → expired (expired)", true)
        );
        assert_eq!(told(row("in_progress", None, None, 0)), expected("dead → free (requeued)", true));
        assert_eq!(told(row("in_progress", None, None, 1)), expected("free → held (claimed)", false));
        assert_eq!(told(row("in_progress", Some("a/1"), Some(2.0), 1)), (None, false));
        assert_eq!(told(row("done", None, None, 1)), (None, false));
        let (stopped, _) = super::told(&row("dead", None, None, 1));
        let stopped = stopped.unwrap();
        assert_eq!((stopped.generation, stopped.why.as_str()), (4, "exhausted: card declined"));
    }
}

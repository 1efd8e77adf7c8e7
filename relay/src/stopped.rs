//! A shard that stands still, because Kafka refuses a message of it: what operators can ask about it.
//!
//! ```text
//!  shard ──report──▶ session ──one guarded statement──▶ outbox.stopped, one row a shard ──▶ status
//! ```
//!
//! The row says which message, why, how often and under which generation. It is written under the lease: owner,
//! generation, expiry and crash token stand in the statement, and zero rows is *fenced*. Nothing takes it away again: it
//! counts as long as the message is there and the shard's durable cursor does not cover it, so it stays true when the relay
//! is killed, and ends by itself when the message is published. A report that finds no room is dropped; the next attempt
//! makes another.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use baton_protocol::lifecycle::Word as _;
use baton_protocol::lifecycle::message::Cause;
use sqlx::postgres::PgConnection;
use uuid::Uuid;

use crate::cursor::Cursor;
use crate::database::{Error, answer};
use crate::refusal;

/// The longest error text that is kept, in characters.
const ERROR_LENGTH: usize = 1_000;

/// A message that stops its shard, as this process knows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stopped {
    /// The message.
    pub id: Uuid,
    /// Its position in the outbox.
    pub position: i64,
    /// Its topic.
    pub topic: String,
    /// Why, as one word.
    pub cause: &'static str,
    /// What an operator can do about it.
    pub advice: &'static str,
    /// How often this relay was refused it without a break.
    pub attempts: u32,
}

impl Stopped {
    /// One more refusal, after what was known of the shard. Whether it is said aloud: at the first one, when the cause is another,
    /// and at every doubling, so that a night's refusals do not bury what else is in the log.
    fn refused(earlier: Option<&Self>, id: Uuid, position: i64, topic: String, cause: Cause) -> (Self, Say) {
        let earlier = earlier.filter(|earlier| earlier.id == id);
        let attempts = earlier.map_or(1, |earlier| earlier.attempts.saturating_add(1));
        let say =
            if earlier.is_none_or(|earlier| earlier.cause != cause.as_str()) || attempts.is_power_of_two() {
                Say::Aloud
            } else {
                Say::Quietly
            };
        (Self { id, position, topic, cause: cause.as_str(), advice: refusal::advice(cause), attempts }, say)
    }

    /// Whether a cursor that came here has passed the message. Late rows come first, in order of position; while they are
    /// worked off, what counts is how far these are.
    fn is_passed_by(&self, cursor: &Cursor) -> bool {
        self.position
            <= cursor.late.as_ref().map_or(cursor.position, |late| late.position.min(cursor.position))
    }
}

/// How a refusal is logged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Say {
    Aloud,
    Quietly,
}

/// Remembers that a shard's message was refused once more.
pub(crate) fn remember(
    shards: &StoppedShards,
    shard: i16,
    id: Uuid,
    position: i64,
    topic: String,
    cause: Cause,
) -> (Stopped, Say) {
    let mut shards = shards.lock().unwrap_or_else(PoisonError::into_inner);
    let (stopped, say) = Stopped::refused(shards.get(&shard), id, position, topic, cause);
    shards.insert(shard, stopped.clone());
    (stopped, say)
}

/// What stopped a shard whose durable cursor came here, if that is over now.
pub(crate) fn passed(shards: &StoppedShards, shard: i16, cursor: &Cursor) -> Option<Stopped> {
    let mut shards = shards.lock().unwrap_or_else(PoisonError::into_inner);
    shards.get(&shard).filter(|stopped| stopped.is_passed_by(cursor))?;
    shards.remove(&shard)
}

/// The shard is let go: what stops it is the next owner's to know.
pub(crate) fn forget(shards: &StoppedShards, shard: i16) {
    shards.lock().unwrap_or_else(PoisonError::into_inner).remove(&shard);
}

/// What stops the shards that others hold, as they have written it down. `ours` are the generations of this process.
pub(crate) async fn elsewhere(
    connection: &mut PgConnection,
    ours: &BTreeMap<i16, i64>,
    patience: Duration,
) -> Result<BTreeMap<i16, Stopped>, Error> {
    let asked = sqlx::query_as(include_str!("../queries/stopped_elsewhere.sql"))
        .bind(ours.keys().copied().collect::<Vec<_>>())
        .bind(ours.values().copied().collect::<Vec<_>>())
        .fetch_all(connection);
    let rows: Vec<(i16, Uuid, i64, String, String, i32)> =
        answer("reading what stops the shards of others", patience, asked).await?;
    Ok(rows
        .into_iter()
        .filter_map(|(shard, id, position, topic, cause, attempts)| {
            let cause = Cause::of_word(&cause)?;
            let (cause, advice) = (cause.as_str(), refusal::advice(cause));
            let attempts = u32::try_from(attempts).unwrap_or(u32::MAX);
            Some((shard, Stopped { id, position, topic, cause, advice, attempts }))
        })
        .collect())
}

/// The shards that a refused message has stopped.
pub(crate) type StoppedShards = Arc<Mutex<BTreeMap<i16, Stopped>>>;

/// An attempt that Kafka refused.
#[derive(Debug)]
pub(crate) struct Report {
    pub shard: i16,
    pub generation: i64,
    /// The crash token that the claim remembered.
    pub token: Uuid,
    /// The message's.
    pub position: i64,
    pub cause: Cause,
    pub error: String,
    /// Until the next attempt.
    pub delay: Duration,
}

/// What became of a report.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// It is the message's so many-th refusal.
    Written {
        attempts: i32,
    },
    /// The message is not there any more: nothing stops the shard.
    Gone,
    Fenced,
}

/// Writes a report down, if the shard still is this owner's by this generation.
pub(crate) async fn write(
    connection: &mut PgConnection,
    owner: &str,
    report: &Report,
    patience: Duration,
) -> Result<Outcome, Error> {
    let error: String = report.error.chars().filter(|c| *c != '\0').take(ERROR_LENGTH).collect();
    let asked = sqlx::query_scalar(include_str!("../queries/stopped_write.sql"))
        .bind(owner)
        .bind(report.token)
        .bind(report.shard)
        .bind(report.generation)
        .bind(report.position)
        .bind(report.cause.as_str())
        .bind(error)
        .bind(i64::try_from(report.delay.as_millis()).unwrap_or(i64::MAX))
        .fetch_optional(connection);
    let row: Option<Option<i32>> = answer("writing down what stops a shard", patience, asked).await?;
    Ok(match row {
        None => Outcome::Fenced,
        Some(None) => Outcome::Gone,
        Some(Some(attempts)) => Outcome::Written { attempts },
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cursor::Late;

    fn cursor(position: i64, late: Option<i64>) -> Cursor {
        let late = late.map(|position| Late { snapshot: "20:20:".to_owned(), position });
        Cursor { position, snapshot: "10:10:".to_owned(), ceiling: "10".to_owned(), late }
    }

    #[test]
    fn a_refusal_is_said_first_then_at_every_doubling_and_whenever_its_cause_is_another() {
        let id = Uuid::from_u128(1);
        let (mut known, mut said) = (None, Vec::new());
        for attempt in 1..=20 {
            let cause = if attempt >= 11 { Cause::NotAuthorized } else { Cause::UnknownTopic };
            let (stopped, say) = Stopped::refused(known.as_ref(), id, 7, "orders".to_owned(), cause);
            assert_eq!(stopped.attempts, attempt);
            if say == Say::Aloud {
                said.push(attempt);
            }
            known = Some(stopped);
        }
        assert_eq!(said, [1, 2, 4, 8, 11, 16]);
        // Another message is counted from one, and said.
        let (other, say) = Stopped::refused(
            known.as_ref(),
            Uuid::from_u128(2),
            9,
            "orders".to_owned(),
            Cause::NotAuthorized,
        );
        assert_eq!((other.attempts, say), (1, Say::Aloud));
    }

    #[test]
    fn a_shard_flows_again_once_its_cursor_has_passed_the_message_and_not_before() {
        let shards = StoppedShards::default();
        remember(&shards, 3, Uuid::nil(), 100, "orders".to_owned(), Cause::TooLarge);
        assert_eq!(passed(&shards, 3, &cursor(99, None)), None, "rows before it");
        assert_eq!(
            passed(&shards, 3, &cursor(200, Some(99))),
            None,
            "late rows before it, of which it is one"
        );
        assert_eq!(passed(&shards, 4, &cursor(200, None)), None, "another shard");
        assert_eq!(passed(&shards, 3, &cursor(100, None)).map(|stopped| stopped.position), Some(100));
        assert_eq!(passed(&shards, 3, &cursor(100, None)), None, "said once");
        remember(&shards, 3, Uuid::nil(), 100, "orders".to_owned(), Cause::TooLarge);
        assert!(passed(&shards, 3, &cursor(200, Some(150))).is_some());
    }
}

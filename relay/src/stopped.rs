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
use std::sync::{Arc, Mutex};
use std::time::Duration;

use sqlx::postgres::PgConnection;
use uuid::Uuid;

use crate::database::{Error, answer};
use crate::publish::Cause;

/// The longest error text that is kept, in characters.
const ERROR_LENGTH: usize = 1_000;

/// A message that stops its shard, as this process knows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stopped {
    /// The message.
    pub id: Uuid,
    /// Its topic.
    pub topic: String,
    /// Why, as one word.
    pub cause: &'static str,
    /// What an operator can do about it.
    pub advice: &'static str,
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

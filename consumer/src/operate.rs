//! What an operator asks of an inbox, and may change in it: `baton inbox` is written with this, and a service's own tool may be.
//!
//! ```text
//! message::known ─▶ every consumer's row of one idempotency key      parked::list ─▶ what was set aside
//!
//! decide: requeue ──┬─ dead ─────▶ retrying, attempts from 0, its inbox row nobody's ┐  under the key's lock,
//!                  └─ retrying ─▶ due now                                            ├  with the audit row,
//! decide: discard ──── any ──────▶ discarded, the next of its key retrying            ┘  in one transaction
//!
//! purge::run ─▶ what is finished and old goes, by the consumers' own purge
//! ```
//!
//! States change by the table of [`delivery`](baton_protocol::lifecycle::delivery), guarded in the statement: a record that a
//! process is trying at this moment, which its lease tells, is never touched, and neither is one whose state has changed since it was
//! looked at; both are told. The consumers need not be stopped.
//!
//! *On failure.* Each transaction is there completely, with its audit row, or not at all. The same command again takes what is left.

pub mod decide;
pub mod message;
pub mod parked;
pub mod purge;

use baton_protocol::lifecycle::{Lifecycle, Word};
use serde::Serialize;
use sqlx::PgConnection;

/// Why the inbox did not answer, or what was not changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// It cannot be read.
    #[error(
        "cannot read the inbox; the role needs SELECT there, as baton_operator and baton_readonly have it"
    )]
    Read(#[source] sqlx::Error),
    /// It cannot be changed; of this transaction nothing is.
    #[error(
        "cannot change the inbox; the role needs what baton_operator may (`baton migrate inbox` grants it)"
    )]
    Change(#[source] sqlx::Error),
    /// The purge ended; the batches before are purged.
    #[error("cannot purge the inbox of {consumer:?}")]
    Purge {
        /// Whose.
        consumer: String,
        /// Why.
        #[source]
        source: crate::inbox::Error,
    },
}

/// What stopped where it is, as an operator may ask of it (R34).
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Stopped {
    /// The last transition that it made, or the one that does not come about.
    pub transition: String,
    /// That of the last lease on it; 0 where there was none.
    pub generation: i64,
    /// In words.
    pub why: String,
}

/// The consumers that have anything in this inbox, in order.
///
/// # Errors
///
/// [`Error::Read`].
///
/// # Cancel safety
///
/// Reads only; the connection must be closed if the future is dropped.
pub async fn consumers(connection: &mut PgConnection) -> Result<Vec<String>, Error> {
    sqlx::query_scalar(include_str!("../queries/operate_consumers.sql"))
        .fetch_all(connection)
        .await
        .map_err(Error::Read)
}

/// Leaves a trace, in the transaction that makes the change.
pub(crate) async fn audit(
    tx: &mut PgConnection,
    command: &str,
    arguments: &serde_json::Value,
    affected: u64,
) -> Result<(), sqlx::Error> {
    sqlx::query(include_str!("../queries/operate_audit.sql"))
        .bind(command)
        .bind(arguments.to_string())
        .bind(i64::try_from(affected).unwrap_or(i64::MAX))
        .execute(tx)
        .await
        .map(drop)
}

/// `retrying → dead (given up)`, as the table has it.
fn transition<S: Word, E: Word>(lifecycle: &Lifecycle<S, E>, from: S, event: E) -> String {
    let to = lifecycle.next(from, event).map_or(from, |to| to);
    format!("{} → {} ({})", from.as_str(), to.as_str(), event.as_str())
}

fn with_cause(cause: Option<&str>, error: Option<&str>) -> String {
    match (cause, error) {
        (Some(cause), Some(error)) => format!("{cause}: {error}"),
        (Some(text), None) | (None, Some(text)) => text.to_owned(),
        (None, None) => "nothing was said".to_owned(),
    }
}

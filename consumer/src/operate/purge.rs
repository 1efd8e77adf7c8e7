//! A purge that an operator asks for: the consumers' own, with a trace; and what it leaves, with the reason.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Serialize;
use sqlx::{PgConnection, PgPool};

use super::Error;
use crate::inbox::{Inbox, Purged, horizon};

/// What a purge finds of one consumer.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Outlook {
    /// Rows of the inbox, by what stands against their purge: `due` (nothing), `recent`, `record_time_ahead`, `set_aside` (their
    /// record is in `inbox.parked` and not settled), `dead`, `in_progress`.
    pub rows: BTreeMap<String, i64>,
    /// Records that were set aside: `due`, `recent`, `record_time_ahead`, `unsettled`.
    pub parked: BTreeMap<String, i64>,
}

/// What a purge of what was finished longer ago than `older_than` would take of a consumer, and what it would leave. Reads
/// all of the consumer's rows.
///
/// # Errors
///
/// [`Error::Read`].
///
/// # Cancel safety
///
/// Reads only; the connection must be closed if the future is dropped.
pub async fn outlook(
    connection: &mut PgConnection,
    consumer: &str,
    older_than: Duration,
) -> Result<Outlook, Error> {
    let counts: Vec<(String, String, i64)> =
        sqlx::query_as(include_str!("../../queries/operate_outlook.sql"))
            .bind(consumer)
            .bind(horizon::bounded(older_than).as_secs_f64())
            .fetch_all(connection)
            .await
            .map_err(Error::Read)?;
    let mut outlook = Outlook::default();
    for (of, why, count) in counts {
        let counts = if of == "rows" { &mut outlook.rows } else { &mut outlook.parked };
        counts.insert(why, count);
    }
    Ok(outlook)
}

/// Purges as [`Inbox::purge`] does, and leaves an audit row with every batch, and one at least.
///
/// # Errors
///
/// [`Error::Purge`]: the batches before are purged.
///
/// # Cancel safety
///
/// As [`Inbox::purge`].
pub async fn run(pool: &PgPool, consumer: &str, older_than: Duration) -> Result<Purged, Error> {
    let failed = |source| Error::Purge { consumer: consumer.to_owned(), source };
    let inbox = Inbox::new(consumer, pool.clone()).map_err(failed)?;
    inbox.purge_and_tell(older_than).await.map_err(failed)
}

//! Who changed what by the commands that change something: a row of the audit table each, written in the transaction that
//! makes the change, so that there is none without the other.

use sqlx::PgConnection;

use crate::{Error, Line};

/// One change.
#[derive(Debug, Clone, PartialEq, Eq, sqlx::FromRow)]
pub struct Entry {
    /// When, RFC 3339 in UTC.
    pub at: String,
    /// The database user that the command ran as.
    pub who: String,
    /// The command.
    pub command: String,
    /// What it was told and what it found, as a JSON object.
    pub arguments: String,
    /// How many rows or items it changed.
    pub affected: i64,
}

/// The newest changes, newest first, at most `limit`.
///
/// # Errors
///
/// When the table cannot be read, or is not there.
///
/// # Cancel safety
///
/// Reads only; the connection must be closed if the future is dropped.
pub async fn read(connection: &mut PgConnection, line: Line, limit: u32) -> Result<Vec<Entry>, Error> {
    let sql = match line {
        Line::Outbox => include_str!("../queries/outbox_audit_read.sql"),
        Line::Inbox => include_str!("../queries/inbox_audit_read.sql"),
    };
    let asked = sqlx::query_as(sql).bind(i64::from(limit)).fetch_all(connection);
    asked.await.map_err(|e| Error::read(line, e))
}

/// Makes sure that the next row can be written after logical replication, which leaves sequences behind. A number too many
/// does no harm, so it does not matter that no rollback takes this back.
pub(crate) async fn mend_sequence(tx: &mut PgConnection, line: Line) -> Result<(), sqlx::Error> {
    let sql = match line {
        Line::Outbox => include_str!("../queries/outbox_audit_sequence.sql"),
        Line::Inbox => include_str!("../queries/inbox_audit_sequence.sql"),
    };
    sqlx::query(sql).execute(tx).await.map(drop)
}

//! Judging a database by what is recorded and what is there, without changing anything.

use sqlx::PgConnection;
use sqlx::migrate::Migrator;

use crate::line::BOOKKEEPING;
use crate::{Error, Line};

/// How a database stands against the migrations of this binary.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// Nothing of the line is there.
    Missing,
    /// Older than this binary: migrate it.
    Behind {
        /// The newest migration that it has; 0 is none.
        applied: i64,
        /// The newest migration that this binary has.
        newest: i64,
    },
    /// Up to date.
    Current,
    /// A newer Baton migrated it: use that one.
    Ahead {
        /// The newest migration that it has.
        applied: i64,
        /// The newest migration that this binary has.
        newest: i64,
    },
}

/// Says how a database stands. Reads only; every group role of the line may do it.
///
/// # Errors
///
/// When the database cannot be read, or when what is recorded and what is there do not fit together.
///
/// # Cancel safety
///
/// Nothing is changed; the connection must be closed if the future is dropped.
pub async fn check(connection: &mut PgConnection, line: Line) -> Result<State, Error> {
    let tables = tables_read(connection, line).await.map_err(|e| Error::read(line, e))?;
    let recorded = if tables.iter().any(|table| table == BOOKKEEPING) {
        Some(applied_read(connection, line).await.map_err(|e| Error::read(line, e))?)
    } else {
        None
    };
    judge(line, &line.migrator(), &tables, recorded.as_deref())
}

/// One line of the bookkeeping table.
#[derive(Debug, Clone)]
struct Recorded {
    version: i64,
    success: bool,
    checksum: Vec<u8>,
}

fn judge(
    line: Line,
    migrator: &Migrator,
    tables: &[String],
    recorded: Option<&[Recorded]>,
) -> Result<State, Error> {
    let Some(recorded) = recorded.filter(|r| !r.is_empty()) else {
        let found: Vec<&str> =
            tables.iter().map(String::as_str).filter(|table| *table != BOOKKEEPING).collect();
        if found.is_empty() {
            return Ok(State::Missing);
        }
        return Err(Error::Unrecorded { line, found: found.join(", ") });
    };
    let newest = migrator.iter().map(|m| m.version).max().unwrap_or(0);
    let applied = recorded.iter().map(|r| r.version).max().unwrap_or(0);
    if let Some(unfinished) = recorded.iter().find(|r| !r.success) {
        return Err(Error::Unfinished { line, version: unfinished.version });
    }
    for known in migrator.iter().filter(|m| m.version <= applied) {
        match recorded.iter().find(|r| r.version == known.version) {
            Some(r) if r.checksum == *known.checksum => {}
            Some(_) => return Err(Error::Changed { line, version: known.version }),
            None => {
                let missing = format!("migration {}, though it has {applied}", known.version);
                return Err(Error::Incomplete { line, missing });
            }
        }
    }
    if applied > newest {
        return Ok(State::Ahead { applied, newest });
    }
    if applied < newest {
        return Ok(State::Behind { applied, newest });
    }
    let missing: Vec<&str> =
        line.tables().iter().copied().filter(|t| !tables.iter().any(|have| have == t)).collect();
    if !missing.is_empty() {
        return Err(Error::Incomplete { line, missing: format!("the table(s) {}", missing.join(", ")) });
    }
    Ok(State::Current)
}

async fn tables_read(connection: &mut PgConnection, line: Line) -> Result<Vec<String>, sqlx::Error> {
    sqlx::query_scalar(include_str!("../queries/tables_read.sql"))
        .bind(line.as_str())
        .fetch_all(connection)
        .await
}

async fn applied_read(connection: &mut PgConnection, line: Line) -> Result<Vec<Recorded>, sqlx::Error> {
    let sql = match line {
        Line::Outbox => include_str!("../queries/outbox_applied_read.sql"),
        Line::Inbox => include_str!("../queries/inbox_applied_read.sql"),
    };
    let rows: Vec<(i64, bool, Vec<u8>)> = sqlx::query_as(sql).fetch_all(connection).await?;
    Ok(rows.into_iter().map(|(version, success, checksum)| Recorded { version, success, checksum }).collect())
}

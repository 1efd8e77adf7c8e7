//! What can stand in the way of a migration, and what to do about it.

use std::num::NonZeroU16;
use std::time::Duration;

use crate::{Holders, Line};

/// Why a database could not be migrated or judged. Nothing has been changed then.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The server is older than what Baton is tried with.
    #[error("postgres {major} is too old, baton needs 15 or newer")]
    ServerVersion {
        /// Its major version.
        major: i32,
    },
    /// The database does not hold UTF-8, which keys, topics and headers are.
    #[error("database encoding is {found}, baton needs UTF8; create the database with ENCODING 'UTF8'")]
    Encoding {
        /// What it holds.
        found: String,
    },
    /// The server is a standby.
    #[error("database is in recovery (a standby); give the address of the primary")]
    InRecovery,
    /// The role lacks a privilege.
    #[error("the database role may not {doing} the {line}; {hint}")]
    Denied {
        /// The line.
        line: Line,
        /// What was tried.
        doing: &'static str,
        /// Which role can.
        hint: &'static str,
        /// What Postgres said.
        #[source]
        source: sqlx::Error,
    },
    /// Tables are there, but no record of what made them.
    #[error(
        "schema {line} has tables ({found}) but no record of migrations in {line}._migrations; bring that table back from a backup or, if nothing in the schema is needed, drop schema {line} cascade and migrate again"
    )]
    Unrecorded {
        /// The line.
        line: Line,
        /// The tables, by name.
        found: String,
    },
    /// Everything is recorded as done, but something is missing.
    #[error(
        "schema {line} is recorded as migrated but lacks {missing}; bring it back from a backup or, if nothing in the schema is needed, drop schema {line} cascade and migrate again"
    )]
    Incomplete {
        /// The line.
        line: Line,
        /// What is missing, by name.
        missing: String,
    },
    /// A migration is recorded as begun and not finished.
    #[error(
        "migration {version} of the {line} is recorded as unfinished in {line}._migrations, which baton never writes; restore the database to before it"
    )]
    Unfinished {
        /// The line.
        line: Line,
        /// The migration.
        version: i64,
    },
    /// A migration was applied with another text than this binary has.
    #[error(
        "migration {version} of the {line} was applied with another text than this baton has; use the baton that applied it, or a newer release"
    )]
    Changed {
        /// The line.
        line: Line,
        /// The migration.
        version: i64,
    },
    /// A newer Baton migrated the database.
    #[error("the {line} is at migration {applied}, this baton knows {newest}; use the newer baton")]
    Ahead {
        /// The line.
        line: Line,
        /// The newest migration recorded.
        applied: i64,
        /// The newest migration that this binary has.
        newest: i64,
    },
    /// No outbox has so many shards.
    #[error("{asked} shards are too many; choose 1 to 1024")]
    TooManyShards {
        /// What was asked for.
        asked: NonZeroU16,
    },
    /// The slot period is shorter than a second or longer than a year.
    #[error("slot period {asked:?} is out of range; choose 1s to 365 days")]
    SlotPeriod {
        /// What was asked for.
        asked: Duration,
    },
    /// The number of shards of an outbox that is in use is fixed.
    #[error(
        "the outbox has {existing} shards and cannot get {asked}: {obstacle}; the number of shards changes only while the outbox is empty and no relay runs"
    )]
    ShardsFixed {
        /// How many it has.
        existing: NonZeroU16,
        /// How many were asked for.
        asked: NonZeroU16,
        /// What stands against it.
        obstacle: Obstacle,
    },
    /// Somebody did not let go of the tables.
    #[error(
        "the {line} is not migrated: its tables are in use by {holders}, and were not let go in {tries} tries of {wait:?} each, between which producers went on; wait for that to end, or end it (SELECT pg_terminate_backend(<pid>), or ROLLBACK PREPARED '<name>' for a prepared transaction), and run the migration again"
    )]
    Locked {
        /// The line.
        line: Line,
        /// Who holds locks.
        holders: Holders,
        /// How often it was tried.
        tries: u32,
        /// How long each try waited.
        wait: Duration,
        /// What Postgres said last.
        #[source]
        source: sqlx::Error,
    },
    /// A statement failed, while the database was looked at.
    #[error("cannot read the state of the {line}")]
    Read {
        /// The line.
        line: Line,
        /// What went wrong.
        #[source]
        source: sqlx::Error,
    },
    /// A statement failed, while the database was changed.
    #[error("cannot migrate the {line}")]
    Migrate {
        /// The line.
        line: Line,
        /// What went wrong.
        #[source]
        source: sqlx::Error,
    },
    /// sqlx's own bookkeeping refused what was judged fine a moment before.
    #[error("cannot run the migrations of the {line}")]
    Bookkeeping {
        /// The line.
        line: Line,
        /// What it says.
        #[source]
        source: sqlx::migrate::MigrateError,
    },
}

/// What stands against another number of shards.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Obstacle {
    /// `outbox.message` has rows.
    Messages,
    /// `outbox.parked` has rows.
    Parked,
    /// A relay lives, or holds a lease that has not run out.
    Relays,
    /// Somebody has it open: a transaction that enqueues, or a backup.
    Busy,
}

impl std::fmt::Display for Obstacle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Messages => "outbox.message has rows",
            Self::Parked => "outbox.parked has rows",
            Self::Relays => "a relay is running",
            Self::Busy => "a transaction that uses it did not end within 3 seconds",
        })
    }
}

impl Error {
    pub(crate) fn read(line: Line, source: sqlx::Error) -> Self {
        if is_denied(&source) {
            let hint = "grant it baton_readonly, baton_operator, or the role of its service";
            return Self::Denied { line, doing: "read", hint, source };
        }
        Self::Read { line, source }
    }

    pub(crate) fn migrate(line: Line, source: sqlx::Error) -> Self {
        if is_denied(&source) {
            let hint = "use one that owns the database and has CREATEROLE, or have a superuser create the baton_… roles first";
            return Self::Denied { line, doing: "migrate", hint, source };
        }
        Self::Migrate { line, source }
    }
}

fn is_denied(error: &sqlx::Error) -> bool {
    error.as_database_error().is_some_and(|e| e.code().as_deref() == Some("42501"))
}

//! The two lines: which migrations each has, and what a database that has them all looks like.

use std::fmt;

use sqlx::SqlSafeStr as _;
use sqlx::migrate::{Migration, MigrationType, Migrator};

/// One of the two lines of migrations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Line {
    /// Schema `outbox`, in the database of a service that produces.
    Outbox,
    /// Schema `inbox`, in the database of a service that consumes.
    Inbox,
}

impl Line {
    /// The schema, and the word of the command line: `outbox` or `inbox`.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Outbox => "outbox",
            Self::Inbox => "inbox",
        }
    }

    /// The newest migration that this binary has.
    #[must_use]
    pub fn newest(self) -> i64 {
        self.texts().iter().map(|(version, ..)| *version).max().unwrap_or(0)
    }

    /// The tables and views of a database that is up to date, in alphabetical order.
    pub(crate) fn tables(self) -> &'static [&'static str] {
        match self {
            Self::Outbox => &[
                BOOKKEEPING,
                "advance",
                "audit",
                "cursor",
                "fence",
                "message",
                "message_0",
                "message_1",
                "message_2",
                "message_3",
                "milestone",
                "parked",
                "paused",
                "relay",
                "settings",
                "shard",
                "stopped",
                "token",
            ],
            Self::Inbox => {
                &[BOOKKEEPING, "audit", "horizon", "message", "parked", "replay_item", "replay_plan"]
            }
        }
    }

    /// Version, description and text of each migration, oldest first. A text that is released never changes.
    fn texts(self) -> &'static [(i64, &'static str, &'static str)] {
        match self {
            Self::Outbox => &[
                (1, "outbox", include_str!("../outbox/0001_outbox.sql")),
                (2, "cursor ring", include_str!("../outbox/0002_cursor_ring.sql")),
                (3, "late index", include_str!("../outbox/0003_late_index.sql")),
                (4, "stopped", include_str!("../outbox/0004_stopped.sql")),
                (5, "retention", include_str!("../outbox/0005_retention.sql")),
                (6, "finite leases", include_str!("../outbox/0006_finite_leases.sql")),
                (7, "one check", include_str!("../outbox/0007_one_check.sql")),
                (8, "cheap checks", include_str!("../outbox/0008_cheap_checks.sql")),
                (9, "parked", include_str!("../outbox/0009_parked.sql")),
            ],
            Self::Inbox => &[
                (1, "inbox", include_str!("../inbox/0001_inbox.sql")),
                (2, "horizon", include_str!("../inbox/0002_horizon.sql")),
                (3, "one check", include_str!("../inbox/0003_one_check.sql")),
                (4, "replay", include_str!("../inbox/0004_replay.sql")),
            ],
        }
    }

    /// The roles and grants, which every migration brings back where they are missing.
    pub(crate) fn roles(self) -> &'static str {
        match self {
            Self::Outbox => include_str!("../outbox/roles.sql"),
            Self::Inbox => include_str!("../inbox/roles.sql"),
        }
    }

    pub(crate) fn migrator(self) -> Migrator {
        let migrations = self
            .texts()
            .iter()
            .map(|(version, description, sql)| {
                Migration::new(
                    *version,
                    (*description).into(),
                    MigrationType::Simple,
                    sql.into_sql_str(),
                    false,
                )
            })
            .collect();
        let mut migrator = Migrator::with_migrations(migrations);
        migrator.dangerous_set_table_name(format!("{self}.{BOOKKEEPING}"));
        migrator.create_schema(self.as_str());
        // The transaction that this runs in holds a lock of its own, which ends with it.
        migrator.set_locking(false);
        migrator
    }
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The bookkeeping table of a line, in its schema.
pub(crate) const BOOKKEEPING: &str = "_migrations";

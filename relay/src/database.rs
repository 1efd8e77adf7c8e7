//! The relay's connections: four, each with one job, none shared, none pooled.
//!
//! A connection that failed or went silent is never used again: its session ends, everything read ahead and in flight is
//! discarded, leases are claimed anew and the durable cursor is read again. So an await on the database has two
//! outcomes, an answer in time or [`Error`], and a transaction is never raced against anything: every statement is its
//! own transaction, and a connection on which one was abandoned is closed.

use std::future::Future;
use std::str::FromStr;
use std::time::Duration;

use sqlx::postgres::{PgConnectOptions, PgConnection};
use sqlx::{ConnectOptions, Connection};

use crate::settings::Settings;

/// A failed or silent database.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The URL cannot be read.
    #[error("the database url is not a Postgres url: expected postgres://user:password@host:port/database")]
    Url,
    /// No connection.
    #[error(
        "cannot connect to postgres at {place} (check outbox.database_url or DATABASE_URL, and that the server runs)"
    )]
    Connect {
        /// Host, port and database; no user, no password.
        place: String,
        /// What the driver said.
        #[source]
        source: sqlx::Error,
    },
    /// No answer in time.
    #[error("postgres did not answer within {within:?} ({operation})")]
    Silent {
        /// What was asked.
        operation: &'static str,
        /// How long was waited.
        within: Duration,
    },
    /// A statement failed.
    #[error("{operation} failed")]
    Statement {
        /// What was asked.
        operation: &'static str,
        /// What the driver said.
        #[source]
        source: sqlx::Error,
    },
    /// The server is a standby, or has become one.
    #[error(
        "the database is in recovery (a standby): the relay reads only the primary, point outbox.database_url there"
    )]
    Recovery,
    /// The outbox is not there.
    #[error("the outbox schema is missing or older than this binary: run `baton migrate outbox`")]
    NotMigrated,
    /// An answer that this version does not understand.
    #[error("{operation}: unexpected answer: {what}")]
    Answer {
        /// What was asked.
        operation: &'static str,
        /// What was wrong with the answer.
        what: String,
    },
}

impl Error {
    /// Whether waiting may help: false for what only an operator can mend.
    #[must_use]
    pub fn passes(&self) -> bool {
        let source = match self {
            Self::Connect { source, .. } | Self::Statement { source, .. } => source,
            Self::Silent { .. } | Self::Recovery => return true,
            Self::Url | Self::NotMigrated | Self::Answer { .. } => return false,
        };
        match source {
            sqlx::Error::Database(e) => {
                // Shutdown, crash recovery, too many connections, resources, serialization and lock time-outs pass.
                e.code().is_some_and(|c| {
                    ["57P", "08", "53", "40", "55P", "57014", "25006", "XX"].iter().any(|p| c.starts_with(p))
                })
            }
            sqlx::Error::Configuration(_) => false,
            _ => true,
        }
    }
}

/// Host, port and database of a URL, for messages.
fn place(options: &PgConnectOptions) -> String {
    let host =
        options.get_socket().map_or_else(|| options.get_host().to_owned(), |s| s.display().to_string());
    format!("{host}:{}/{}", options.get_port(), options.get_database().unwrap_or(options.get_username()))
}

/// Opens a connection set up for a relay.
///
/// `statement_timeout` bounds what the server does for us, [`answer`] bounds what the network does.
pub(crate) async fn connect(
    settings: &Settings,
    job: &str,
    patience: Duration,
) -> Result<PgConnection, Error> {
    let options = PgConnectOptions::from_str(&settings.database_url).map_err(|_| Error::Url)?;
    let place = place(&options);
    let millis = patience.as_millis().to_string();
    let options = options
        .application_name(&format!("baton {job} {}", settings.owner).chars().take(63).collect::<String>())
        .options([
            // A page read is planned once and must never walk a table; compiling it takes longer than running it.
            ("jit", "off"),
            ("enable_seqscan", "off"),
            ("plan_cache_mode", "force_generic_plan"),
            ("work_mem", "16MB"),
            // What the relay says was published must survive a crash of the server.
            ("synchronous_commit", "on"),
            ("timezone", "UTC"),
            ("statement_timeout", &millis),
            ("lock_timeout", &millis),
            ("idle_in_transaction_session_timeout", &millis),
        ])
        .log_statements(tracing::log::LevelFilter::Trace)
        .log_slow_statements(tracing::log::LevelFilter::Debug, Duration::from_secs(1));
    match tokio::time::timeout(patience, PgConnection::connect_with(&options)).await {
        Ok(Ok(connection)) => Ok(connection),
        Ok(Err(source)) => Err(Error::Connect { place, source }),
        Err(_) => Err(Error::Silent { operation: "connecting", within: patience }),
    }
}

/// Waits for an answer for at most `within`. After an error the connection must not be used again.
pub(crate) async fn answer<T>(
    operation: &'static str,
    within: Duration,
    asked: impl Future<Output = Result<T, sqlx::Error>>,
) -> Result<T, Error> {
    match tokio::time::timeout(within, asked).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(source)) => Err(missing_table(&source).unwrap_or(Error::Statement { operation, source })),
        Err(_) => Err(Error::Silent { operation, within }),
    }
}

/// A table, column, function or schema that is not there means a migration that was not run.
fn missing_table(error: &sqlx::Error) -> Option<Error> {
    let code = error.as_database_error()?.code()?;
    ["42P01", "42703", "42883", "3F000"].contains(&code.as_ref()).then_some(Error::NotMigrated)
}

/// What a relay must know of its database before it may start.
#[derive(Debug, Clone)]
pub(crate) struct Outbox {
    /// The name of the database, for the default `ce_source`.
    pub database: String,
    /// The number of shards.
    pub shards: i16,
}

/// Checks that this is the primary of a migrated outbox.
pub(crate) async fn inspect(connection: &mut PgConnection, within: Duration) -> Result<Outbox, Error> {
    let asked = sqlx::query_as(include_str!("../queries/outbox_inspect.sql")).fetch_optional(connection);
    let row: Option<(String, bool, i16)> = answer("reading the outbox settings", within, asked).await?;
    match row {
        None => Err(Error::NotMigrated),
        Some((_, true, _)) => Err(Error::Recovery),
        Some((database, false, shards)) => Ok(Outbox { database, shards }),
    }
}

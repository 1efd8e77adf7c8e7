//! The relay's connections: four, each with one job, none shared, none pooled.
//!
//! A connection that failed or went silent is never used again: its session ends, everything read ahead and in flight is
//! discarded, leases are claimed anew and the durable cursor is read again. So an await on the database has two
//! outcomes, an answer in time or [`Error`], and a transaction is never raced against anything: every statement is its
//! own transaction, and a connection on which one was abandoned is closed.

use std::future::Future;
use std::str::FromStr;
use std::time::Duration;

use baton_protocol::report;
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
    /// The role lacks what a relay needs.
    #[error(
        "the role {role} lacks {missing}: run `GRANT baton_relay TO {role}`, and `baton migrate outbox` where baton_relay itself lacks it"
    )]
    Denied {
        /// Who the relay is to the database.
        role: String,
        /// The privileges, as a GRANT names them.
        missing: String,
    },
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
            Self::Url | Self::NotMigrated | Self::Denied { .. } | Self::Answer { .. } => return false,
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

    /// What an operator can do about an error that does not pass, where its own text does not say it.
    pub(crate) fn advice(&self) -> &'static str {
        let (Self::Connect { source, .. } | Self::Statement { source, .. }) = self else { return "" };
        let code = source.as_database_error().and_then(|e| e.code());
        match code.as_deref().unwrap_or_default() {
            "42501" => "; give the relay's database role its privileges back: GRANT baton_relay TO it",
            "28000" | "28P01" => "; check user and password in outbox.database_url or DATABASE_URL",
            "3D000" => "; create the database, or check its name in outbox.database_url or DATABASE_URL",
            _ => "; the log of Postgres may say more",
        }
    }
}

/// An error and its causes in one line. sqlx wraps what the server or the system said in words that help nobody, and adds a
/// line of Postgres' own source: of a cause of its kind only the server's own words are told.
#[must_use]
pub fn told(error: &(dyn std::error::Error + 'static)) -> String {
    report::chain_in(error, |error| {
        if let Some(error) = error.downcast_ref::<Box<dyn sqlx::error::DatabaseError>>() {
            return error.message().to_owned();
        }
        match error.downcast_ref::<sqlx::Error>() {
            Some(sqlx::Error::Database(error)) => error.message().to_owned(),
            Some(sqlx::Error::Io(error)) => error.to_string(),
            _ => error.to_string(),
        }
    })
}

/// How many missing privileges a message lists.
const LACKS_SHOWN: usize = 4;

/// Host, port and database of a URL, for messages.
fn place(options: &PgConnectOptions) -> String {
    let host =
        options.get_socket().map_or_else(|| options.get_host().to_owned(), |s| s.display().to_string());
    format!("{host}:{}/{}", options.get_port(), options.get_database().unwrap_or(options.get_username()))
}

/// What plans rest on. A page read is planned once and must never walk a table; compiling it takes longer than running it.
pub(crate) const PLANNED: [(&str, &str); 4] = [
    ("jit", "off"),
    ("enable_seqscan", "off"),
    ("plan_cache_mode", "force_generic_plan"),
    ("work_mem", "16MB"),
];

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
        .options(PLANNED)
        .options([
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

/// Checks that this is the primary of a migrated outbox, and that the relay's role may do what a relay does.
pub(crate) async fn inspect(connection: &mut PgConnection, within: Duration) -> Result<Outbox, Error> {
    let asked = sqlx::query_as(include_str!("../queries/outbox_needs.sql")).fetch_one(&mut *connection);
    let needs: (String, bool, Vec<String>, Vec<String>) =
        answer("looking for what a relay needs", within, asked).await?;
    match needs {
        (_, _, absent, _) if !absent.is_empty() => return Err(Error::NotMigrated),
        (role, false, _, _) => {
            return Err(Error::Denied { role, missing: "USAGE ON SCHEMA outbox".to_owned() });
        }
        (role, true, _, missing) if !missing.is_empty() => {
            let more = missing.len().saturating_sub(LACKS_SHOWN);
            let mut shown = missing.iter().take(LACKS_SHOWN).cloned().collect::<Vec<_>>().join(", ");
            if more > 0 {
                shown.push_str(&format!(" and {more} more"));
            }
            return Err(Error::Denied { role, missing: shown });
        }
        (_, true, _, _) => {}
    }
    let asked = sqlx::query_as(include_str!("../queries/outbox_inspect.sql")).fetch_optional(connection);
    let row: Option<(String, bool, i16)> = answer("reading the outbox settings", within, asked).await?;
    match row {
        None => Err(Error::NotMigrated),
        Some((_, true, _)) => Err(Error::Recovery),
        Some((database, false, shards)) => Ok(Outbox { database, shards }),
    }
}

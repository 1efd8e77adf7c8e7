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
use sqlx::{AssertSqlSafe, ConnectOptions, Connection, Row as _};

use crate::guards::{self, Violations};

use crate::settings::Settings;

/// The newest migration of the outbox that this relay knows. It works on no newer one: what that changed may be what it relies on.
pub const SCHEMA: i64 = 9;

/// A failed or silent database.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The URL cannot be read.
    #[error("the database url is not a Postgres url: expected postgres://user:password@host:port/database")]
    Url,
    /// No connection.
    #[error(
        "cannot connect to postgres at {place} ({})", unconnected(.source)
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
    /// `outbox.settings` is empty.
    #[error("{WITHOUT_SETTINGS}: {NO_SETTINGS}")]
    NoSettings,
    /// A newer Baton has migrated it.
    #[error(
        "the outbox schema is newer than this binary (it is at migration {found}, this relay knows {SCHEMA}): use the baton that \
         migrated it, or a newer one"
    )]
    Newer {
        /// The newest migration that is recorded.
        found: i64,
    },
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
    /// A pooler stands between, and it does not keep one session for each connection.
    #[error(
        "{found}: a relay needs sessions of its own, because its settings and prepared statements live in them; point \
         outbox.database_url or DATABASE_URL at Postgres itself, or at a pool in session mode (pgbouncer: pool_mode = session)"
    )]
    Pooler {
        /// Where, or by what it was noticed.
        found: String,
    },
    /// A pooler refuses what the URL asks for.
    #[error(
        "the pooler at {place} does not pass on a parameter of the connection ({said}): take `options` out of outbox.database_url or \
         DATABASE_URL, or point it at Postgres itself"
    )]
    Parameter {
        /// Host, port and database.
        place: String,
        /// What the pooler said.
        said: String,
    },
    /// Something was done to the outbox on which no relay may work.
    #[error(transparent)]
    Guards(#[from] Violations),
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
            Self::Url
            | Self::NotMigrated
            | Self::NoSettings
            | Self::Newer { .. }
            | Self::Denied { .. }
            | Self::Answer { .. } => return false,
            Self::Pooler { .. } | Self::Parameter { .. } | Self::Guards(_) => return false,
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
        let Self::Statement { source, .. } = self else { return "" };
        let code = source.as_database_error().and_then(|e| e.code());
        match code.as_deref().unwrap_or_default() {
            "42501" => "; give the relay's database role its privileges back: GRANT baton_relay TO it",
            _ => "; the log of Postgres may say more",
        }
    }
}

/// What to look at when there is no connection.
fn unconnected(source: &sqlx::Error) -> &'static str {
    let code = source.as_database_error().and_then(|e| e.code());
    match code.as_deref().unwrap_or_default() {
        "28P01" => "check user and password in outbox.database_url or DATABASE_URL",
        "28000" => {
            "check the user in outbox.database_url or DATABASE_URL: it must be a role with LOGIN that pg_hba.conf lets in; baton_relay \
             itself cannot log in, GRANT it to one that can"
        }
        "3D000" => "create the database, or check its name in outbox.database_url or DATABASE_URL",
        "" => "check outbox.database_url or DATABASE_URL, and that the server runs",
        _ => "the server answers, and refuses; its log may say more",
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

/// What the plans of a relay's statements rest on: its sessions set it, and so must whoever asks what they cost.
///
/// A page read is planned once and must never walk a table; compiling it takes longer than running it. A bitmap has no order,
/// so it reads all rows of a shard where the newest is asked for: what the planner takes to be one row may be a hundred
/// thousand that a held snapshot keeps the vacuum away from.
pub const PLANNED: [(&str, &str); 5] = [
    ("jit", "off"),
    ("enable_seqscan", "off"),
    ("enable_bitmapscan", "off"),
    ("plan_cache_mode", "force_generic_plan"),
    ("work_mem", "16MB"),
];

/// Opens a connection set up for a relay.
///
/// `statement_timeout` bounds what the server does for us, [`answer`] bounds what the network does. Settings are made once
/// the connection is there, one round trip later: pgbouncer knows but a few of the parameters that a connection may start with,
/// and refuses a client that sends others.
pub(crate) async fn connect(
    settings: &Settings,
    job: &str,
    patience: Duration,
) -> Result<PgConnection, Error> {
    let options = PgConnectOptions::from_str(&settings.database_url).map_err(|_| Error::Url)?;
    let place = place(&options);
    let options = options
        .application_name(&format!("baton {job} {}", settings.owner).chars().take(63).collect::<String>())
        .extra_float_digits(None)
        .log_statements(tracing::log::LevelFilter::Trace)
        .log_slow_statements(tracing::log::LevelFilter::Debug, Duration::from_secs(1));
    let set_up = session_settings(patience);
    let connected = async {
        let mut connection = PgConnection::connect_with(&options).await?;
        // By the simple protocol: nothing is prepared, and it is one round trip.
        sqlx::raw_sql(AssertSqlSafe(set_up)).execute(&mut connection).await?;
        Ok(connection)
    };
    match tokio::time::timeout(patience, connected).await {
        Ok(Ok(connection)) => Ok(connection),
        Ok(Err(source)) => {
            Err(unknown_parameter(&source, &place).unwrap_or(Error::Connect { place, source }))
        }
        Err(_) => Err(Error::Silent { operation: "connecting", within: patience }),
    }
}

/// The statement that makes the settings of a session.
pub(crate) fn session_settings(patience: Duration) -> String {
    let millis = patience.as_millis().to_string();
    let settings: Vec<String> = PLANNED
        .into_iter()
        .chain([
            // What the relay says was published must survive a crash of the server.
            ("synchronous_commit", "on"),
            ("timezone", "UTC"),
            // A policy that hides rows would make them count as published: then statements fail instead.
            ("row_security", "off"),
            // A statement that waited for a lock must see what was committed meanwhile, whatever the database's default is.
            ("default_transaction_isolation", "read committed"),
            ("statement_timeout", &millis),
            ("lock_timeout", &millis),
            ("idle_in_transaction_session_timeout", &millis),
        ])
        .map(|(name, value)| format!("('{name}', '{value}')"))
        .collect();
    include_str!("../queries/session_set.sql").replace("{settings}", &settings.join(", "))
}

/// What pgbouncer says to a parameter that it does not know.
fn unknown_parameter(error: &sqlx::Error, place: &str) -> Option<Error> {
    let said = error.as_database_error()?.message();
    let refused = said.contains("unsupported startup parameter");
    refused.then(|| Error::Parameter { place: place.to_owned(), said: said.to_owned() })
}

/// What an empty `outbox.settings` means.
pub(crate) const WITHOUT_SETTINGS: &str =
    "outbox.settings has no row, which says how many shards there are, so no relay starts";

/// What to do about an empty `outbox.settings`. The cluster it is said to come from is none, so that no relay takes the cursors for its
/// own before a rebase has judged them.
pub(crate) const NO_SETTINGS: &str = "copy the row from a backup, or, where there is none, run `INSERT INTO outbox.settings \
    (system_identifier, shards, slot_period) SELECT 0, count(*), '6h' FROM outbox.shard` as the owner, with the slot period that was \
    chosen, then stop the relays and run `baton rebase`";

/// Whether connections have sessions to themselves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sessions {
    /// Each has its own, always the same one.
    Own,
    /// A pooler gives its sessions to one transaction each.
    Pooled,
}

/// How often each of two connections is asked for its session.
const SESSION_LOOKS: usize = 3;

/// Makes sure that two connections, both open, are two sessions of Postgres, and stay the same ones.
///
/// Of direct connections, through whatever forwards bytes, both are always true, so this never refuses one. A pooler that gives
/// sessions to transactions breaks one of them: it gives the session that one connection has just left to the other, or,
/// where it hands its sessions out in turn, it gives one connection two of them. Asked by the simple protocol, before anything
/// is prepared or claimed.
pub(crate) async fn own_sessions(
    settings: &Settings,
    one: &mut PgConnection,
    other: &mut PgConnection,
    within: Duration,
) -> Result<(), Error> {
    match sessions_of(one, other, within).await? {
        Sessions::Own => Ok(()),
        Sessions::Pooled => {
            let options = PgConnectOptions::from_str(&settings.database_url).map_err(|_| Error::Url)?;
            let place = place(&options);
            let found = format!("a connection pooler at {place} gives its sessions to one transaction each");
            Err(Error::Pooler { found })
        }
    }
}

/// Looks whether two open connections are two sessions of Postgres, and stay the same ones. What a pooler gives away is found, as
/// long as no third connection goes through it at this very moment.
///
/// # Errors
/// When the server does not answer within `within`, each time it is asked.
pub async fn sessions_of(
    one: &mut PgConnection,
    other: &mut PgConnection,
    within: Duration,
) -> Result<Sessions, Error> {
    let mut seen: [Option<String>; 2] = [None, None];
    for _ in 0..SESSION_LOOKS {
        // Twice the one: sessions handed out in turn would otherwise come back to whom they were with.
        for at in [0, 0, 1] {
            let connection = if at == 0 { &mut *one } else { &mut *other };
            let session = which_session(connection, within).await?;
            let kept = seen[at].get_or_insert_with(|| session.clone()) == &session;
            if !kept || seen[1 - at].as_ref() == Some(&session) {
                return Ok(Sessions::Pooled);
            }
        }
    }
    Ok(Sessions::Own)
}

async fn which_session(connection: &mut PgConnection, within: Duration) -> Result<String, Error> {
    let asked = async {
        let row = sqlx::raw_sql(include_str!("../queries/session_which.sql")).fetch_one(connection).await?;
        row.try_get(0)
    };
    answer("asking which session this is", within, asked).await
}

/// Waits for an answer for at most `within`. After an error the connection must not be used again.
pub(crate) async fn answer<T>(
    operation: &'static str,
    within: Duration,
    asked: impl Future<Output = Result<T, sqlx::Error>>,
) -> Result<T, Error> {
    match tokio::time::timeout(within, asked).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(source)) => Err(missing_table(&source)
            .or_else(|| lost_statement(&source))
            .unwrap_or(Error::Statement { operation, source })),
        Err(_) => Err(Error::Silent { operation, within }),
    }
}

/// A table, column, function or schema that is not there means a migration that was not run.
fn missing_table(error: &sqlx::Error) -> Option<Error> {
    let code = error.as_database_error()?.code()?;
    ["42P01", "42703", "42883", "3F000"].contains(&code.as_ref()).then_some(Error::NotMigrated)
}

/// A prepared statement that is gone, or was there before it was prepared, is another session's: a pooler has exchanged them.
fn lost_statement(error: &sqlx::Error) -> Option<Error> {
    exchanged_session(error).map(|found| Error::Pooler { found })
}

/// What a pooler that has exchanged the session of a connection is noticed by, in words; none where this error is another one.
#[must_use]
pub fn exchanged_session(error: &sqlx::Error) -> Option<String> {
    let error = error.as_database_error()?;
    let code = error.code()?;
    // invalid_sql_statement_name, duplicate_prepared_statement
    ["26000", "42P05"]
        .contains(&code.as_ref())
        .then(|| format!("a connection pooler stands before postgres, which says: {}", error.message()))
}

/// What a relay must know of its database before it may start.
#[derive(Debug, Clone)]
pub(crate) struct Outbox {
    /// The name of the database, for the default `ce_source`.
    pub database: String,
    /// The number of shards.
    pub shards: i16,
}

/// Checks that this is the primary of a migrated outbox, that the relay's role may do what a relay does, and that nothing was
/// done to the outbox on which no relay may work.
pub(crate) async fn inspect(connection: &mut PgConnection, within: Duration) -> Result<Outbox, Error> {
    needs(connection, within).await?;
    let (outbox, cluster) = identify(connection, within).await?;
    let elsewhere = match cluster {
        Cluster::Stored(stored) => guards::judge_cluster(stored, guards::cluster(connection, within).await?),
        // `baton doctor` says so, with the grant.
        Cluster::NotToBeAsked => None,
    };
    guards::check(connection, within, elsewhere).await?;
    Ok(outbox)
}

/// Refuses an outbox that a newer Baton migrated, before anything is asked of tables that may not be what they were.
async fn not_newer(connection: &mut PgConnection, within: Duration) -> Result<(), Error> {
    let asked = sqlx::query_scalar(include_str!("../queries/outbox_version.sql")).fetch_one(&mut *connection);
    let found: Result<Option<i64>, Error> = answer("reading the version of the outbox", within, asked).await;
    match found {
        Ok(Some(found)) if found > SCHEMA => Err(Error::Newer { found }),
        // Without the privilege it is not this that is said, but which privileges lack.
        Err(Error::Statement { source, .. }) if is_denied(&source) => Ok(()),
        found => found.map(drop),
    }
}

fn is_denied(error: &sqlx::Error) -> bool {
    error.as_database_error().is_some_and(|e| e.code().as_deref() == Some("42501"))
}

/// Checks that everything a relay uses is there, and that its role may use it.
pub(crate) async fn needs(connection: &mut PgConnection, within: Duration) -> Result<(), Error> {
    not_newer(connection, within).await?;
    let asked = sqlx::query_as(include_str!("../queries/outbox_needs.sql")).fetch_one(connection);
    let needs: (String, bool, Vec<String>, Vec<String>) =
        answer("looking for what a relay needs", within, asked).await?;
    match needs {
        (_, _, absent, _) if !absent.is_empty() => Err(Error::NotMigrated),
        (role, false, _, _) => Err(Error::Denied { role, missing: "USAGE ON SCHEMA outbox".to_owned() }),
        (role, true, _, missing) if !missing.is_empty() => {
            let more = missing.len().saturating_sub(LACKS_SHOWN);
            let mut shown = missing.iter().take(LACKS_SHOWN).cloned().collect::<Vec<_>>().join(", ");
            if more > 0 {
                shown.push_str(&format!(" and {more} more"));
            }
            Err(Error::Denied { role, missing: shown })
        }
        (_, true, _, _) => Ok(()),
    }
}

/// Of which cluster an outbox says that it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cluster {
    /// The one with this identifier.
    Stored(i64),
    /// This role may not ask which one answers, so there is nothing to compare.
    NotToBeAsked,
}

/// Reads which outbox this is. Refuses a standby.
pub(crate) async fn identify(
    connection: &mut PgConnection,
    within: Duration,
) -> Result<(Outbox, Cluster), Error> {
    let asked = sqlx::query_as(include_str!("../queries/outbox_inspect.sql")).fetch_optional(connection);
    let row: Option<(String, bool, i16, i64, bool)> =
        answer("reading the outbox settings", within, asked).await?;
    match row {
        None => Err(Error::NoSettings),
        Some((_, true, ..)) => Err(Error::Recovery),
        Some((database, false, shards, stored, may_ask)) => {
            let cluster = if may_ask { Cluster::Stored(stored) } else { Cluster::NotToBeAsked };
            Ok((Outbox { database, shards }, cluster))
        }
    }
}

//! Connections, and the rows that both sides of the example have in common.

use std::str::FromStr as _;
use std::time::Duration;

use sqlx::postgres::{PgConnectOptions, PgConnection};
use sqlx::{Connection as _, FromRow};
use uuid::Uuid;

use crate::order::Facts;

/// How long a server may take to answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// A database that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The URL cannot be read.
    #[error("DATABASE_URL is not a Postgres URL; write postgres://user:password@host:5432/database")]
    Malformed,
    /// No connection came about.
    #[error(
        "cannot connect to Postgres at {place} (from DATABASE_URL); check that it runs there, user, password and database"
    )]
    Connect {
        /// Host, port and database.
        place: String,
        /// What the driver said.
        source: sqlx::Error,
    },
    /// No answer came in time.
    #[error("Postgres at {place} (from DATABASE_URL) does not answer within {} s", PATIENCE.as_secs())]
    Silent {
        /// Host, port and database.
        place: String,
    },
    /// The tables of the example are not there.
    #[error("the tables of the example are missing; run `orders setup`")]
    NotSetUp {
        /// What Postgres said.
        source: sqlx::Error,
    },
    /// A statement failed.
    #[error("cannot {operation}")]
    Statement {
        /// What was asked.
        operation: &'static str,
        /// What went wrong.
        source: sqlx::Error,
    },
}

impl Error {
    /// Tells a missing setup from any other failure of a statement.
    pub(crate) fn statement(operation: &'static str, source: sqlx::Error) -> Self {
        // undefined_table, invalid_schema_name
        match code(&source).as_deref() {
            Some("42P01" | "3F000") => Self::NotSetUp { source },
            _ => Self::Statement { operation, source },
        }
    }

    /// Whether another try, on another connection, may go well.
    #[must_use]
    pub fn passes(&self) -> bool {
        match self {
            Self::Silent { .. } => true,
            Self::Malformed | Self::NotSetUp { .. } => false,
            Self::Connect { source, .. } | Self::Statement { source, .. } => passes(source),
        }
    }
}

fn code(error: &sqlx::Error) -> Option<String> {
    error.as_database_error()?.code().map(|code| code.into_owned())
}

pub(crate) fn passes(error: &sqlx::Error) -> bool {
    match code(error) {
        // Connections, resources, rollbacks, locks, shutdown and crash recovery of the server, a fail-over in progress.
        Some(code) => {
            ["08", "25006", "40", "53", "55P03", "57P", "XX"].iter().any(|class| code.starts_with(class))
        }
        None => matches!(error, sqlx::Error::Io(_) | sqlx::Error::Protocol(_) | sqlx::Error::WorkerCrashed),
    }
}

/// Reads the URL.
///
/// # Errors
/// When it is none. The error does not show it: it may hold a password.
pub fn options(url: &str) -> Result<PgConnectOptions, Error> {
    if !url.starts_with("postgres://") && !url.starts_with("postgresql://") {
        return Err(Error::Malformed);
    }
    PgConnectOptions::from_str(url).map_err(|_| Error::Malformed)
}

/// Opens one connection.
///
/// # Errors
/// When the server does not let us in, or says nothing for 10 s.
pub async fn connect(options: &PgConnectOptions) -> Result<PgConnection, Error> {
    let host = options
        .get_socket()
        .map_or_else(|| options.get_host().to_owned(), |socket| socket.display().to_string());
    let place =
        format!("{host}:{}/{}", options.get_port(), options.get_database().unwrap_or(options.get_username()));
    match tokio::time::timeout(PATIENCE, PgConnection::connect_with(options)).await {
        Err(_) => Err(Error::Silent { place }),
        Ok(connected) => connected.map_err(|source| Error::Connect { place, source }),
    }
}

#[derive(FromRow)]
struct FactsRow {
    order_id: Uuid,
    customer: String,
    seq: i64,
    amount_cents: i64,
}

impl From<FactsRow> for Facts {
    fn from(FactsRow { order_id, customer, seq, amount_cents }: FactsRow) -> Self {
        Self { order_id, customer, seq, amount_cents }
    }
}

/// What was placed, in no order.
pub(crate) async fn placed_read(connection: &mut PgConnection) -> Result<Vec<Facts>, Error> {
    let rows: Result<Vec<FactsRow>, _> =
        sqlx::query_as(include_str!("../queries/placed_read.sql")).fetch_all(connection).await;
    let rows = rows.map_err(|source| Error::statement("read orders.placed", source))?;
    Ok(rows.into_iter().map(Facts::from).collect())
}

/// What was billed, in the order in which it was.
pub(crate) async fn invoices_read(connection: &mut PgConnection) -> Result<Vec<Facts>, Error> {
    let rows: Result<Vec<FactsRow>, _> =
        sqlx::query_as(include_str!("../queries/invoices_read.sql")).fetch_all(connection).await;
    let rows = rows.map_err(|source| Error::statement("read billing.invoice", source))?;
    Ok(rows.into_iter().map(Facts::from).collect())
}

//! A connection for one command, and in plain words why there is none.

use std::str::FromStr as _;
use std::time::Duration;

use baton_relay::database::{self, Sessions};
use sqlx::postgres::PgConnectOptions;
use sqlx::postgres::PgPoolOptions;
use sqlx::{ConnectOptions as _, Connection as _, PgConnection, PgPool};

use crate::config::{DatabaseUrl, is_secret};
use crate::failure::Failure;

/// How long a server may take to answer: enough for a TLS handshake over a slow link, short enough to wait for.
const PATIENCE: Duration = Duration::from_secs(10);

/// From when on a statement is noted, for whoever debugs.
const SLOW: Duration = Duration::from_secs(1);

/// What to do about a pooler, in the words of the relay's own refusal.
const SESSION_OF_ITS_OWN: &str = "this command needs a session of its own, because its prepared statements live in it; point \
    outbox.database_url, inbox.database_url or DATABASE_URL at Postgres itself, or at a pool in session mode (pgbouncer: pool_mode = \
    session)";

/// Why there is no connection. None of these holds the URL, which may hold a password.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error(
        "the database URL from {origin} is not a Postgres URL ({reason}); write postgres://user:password@host:5432/database, with special characters in the password percent-encoded"
    )]
    Malformed { origin: String, reason: String },
    #[error(
        "cannot reach Postgres at {place} (from {origin}); does it run there, and are host and port right"
    )]
    Unreachable { place: String, origin: String, source: sqlx::Error },
    #[error("Postgres at {place} does not answer within {} s (from {origin}); does it run there, and are host and port right", PATIENCE.as_secs())]
    Silent { place: String, origin: String },
    #[error(
        "Postgres at {place} does not let user {user} in (from {origin}); check user and password, and that it is a role with LOGIN"
    )]
    Refused { place: String, user: String, origin: String, source: sqlx::Error },
    #[error("Postgres at {place} has no such database (from {origin}); create it, or check the name")]
    NoDatabase { place: String, origin: String, source: sqlx::Error },
    #[error("Postgres at {place} cannot be used (from {origin})")]
    Unusable { place: String, origin: String, source: sqlx::Error },
    #[error(
        "a connection pooler at {place} gives its sessions to one transaction each (from {origin}): {SESSION_OF_ITS_OWN}"
    )]
    Pooled { place: String, origin: String },
    #[error("{found}: {SESSION_OF_ITS_OWN}")]
    Exchanged { found: String },
    #[error("cannot tell whether a connection pooler stands before Postgres at {place} (from {origin})")]
    Untold { place: String, origin: String, source: database::Error },
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        match error {
            Error::Malformed { .. } => Self::usage(error),
            _ => Self::failed(error),
        }
    }
}

/// Connects as the configuration says.
///
/// # Errors
/// One kind for each thing that a person would do differently.
///
/// # Cancel safety
/// Safe: a connection that is being made is dropped.
pub(crate) async fn connect(database: &DatabaseUrl) -> Result<PgConnection, Error> {
    // How long a statement takes is the command's to say, in its own words.
    // pgbouncer refuses a parameter that it does not know.
    let options = options(database)?.extra_float_digits(None);
    let options = options.log_slow_statements(tracing::log::LevelFilter::Debug, SLOW);
    let place = place(&options);
    let origin = database.origin.clone();
    match tokio::time::timeout(PATIENCE, PgConnection::connect_with(&options)).await {
        Err(_) => Err(Error::Silent { place, origin }),
        Ok(Ok(connection)) => Ok(connection),
        Ok(Err(source)) => Err(explain(place, options.get_username(), origin, source)),
    }
}

/// The same, for a command that a pooler in transaction mode would break half-way: refused before anything is done.
///
/// # Errors
/// Those of [`connect`]; and [`Error::Pooled`].
///
/// # Cancel safety
/// Safe: connections that are being made are dropped.
pub(crate) async fn connect_alone(database: &DatabaseUrl) -> Result<PgConnection, Error> {
    let (mut connection, mut another) = (connect(database).await?, connect(database).await?);
    let sessions = database::sessions_of(&mut connection, &mut another, PATIENCE).await;
    let options = options(database)?;
    let (place, origin) = (place(&options), database.origin.clone());
    match sessions {
        Ok(Sessions::Own) => {
            // Nothing is lost with it.
            drop(another.close().await);
            Ok(connection)
        }
        Ok(Sessions::Pooled) => Err(Error::Pooled { place, origin }),
        Err(source) => Err(Error::Untold { place, origin, source }),
    }
}

/// A pool of one connection, for a library that wants one; it connects when it is first used, as [`connect`] has found that it can.
///
/// # Errors
/// When the URL is none.
pub(crate) fn pool(database: &DatabaseUrl) -> Result<PgPool, Error> {
    let options = options(database)?.extra_float_digits(None);
    let options = options.log_slow_statements(tracing::log::LevelFilter::Debug, SLOW);
    Ok(PgPoolOptions::new().max_connections(1).acquire_timeout(PATIENCE).connect_lazy_with(options))
}

/// Whether an error has its cause in a pooler that has exchanged the session of a connection.
pub(crate) fn exchanged(error: &(dyn std::error::Error + 'static)) -> Option<Error> {
    let mut cause = Some(error);
    while let Some(error) = cause {
        if let Some(found) = error.downcast_ref().and_then(database::exchanged_session) {
            return Some(Error::Exchanged { found });
        }
        cause = error.source();
    }
    None
}

/// Checks the URL without connecting.
///
/// # Errors
/// When it is no Postgres URL.
pub(crate) fn check_url(database: &DatabaseUrl) -> Result<(), Error> {
    options(database).map(drop)
}

/// Reads the URL. sqlx alone would take any scheme, and would log what it does not know with its value.
fn options(database: &DatabaseUrl) -> Result<PgConnectOptions, Error> {
    let malformed =
        |reason: &str| Error::Malformed { origin: database.origin.clone(), reason: reason.to_owned() };
    let (scheme, rest) =
        database.url.split_once("://").ok_or_else(|| malformed("it does not start with postgres://"))?;
    if !matches!(scheme, "postgres" | "postgresql") {
        return Err(malformed("it does not start with postgres://"));
    }
    // An unescaped @ or / ends the password early, and what is left of it would be shown as host or database.
    let address = rest.split_once('?').map_or(rest, |(address, _)| address);
    let (authority, path) = address.split_once('/').unwrap_or((address, ""));
    if authority.matches('@').count() > 1 || path.contains('@') {
        return Err(malformed(
            "it has an @ or a / too many: write %40 and %2F for those in user and password",
        ));
    }
    let parameters = rest.split_once('?').map_or("", |(_, parameters)| parameters);
    for (name, _) in parameters.split('&').filter_map(|parameter| parameter.split_once('=')) {
        if name != "password" && is_secret(name) {
            return Err(malformed(&format!("the parameter {name} is not supported")));
        }
    }
    PgConnectOptions::from_str(&database.url).map_err(|e| match e {
        sqlx::Error::Configuration(reason) => malformed(&reason.to_string()),
        _ => malformed("it cannot be parsed"),
    })
}

/// Host, port and database, which are no secret.
fn place(options: &PgConnectOptions) -> String {
    let host = options
        .get_socket()
        .map_or_else(|| options.get_host().to_owned(), |socket| socket.display().to_string());
    format!("{host}:{}/{}", options.get_port(), options.get_database().unwrap_or(options.get_username()))
}

fn explain(place: String, user: &str, origin: String, source: sqlx::Error) -> Error {
    let code = match &source {
        sqlx::Error::Io(_) => return Error::Unreachable { place, origin, source },
        sqlx::Error::Database(error) => error.code().unwrap_or_default().into_owned(),
        _ => String::new(),
    };
    match code.as_str() {
        // invalid_authorization_specification, invalid_password
        "28000" | "28P01" => Error::Refused { place, user: user.to_owned(), origin, source },
        // invalid_catalog_name
        "3D000" => Error::NoDatabase { place, origin, source },
        _ => Error::Unusable { place, origin, source },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(url: &str) -> String {
        let database = DatabaseUrl { url: url.to_owned(), origin: "DATABASE_URL".to_owned() };
        options(&database).expect_err("must be refused").to_string()
    }

    #[test]
    fn a_url_of_another_kind_is_refused_without_showing_it() {
        for url in [
            "host=db password=hunter2",
            "mysql://app:hunter2@db/x",
            "postgres://app:hunter2@db:port/x",
            "postgres://app:hunt/hunter2@db/x",
            "postgres://app@db/x?sslpassword=hunter2",
            "postgres://app:hunt@hunter2@db/x",
            "postgres://app:top@hunter2/et@db/x",
            "postgres://app:5432/hunter2@db/x",
            "",
        ] {
            let message = refusal(url);
            assert!(
                message.starts_with("the database URL from DATABASE_URL is not a Postgres URL ("),
                "{message}"
            );
            assert!(!message.contains("hunter2"), "{message}");
        }
    }

    #[test]
    fn the_place_shows_neither_user_nor_password() {
        let database =
            DatabaseUrl { url: "postgres://app:hunter2@db:6432/shop".to_owned(), origin: String::new() };
        assert_eq!(place(&options(&database).unwrap()), "db:6432/shop");
    }
}

//! A database for each test, and the removal of those that nobody removed.
//!
//! The name holds the time it was made by the server's own clock, so that whoever comes an hour later knows it for stale
//! and drops it: a test program that was killed leaves its databases behind.

use std::num::NonZeroU16;
use std::time::Duration;

use sqlx::postgres::{PgConnectOptions, PgConnection, PgPoolOptions};
use sqlx::{AssertSqlSafe, Connection, PgPool};
use tokio::time::timeout;
use uuid::Uuid;

use crate::failure::{Failure, Outcome};
use crate::place::Place;

const PREFIX: &str = "baton_test_";

/// How old what a test left behind must be before another test may take it away.
pub(crate) const STALE: Duration = Duration::from_secs(3600);

/// How long a server gets to answer while a test sets up or clears up.
const PATIENCE: Duration = Duration::from_secs(30);

/// What a new database contains.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Schema {
    /// Nothing.
    Empty,
    /// Both migration lines, with so many shards.
    Both {
        /// From 1 to 1024.
        shards: u16,
    },
}

/// A moment by the database's clock and a random part: what the names of one test's databases and topics begin with.
#[derive(Debug, Clone)]
pub(crate) struct Stamp {
    pub(crate) epoch: i64,
    pub(crate) random: String,
}

/// Connects, or says that it did not come about in time. The address, which may hold a password, is not in the error.
pub(crate) async fn connect(url: &str) -> Outcome<PgConnection> {
    let options: PgConnectOptions =
        url.parse().map_err(|_| Failure::new("DATABASE_URL cannot be understood"))?;
    match timeout(PATIENCE, PgConnection::connect_with(&options)).await {
        Ok(connection) => connection.map_err(|error| {
            Failure::from(error).during("connect to the tests' Postgres (is the stack up? `cargo xtask up`)")
        }),
        Err(_) => crate::fail!("the tests' Postgres has not let us in within {PATIENCE:?}"),
    }
}

/// The time of the server, and something random.
pub(crate) async fn stamp(place: &Place) -> Outcome<Stamp> {
    let mut admin = connect(&place.database_url).await?;
    let epoch: i64 = sqlx::query_scalar("SELECT extract(epoch FROM clock_timestamp())::bigint")
        .fetch_one(&mut admin)
        .await?;
    admin.close().await?;
    let random = Uuid::new_v4().simple().to_string()[..10].to_owned();
    Ok(Stamp { epoch, random })
}

/// Makes a database and gives its place.
pub(crate) async fn create(place: &Place, stamp: &Stamp, schema: Schema) -> Outcome<(Place, PgPool)> {
    let name = format!("{PREFIX}{}_{}", stamp.epoch, stamp.random);
    let mut admin = connect(&place.database_url).await?;
    sqlx::raw_sql(AssertSqlSafe(format!(r#"CREATE DATABASE "{name}""#))).execute(&mut admin).await?;
    admin.close().await?;
    let place = place.with_database(&name);
    if let Schema::Both { shards } = schema {
        migrate(&place, shards).await?;
    }
    let options: PgConnectOptions = place.database_url.parse()?;
    let pool = PgPoolOptions::new()
        .max_connections(8)
        .acquire_timeout(PATIENCE)
        .connect_lazy_with(options.application_name("baton-tests"));
    Ok((place, pool))
}

async fn migrate(place: &Place, shards: u16) -> Outcome {
    let mut connection = connect(&place.database_url).await?;
    let shards = NonZeroU16::new(shards).ok_or_else(|| Failure::new("a test wants 0 shards"))?;
    baton_migrations::migrate_outbox(&mut connection, Some(shards), None).await?;
    baton_migrations::migrate_inbox(&mut connection).await?;
    connection.close().await?;
    Ok(())
}

/// Drops one test's database, whoever is connected.
pub(crate) async fn drop_database(place: &Place, stamp: &Stamp) -> Outcome {
    let name = format!("{PREFIX}{}_{}", stamp.epoch, stamp.random);
    let mut admin = connect(&place.database_url).await?;
    drop_named(place, &mut admin, &name).await?;
    admin.close().await?;
    Ok(())
}

async fn drop_named(place: &Place, admin: &mut PgConnection, name: &str) -> Outcome {
    // A prepared transaction keeps its database from being dropped, and only in that database can it be ended.
    let prepared: Vec<String> = sqlx::query_scalar("SELECT gid FROM pg_prepared_xacts WHERE database = $1")
        .bind(name)
        .fetch_all(&mut *admin)
        .await?;
    if !prepared.is_empty() {
        let mut inside = connect(&place.with_database(name).database_url).await?;
        for gid in prepared {
            let sql = format!("ROLLBACK PREPARED '{}'", gid.replace('\'', "''"));
            sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut inside).await?;
        }
        inside.close().await?;
    }
    let sql = format!(r#"DROP DATABASE IF EXISTS "{name}" WITH (FORCE)"#);
    match timeout(PATIENCE, sqlx::raw_sql(AssertSqlSafe(sql)).execute(admin)).await {
        Ok(dropped) => dropped.map(drop).map_err(|error| Failure::from(error).during(format!("drop {name}"))),
        Err(_) => crate::fail!("{name} was not dropped within {PATIENCE:?}"),
    }
}

/// Drops what tests of long ago left behind. Best effort: others may be doing the same.
pub(crate) async fn sweep(place: &Place, now: i64) -> Outcome {
    let mut admin = connect(&place.database_url).await?;
    let names: Vec<String> =
        sqlx::query_scalar("SELECT datname::text FROM pg_database WHERE datname LIKE 'baton\\_test\\_%'")
            .fetch_all(&mut admin)
            .await?;
    for name in names.iter().filter(|name| is_stale(name.strip_prefix(PREFIX), '_', now)) {
        drop_named(place, &mut admin, name).await.ok();
    }
    admin.close().await?;
    Ok(())
}

/// Whether what follows the prefix begins with a moment more than [`STALE`] ago.
pub(crate) fn is_stale(rest: Option<&str>, separator: char, now: i64) -> bool {
    rest.and_then(|rest| rest.split(separator).next()?.parse::<i64>().ok())
        .is_some_and(|made| now - made > STALE.as_secs().cast_signed())
}

#[cfg(test)]
mod tests {
    use super::is_stale;

    #[test]
    fn only_what_is_older_than_an_hour_is_stale() {
        let stale = |name: &str| is_stale(name.strip_prefix("baton_test_"), '_', 10_000);
        assert!(stale("baton_test_6399_abc"));
        assert!(!stale("baton_test_6400_abc"));
        assert!(!stale("baton_test_20000_abc"));
        assert!(!stale("baton_test_x_abc"));
        assert!(!stale("baton_tests"));
    }
}

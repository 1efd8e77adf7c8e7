//! Bringing a database up to date, in one transaction under one lock; tried again while somebody uses its tables.

use std::num::NonZeroU16;
use std::time::Duration;

use sqlx::migrate::MigrateError;
use sqlx::{Connection as _, Executor as _, PgConnection};

use crate::locks::{self, Patience};
use crate::settings::{self, Settings, Wish};
use crate::{Error, Line, State, audit, check};

/// What a migration found and did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Applied {
    /// The line that was brought up to date.
    pub line: Line,
    /// The versions that were applied now, oldest first; none when it was up to date.
    pub versions: Vec<i64>,
    /// The roles that were missing, or lacked their privileges, and have them now.
    pub roles: Vec<String>,
    /// What stands in `outbox.settings` now; none for the inbox.
    pub settings: Option<Settings>,
}

impl Applied {
    fn changed(&self) -> bool {
        !self.versions.is_empty() || !self.roles.is_empty()
    }
}

/// Brings the outbox of a database up to date, and its settings to what is asked for. Without a wish a new outbox gets
/// 8 shards and a slot period of 6 h, and one that exists keeps what it has.
///
/// # Errors
///
/// When the database is not fit for it, when what is there and what is recorded do not fit together, or when another
/// number of shards is asked for while the outbox has messages or a relay runs. Nothing has been changed then.
///
/// # Cancel safety
///
/// One transaction: a dropped future changes nothing. The connection must be closed then.
pub async fn migrate_outbox(
    connection: &mut PgConnection,
    shards: Option<NonZeroU16>,
    slot_period: Option<Duration>,
) -> Result<Applied, Error> {
    let wish = Wish { shards, slot_period };
    wish.validate()?;
    patiently(connection, Task::Outbox(wish)).await
}

async fn outbox_once(
    connection: &mut PgConnection,
    wish: Wish,
    patience: Patience,
) -> Result<Applied, Error> {
    let line = Line::Outbox;
    let mut tx = begin(connection, line, patience).await?;
    let (state, mut applied) = advance(&mut tx, line).await?;
    let before = match state {
        State::Missing => None,
        State::Behind { .. } | State::Current | State::Ahead { .. } => Some(settings::read(&mut tx).await?),
    };
    applied.settings = Some(match before {
        None => settings::create(&mut tx, wish).await?,
        Some(_) => settings::update(&mut tx, wish).await?,
    });
    if applied.settings != before || applied.changed() {
        audit_write(&mut tx, &applied).await.map_err(|e| Error::migrate(line, e))?;
    }
    tx.commit().await.map_err(|e| Error::migrate(line, e))?;
    Ok(applied)
}

/// Brings the inbox of a database up to date.
///
/// # Errors
///
/// When the database is not fit for it, or when what is there and what is recorded do not fit together. Nothing has
/// been changed then.
///
/// # Cancel safety
///
/// One transaction: a dropped future changes nothing. The connection must be closed then.
pub async fn migrate_inbox(connection: &mut PgConnection) -> Result<Applied, Error> {
    patiently(connection, Task::Inbox).await
}

async fn inbox_once(connection: &mut PgConnection, patience: Patience) -> Result<Applied, Error> {
    let line = Line::Inbox;
    let mut tx = begin(connection, line, patience).await?;
    let (_, applied) = advance(&mut tx, line).await?;
    if applied.changed() {
        audit_write(&mut tx, &applied).await.map_err(|e| Error::migrate(line, e))?;
    }
    tx.commit().await.map_err(|e| Error::migrate(line, e))?;
    Ok(applied)
}

/// What is to be brought up to date.
#[derive(Debug, Clone, Copy)]
enum Task {
    Outbox(Wish),
    Inbox,
}

/// Tries until the tables can be locked, each time for a moment only.
async fn patiently(connection: &mut PgConnection, task: Task) -> Result<Applied, Error> {
    let line = match task {
        Task::Outbox(_) => Line::Outbox,
        Task::Inbox => Line::Inbox,
    };
    let patience = Patience::of(connection).await.map_err(|e| Error::read(line, e))?;
    let mut tried = 0;
    loop {
        tried += 1;
        let ended = match task {
            Task::Outbox(wish) => outbox_once(connection, wish, patience).await,
            Task::Inbox => inbox_once(connection, patience).await,
        };
        let source = match ended {
            Err(Error::Migrate { source, .. }) if locks::is_timeout(&source) => source,
            ended => return ended,
        };
        // Asked over the same connection, which rolls the try back first: from here on nobody waits for us.
        let holders =
            locks::holders(connection, line.as_str(), patience).await.map_err(|e| Error::read(line, e))?;
        let (tries, wait) = (locks::TRIES, patience.wait());
        if tried == tries {
            return Err(Error::Locked { line, holders, tries, wait, source });
        }
        tracing::warn!(
            "the migration waits for the tables of the {line}, in use by {holders}; producers go first, then it is tried again \
             ({tried} of {tries})"
        );
        tokio::time::sleep(patience.pause()).await;
    }
}

type Tx<'c> = sqlx::Transaction<'c, sqlx::Postgres>;

/// A transaction that holds the lock. READ COMMITTED is said aloud: under another default the wait for the lock would
/// be over with a snapshot from before it.
async fn begin(connection: &mut PgConnection, line: Line, patience: Patience) -> Result<Tx<'_>, Error> {
    let read = move |e| Error::read(line, e);
    let server: (i32, String, bool) = server_read(connection).await.map_err(read)?;
    match server {
        (version, _, _) if version < 150_000 => return Err(Error::ServerVersion { major: version / 10_000 }),
        (_, encoding, _) if encoding != "UTF8" => return Err(Error::Encoding { found: encoding }),
        (_, _, true) => return Err(Error::InRecovery),
        (_, _, false) => {}
    }
    let migrate = move |e| Error::migrate(line, e);
    let mut tx =
        connection.begin_with("BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE").await.map_err(migrate)?;
    // "already exists, skipping" is no news.
    tx.execute("SET LOCAL client_min_messages = warning").await.map_err(migrate)?;
    lock_take(&mut tx).await.map_err(migrate)?;
    // Only now: who waits for another migration keeps nobody waiting.
    patience.bound(&mut tx).await.map_err(migrate)?;
    Ok(tx)
}

/// Applies what is missing. Comes back with the state before.
async fn advance(tx: &mut PgConnection, line: Line) -> Result<(State, Applied), Error> {
    let state = check(tx, line).await?;
    let from = match state {
        State::Missing => 0,
        State::Behind { applied, .. } => applied,
        State::Current => i64::MAX,
        State::Ahead { applied, newest } => return Err(Error::Ahead { line, applied, newest }),
    };
    let migrator = line.migrator();
    let versions: Vec<i64> = migrator.iter().map(|m| m.version).filter(|version| *version > from).collect();
    if !versions.is_empty() {
        // `run` would be the same, but its future is not general enough to be spawned.
        migrator.run_direct(None, tx, false).await.map_err(|e| match e {
            MigrateError::Execute(source) | MigrateError::ExecuteMigration(source, _) => {
                Error::migrate(line, source)
            }
            source => Error::Bookkeeping { line, source },
        })?;
    }
    let roles = roles_check(tx, line).await.map_err(|e| Error::migrate(line, e))?;
    if !roles.is_empty() || !versions.is_empty() {
        tx.execute(line.roles()).await.map_err(|e| Error::migrate(line, e))?;
    }
    Ok((state, Applied { line, versions, roles, settings: None }))
}

async fn server_read(connection: &mut PgConnection) -> Result<(i32, String, bool), sqlx::Error> {
    sqlx::query_as(include_str!("../queries/server_read.sql")).fetch_one(connection).await
}

async fn lock_take(tx: &mut PgConnection) -> Result<(), sqlx::Error> {
    sqlx::query(include_str!("../queries/lock_take.sql")).execute(tx).await.map(drop)
}

/// Says who brought what up to date, in the transaction that does it.
async fn audit_write(tx: &mut PgConnection, applied: &Applied) -> Result<(), sqlx::Error> {
    let sql = match applied.line {
        Line::Outbox => include_str!("../queries/outbox_audit_write.sql"),
        Line::Inbox => include_str!("../queries/inbox_audit_write.sql"),
    };
    audit::mend_sequence(tx, applied.line).await?;
    let settings = applied.settings.as_ref();
    sqlx::query(sql)
        .bind(&applied.versions)
        .bind(&applied.roles)
        .bind(settings.map(|s| i32::from(s.shards.get())))
        .bind(settings.map(|s| s.slot_period.as_secs_f64()))
        .execute(tx)
        .await
        .map(drop)
}

async fn roles_check(tx: &mut PgConnection, line: Line) -> Result<Vec<String>, sqlx::Error> {
    let sql = match line {
        Line::Outbox => include_str!("../queries/outbox_roles_check.sql"),
        Line::Inbox => include_str!("../queries/inbox_roles_check.sql"),
    };
    sqlx::query_scalar(sql).fetch_all(tx).await
}

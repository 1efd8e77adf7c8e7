//! What is chosen once for an outbox: the number of its shards and its slot period.
//!
//! The table `outbox.settings` is authoritative. The functions `outbox.shard_of` and `outbox.slot_at` repeat it as
//! literals, so that an insert inlines them instead of reading a table; both are written in one transaction.
//!
//! The number of shards is part of where every waiting message lies, so it changes only while there is none, under a
//! lock that keeps producers and relays out. The slot period only says when rows move on to the next leaf: it may
//! change at any time, and shortens or lengthens the time that published rows stay readable once.

use std::num::NonZeroU16;
use std::time::Duration;

use sqlx::{AssertSqlSafe, Executor as _, PgConnection};
use uuid::Uuid;

use crate::{Error, Line, Obstacle};

const DEFAULT_SHARDS: NonZeroU16 = NonZeroU16::new(8).expect("eight is not zero");
const DEFAULT_SLOT_PERIOD: Duration = Duration::from_secs(6 * 3600);
const MOST_SHARDS: NonZeroU16 = NonZeroU16::new(1024).expect("1024 is not zero");
const LONGEST_SLOT_PERIOD: Duration = Duration::from_secs(365 * 24 * 3600);

/// The choices of one outbox, as they stand in its database.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settings {
    /// Names this outbox on a Kafka that several services share.
    pub outbox_id: Uuid,
    /// Into how many slices its keys are divided, 1 to 1024. Default: 8.
    pub shards: NonZeroU16,
    /// For how long rows go to one leaf; published ones stay readable for at least as long. Default: 6 h.
    pub slot_period: Duration,
}

/// What somebody asks for; `None` is what there is, or the default.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Wish {
    pub(crate) shards: Option<NonZeroU16>,
    pub(crate) slot_period: Option<Duration>,
}

impl Wish {
    pub(crate) fn validate(&self) -> Result<(), Error> {
        if let Some(asked) = self.shards.filter(|n| *n > MOST_SHARDS) {
            return Err(Error::TooManyShards { asked });
        }
        let in_range = |asked: &Duration| (Duration::from_secs(1)..=LONGEST_SLOT_PERIOD).contains(asked);
        if let Some(asked) = self.slot_period.filter(|asked| !in_range(asked)) {
            return Err(Error::SlotPeriod { asked });
        }
        Ok(())
    }
}

/// Fills a database whose tables have just been made.
pub(crate) async fn create(tx: &mut PgConnection, wish: Wish) -> Result<Settings, Error> {
    let shards = wish.shards.unwrap_or(DEFAULT_SHARDS);
    let slot_period = wish.slot_period.unwrap_or(DEFAULT_SLOT_PERIOD);
    let write = async {
        settings_insert(tx, shards, slot_period).await?;
        shards_insert(tx, shards).await?;
        cursors_insert(tx, 0).await?;
        shard_of_replace(tx, shards).await?;
        slot_at_replace(tx, slot_period).await
    };
    write.await.map_err(|e| Error::migrate(Line::Outbox, e))?;
    read(tx).await
}

/// Brings the settings of a database that has some to what is asked for.
pub(crate) async fn update(tx: &mut PgConnection, wish: Wish) -> Result<Settings, Error> {
    let existing = read(tx).await?;
    let shards = wish.shards.unwrap_or(existing.shards);
    let slot_period = wish.slot_period.map_or(existing.slot_period, whole_micros);
    if shards != existing.shards {
        reshard(tx, existing.shards, shards).await?;
    }
    let migrate = move |e| Error::migrate(Line::Outbox, e);
    if slot_period != existing.slot_period {
        slot_at_replace(tx, slot_period).await.map_err(migrate)?;
    }
    if (shards, slot_period) != (existing.shards, existing.slot_period) {
        settings_update(tx, shards, slot_period).await.map_err(migrate)?;
    }
    Ok(Settings { shards, slot_period, ..existing })
}

/// The settings as they stand.
pub(crate) async fn read(connection: &mut PgConnection) -> Result<Settings, Error> {
    let line = Line::Outbox;
    let row: Option<(Uuid, i16, i64)> = settings_read(connection).await.map_err(|e| Error::read(line, e))?;
    row.and_then(|(outbox_id, shards, slot_period_us)| {
        let shards = NonZeroU16::new(u16::try_from(shards).ok()?)?;
        let slot_period = Duration::from_micros(u64::try_from(slot_period_us).ok()?);
        Some(Settings { outbox_id, shards, slot_period })
    })
    .ok_or_else(|| Error::Incomplete { line, missing: "the row of outbox.settings".to_owned() })
}

/// Another number of shards for an outbox that nobody uses.
async fn reshard(tx: &mut PgConnection, existing: NonZeroU16, asked: NonZeroU16) -> Result<(), Error> {
    let fixed = move |obstacle| Error::ShardsFixed { existing, asked, obstacle };
    let migrate = move |e| Error::migrate(Line::Outbox, e);
    // Once without the lock, so that an outbox in use is told so without anybody having to wait.
    if let Some(obstacle) = reshard_check(tx).await.map_err(migrate)? {
        return Err(fixed(obstacle));
    }
    if let Err(e) = reshard_lock(tx).await {
        let timed_out = e.as_database_error().is_some_and(|e| e.code().as_deref() == Some("55P03"));
        return Err(if timed_out { fixed(Obstacle::Busy) } else { migrate(e) });
    }
    if let Some(obstacle) = reshard_check(tx).await.map_err(migrate)? {
        return Err(fixed(obstacle));
    }
    let write = async {
        // Nobody has a row or a position of the sequence in hand, so every cursor may start where the furthest was.
        let position = cursors_delete(tx).await?;
        shards_insert(tx, asked).await?;
        shards_raise(tx).await?;
        shards_delete(tx, asked).await?;
        cursors_insert(tx, position).await?;
        shard_of_replace(tx, asked).await
    };
    write.await.map_err(migrate)
}

fn whole_micros(period: Duration) -> Duration {
    Duration::new(period.as_secs(), period.subsec_micros() * 1000)
}

/// Microseconds of a slot period, which [`Wish::validate`] keeps below a year.
fn micros(period: Duration) -> i64 {
    i64::try_from(period.as_micros()).unwrap_or(i64::MAX)
}

async fn settings_read(connection: &mut PgConnection) -> Result<Option<(Uuid, i16, i64)>, sqlx::Error> {
    sqlx::query_as(include_str!("../queries/settings_read.sql")).fetch_optional(connection).await
}

async fn settings_insert(
    tx: &mut PgConnection,
    shards: NonZeroU16,
    period: Duration,
) -> Result<(), sqlx::Error> {
    let sql = include_str!("../queries/settings_insert.sql");
    sqlx::query(sql).bind(i32::from(shards.get())).bind(micros(period)).execute(tx).await.map(drop)
}

async fn settings_update(
    tx: &mut PgConnection,
    shards: NonZeroU16,
    period: Duration,
) -> Result<(), sqlx::Error> {
    let sql = include_str!("../queries/settings_update.sql");
    sqlx::query(sql).bind(i32::from(shards.get())).bind(micros(period)).execute(tx).await.map(drop)
}

async fn shards_insert(tx: &mut PgConnection, shards: NonZeroU16) -> Result<(), sqlx::Error> {
    let sql = include_str!("../queries/shards_insert.sql");
    sqlx::query(sql).bind(i32::from(shards.get())).execute(tx).await.map(drop)
}

async fn shards_raise(tx: &mut PgConnection) -> Result<(), sqlx::Error> {
    sqlx::query(include_str!("../queries/shards_raise.sql")).execute(tx).await.map(drop)
}

async fn shards_delete(tx: &mut PgConnection, shards: NonZeroU16) -> Result<(), sqlx::Error> {
    let sql = include_str!("../queries/shards_delete.sql");
    sqlx::query(sql).bind(i32::from(shards.get())).execute(tx).await.map(drop)
}

async fn cursors_insert(tx: &mut PgConnection, position: i64) -> Result<(), sqlx::Error> {
    sqlx::query(include_str!("../queries/cursors_insert.sql")).bind(position).execute(tx).await.map(drop)
}

async fn cursors_delete(tx: &mut PgConnection) -> Result<i64, sqlx::Error> {
    sqlx::query_scalar(include_str!("../queries/cursors_delete.sql")).fetch_one(tx).await
}

async fn reshard_lock(tx: &mut PgConnection) -> Result<(), sqlx::Error> {
    tx.execute("SET LOCAL lock_timeout = '3s'").await?;
    sqlx::query(include_str!("../queries/reshard_lock.sql")).execute(tx).await.map(drop)
}

async fn reshard_check(tx: &mut PgConnection) -> Result<Option<Obstacle>, sqlx::Error> {
    let (messages, parked, relays): (bool, bool, bool) =
        sqlx::query_as(include_str!("../queries/reshard_check.sql")).fetch_one(tx).await?;
    let obstacles = [(messages, Obstacle::Messages), (parked, Obstacle::Parked), (relays, Obstacle::Relays)];
    Ok(obstacles.into_iter().find_map(|(stands, obstacle)| stands.then_some(obstacle)))
}

async fn shard_of_replace(tx: &mut PgConnection, shards: NonZeroU16) -> Result<(), sqlx::Error> {
    // A statement that defines a function takes no parameters; what is put in is a number of ours.
    let sql = include_str!("../queries/shard_of_replace.sql").replace("{shards}", &shards.to_string());
    tx.execute(AssertSqlSafe(sql)).await.map(drop)
}

async fn slot_at_replace(tx: &mut PgConnection, period: Duration) -> Result<(), sqlx::Error> {
    let seconds = format!("{}.{:06}", period.as_secs(), period.subsec_micros());
    let sql = include_str!("../queries/slot_at_replace.sql").replace("{seconds}", &seconds);
    tx.execute(AssertSqlSafe(sql)).await.map(drop)
}

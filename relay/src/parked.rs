//! The table of what is set aside, `outbox.parked`, as a shard's owner works on it: by a connection of its own, one for all
//! shards of a relay, made when the first of them has something there.
//!
//! What is set aside comes by the advance that passes it (see `advance`). Everything here that writes names owner, generation and
//! crash token, under a valid lease and a lock on the shard's fence, as an advance does: zero rows is *fenced*. So a stale owner
//! settles nothing, and what it settled before its successor's claim is seen by that claim's reader.

use std::sync::Arc;
use std::time::Duration;

use baton_protocol::lifecycle::Word as _;
use baton_protocol::lifecycle::message::{Cause, State};
use sqlx::postgres::PgConnection;
use sqlx::{AssertSqlSafe, Row as _};
use tokio::sync::{mpsc, oneshot};
use uuid::Uuid;

use crate::aside::Loaded;
use crate::database::{self, Error, answer};
use crate::read::Row;
use crate::settings::Settings;

/// The longest error text that is kept, in characters.
const ERROR_LENGTH: usize = 1_000;

/// The longest a statement may take: one may carry a page of large payloads.
const PATIENCE: Duration = Duration::from_secs(30);

/// The longest that reading all keys may take which wait: a paused topic may have any number of them.
const LOADING: Duration = Duration::from_secs(300);

/// An error as it is kept: Postgres takes no zero bytes, and nobody reads a page of it.
pub(crate) fn kept(error: &str) -> String {
    error.chars().filter(|c| *c != '\0').take(ERROR_LENGTH).collect()
}

/// Who asks: what a statement that writes is guarded by.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Grip {
    pub shard: i16,
    pub generation: i64,
    /// The crash token that the claim remembered.
    pub token: Uuid,
}

/// What a shard's owner asks.
#[derive(Debug)]
pub(crate) enum Request {
    /// Says what there is; first, where that is asked for, lets what waits for nothing be tried.
    Look { grip: Grip, tidy: Tidy, reply: oneshot::Sender<Answer<Look>> },
    /// The messages that are due, one of each key, but for those of some topics.
    Due { shard: i16, rows: usize, bytes: usize, without: Vec<String>, reply: oneshot::Sender<Vec<Tried>> },
    /// Those behind one of a key, in order.
    Behind { shard: i16, behind: Behind, rows: usize, bytes: usize, reply: oneshot::Sender<Vec<Row>> },
    /// What became of those that were tried.
    Settle { grip: Grip, settled: Vec<Settled>, reply: oneshot::Sender<Answer<Vec<Left>>> },
}

/// Whether a look tidies up first, which looks at every key that waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tidy {
    First,
    NotNow,
}

/// An answer to what is guarded by a lease.
#[derive(Debug)]
pub(crate) enum Answer<T> {
    Done(T),
    Fenced,
    /// Somebody has locked what it is about: nothing was done.
    Locked,
}

/// What of a shard is in the table.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Look {
    pub is_occupied: bool,
    /// How many count towards what a shard may have.
    pub counted: usize,
    /// Until the next one is due; zero or less: it is.
    pub due_in: Option<Duration>,
}

/// A message that is due.
#[derive(Debug)]
pub(crate) struct Tried {
    pub row: Row,
    pub place: i64,
    /// So often it was tried.
    pub attempts: i32,
    /// So often before its budget began.
    pub budget_from: i32,
}

/// A place in a key's queue.
#[derive(Debug)]
pub(crate) struct Behind {
    pub topic: String,
    pub key: String,
    pub place: i64,
}

/// What became of a message that was tried.
#[derive(Debug, Clone)]
pub(crate) struct Settled {
    pub position: i64,
    pub state: State,
    pub refusal: Option<(Cause, String)>,
    /// Until the next attempt.
    pub delay: Option<Duration>,
    /// The attempts that it had, and where its budget began: if an operator has changed these, it is tried anew.
    pub seen: Option<(i32, i32)>,
}

/// Of a key of which something was published.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Left {
    /// One of those that were.
    pub position: i64,
    /// Something of it still waits.
    pub is_left: bool,
}

/// Serves requests until every sender is gone or the connection fails.
pub(crate) async fn run(mut requests: mpsc::Receiver<Request>, settings: Arc<Settings>) -> Result<(), Error> {
    let Some(first) = requests.recv().await else { return Ok(()) };
    let mut connection = database::connect(&settings, "parked", PATIENCE).await?;
    let mut next = Some(first);
    while let Some(request) = next {
        serve(&mut connection, request, &settings.owner).await?;
        next = requests.recv().await;
    }
    Ok(())
}

/// Answers one. A shard that has gone meanwhile needs no answer.
async fn serve(connection: &mut PgConnection, request: Request, owner: &str) -> Result<(), Error> {
    match request {
        Request::Look { grip, tidy, reply } => drop(reply.send(look(connection, owner, grip, tidy).await?)),
        Request::Due { shard, rows, bytes, without, reply } => {
            drop(reply.send(due(connection, shard, rows, bytes, &without).await?));
        }
        Request::Behind { shard, behind: after, rows, bytes, reply } => {
            drop(reply.send(behind(connection, shard, &after, rows, bytes).await?));
        }
        Request::Settle { grip, settled, reply } => {
            drop(reply.send(settle(connection, owner, grip, settled).await?));
        }
    }
    Ok(())
}

/// Whether a shard whose lease was won has anything set aside. Nothing can join it under an earlier generation any more.
pub(crate) async fn any(
    connection: &mut PgConnection,
    shard: i16,
    patience: Duration,
) -> Result<bool, Error> {
    let asked =
        sqlx::query_scalar(include_str!("../queries/parked_any.sql")).bind(shard).fetch_one(connection);
    answer("asking whether anything is set aside", patience, asked).await
}

/// All that a shard has set aside, by a connection of its own: that may take long, and the others must not wait for it.
pub(crate) async fn load(settings: &Settings, shard: i16) -> Result<Loaded, Error> {
    type Found = (Option<String>, Option<String>, Option<String>, Option<i64>, Option<i64>);
    let mut connection = database::connect(settings, "parked", PATIENCE).await?;
    let limit = format!("SET statement_timeout = {}", LOADING.as_millis());
    let asked = sqlx::raw_sql(AssertSqlSafe(limit)).execute(&mut connection);
    answer("setting the limit of reading what is set aside", PATIENCE, asked).await?;
    let asked =
        sqlx::query_as(include_str!("../queries/parked_load.sql")).bind(shard).fetch_all(&mut connection);
    let rows: Vec<Found> = answer("reading what is set aside", LOADING, asked).await?;
    let mut loaded = Loaded::default();
    for (topic, key, cause, waiting, counted) in rows {
        match topic.zip(key) {
            Some((topic, key)) => loaded.keys.push((topic, key, cause.as_deref().and_then(Cause::of_word))),
            None => {
                loaded.waiting = number(waiting);
                loaded.counted = number(counted);
            }
        }
    }
    Ok(loaded)
}

/// The topics that operators have paused.
pub(crate) async fn paused(
    connection: &mut PgConnection,
    patience: Duration,
) -> Result<std::collections::BTreeSet<String>, Error> {
    let asked = sqlx::query_scalar(include_str!("../queries/paused_read.sql")).fetch_all(connection);
    let topics: Vec<String> = answer("reading the paused topics", patience, asked).await?;
    Ok(topics.into_iter().collect())
}

async fn look(
    connection: &mut PgConnection,
    owner: &str,
    grip: Grip,
    tidy: Tidy,
) -> Result<Answer<Look>, Error> {
    // What is locked is tidied the next time.
    if tidy == Tidy::First && matches!(tidy_up(connection, owner, grip).await?, Answer::Fenced) {
        return Ok(Answer::Fenced);
    }
    let asked =
        sqlx::query_as(include_str!("../queries/parked_look.sql")).bind(grip.shard).fetch_one(connection);
    let (is_occupied, counted, due_ms): (bool, i64, Option<i64>) =
        answer("looking at what is set aside", PATIENCE, asked).await?;
    let due_in = due_ms.map(|ms| Duration::from_millis(u64::try_from(ms).unwrap_or(0)));
    Ok(Answer::Done(Look { is_occupied, counted: number(Some(counted)), due_in }))
}

async fn tidy_up(connection: &mut PgConnection, owner: &str, grip: Grip) -> Result<Answer<()>, Error> {
    let asked = sqlx::query_scalar(include_str!("../queries/parked_tidy.sql"))
        .bind(owner)
        .bind(grip.token)
        .bind(grip.shard)
        .bind(grip.generation)
        .fetch_optional(connection);
    let tidied: Option<Option<i64>> =
        unless_locked(answer("tidying what is set aside", PATIENCE, asked).await)?;
    Ok(match tidied {
        Some(Some(_count)) => Answer::Done(()),
        Some(None) => Answer::Fenced,
        None => Answer::Locked,
    })
}

async fn due(
    connection: &mut PgConnection,
    shard: i16,
    rows: usize,
    bytes: usize,
    without: &[String],
) -> Result<Vec<Tried>, Error> {
    const OPERATION: &str = "reading what is due";
    let asked = sqlx::query(include_str!("../queries/parked_take.sql"))
        .bind(shard)
        .bind(i64::try_from(rows).unwrap_or(i64::MAX))
        .bind(i64::try_from(bytes).unwrap_or(i64::MAX))
        .bind(without)
        .fetch_one(connection);
    let page = answer(OPERATION, PATIENCE, asked).await?;
    let decoded = |source| Error::Statement { operation: OPERATION, source };
    let places: Option<Vec<i64>> = page.try_get(2).map_err(decoded)?;
    let attempts: Option<Vec<i32>> = page.try_get(3).map_err(decoded)?;
    let budgets: Option<Vec<i32>> = page.try_get(4).map_err(decoded)?;
    let (places, attempts, budgets) =
        (places.unwrap_or_default(), attempts.unwrap_or_default(), budgets.unwrap_or_default());
    let rows = Row::whole(page)?;
    Ok(rows
        .into_iter()
        .zip(places)
        .zip(attempts.into_iter().zip(budgets))
        .map(|((row, place), (attempts, budget_from))| Tried { row, place, attempts, budget_from })
        .collect())
}

async fn behind(
    connection: &mut PgConnection,
    shard: i16,
    behind: &Behind,
    rows: usize,
    bytes: usize,
) -> Result<Vec<Row>, Error> {
    let asked = sqlx::query(include_str!("../queries/parked_behind.sql"))
        .bind(shard)
        .bind(&behind.topic)
        .bind(&behind.key)
        .bind(behind.place)
        .bind(i64::try_from(rows).unwrap_or(i64::MAX))
        .bind(i64::try_from(bytes).unwrap_or(i64::MAX))
        .fetch_one(connection);
    Row::whole(answer("reading what waits behind", PATIENCE, asked).await?)
}

async fn settle(
    connection: &mut PgConnection,
    owner: &str,
    grip: Grip,
    settled: Vec<Settled>,
) -> Result<Answer<Vec<Left>>, Error> {
    let refusal = |f: fn(&(Cause, String)) -> String| {
        settled.iter().map(|s| s.refusal.as_ref().map(f)).collect::<Vec<_>>()
    };
    let delay = |s: &Settled| s.delay.map(|delay| i64::try_from(delay.as_millis()).unwrap_or(i64::MAX));
    let asked = sqlx::query_as(include_str!("../queries/parked_settle.sql"))
        .bind(owner)
        .bind(grip.token)
        .bind(grip.shard)
        .bind(grip.generation)
        .bind(settled.iter().map(|s| s.position).collect::<Vec<_>>())
        .bind(settled.iter().map(|s| s.state.as_str()).collect::<Vec<_>>())
        .bind(refusal(|(cause, _)| cause.as_str().to_owned()))
        .bind(refusal(|(_, error)| kept(error)))
        .bind(settled.iter().map(delay).collect::<Vec<_>>())
        .bind(settled.iter().map(|s| s.seen.map(|(attempts, _)| attempts)).collect::<Vec<_>>())
        .bind(settled.iter().map(|s| s.seen.map(|(_, budget)| budget)).collect::<Vec<_>>())
        .fetch_all(connection);
    let Some(rows) = unless_locked(answer("settling what was tried", PATIENCE, asked).await)? else {
        return Ok(Answer::Locked);
    };
    let rows: Vec<(Option<i64>, Option<bool>)> = rows;
    if rows.is_empty() {
        return Ok(Answer::Fenced);
    }
    let left = rows.into_iter().filter_map(|(position, is_left)| {
        Some(Left { position: position?, is_left: is_left.unwrap_or(true) })
    });
    Ok(Answer::Done(left.collect()))
}

/// None: somebody has locked what the statement is about, or the two waited for one another and this one gave way.
fn unless_locked<T>(answer: Result<T, Error>) -> Result<Option<T>, Error> {
    const LOCK_NOT_AVAILABLE: &str = "55P03";
    const DEADLOCK: &str = "40P01";
    match answer {
        Ok(answer) => Ok(Some(answer)),
        Err(Error::Statement { source: sqlx::Error::Database(error), .. })
            if error.code().is_some_and(|code| code == LOCK_NOT_AVAILABLE || code == DEADLOCK) =>
        {
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

fn number(found: Option<i64>) -> usize {
    found.and_then(|found| usize::try_from(found).ok()).unwrap_or(0)
}

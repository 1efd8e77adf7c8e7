//! Reads pages of committed messages by cursor, one statement for all shards that ask.
//!
//! A shard asks with its cursor and gets an answer when there is something to hand over. Until then its request stays
//! here and is polled: at once while pages come back full, then from the floor up to the ceiling while nothing comes.
//! Shards whose pages come back full and the others are read in turn, and none takes more than its budget allows.
//! A page is given out only once everything the statement saw is on disk, because a producer may run with
//! `synchronous_commit = off` and a crash must not take back what is on a topic.

use std::collections::BTreeSet;
use std::str;
use std::sync::Arc;
use std::time::Duration;

use baton_protocol::envelope::Outgoing;
use futures_util::TryStreamExt;
use sqlx::Row as _;
use sqlx::postgres::{PgConnection, PgRow};
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;
use uuid::Uuid;

use crate::budget::Budget;
use crate::cursor::{Cursor, ReadAt};
use crate::database::{Error, PLANNED, answer};
use crate::metrics::DatabaseClock;
use crate::record::{Place, Records};
use crate::sizes::{self, Limits, Sizes};

const PAGE_READ: &str = include_str!("../queries/page_read.sql");

/// How long a page may wait for somebody else's flush before the relay flushes by a commit of its own.
const FLUSH_PATIENCE: Duration = Duration::from_millis(3);

/// One message of the outbox, as read. Its bytes stay in the driver's buffer: nothing is copied before the producer copies it.
#[derive(Debug)]
pub(crate) struct Row {
    /// The row of the whole page.
    page: Arc<PgRow>,
    topic: Place,
    key: Place,
    idempotency_key: Place,
    r#type: Place,
    payload: Place,
    headers: Place,
    pub position: i64,
    pub id: Uuid,
    /// `created_at`, milliseconds since the epoch.
    pub created_ms: i64,
    /// What the row costs in memory, roughly.
    pub size: usize,
}

/// What the statement shows of a row.
enum Shown {
    Whole(Row),
    /// Only that there is one at this position, too large for its page.
    Announced(i64),
}

impl Row {
    /// The rows of a page.
    fn all(page: PgRow) -> Result<Vec<Shown>, Error> {
        let page = Arc::new(page);
        let Some(value) = column::<Option<&[u8]>>(&page, 1)? else { return Ok(Vec::new()) };
        Records::of(value).map(|record| Self::of(&page, value, record.map_err(unexpected)?)).collect()
    }

    /// The rows of a page none of which is only announced.
    pub(crate) fn whole(page: PgRow) -> Result<Vec<Self>, Error> {
        let rows = Self::all(page)?.into_iter();
        Ok(rows.filter_map(|shown| if let Shown::Whole(row) = shown { Some(row) } else { None }).collect())
    }

    fn of(page: &Arc<PgRow>, value: &[u8], fields: [Place; 9]) -> Result<Shown, Error> {
        let [position, id, created_at, topic, key, idempotency_key, r#type, payload, headers] = fields;
        let position = i64::from_be_bytes(fixed(position, value)?);
        if !headers.is_null() && headers.len() == 0 {
            return Ok(Shown::Announced(position));
        }
        let size = [key, payload, headers, idempotency_key, r#type].map(Place::len).iter().sum::<usize>();
        Ok(Shown::Whole(Self {
            page: Arc::clone(page),
            topic,
            key,
            idempotency_key,
            r#type,
            payload,
            headers,
            position,
            id: Uuid::from_bytes(fixed(id, value)?),
            created_ms: milliseconds(i64::from_be_bytes(fixed(created_at, value)?)),
            size: sizes::OF_A_ROW + size,
        }))
    }

    fn bytes(&self, place: Place) -> Result<Option<&[u8]>, Error> {
        Ok(place.of(column(&self.page, 1)?))
    }

    fn text(&self, place: Place) -> Result<Option<&str>, Error> {
        self.bytes(place)?.map(str::from_utf8).transpose().map_err(unexpected)
    }

    pub(crate) fn topic(&self) -> Result<&str, Error> {
        self.text(self.topic)?.ok_or_else(|| unexpected("a message without a topic"))
    }

    /// UTF-8, which nobody here has to know.
    pub(crate) fn key(&self) -> Result<Option<&[u8]>, Error> {
        self.bytes(self.key)
    }

    pub(crate) fn payload(&self) -> Result<Option<&[u8]>, Error> {
        self.bytes(self.payload)
    }

    /// What the envelope is written from.
    pub(crate) fn outgoing(&self) -> Result<Outgoing<'_>, Error> {
        Ok(Outgoing {
            id: self.id,
            idempotency_key: self.text(self.idempotency_key)?,
            topic: self.topic()?,
            r#type: self.text(self.r#type)?,
            has_payload: !self.payload.is_null(),
            created_ms: self.created_ms,
            headers: self.text(self.headers)?,
        })
    }
}

/// A field whose type has `N` bytes.
fn fixed<const N: usize>(place: Place, value: &[u8]) -> Result<[u8; N], Error> {
    let bytes = place.of(value).and_then(|bytes| bytes.try_into().ok());
    bytes.ok_or_else(|| unexpected(format!("a field of {} bytes instead of {N}", place.len())))
}

fn unexpected(what: impl std::fmt::Display) -> Error {
    Error::Answer { operation: "decoding a message", what: what.to_string() }
}

/// A timestamp as Postgres sends it, microseconds since 2000, in milliseconds since 1970. Never before 1970, which Kafka does not
/// take: an old row may say `-infinity`.
fn milliseconds(micros: i64) -> i64 {
    const FROM_1970_TO_2000: i64 = 946_684_800_000;
    let is_finite = micros != i64::MAX && micros != i64::MIN;
    if is_finite { (micros.saturating_add(500).div_euclid(1_000) + FROM_1970_TO_2000).max(1) } else { 1 }
}

/// The statement's column types are fixed, so the check for each value is left out.
fn column<'r, T>(row: &'r PgRow, index: usize) -> Result<T, Error>
where
    T: sqlx::Decode<'r, sqlx::Postgres> + sqlx::Type<sqlx::Postgres>,
{
    row.try_get_unchecked(index)
        .map_err(|source| Error::Statement { operation: "decoding a message", source })
}

/// Rows of one shard in order of position, never empty.
#[derive(Debug)]
pub(crate) struct Page {
    /// The cursor the page was read from.
    pub from: Cursor,
    /// When.
    pub read: ReadAt,
    /// The same moment on the database's clock.
    pub clock: DatabaseClock,
    pub rows: Vec<Row>,
    /// Bytes taken from the budget; given back when the page is acknowledged or dropped.
    pub bytes: crate::budget::Held,
}

/// A shard wants its next page.
#[derive(Debug)]
pub(crate) struct Request {
    pub shard: i16,
    pub cursor: Cursor,
    pub rows: usize,
    pub bytes: usize,
    pub reply: oneshot::Sender<Page>,
}

/// A request that waits here, and whether the last look found nothing.
struct Waiting {
    request: Request,
    caught_up: bool,
}

/// Who is asked for now, each with the bytes it may take.
type Asking = Vec<(Waiting, usize)>;

/// What one statement found of one shard: rows in order of position.
#[derive(Default)]
struct Found {
    rows: Vec<Row>,
    /// A row after these is too large for this page.
    ended_by_larger: bool,
}

/// What is known of the shards from their last pages.
#[derive(Default)]
struct Known {
    /// Those whose last page was at least half full.
    behind: BTreeSet<i16>,
    sizes: Sizes,
}

/// How the reader is set.
#[derive(Debug, Clone)]
pub(crate) struct Pace {
    pub floor: Duration,
    pub ceiling: Duration,
    /// How long a statement may take before the connection counts as lost.
    pub patience: Duration,
    #[cfg(feature = "plants")]
    pub plant: Option<crate::plant::Plant>,
}

/// Serves requests until the session ends (every sender is gone) or the connection fails.
pub(crate) async fn run(
    mut connection: PgConnection,
    mut requests: mpsc::Receiver<Request>,
    budget: Budget,
    pace: Pace,
) -> Result<(), Error> {
    let mut waiting: Vec<Waiting> = Vec::new();
    let mut delay = pace.floor;
    let mut known = Known::default();
    let mut turn = Turn::Ahead;
    let mut not_before = Instant::now();
    loop {
        if waiting.is_empty() {
            match requests.recv().await {
                Some(request) => waiting.push(Waiting { request, caught_up: false }),
                None => return Ok(()),
            }
        }
        while let Ok(request) = requests.try_recv() {
            waiting.push(Waiting { request, caught_up: false });
        }
        waiting.retain(|w| !w.request.reply.is_closed());
        if waiting.is_empty() {
            continue;
        }
        let shards: Vec<i16> = waiting.iter().map(|w| w.request.shard).collect();
        let allowed = budget.allow(&shards);
        if !waiting.iter().zip(&allowed).any(|(w, allowed)| !w.caught_up && *allowed > 0) {
            // Nothing new can be read: poll again after the delay, unless somebody asks first, or who holds too much to ask
            // on gets rid of something.
            tokio::select! {
                request = requests.recv() => match request {
                    Some(request) => {
                        waiting.push(Waiting { request, caught_up: false });
                        continue;
                    }
                    None => return Ok(()),
                },
                () = budget.freed(), if allowed.contains(&0) => continue,
                () = tokio::time::sleep(delay), if allowed.iter().any(|allowed| *allowed > 0) => {}
            }
        } else if Instant::now() < not_before {
            // The shards ask one after the other: one statement for all of them, rather than one for each.
            tokio::time::sleep_until(not_before).await;
            continue;
        }
        let (allowed, full): (Vec<_>, Vec<_>) =
            waiting.into_iter().zip(allowed).partition(|(_, allowed)| *allowed > 0);
        let (asking, others) = turn.take(allowed, &known.behind);
        let (read, clock, found) = read_pages(&mut connection, &asking, &known.sizes, &pace).await?;
        let is_empty = found.iter().all(|found| found.rows.is_empty() && !found.ended_by_larger);
        delay = if is_empty { (delay * 2).min(pace.ceiling) } else { pace.floor };
        let asked: Vec<i16> = asking.iter().map(|(w, _)| w.request.shard).collect();
        waiting = deliver(asking, &read, clock, found, &budget, &mut known);
        let is_behind = asked.iter().any(|shard| known.behind.contains(shard));
        not_before = Instant::now() + if is_behind { Duration::ZERO } else { pace.floor };
        waiting.extend(others.into_iter().chain(full).map(|(w, _)| w));
    }
}

/// Whose turn it is. A message of a shard that is up to date must not wait for the large pages of one that is behind, so
/// the two kinds are read by statements of their own, in turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Turn {
    Ahead,
    Behind,
}

impl Turn {
    /// Who is asked for now, and the others; the turn passes on. Without one of the kinds it is the other's turn.
    fn take(&mut self, asking: Asking, behind: &BTreeSet<i16>) -> (Asking, Asking) {
        let (rear, front): (Asking, Asking) =
            asking.into_iter().partition(|(w, _)| behind.contains(&w.request.shard));
        let now = if rear.is_empty() {
            Self::Ahead
        } else if front.is_empty() {
            Self::Behind
        } else {
            *self
        };
        match now {
            Self::Ahead => {
                *self = Self::Behind;
                (front, rear)
            }
            Self::Behind => {
                *self = Self::Ahead;
                (rear, front)
            }
        }
    }
}

/// Answers the requests that have rows and moves the cursors of the others on to the new snapshot.
fn deliver(
    asking: Asking,
    read: &ReadAt,
    clock: DatabaseClock,
    found: Vec<Found>,
    budget: &Budget,
    known: &mut Known,
) -> Vec<Waiting> {
    let mut left = Vec::new();
    for ((mut waiter, allowed), Found { rows, ended_by_larger }) in asking.into_iter().zip(found) {
        let shard = waiter.request.shard;
        let bytes = rows.iter().map(|row| row.size).sum::<usize>();
        let may_take = waiter.request.bytes.min(allowed);
        let most = known.sizes.limits(shard, waiter.request.rows, may_take).rows;
        let is_half_full = !rows.is_empty() && (rows.len() * 2 >= most || bytes * 2 >= may_take);
        if ended_by_larger || is_half_full {
            known.behind.insert(shard);
        } else {
            known.behind.remove(&shard);
        }
        known.sizes.seen(shard, ended_by_larger, rows.iter().map(|row| row.size).max().unwrap_or(0));
        if rows.is_empty() {
            waiter.caught_up = false;
            if !ended_by_larger {
                // An empty page of late rows ends the late part; fresh ones were not looked at yet.
                waiter.caught_up = waiter.request.cursor.late.is_none();
                waiter.request.cursor = waiter.request.cursor.after_empty(read);
            }
            left.push(waiter);
            continue;
        }
        let Request { cursor: from, reply, .. } = waiter.request;
        // A shard that has gone meanwhile drops the page, and with it the hold on the budget.
        drop(reply.send(Page { from, read: read.clone(), clock, rows, bytes: budget.hold(shard, bytes) }));
    }
    left
}

/// One statement, and the wait until what it saw is durable.
async fn read_pages(
    connection: &mut PgConnection,
    asking: &[(Waiting, usize)],
    sizes: &Sizes,
    pace: &Pace,
) -> Result<(ReadAt, DatabaseClock, Vec<Found>), Error> {
    let statement = PAGE_READ;
    #[cfg(feature = "plants")]
    let statement = pace.planted_read().unwrap_or(statement);
    let asks: Vec<Ask<'_>> = asking
        .iter()
        .map(|(w, allowed)| Ask {
            shard: w.request.shard,
            cursor: &w.request.cursor,
            caught_up: w.caught_up,
            limits: sizes.limits(w.request.shard, w.request.rows, w.request.bytes.min(*allowed)),
        })
        .collect();
    let asked = Instant::now();
    let rows: Vec<PgRow> = answer(
        "reading a page",
        pace.patience,
        query(statement, &asks).fetch(&mut *connection).try_collect(),
    )
    .await?;

    let mut found: Vec<Found> = asks.iter().map(|_| Found::default()).collect();
    let mut head = None;
    for row in rows {
        match column::<Option<i16>>(&row, 0)? {
            None => {
                head = Some((
                    DatabaseClock { shown_ms: milliseconds(column(&row, 6)?), asked },
                    ReadAt { snapshot: column(&row, 2)?, ceiling: column(&row, 3)? },
                    column(&row, 4)?,
                    column(&row, 5)?,
                ));
            }
            Some(shard) => {
                let found = asks.iter().zip(&mut found).find(|(ask, _)| ask.shard == shard);
                let (_, found) = found.ok_or_else(|| Error::Answer {
                    operation: "reading a page",
                    what: format!("shard {shard} was not asked for"),
                })?;
                let mut larger: Option<i64> = None;
                for shown in Row::all(row)? {
                    match shown {
                        Shown::Whole(row) => found.rows.push(row),
                        Shown::Announced(at) => larger = Some(larger.unwrap_or(at).min(at)),
                    }
                }
                if let Some(larger) = larger {
                    found.rows.retain(|row| row.position < larger);
                    found.ended_by_larger = true;
                }
                #[cfg(feature = "plants")]
                if pace.keeps_order() {
                    continue;
                }
                // An aggregate promises no order; in practice this finds them sorted.
                found.rows.sort_by_key(|row| row.position);
            }
        }
    }
    let (clock, read, written, flushed): (DatabaseClock, ReadAt, String, bool) =
        head.ok_or_else(|| Error::Answer { operation: "reading a page", what: "no snapshot".to_owned() })?;
    if !flushed && found.iter().any(|found| !found.rows.is_empty()) {
        wait_until_flushed(connection, &written, pace.patience).await?;
    }
    Ok((read, clock, found))
}

async fn wait_until_flushed(
    connection: &mut PgConnection,
    written: &str,
    patience: Duration,
) -> Result<(), Error> {
    let until = Instant::now() + FLUSH_PATIENCE;
    loop {
        let asked = sqlx::query_scalar(include_str!("../queries/wal_flushed.sql"))
            .bind(written)
            .fetch_one(&mut *connection);
        if answer("waiting for the flush of a page", patience, asked).await? {
            return Ok(());
        }
        if Instant::now() >= until {
            let commit = sqlx::query(include_str!("../queries/wal_flush.sql")).execute(&mut *connection);
            answer("flushing a page", patience, commit).await?;
            continue;
        }
        tokio::time::sleep(Duration::from_micros(500)).await;
    }
}

/// What one shard asks of the statement.
#[derive(Debug, Clone, Copy)]
pub struct Ask<'a> {
    /// The shard.
    pub shard: i16,
    /// Where it stands.
    pub cursor: &'a Cursor,
    /// The look before found nothing at the cursor's snapshot.
    pub caught_up: bool,
    limits: Limits,
}

impl<'a> Ask<'a> {
    /// For at most so many rows that have at most so many bytes together; one larger row still comes.
    #[must_use]
    pub fn new(shard: i16, cursor: &'a Cursor, caught_up: bool, rows: usize, bytes: usize) -> Self {
        Self { shard, cursor, caught_up, limits: Limits::of(rows, bytes) }
    }
}

type Query = sqlx::query::Query<'static, sqlx::Postgres, sqlx::postgres::PgArguments>;

fn query(sql: &'static str, asks: &[Ask<'_>]) -> Query {
    let late = |f: fn(&crate::cursor::Late) -> String| -> Vec<Option<String>> {
        asks.iter().map(|a| a.cursor.late.as_ref().map(f)).collect()
    };
    sqlx::query(sql)
        .bind(asks.iter().map(|a| a.shard).collect::<Vec<_>>())
        .bind(asks.iter().map(|a| a.cursor.position).collect::<Vec<_>>())
        .bind(asks.iter().map(|a| a.cursor.snapshot.clone()).collect::<Vec<_>>())
        .bind(asks.iter().map(|a| a.cursor.ceiling.clone()).collect::<Vec<_>>())
        .bind(late(|l| l.snapshot.clone()))
        .bind(asks.iter().map(|a| a.cursor.late.as_ref().map(|l| l.position)).collect::<Vec<_>>())
        .bind(asks.iter().map(|a| a.caught_up).collect::<Vec<_>>())
        .bind(asks.iter().map(|a| i64::try_from(a.limits.rows).unwrap_or(i64::MAX)).collect::<Vec<_>>())
        .bind(asks.iter().map(|a| i64::try_from(a.limits.payload).unwrap_or(i64::MAX)).collect::<Vec<_>>())
}

/// What a page read costs: the plan that Postgres ran, with its buffers, as `EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON)`
/// prints it. For plan tests and `doctor`.
///
/// It is the relay's own plan: the statement is prepared at the first call on a connection, under the settings of the
/// relay's, and later calls run what was planned then.
///
/// # Errors
/// When the database fails.
pub async fn explain(connection: &mut PgConnection, asks: &[Ask<'_>]) -> Result<serde_json::Value, Error> {
    const PREPARE: &str = concat!(
        "PREPARE baton_page_read (smallint[], bigint[], text[], text[], text[], bigint[], boolean[], bigint[], bigint[]) AS\n",
        include_str!("../queries/page_read.sql")
    );
    let asked = async {
        let prepared: bool = sqlx::query_scalar(
            "SELECT EXISTS (SELECT FROM pg_prepared_statements WHERE name = 'baton_page_read')",
        )
        .fetch_one(&mut *connection)
        .await?;
        if !prepared {
            for (name, value) in PLANNED {
                sqlx::query("SELECT set_config($1, $2, false)")
                    .bind(name)
                    .bind(value)
                    .execute(&mut *connection)
                    .await?;
            }
            sqlx::raw_sql(PREPARE).execute(&mut *connection).await?;
        }
        let execute =
            format!("EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) EXECUTE baton_page_read ({})", arguments(asks));
        let row = sqlx::raw_sql(sqlx::AssertSqlSafe(execute)).fetch_one(&mut *connection).await?;
        row.try_get_unchecked::<String, _>(0)
    };
    let plan = answer("explaining a page read", Duration::from_secs(300), asked).await?;
    serde_json::from_str(&plan)
        .map_err(|error| Error::Answer { operation: "explaining a page read", what: error.to_string() })
}

/// The statement's parameters as literals, because EXPLAIN EXECUTE takes no others.
fn arguments(asks: &[Ask<'_>]) -> String {
    let array = |of: fn(&Ask<'_>) -> Option<String>| {
        let elements: Vec<String> = asks
            .iter()
            .map(|ask| {
                of(ask).map_or_else(
                    || "NULL".to_owned(),
                    |text| format!("\"{}\"", text.replace(['"', '\\', '\''], "")),
                )
            })
            .collect();
        format!("'{{{}}}'", elements.join(","))
    };
    [
        array(|a| Some(a.shard.to_string())),
        array(|a| Some(a.cursor.position.to_string())),
        array(|a| Some(a.cursor.snapshot.clone())),
        array(|a| Some(a.cursor.ceiling.clone())),
        array(|a| a.cursor.late.as_ref().map(|l| l.snapshot.clone())),
        array(|a| a.cursor.late.as_ref().map(|l| l.position.to_string())),
        array(|a| Some(a.caught_up.to_string())),
        array(|a| Some(a.limits.rows.to_string())),
        array(|a| Some(i64::try_from(a.limits.payload).unwrap_or(i64::MAX).to_string())),
    ]
    .join(", ")
}

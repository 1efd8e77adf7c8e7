//! Records set aside, so that offsets may move on: in order for each (topic, key), tried again under a lease of their own.
//!
//! `inbox.parked` is authoritative. The first of a key is `retrying`, those behind it are `blocked`; whoever ends the first
//! makes the next one `retrying`. Adding to a key's queue and ending its first record exclude each other by a lock on the key
//! that ends with the transaction, so that nothing is put behind a queue that has just become empty.
//!
//! *On failure.* A process that dies while it tries a record leaves a lease, which ends by the database's clock; the next take
//! is the recovery. The record's effect and its row here end in two transactions: what dies between them is tried once more and
//! found done by its inbox row.

use std::sync::Arc;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use baton_protocol::dead_letter::Cause;
use sqlx::postgres::PgQueryResult;
use sqlx::{Postgres, Transaction};
use tokio::time::Instant;

use super::session::Session;
use super::statements::{Holder, STORABLE_MS, storable};
use super::{Error, Inbox, Work};
use crate::Record;
use crate::metrics::Aside;

/// How a record is set aside.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Place<'a> {
    /// To be tried again, after so long; behind others of its key, when they are done.
    Aside { error: &'a str, failed_for: Duration, delay: Duration },
    /// Behind others of its key, if there are any.
    Behind,
    /// Given up, and its key held up behind it.
    Dead { cause: Cause, error: &'a str, failed_for: Duration },
}

impl Place<'_> {
    pub(crate) fn aside(self) -> Aside {
        match self {
            Self::Aside { .. } => Aside::Retrying,
            Self::Behind => Aside::Blocked,
            Self::Dead { .. } => Aside::Dead,
        }
    }
}

/// A record whose key is held up behind it, once it is given up.
#[derive(Debug, Clone, Copy)]
pub(crate) struct HoldUp<'a> {
    pub(crate) record: &'a Record,
    pub(crate) failed_for: Duration,
}

/// What became of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Parked {
    /// Its row stands, now or since before.
    Aside,
    /// Nothing of its key waits (any more): handle it.
    Free,
    /// Somebody has settled the work meanwhile: claim it, and see.
    Settled,
}

/// Whether a dead letter lets later messages of its key go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum AfterDeadLetter {
    /// They go on, and so overtake it. The default.
    #[default]
    Continue,
    /// They wait, in order, until an operator has requeued or discarded it: `baton inbox parked requeue` and `discard`, or
    /// [`operate`](crate::operate).
    Block,
}

impl AfterDeadLetter {
    fn blocks(self) -> bool {
        self == Self::Block
    }
}

/// A record that is this process's to try.
#[derive(Debug)]
pub(crate) struct Taken {
    sequence: i64,
    holder: Holder,
    pub(crate) record: Arc<Record>,
    /// Spent, this one included.
    pub(crate) attempts: u32,
    /// When it was asked for: its lease counts from then.
    pub(crate) asked: Instant,
    pub(crate) failed_for: Duration,
}

/// How a try that settles a record ended.
#[derive(Debug, Clone, Copy)]
pub(crate) enum End<'a> {
    Done,
    Dead {
        /// As in `dlt-cause`.
        cause: &'a str,
        error: Option<&'a str>,
    },
}

/// Whether what was to be written was the holder's to write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Written {
    Yes,
    /// Its lease ran out; somebody else has it, or will.
    Fenced,
}

impl Written {
    fn of(result: &PgQueryResult) -> Self {
        if result.rows_affected() == 1 { Self::Yes } else { Self::Fenced }
    }
}

#[derive(sqlx::FromRow)]
struct Row(i64, i64, String, i32, i64, Option<Vec<u8>>, Option<Vec<u8>>, String, Option<i64>, i32, i64);

/// As they are stored: names, and values in base64.
type StoredHeaders = Vec<(String, Option<String>)>;

impl Error {
    /// Whether what is set aside could not be written because the database is away, and not because of what was to be written.
    pub(crate) fn is_an_outage(&self) -> bool {
        let source = match self {
            Self::Connect(source) | Self::Begin(source) | Self::Parked(source) => source,
            _ => return false,
        };
        source.as_database_error().is_none_or(|error| {
            error.code().is_none_or(|code| ["08", "57P", "53"].iter().any(|class| code.starts_with(class)))
        })
    }
}

impl Inbox {
    /// The keys of a topic that wait.
    pub(crate) async fn parked_keys(
        &self,
        topic: &str,
        after: AfterDeadLetter,
    ) -> Result<Vec<Vec<u8>>, Error> {
        #[cfg(feature = "plants")]
        if self.has(crate::plant::Plant::ParkedKeysForgotten) {
            return Ok(Vec::new());
        }
        sqlx::query_scalar(include_str!("../../queries/parked_keys.sql"))
            .bind(&*self.consumer)
            .bind(topic)
            .bind(after.blocks())
            .fetch_all(&self.pool)
            .await
            .map_err(Error::Parked)
    }

    /// Sets a record aside. `work.attempts` are spent.
    pub(crate) async fn park(
        &self,
        work: &Work,
        record: &Record,
        place: Place<'_>,
        after: AfterDeadLetter,
    ) -> Result<Parked, Error> {
        self.in_transaction(async |tx| {
            self.lock_key(tx, record.topic(), record.key()).await?;
            self.park_within(tx, work, record, place, after).await
        })
        .await
    }

    /// What the others here do, in one transaction.
    pub(super) async fn in_transaction<T>(
        &self,
        act: impl AsyncFnOnce(&mut Transaction<'_, Postgres>) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let mut session = Session::acquire(&self.pool).await.map_err(Error::Parked)?;
        let mut tx = session.begin_plainly(&self.begin).await.map_err(Error::Parked)?;
        let done = act(&mut tx).await?;
        tx.commit().await.map_err(Error::Parked)?;
        session.ended(Ok(()));
        Ok(done)
    }

    /// The same in a transaction that has the key's lock.
    pub(super) async fn park_within(
        &self,
        tx: &mut Transaction<'_, Postgres>,
        work: &Work,
        record: &Record,
        place: Place<'_>,
        after: AfterDeadLetter,
    ) -> Result<Parked, Error> {
        let headers: StoredHeaders = record
            .headers()
            .map(|(name, value)| (name.to_owned(), value.map(|value| STANDARD.encode(value))))
            .collect();
        let headers = serde_json::to_string(&headers)
            .map_err(|error| Error::Parked(sqlx::Error::Encode(error.into())))?;
        let (state, cause, error, failed_for, delay) = match place {
            Place::Aside { error, failed_for, delay } => ("retrying", None, Some(error), failed_for, delay),
            Place::Behind => ("blocked", None, None, Duration::ZERO, Duration::ZERO),
            Place::Dead { cause, error, failed_for } => {
                ("dead", Some(cause.as_str()), Some(error), failed_for, Duration::ZERO)
            }
        };
        let attempts = if matches!(place, Place::Behind) { 0 } else { work.attempts_column() };
        let (is_behind, is_settled): (bool, bool) =
            sqlx::query_as(include_str!("../../queries/parked_insert.sql"))
                .bind(&*self.consumer)
                .bind(record.topic())
                .bind(record.partition())
                .bind(record.offset())
                .bind(record.key())
                .bind(record.payload().map(AsRef::<[u8]>::as_ref))
                .bind(headers)
                .bind(record.timestamp_ms().filter(|ms| STORABLE_MS.contains(ms)))
                .bind(&work.scope)
                .bind(&work.key)
                .bind(attempts)
                .bind(state)
                .bind(cause)
                .bind(error.map(storable))
                .bind(milliseconds(failed_for))
                .bind(milliseconds(delay))
                .bind(after.blocks())
                .bind(work.replay.is_some())
                .fetch_one(&mut **tx)
                .await
                .map_err(Error::Parked)?;
        Ok(match place {
            Place::Behind if !is_behind => Parked::Free,
            Place::Aside { .. } if is_settled => Parked::Settled,
            _ => Parked::Aside,
        })
    }

    /// Takes records that are due, at most `limit`.
    pub(crate) async fn take_parked(&self, topics: &[String], limit: i64) -> Result<Vec<Taken>, Error> {
        let (asked, rows) = self
            .in_transaction(async |tx| {
                let asked = Instant::now();
                let rows = sqlx::query_as::<_, Row>(include_str!("../../queries/parked_take.sql"))
                    .bind(&*self.consumer)
                    .bind(topics)
                    .bind(&*self.owner)
                    .bind(self.ttl_ms())
                    .bind(limit)
                    .fetch_all(&mut **tx)
                    .await
                    .map_err(Error::Parked)?;
                Ok((asked, rows))
            })
            .await?;
        // One that cannot be read, of another version say, must not keep the others from being tried.
        let read = |row| match taken(row, &self.consumer, &self.owner, asked) {
            #[cfg(feature = "plants")]
            Ok(taken) if self.has(crate::plant::Plant::AttemptsForgotten) => {
                Some(Taken { attempts: 1, ..taken })
            }
            Ok(taken) => Some(taken),
            Err(error) => {
                tracing::error!(%error, "a record that was set aside cannot be read; look at the headers of the oldest in inbox.parked");
                None
            }
        };
        Ok(rows.into_iter().filter_map(read).collect())
    }

    /// Lets be tried what is blocked behind nothing, and says how many.
    pub(crate) async fn sweep_parked(&self, topics: &[String], after: AfterDeadLetter) -> Result<u64, Error> {
        self.in_transaction(async |tx| {
            sqlx::query(include_str!("../../queries/parked_sweep.sql"))
                .bind(&*self.consumer)
                .bind(topics)
                .bind(after.blocks())
                .execute(&mut **tx)
                .await
                .map(|swept| swept.rows_affected())
                .map_err(Error::Parked)
        })
        .await
    }

    /// Gives a record back, to be tried again after `delay`. `attempts` are spent in all.
    pub(crate) async fn postpone(
        &self,
        taken: &Taken,
        attempts: u32,
        error: Option<&str>,
        delay: Duration,
    ) -> Result<Written, Error> {
        self.in_transaction(async |tx| {
            sqlx::query(include_str!("../../queries/parked_postpone.sql"))
                .bind(taken.sequence)
                .bind(&taken.holder.owner)
                .bind(taken.holder.generation)
                .bind(i32::try_from(attempts).unwrap_or(i32::MAX))
                .bind(error.map(storable))
                .bind(milliseconds(delay))
                .execute(&mut **tx)
                .await
                .map(|written| Written::of(&written))
                .map_err(Error::Parked)
        })
        .await
    }

    /// Ends a record, and lets the next one of its key be tried. `attempts` are spent in all.
    pub(crate) async fn end_parked(
        &self,
        taken: &Taken,
        end: End<'_>,
        attempts: u32,
        after: AfterDeadLetter,
    ) -> Result<Written, Error> {
        let (state, cause, error) = match end {
            End::Done => ("done", None, None),
            End::Dead { cause, error } => ("dead", Some(cause), error.map(storable)),
        };
        let (topic, key) = (taken.record.topic(), taken.record.key());
        self.in_transaction(async |tx| {
            self.lock_key(tx, topic, key).await?;
            let ended = sqlx::query(include_str!("../../queries/parked_end.sql"))
                .bind(taken.sequence)
                .bind(&taken.holder.owner)
                .bind(taken.holder.generation)
                .bind(state)
                .bind(i32::try_from(attempts).unwrap_or(i32::MAX))
                .bind(cause)
                .bind(error)
                .execute(&mut **tx)
                .await
                .map_err(Error::Parked)?;
            let written = Written::of(&ended);
            if written == Written::Yes {
                self.unblock(tx, topic, key, after).await?;
            }
            Ok(written)
        })
        .await
    }

    /// A replay has applied what was set aside as dead: that row is done, and the next one of its key may be tried.
    pub(super) async fn end_dead(
        &self,
        work: &Work,
        record: &Record,
        after: AfterDeadLetter,
    ) -> Result<(), Error> {
        let (topic, key) = (record.original_topic(), record.key());
        self.in_transaction(async |tx| {
            self.lock_key(tx, topic, key).await?;
            let ended = sqlx::query(include_str!("../../queries/parked_replayed.sql"))
                .bind(&*self.consumer)
                .bind(topic)
                .bind(key)
                .bind(&work.scope)
                .bind(&work.key)
                .execute(&mut **tx)
                .await
                .map_err(Error::Parked)?;
            if ended.rows_affected() > 0 {
                self.unblock(tx, topic, key, after).await?;
            }
            Ok(())
        })
        .await
    }

    /// The next record of a key, once nothing before it is unsettled.
    async fn unblock(
        &self,
        tx: &mut Transaction<'_, Postgres>,
        topic: &str,
        key: Option<&[u8]>,
        after: AfterDeadLetter,
    ) -> Result<(), Error> {
        let Some(key) = key else { return Ok(()) };
        sqlx::query(include_str!("../../queries/parked_unblock.sql"))
            .bind(&*self.consumer)
            .bind(topic)
            .bind(key)
            .bind(after.blocks())
            .execute(&mut **tx)
            .await
            .map(drop)
            .map_err(Error::Parked)
    }

    pub(super) async fn lock_key(
        &self,
        tx: &mut Transaction<'_, Postgres>,
        topic: &str,
        key: Option<&[u8]>,
    ) -> Result<(), Error> {
        let Some(key) = key else { return Ok(()) };
        sqlx::query(include_str!("../../queries/parked_lock.sql"))
            .bind(&*self.consumer)
            .bind(topic)
            .bind(key)
            .execute(&mut **tx)
            .await
            .map(drop)
            .map_err(Error::Parked)
    }
}

fn taken(row: Row, consumer: &str, owner: &str, asked: Instant) -> Result<Taken, sqlx::Error> {
    let Row(
        sequence,
        generation,
        topic,
        partition,
        offset,
        key,
        payload,
        headers,
        timestamp_ms,
        attempts,
        failed_ms,
    ) = row;
    let stored: StoredHeaders =
        serde_json::from_str(&headers).map_err(|error| sqlx::Error::Decode(error.into()))?;
    let mut headers = Vec::with_capacity(stored.len());
    for (name, value) in stored {
        let value = value.map(|value| STANDARD.decode(value)).transpose();
        headers.push((name, value.map_err(|error| sqlx::Error::Decode(error.into()))?));
    }
    let record = Record::restored(
        topic.into(),
        partition,
        offset,
        timestamp_ms,
        key.map(Into::into),
        payload.map(Into::into),
        &headers,
    )
    .read_by(consumer);
    Ok(Taken {
        sequence,
        holder: Holder { owner: owner.to_owned(), generation },
        record: Arc::new(record),
        attempts: u32::try_from(attempts).unwrap_or_default(),
        asked,
        failed_for: Duration::from_millis(u64::try_from(failed_ms).unwrap_or_default()),
    })
}

fn milliseconds(span: Duration) -> i64 {
    i64::try_from(span.as_millis()).unwrap_or(i64::MAX)
}

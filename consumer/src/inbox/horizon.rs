//! The dedupe horizon: finished rows go after a while, and what was purged is still refused by its record's time.
//!
//! ```text
//! row: done ──for longer than the horizon──▶ gone, and the watermark is at or above its record's time
//!
//! claim of a record ─┬─ it has a row ──────────────────────────────▶ as the row says
//!                    ├─ none, its time above the watermark, or no watermark ─▶ it is new
//!                    └─ none, its time at or below the watermark ──▶ TooOld: never applied
//! ```
//!
//! *The promise.* Within the horizon after it was applied, a repeat of any kind is a duplicate. Later, a repeat of a record is
//! refused by its time, for ever. What is brought by a caller, or by a record without a time, has no such time: a repeat after the
//! horizon is new. A record that was never applied and is as old as what was purged is refused as well, as a dead letter, because
//! nothing tells it from a repeat: the horizon has to be longer than any partition can lag behind the others, so at least as long
//! as the topics are kept. A first start over old history is not affected, because what was never purged raises no watermark.
//!
//! *The race.* A batch is one transaction that deletes rows and raises the watermark over them. So a claim finds the row; or it
//! finds neither, and its statement can see the watermark; or its snapshot is older than the batch and its insert later, and then
//! the completion, whose snapshot is later than the insert, sees the watermark and rolls everything back. That holds however long
//! any of it takes, and no clock takes part in it.
//!
//! The watermark in `inbox.horizon` is authoritative, and never falls. Rows that are dead or in progress stay, and so does a
//! row whose record stands unsettled in `inbox.parked`.
//!
//! *On failure.* A batch is there completely or not at all, so that a purge may end anywhere: the next one goes on.

use std::future::Future;
use std::pin::pin;
use std::time::Duration;

use baton_protocol::report::chain;
use baton_protocol::retry::Policy;
use futures_util::FutureExt;
use sqlx::{PgPool, Postgres, Transaction};
use time::OffsetDateTime;

use super::session::Session;
use super::{Error, Inbox};
use crate::operate;

/// Rows of one transaction. A batch of them takes 100 to 200 ms on two busy cores and holds up no claim.
const BATCH: u16 = 5_000;

/// What [`Inbox::purge`] did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Purged {
    /// How many rows of finished work are gone.
    pub rows: u64,
    /// How many parked records are gone that were done or discarded.
    pub parked: u64,
    /// The highest record time that was ever purged for this consumer; none when none was.
    pub watermark: Option<OffsetDateTime>,
    /// What was left to purge.
    pub left: Left,
}

/// What a purge left to purge.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Left {
    /// Nothing that was beyond the horizon when it began.
    Nothing,
    /// Whatever there was: another process was purging for this consumer, and goes on.
    ToAnother,
}

impl Inbox {
    /// How long finished work is remembered, unless set otherwise.
    pub const DEFAULT_HORIZON: Duration = Duration::from_secs(30 * 24 * 3600);

    /// Purges what this consumer finished longer ago than `horizon`, 1 s to 100 years (what lies outside counts as the nearest);
    /// [`DEFAULT_HORIZON`](Self::DEFAULT_HORIZON) is 30 days. It must be longer than a partition can lag behind the others, and
    /// than a repeat can be late: at least as long as the topics are kept. To be called now and then, by a scheduler say: once an hour
    /// is plenty.
    ///
    /// A record as old as what was purged is then [`Once::TooOld`](super::Once::TooOld), unless it has a row. What came without a
    /// record's time, as all of [`run_once`](Self::run_once) does, is remembered for the horizon and not longer: a repeat after it
    /// runs. Dead work, work in progress and rows with a time ahead of the horizon stay.
    ///
    /// In transactions of 5,000 rows; several processes may do it at once, and those that come second leave it to the first.
    ///
    /// # Errors
    ///
    /// [`Error::Connect`], [`Error::Begin`], [`Error::Clock`], [`Error::Purge`]: the batches before it are purged.
    ///
    /// # Cancel safety
    ///
    /// Dropped half-way it has purged some batches, each completely.
    pub async fn purge(&self, horizon: Duration) -> Result<Purged, Error> {
        let mut purge = Purge::begin(self, horizon, Trace::None).await?;
        while purge.step().await? == Step::More {}
        purge.end().await
    }

    /// The same, for a command: with every batch goes an audit row, and one at least.
    pub(crate) async fn purge_and_tell(&self, horizon: Duration) -> Result<Purged, Error> {
        let mut purge = Purge::begin(self, horizon, Trace::Missing).await?;
        while purge.step().await? == Step::More {}
        purge.end().await
    }
}

/// The length that counts.
pub(crate) fn bounded(horizon: Duration) -> Duration {
    const LONGEST: Duration = Duration::from_secs(100 * 365 * 24 * 3600);
    horizon.clamp(Duration::from_secs(1), LONGEST)
}

/// Whether a purge leaves audit rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Trace {
    /// It is a consumer's own.
    None,
    /// It is to, and has left none yet.
    Missing,
    Left,
}

/// Purges now and then until `stop`, which is looked at between two batches. What fails is said, and tried again when the next
/// purge is due: rows that stay longer do no harm.
pub(crate) async fn keep(inbox: Inbox, horizon: Duration, stop: impl Future<Output = ()>) {
    let mut stop = pin!(stop);
    let mut waits = pauses(horizon).delays();
    let mut has_failed = false;
    loop {
        tokio::select! {
            biased;
            () = &mut stop => return,
            () = tokio::time::sleep(waits.next_delay()) => {}
        }
        let purged = async {
            let mut purge = Purge::begin(&inbox, horizon, Trace::None).await?;
            while purge.step().await? == Step::More {
                if stop.as_mut().now_or_never().is_some() {
                    return Ok(None);
                }
            }
            purge.end().await.map(Some)
        };
        match purged.await {
            Ok(None) => return,
            Ok(Some(purged)) => {
                has_failed = false;
                if purged.rows + purged.parked > 0 {
                    tracing::info!(
                        rows = purged.rows,
                        parked = purged.parked,
                        watermark = ?purged.watermark,
                        "purged what was finished longer ago than the horizon"
                    );
                }
            }
            Err(error) if has_failed => {
                tracing::debug!(error = chain(&error), "the inbox still cannot be purged");
            }
            Err(error) => {
                has_failed = true;
                tracing::warn!(
                    error = chain(&error),
                    "the inbox cannot be purged for now, so it grows; records flow"
                );
            }
        }
    }
}

/// A hundredth of the horizon, 1 min to 1 h, on average: each is drawn evenly from nothing to twice that, so that processes that
/// start together do not purge together, and one that is started again and again does purge.
fn pauses(horizon: Duration) -> Policy {
    let longest = (horizon / 100).clamp(Duration::from_secs(60), Duration::from_secs(3600)) * 2;
    Policy { base: longest, factor: 1.0, cap: longest }
}

/// A purge under way. Its cut-off stands from the beginning, so that it ends.
struct Purge<'a> {
    inbox: &'a Inbox,
    horizon: Duration,
    cut_off: OffsetDateTime,
    trace: Trace,
    stage: Stage,
    purged: Purged,
}

#[derive(Debug, Clone, Copy)]
enum Stage {
    /// From the rows claimed at this moment on; what was passed over before it stays.
    Rows(Option<OffsetDateTime>),
    Parked,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    More,
    Over,
}

impl<'a> Purge<'a> {
    async fn begin(inbox: &'a Inbox, horizon: Duration, trace: Trace) -> Result<Self, Error> {
        let horizon = bounded(horizon);
        let cut_off = inbox.now().await? - horizon;
        let purged = Purged { rows: 0, parked: 0, watermark: None, left: Left::Nothing };
        Ok(Self { inbox, horizon, cut_off, trace, stage: Stage::Rows(None), purged })
    }

    /// In the transaction of a batch; what came to nothing is told once, by the last one.
    async fn tell(&mut self, tx: &mut Transaction<'_, Postgres>, what: &str, gone: u64) -> Result<(), Error> {
        let is_last = matches!(self.stage, Stage::Parked) && what == "parked" && gone < BATCH.into();
        if self.trace == Trace::None || gone == 0 && (self.trace == Trace::Left || !is_last) {
            return Ok(());
        }
        let arguments = serde_json::json!({
            "consumer": &*self.inbox.consumer, "older_than_seconds": self.horizon.as_secs_f64(), "what": what,
        });
        operate::audit(tx, "inbox purge", &arguments, gone).await.map_err(Error::Purge)?;
        self.trace = Trace::Left;
        Ok(())
    }

    /// One batch.
    async fn step(&mut self) -> Result<Step, Error> {
        let consumer = &*self.inbox.consumer;
        let mut session = Session::open(&self.inbox.pool).await?;
        let mut tx = session.begin(&self.inbox.begin).await?;
        if !lock(&mut tx, consumer).await.map_err(Error::Purge)? {
            let rolled_back = tx.rollback().await;
            session.ended(rolled_back);
            self.purged.left = Left::ToAnother;
            return Ok(Step::Over);
        }
        let gone = match self.stage {
            Stage::Rows(from) => {
                let (gone, reached) =
                    purge_rows(&mut tx, consumer, self.cut_off, from).await.map_err(Error::Purge)?;
                self.tell(&mut tx, "rows", gone).await?;
                self.stage = if gone < BATCH.into() { Stage::Parked } else { Stage::Rows(reached) };
                tx.commit().await.map_err(Error::Purge)?;
                self.purged.rows += gone;
                Step::More
            }
            Stage::Parked => {
                let gone = purge_parked(&mut tx, consumer, self.cut_off).await.map_err(Error::Purge)?;
                self.tell(&mut tx, "parked", gone).await?;
                tx.commit().await.map_err(Error::Purge)?;
                self.purged.parked += gone;
                if gone < BATCH.into() { Step::Over } else { Step::More }
            }
        };
        session.ended(Ok(()));
        Ok(gone)
    }

    async fn end(mut self) -> Result<Purged, Error> {
        self.purged.watermark =
            watermark(&self.inbox.pool, &self.inbox.consumer).await.map_err(Error::Purge)?;
        Ok(self.purged)
    }
}

/// Whether this transaction is the only one that purges for the consumer.
async fn lock(tx: &mut Transaction<'_, Postgres>, consumer: &str) -> Result<bool, sqlx::Error> {
    sqlx::query_scalar(include_str!("../../queries/horizon_lock.sql"))
        .bind(consumer)
        .fetch_one(&mut **tx)
        .await
}

/// How many are gone, and when the last of them was claimed.
async fn purge_rows(
    tx: &mut Transaction<'_, Postgres>,
    consumer: &str,
    cut_off: OffsetDateTime,
    from: Option<OffsetDateTime>,
) -> Result<(u64, Option<OffsetDateTime>), sqlx::Error> {
    let (gone, reached): (i64, _) = sqlx::query_as(include_str!("../../queries/message_purge.sql"))
        .bind(consumer)
        .bind(cut_off)
        .bind(i64::from(BATCH))
        .bind(from)
        .fetch_one(&mut **tx)
        .await?;
    Ok((gone.unsigned_abs(), reached))
}

/// How many are gone.
async fn purge_parked(
    tx: &mut Transaction<'_, Postgres>,
    consumer: &str,
    cut_off: OffsetDateTime,
) -> Result<u64, sqlx::Error> {
    let gone: i64 = sqlx::query_scalar(include_str!("../../queries/parked_purge.sql"))
        .bind(consumer)
        .bind(cut_off)
        .bind(i64::from(BATCH))
        .fetch_one(&mut **tx)
        .await?;
    Ok(gone.unsigned_abs())
}

async fn watermark(pool: &PgPool, consumer: &str) -> Result<Option<OffsetDateTime>, sqlx::Error> {
    sqlx::query_scalar(include_str!("../../queries/horizon_read.sql"))
        .bind(consumer)
        .fetch_optional(pool)
        .await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_purge_is_due_every_hundredth_of_the_horizon_within_a_minute_and_an_hour() {
        for (horizon, seconds) in
            [(1, 120), (3600, 120), (24 * 3600, 1728), (30 * 24 * 3600, 7200), (u64::MAX, 7200)]
        {
            assert_eq!(pauses(Duration::from_secs(horizon)).cap.as_secs(), seconds, "{horizon}");
        }
    }
}

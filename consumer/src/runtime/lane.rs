//! One partition's records, one after the other, each until it is settled.
//!
//! ```text
//!            ┌─ no identity ───────────────────────────────────────────────┐
//! record ────┤                                                             ▼
//!            └─ inbox: claim ─┬─ fresh, duplicate, dead ─▶ settled     dead letter, acknowledged
//!                             ├─ transient, unknown ─▶ wait, again         │
//!                             ├─ in progress elsewhere, database away      ▼
//!                             │    ─▶ wait, again                      marked as dead (not a conflict: the row is
//!                             └─ permanent, panic, undecodable, of an      │         the other payload's)
//!                                unknown type, conflict ───────────────▶   ▼
//!                                                                       settled
//! ```
//!
//! Nothing is skipped: whatever cannot be done waits, in its place, with capped backoff. An outage of the database or of
//! the dead-letter topic spends nothing and gives nothing up. Between attempts a lane that is asked to stop abandons its
//! record; within one it does not, because a transaction is never raced.

use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::Duration;

use baton_protocol::dead_letter::{self, Cause, Letter};
use baton_protocol::envelope::{Identity, identity};
use baton_protocol::report::chain;
use baton_protocol::retry::Policy;
use futures_util::future::BoxFuture;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use super::LaneId;
use super::next::{Next, Position, Reason, Waits, next};
use crate::dead_letter::DeadLetters;
use crate::inbox::{Buried, Inbox, Origin, SCOPE_LIMIT, Work};
use crate::{Delivery, Failure, Fingerprints, Handler, Record, Scope};

/// Starts a lane: what turns an inlet into the task's future.
pub(crate) type Spawn = Arc<dyn Fn(Inlet) -> BoxFuture<'static, ()> + Send + Sync>;

/// What a lane is given.
pub(crate) struct Inlet {
    pub(crate) records: mpsc::UnboundedReceiver<Record>,
    pub(crate) stop: Stop,
    pub(crate) reporter: Reporter,
}

/// What a lane says to the poll thread.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Report {
    /// The record at this offset has its effect committed, or is safely set aside.
    Settled { lane: LaneId, offset: i64, bytes: usize },
    /// The lane has ended: its last report.
    Ended { lane: LaneId },
}

/// Reports for one lane, and its end when it is dropped, however that comes.
pub(crate) struct Reporter {
    pub(crate) lane: LaneId,
    pub(crate) reports: Sender<Report>,
}

impl Reporter {
    pub(super) fn settled(&self, offset: i64, bytes: usize) {
        // The poll thread is gone only when nothing counts any more.
        let _ = self.reports.send(Report::Settled { lane: self.lane, offset, bytes });
    }
}

impl Drop for Reporter {
    fn drop(&mut self) {
        let _ = self.reports.send(Report::Ended { lane: self.lane });
    }
}

/// Tells a lane to take no further record and to wait for nothing.
#[derive(Clone)]
pub(crate) struct Stop(pub(crate) watch::Receiver<bool>);

impl Stop {
    async fn requested(&mut self) {
        // A sender that is gone asks for the same.
        let _ = self.0.wait_for(|stop| *stop).await;
    }

    async fn sleep(&mut self, delay: Duration) -> Rest {
        tokio::select! {
            biased;
            () = self.requested() => Rest::Stopped,
            () = tokio::time::sleep(delay) => Rest::Over,
        }
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Rest {
    Over,
    Stopped,
}

#[derive(Debug, PartialEq, Eq)]
enum Progress {
    Settled,
    /// Asked to stop before it was settled; the next owner reads it again.
    Abandoned,
}

/// What all lanes of a consumer share.
pub(crate) struct Worker<H> {
    pub(crate) consumer: String,
    pub(crate) handler: H,
    pub(crate) inbox: Inbox,
    pub(crate) scope: Scope,
    pub(crate) fingerprints: Fingerprints,
    pub(crate) retry: Policy,
    pub(crate) letters: Arc<DeadLetters>,
}

impl<H: Handler> Worker<H> {
    /// A lane's life: until it is asked to stop or its records end.
    pub(crate) async fn run(&self, mut inlet: Inlet) {
        loop {
            let record = tokio::select! {
                biased;
                () = inlet.stop.requested() => return,
                record = inlet.records.recv() => record,
            };
            let Some(record) = record else { return };
            let (offset, bytes) = (record.offset(), record.size());
            match self.settle(Arc::new(record), &mut inlet.stop).await {
                Progress::Settled => inlet.reporter.settled(offset, bytes),
                Progress::Abandoned => return,
            }
        }
    }

    async fn settle(&self, record: Arc<Record>, stop: &mut Stop) -> Progress {
        let started = Instant::now();
        match identify(&record, &self.scope, &self.fingerprints) {
            Ok(identified) => self.apply(record, identified, stop).await,
            Err(error) => {
                let death = Death {
                    record,
                    work: None,
                    cause: Cause::NoIdentity,
                    error,
                    attempts: 1,
                    failed_since: started,
                };
                self.give_up(&death, stop).await
            }
        }
    }

    async fn apply(&self, record: Arc<Record>, identified: Identified, stop: &mut Stop) -> Progress {
        let Identified { mut work, identity, refused } = identified;
        let mut waits = Waits::new(&self.retry);
        let mut failed_since = None;
        loop {
            let attempt = self.inbox.settle(&work, async |tx| {
                if let Some(error) = &refused {
                    return Failure::undecodable(error.clone()).into();
                }
                match Delivery::decode(Arc::clone(&record), Arc::clone(&identity), work.attempts) {
                    Ok(delivery) => self.handler.handle(&delivery, tx).await,
                    Err(failure) => failure.into(),
                }
            });
            match next(attempt.await) {
                Next::Advance(met) => {
                    tracing::debug!(at = %Position { record: &record, key: Some(&work.key) }, ?met, "settled");
                    return Progress::Settled;
                }
                Next::Wait { reason, error } => {
                    failed_since.get_or_insert_with(Instant::now);
                    if reason == Reason::Handler {
                        work.attempts = work.attempts.saturating_add(1);
                    }
                    let at = Position { record: &record, key: Some(&work.key) };
                    if stop.sleep(waits.wait(&at, reason, &error)).await == Rest::Stopped {
                        return Progress::Abandoned;
                    }
                }
                Next::GiveUp { cause, error } => {
                    let attempts = work.attempts;
                    // The row of a conflict belongs to the payload that came first.
                    let work = (cause != Cause::Conflict).then_some(work);
                    let failed_since = failed_since.unwrap_or_else(Instant::now);
                    let death = Death { record, work, cause, error, attempts, failed_since };
                    return self.give_up(&death, stop).await;
                }
            }
        }
    }

    /// Dead letter first, acknowledged; then the mark. Both for as long as it takes.
    async fn give_up(&self, death: &Death, stop: &mut Stop) -> Progress {
        let topic = dead_letter::topic(death.record.topic(), &self.consumer);
        let at = death.position();
        let mut waits = Waits::new(&self.retry);
        while let Err((reason, error)) = self.write_letter(&topic, death).await {
            if stop.sleep(waits.wait(&at, reason, &error)).await == Rest::Stopped {
                return Progress::Abandoned;
            }
        }
        tracing::warn!(%at, cause = %death.cause, error = %death.error, %topic, "dead letter written");
        let Some(work) = &death.work else { return Progress::Settled };
        loop {
            match self.inbox.bury(work, death.cause, &death.error).await {
                Ok(Buried::Now) => return Progress::Settled,
                Ok(Buried::SettledBefore) => {
                    tracing::warn!(%at, "settled by somebody else meanwhile; its dead letter is one too many");
                    return Progress::Settled;
                }
                Err(error) => {
                    if stop.sleep(waits.wait(&at, Reason::Database, &chain(&error))).await == Rest::Stopped {
                        return Progress::Abandoned;
                    }
                }
            }
        }
    }

    async fn write_letter(&self, topic: &str, death: &Death) -> Result<(), (Reason, String)> {
        let failed_at = self.inbox.now().await.map_err(|error| (Reason::Database, chain(&error)))?;
        let ago = death.failed_since.elapsed();
        let record = &death.record;
        let letter = Letter {
            cause: death.cause,
            error: &death.error,
            attempts: death.attempts,
            original_topic: record.topic(),
            original_partition: record.partition(),
            original_offset: record.offset(),
            original_timestamp_ms: record.timestamp_ms(),
            consumer: &self.consumer,
            first_failed_at: failed_at.checked_sub(ago.try_into().unwrap_or_default()).unwrap_or(failed_at),
            failed_at,
        };
        self.letters.write(topic, record, &letter).await.map_err(|error| (Reason::DeadLetter, chain(&error)))
    }
}

/// A record that nobody can apply.
struct Death {
    record: Arc<Record>,
    /// None where there is no row to mark.
    work: Option<Work>,
    cause: Cause,
    error: String,
    attempts: u32,
    failed_since: Instant,
}

impl Death {
    fn position(&self) -> Position<'_> {
        Position { record: &self.record, key: self.work.as_ref().map(|work| work.key.as_str()) }
    }
}

/// A record that can be deduplicated.
struct Identified {
    work: Work,
    identity: Arc<Identity>,
    /// Why its payload cannot be compared as set: it is not handled.
    refused: Option<String>,
}

/// What the record is deduplicated by, or why it cannot be.
fn identify(record: &Record, scope: &Scope, fingerprints: &Fingerprints) -> Result<Identified, String> {
    if !record.headers_are_text() {
        return Err("a header's name is not UTF-8, so the record's identity cannot be read".to_owned());
    }
    let identity = identity(record.headers()).ok_or_else(|| {
        "no usable idempotency-key, no ce_source with ce_id and no id among its headers".to_owned()
    })?;
    let scope = scope.of(record.topic(), identity.r#type.as_deref());
    if scope.len() > SCOPE_LIMIT {
        return Err(format!(
            "its scope has {} bytes, from a long type; the inbox keeps {SCOPE_LIMIT}",
            scope.len()
        ));
    }
    let (fingerprint, refused) = fingerprints.take(record);
    let work = Work {
        scope,
        key: identity.key.clone(),
        fingerprint,
        attempts: 1,
        origin: Some(Origin {
            topic: record.topic().to_owned(),
            partition: record.partition(),
            offset: record.offset(),
            timestamp_ms: record.timestamp_ms(),
        }),
    };
    Ok(Identified { work, identity: Arc::new(identity), refused })
}

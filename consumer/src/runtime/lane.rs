//! One partition's records, one after the other, each until it is settled.
//!
//! ```text
//!            ┌─ no identity ───────────────────────────────────────────────┐
//! record ────┤                                                             ▼
//!            └─ inbox: claim ─┬─ fresh, duplicate, dead ─▶ settled     dead letter, acknowledged
//!                             ├─ transient, unknown ─▶ wait, again         │
//!                             ├─ in progress elsewhere, database away      ▼
//!                             │    ─▶ wait, again                      marked as dead (not a conflict: the row is
//!                             └─ permanent, panic, undecodable,            │         the other payload's)
//!                                conflict ─────────────────────────────▶   ▼
//!                                                                       settled
//! ```
//!
//! Nothing is skipped: whatever cannot be done waits, in its place, with capped backoff. An outage of the database or of
//! the dead-letter topic spends nothing and gives nothing up. Between attempts a lane that is asked to stop abandons its
//! record; within one it does not, because a transaction is never raced.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::Duration;

use baton_protocol::dead_letter::{self, Cause, Letter};
use baton_protocol::envelope::{Identity, identity};
use baton_protocol::fingerprint::Fingerprint;
use baton_protocol::retry::{Delays, Policy};
use futures_util::future::BoxFuture;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use super::LaneId;
use crate::dead_letter::DeadLetters;
use crate::inbox::{self, Buried, Inbox, Once, Origin, TEXT_LIMIT, Work, panic_message};
use crate::verdict::chain;
use crate::{Decode, Delivery, Failure, Handler, Record, Scope, Verdict};

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

/// The waits for what is not the message's fault: a database that is away, a dead-letter topic that takes nothing.
const OUTAGE: Policy = Policy { base: Duration::from_millis(100), factor: 2.0, cap: Duration::from_secs(5) };

/// What all lanes of a consumer share.
pub(crate) struct Worker<H> {
    pub(crate) consumer: String,
    pub(crate) handler: H,
    pub(crate) inbox: Inbox,
    pub(crate) scope: Scope,
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
        match identify(&record, &self.scope) {
            Ok((work, identity)) => self.apply(record, work, identity, stop).await,
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

    async fn apply(
        &self,
        record: Arc<Record>,
        mut work: Work,
        identity: Identity,
        stop: &mut Stop,
    ) -> Progress {
        let mut delivery = decode::<H::Payload>(&record, identity);
        let mut waits = Waits::new(&self.retry);
        let mut failed_since = None;
        loop {
            if let Ok(delivery) = &mut delivery {
                delivery.set_attempt(work.attempts);
            }
            let attempt = self.inbox.settle(&work, async |tx| match &delivery {
                Ok(delivery) => self.handler.handle(delivery, tx).await,
                Err((_, error)) => Verdict::permanent(error.clone()),
            });
            let undecodable = delivery.as_ref().err().map(|(cause, _)| *cause);
            match next(attempt.await, undecodable) {
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

/// Where a record stands, for the log.
struct Position<'a> {
    record: &'a Record,
    key: Option<&'a str>,
}

impl std::fmt::Display for Position<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}[{}]@{}", self.record.topic(), self.record.partition(), self.record.offset())?;
        self.key.map_or(Ok(()), |key| write!(f, " {key}"))
    }
}

/// What the record is deduplicated by, or why it cannot be.
fn identify(record: &Record, scope: &Scope) -> Result<(Work, Identity), String> {
    if !record.headers_are_text() {
        return Err("a header's name is not UTF-8, so the record's identity cannot be read".to_owned());
    }
    let identity = identity(record.headers()).ok_or_else(|| {
        "no usable idempotency-key, no ce_source with ce_id and no id among its headers".to_owned()
    })?;
    let scope = scope.of(record.topic(), identity.r#type.as_deref());
    if scope.len() > TEXT_LIMIT {
        return Err(format!(
            "its scope has {} bytes, from a long type; the inbox keeps {TEXT_LIMIT}",
            scope.len()
        ));
    }
    let work = Work {
        scope,
        key: identity.key.clone(),
        fingerprint: Fingerprint::exact(record.payload().map(AsRef::as_ref)),
        attempts: 1,
        origin: Some(Origin {
            topic: record.topic().to_owned(),
            partition: record.partition(),
            offset: record.offset(),
            timestamp_ms: record.timestamp_ms(),
        }),
    };
    Ok((work, identity))
}

fn decode<P: Decode>(record: &Arc<Record>, identity: Identity) -> Result<Delivery<P>, (Cause, String)> {
    match catch_unwind(AssertUnwindSafe(|| P::decode(record))) {
        Ok(Ok(payload)) => Ok(Delivery::new(payload, Arc::clone(record), identity.key, identity.r#type)),
        Ok(Err(error)) => Err((Cause::Undecodable, chain(error.as_ref()))),
        Err(panic) => Err((Cause::Panic, panic_message(panic.as_ref()))),
    }
}

/// What follows an attempt.
#[derive(Debug)]
enum Next {
    Advance(Met),
    Wait { reason: Reason, error: String },
    GiveUp { cause: Cause, error: String },
}

/// How a record was settled, in the words of the metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Met {
    Fresh,
    Duplicate,
    Dead,
}

/// The rule. `undecodable` is the cause of a payload that could not be decoded: what the action then says is not the
/// handler's word.
fn next(attempt: Result<Once, inbox::Error>, undecodable: Option<Cause>) -> Next {
    match attempt {
        Ok(Once::Fresh(_)) => Next::Advance(Met::Fresh),
        Ok(Once::Duplicate(_)) => Next::Advance(Met::Duplicate),
        Ok(Once::Dead { .. }) => Next::Advance(Met::Dead),
        Ok(Once::InProgress) => {
            Next::Wait { reason: Reason::InProgress, error: "in progress elsewhere".to_owned() }
        }
        Ok(Once::Conflict) => Next::GiveUp {
            cause: Cause::Conflict,
            error: "its idempotency key was used with another payload".to_owned(),
        },
        Ok(Once::Failed(failure)) => {
            let error = failure.to_string();
            match failure {
                // The rollback has settled what was unknown.
                Failure::Transient(_) | Failure::Unknown(_) => Next::Wait { reason: Reason::Handler, error },
                Failure::Permanent(_) => {
                    Next::GiveUp { cause: undecodable.unwrap_or(Cause::Permanent), error }
                }
                Failure::Panicked(error) => Next::GiveUp { cause: Cause::Panic, error },
            }
        }
        Err(error @ inbox::Error::Fenced { .. }) => {
            Next::Wait { reason: Reason::Fenced, error: chain(&error) }
        }
        Err(error) => Next::Wait { reason: Reason::Database, error: chain(&error) },
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reason {
    Handler,
    Database,
    InProgress,
    Fenced,
    DeadLetter,
}

impl Reason {
    fn text(self) -> &'static str {
        match self {
            Self::Handler => "the handler failed for the time being; the partition waits and tries again",
            Self::Database => {
                "the inbox database does not answer as it should; the partition waits and tries again"
            }
            Self::InProgress => "the message is in progress elsewhere; the partition waits for it",
            Self::Fenced => "the handler ended its transaction itself; mend it: the partition waits",
            Self::DeadLetter => "the dead letter cannot be written; the partition waits until it can be",
        }
    }
}

/// How loud a line is. What somebody must act on is said once as an error, what mends itself once as a warning; a
/// handler's failures are each worth a warning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Loud {
    Error,
    Warn,
    Quiet,
}

/// The waits of one record.
struct Waits {
    handler: Delays,
    outage: Delays,
    said: Vec<Reason>,
}

impl Waits {
    fn new(retry: &Policy) -> Self {
        Self { handler: retry.delays(), outage: OUTAGE.delays(), said: Vec::new() }
    }

    /// How long to wait, and says so.
    fn wait(&mut self, at: &Position<'_>, reason: Reason, error: &str) -> Duration {
        let delay = self.next(reason);
        match self.loudness(reason) {
            Loud::Error => tracing::error!(%at, error, ?delay, "{}", reason.text()),
            Loud::Warn => tracing::warn!(%at, error, ?delay, "{}", reason.text()),
            Loud::Quiet => tracing::debug!(%at, error, ?delay, "{}", reason.text()),
        }
        delay
    }

    fn next(&mut self, reason: Reason) -> Duration {
        match reason {
            Reason::Handler => {
                self.outage.reset();
                self.handler.next_delay()
            }
            Reason::Database | Reason::InProgress | Reason::Fenced | Reason::DeadLetter => {
                self.outage.next_delay()
            }
        }
    }

    fn loudness(&mut self, reason: Reason) -> Loud {
        if reason == Reason::Handler {
            return Loud::Warn;
        }
        if self.said.contains(&reason) {
            return Loud::Quiet;
        }
        self.said.push(reason);
        match reason {
            Reason::DeadLetter | Reason::Fenced => Loud::Error,
            Reason::Handler | Reason::Database | Reason::InProgress => Loud::Warn,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failed(failure: Failure) -> Result<Once, inbox::Error> {
        Ok(Once::Failed(failure))
    }

    #[test]
    fn what_is_settled_moves_on_and_what_waits_does_not() {
        assert!(matches!(next(Ok(Once::Fresh(None)), None), Next::Advance(Met::Fresh)));
        assert!(matches!(next(Ok(Once::Duplicate(None)), None), Next::Advance(Met::Duplicate)));
        let dead = Once::Dead { cause: "permanent".to_owned(), error: None };
        assert!(matches!(next(Ok(dead), None), Next::Advance(Met::Dead)));
        assert!(matches!(next(Ok(Once::InProgress), None), Next::Wait { reason: Reason::InProgress, .. }));
    }

    #[test]
    fn an_unknown_result_in_a_transaction_is_tried_again_like_a_transient_one() {
        assert!(matches!(
            next(failed(Failure::transient("later")), None),
            Next::Wait { reason: Reason::Handler, .. }
        ));
        assert!(matches!(
            next(failed(Failure::unknown("lost")), None),
            Next::Wait { reason: Reason::Handler, .. }
        ));
    }

    #[test]
    fn a_dead_letter_names_its_cause() {
        let cause = |next| match next {
            Next::GiveUp { cause, .. } => Some(cause),
            Next::Advance(_) | Next::Wait { .. } => None,
        };
        assert_eq!(cause(next(failed(Failure::permanent("no")), None)), Some(Cause::Permanent));
        assert_eq!(
            cause(next(failed(Failure::permanent("no")), Some(Cause::Undecodable))),
            Some(Cause::Undecodable)
        );
        assert_eq!(cause(next(failed(Failure::Panicked("boom".to_owned())), None)), Some(Cause::Panic));
        assert_eq!(cause(next(Ok(Once::Conflict), None)), Some(Cause::Conflict));
        assert_eq!(cause(next(Ok(Once::Conflict), Some(Cause::Undecodable))), Some(Cause::Conflict));
    }

    #[test]
    fn an_outage_gives_nothing_up() {
        for error in [
            inbox::Error::Connect(sqlx::Error::PoolTimedOut),
            inbox::Error::Begin(sqlx::Error::BeginFailed),
            inbox::Error::Commit { key: "k".to_owned(), source: sqlx::Error::WorkerCrashed },
            inbox::Error::Complete { key: "k".to_owned(), source: sqlx::Error::WorkerCrashed },
        ] {
            assert!(matches!(next(Err(error), None), Next::Wait { reason: Reason::Database, .. }));
        }
    }

    #[test]
    fn what_needs_somebody_is_said_once_as_an_error() {
        let mut waits = Waits::new(&OUTAGE);
        assert_eq!(waits.loudness(Reason::DeadLetter), Loud::Error);
        assert_eq!(waits.loudness(Reason::DeadLetter), Loud::Quiet);
        assert_eq!(waits.loudness(Reason::Database), Loud::Warn);
        assert_eq!(waits.loudness(Reason::Database), Loud::Quiet);
        assert_eq!(waits.loudness(Reason::Handler), Loud::Warn);
        assert_eq!(waits.loudness(Reason::Handler), Loud::Warn);
    }
}

//! One record, until it is settled: applied, found applied, dead-lettered, or set aside in order.
//!
//! ```text
//!            ┌─ no identity ─────────────────────────────────────────────────────────┐
//! record ────┼─ earlier ones of its key are set aside ─▶ behind them ─▶ settled      ▼
//!            └─ breaker ▶ inbox: claim ─┬─ fresh, duplicate, dead ─▶ settled    dead letter, acknowledged
//!                  ▲                    ├─ transient, unknown ─▶ wait, again         │
//!                  │                    │    └─ for long ─▶ set aside ─▶ settled     ▼
//!                  │                    ├─ outage, database away ─▶ wait, again   marked as dead (not a conflict: the
//!                  └────────────────────┘                                            │ row is the other payload's)
//!                                       └─ permanent, panic, undecodable,            ▼
//!                                          conflict, attempts spent ─▶            settled
//! ```
//!
//! Nothing is skipped: whatever cannot be done waits, with its key, in memory at first and then in `inbox.parked`, from where
//! [`retrier`](super::retrier) tries it again. An outage of the database, of the dead-letter topic or of what handlers need
//! spends nothing and gives nothing up. Between attempts a record is abandoned when the lane is asked to stop; within one it is
//! not, because a transaction is never raced.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;

use baton_protocol::dead_letter::{Cause, Letter};
use baton_protocol::replay;
use baton_protocol::report::chain;
use baton_protocol::retry::Policy;
use tokio::sync::{Notify, Semaphore};
use tokio::time::Instant;

use super::breaker::{Breaker, Streak, Ticket};
use super::lane::{Rest, Stop};
use super::next::{Met, Next, Position, Reason, Waits, next};
use super::queues::Way;
use crate::apply::{Apply, Together};
use crate::dead_letter::DeadLetters;
use crate::inbox::{
    AfterDeadLetter, Buried, Error, FirstDeath, HoldUp, Inbox, Once, Parked, Place, ReplayEnd, Work,
};
use crate::message::Message;
use crate::metrics::{self, Consumed, Fenced};
use crate::{Failure, Fingerprints, Record, Scope};

/// How long a failure waits for its streak to show whether it was an outage's.
pub(super) const DOUBT: Duration = Duration::from_secs(1);

/// What a consumer was told about attempts.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Terms {
    /// Records of one partition that are handled at once.
    pub(crate) concurrency: usize,
    /// Attempts on one record in all.
    pub(crate) attempts: u32,
    /// How long a record that fails waits in memory before it is set aside.
    pub(crate) park_after: Duration,
    pub(crate) after_dead_letter: AfterDeadLetter,
}

/// What all lanes of a consumer share.
pub(crate) struct Worker<A> {
    pub(crate) consumer: String,
    pub(crate) apply: A,
    pub(crate) inbox: Inbox,
    pub(crate) scope: Scope,
    pub(crate) fingerprints: Fingerprints,
    pub(crate) retry: Policy,
    pub(crate) terms: Terms,
    pub(crate) letters: Arc<DeadLetters>,
    pub(crate) breaker: Arc<Breaker>,
    /// Something was set aside.
    pub(crate) set_aside: Notify,
    /// Attempts on what was set aside that are to be taken back and, the database being away, are not.
    pub(crate) owed: AtomicUsize,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Progress {
    Settled,
    /// Set aside, and its key with it.
    Aside,
    /// Asked to stop before it was settled; the next owner reads it again.
    Abandoned,
}

/// Where a record that is tried comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum From {
    Lane,
    /// It failed before: that it does so again says nothing of the rest.
    Aside,
}

/// What one attempt came to.
pub(super) enum Tried {
    Settled(Met),
    /// It was given up before.
    Dead {
        cause: String,
        error: Option<String>,
    },
    /// It failed for the time being, and an attempt is spent, unless its streak was an outage's.
    Failed {
        error: String,
        streak: Streak,
    },
    /// It may be tried again, and no attempt is spent.
    Again {
        reason: Reason,
        error: String,
    },
    GiveUp {
        cause: Cause,
        error: String,
        attempts: u32,
    },
}

impl<A: Apply> Worker<A> {
    /// A record whose turn it is. It holds one of `permits` only while it is tried.
    pub(super) async fn settle(
        &self,
        record: Arc<Record>,
        way: Way,
        permits: &Semaphore,
        stop: &mut Stop,
    ) -> Progress {
        let message = match self.message(&record) {
            Ok(message) => message,
            Err(error) => {
                let mut death = Death {
                    replay: replay::item(record.headers()),
                    record,
                    work: None,
                    cause: Cause::NoIdentity,
                    error,
                    attempts: 1,
                    failed_since: Instant::now(),
                    is_written: false,
                };
                // Whatever waits of its key still does.
                let left = if way == Way::Behind { Progress::Aside } else { Progress::Settled };
                return match self.give_up(&mut death, stop).await {
                    Progress::Settled => left,
                    other => other,
                };
            }
        };
        if way == Way::Behind {
            match self.set_aside(&message, Place::Behind, stop).await {
                Some(Parked::Aside) => return Progress::Aside,
                Some(Parked::Free | Parked::Settled) => {}
                None => return Progress::Abandoned,
            }
        }
        // A replay is free to go where others of its key still wait: the table tells the next one, not this one's end.
        let others_may_wait = way == Way::Behind && message.work.replay.is_some();
        match self.apply(message, permits, stop).await {
            Progress::Settled if others_may_wait => Progress::Aside,
            progress => progress,
        }
    }

    /// What a record says, or why it has no identity.
    pub(super) fn message(&self, record: &Arc<Record>) -> Result<Message, String> {
        Message::of(record, &self.scope, &self.fingerprints)
    }

    async fn apply(&self, mut message: Message, permits: &Semaphore, stop: &mut Stop) -> Progress {
        let mut waits = Waits::new(&self.retry);
        let mut since: Option<Instant> = None;
        let mut failures: Vec<Streak> = Vec::new();
        loop {
            let Some(permit) = stop.unless(permits.acquire()).await else { return Progress::Abandoned };
            let Some(ticket) = stop.unless(self.breaker.admit()).await else { return Progress::Abandoned };
            // Only now it shows which failures were an outage's.
            message.work.attempts = self.spent(&failures).saturating_add(1);
            let tried = self.attempt(ticket, &message, From::Lane).await;
            drop(permit);
            let (reason, error) = match tried {
                Tried::Settled(met) => {
                    tracing::debug!(at = %Position::of(&message), ?met, "settled");
                    return Progress::Settled;
                }
                Tried::Dead { .. } => return Progress::Settled,
                Tried::GiveUp { cause, error, attempts } => {
                    message.work.attempts = attempts;
                    return self.die(&message, cause, error, since, stop).await;
                }
                Tried::Again { reason, error } => (reason, error),
                Tried::Failed { error, streak } => {
                    failures.push(streak);
                    (Reason::Handler, error)
                }
            };
            let first = *since.get_or_insert_with(Instant::now);
            let delay = waits.wait(&Position::of(&message), reason, &error);
            let is_last = self.spent(&failures) >= self.terms.attempts;
            let stays =
                if reason.is_the_records() && (is_last || first.elapsed() + delay > self.terms.park_after) {
                    // What follows cannot be taken back: was it an outage?
                    match self.was_outage(&failures, stop).await {
                        Some(true) => {
                            since = None;
                            waits = Waits::new(&self.retry);
                            continue;
                        }
                        Some(false) => true,
                        None => false,
                    }
                } else {
                    if stop.sleep(delay).await == Rest::Over {
                        continue;
                    }
                    false
                };
            message.work.attempts = self.spent(&failures);
            let is_spent = message.work.attempts >= self.terms.attempts;
            if stays && is_spent {
                return self.die(&message, Cause::Exhausted, error, since, stop).await;
            }
            // Its partition leaves. Unless it is at fault itself the next owner reads it again; if it is, its offset would hold
            // back those of everything that was done after it.
            let is_outage = failures.last().is_some_and(|streak| self.breaker.is_outage(*streak));
            if !stays && (is_spent || is_outage || !reason.is_the_records()) {
                return Progress::Abandoned;
            }
            let place = Place::Aside { error: &error, failed_for: first.elapsed(), delay };
            match self.set_aside(&message, place, stop).await {
                Some(Parked::Aside) => {
                    let (at, attempts) = (Position::of(&message), message.work.attempts);
                    tracing::warn!(%at, error, attempts, "set aside with its key; others go on");
                    self.set_aside.notify_one();
                    return Progress::Aside;
                }
                Some(Parked::Free | Parked::Settled) => {}
                None => return Progress::Abandoned,
            }
        }
    }

    /// Whether the last failure was an outage's, once that shows. Nothing: a stop was asked for before.
    async fn was_outage(&self, failures: &[Streak], stop: &mut Stop) -> Option<bool> {
        match failures.last() {
            Some(last) => stop.unless(self.breaker.settled(*last, DOUBT)).await,
            None => Some(false),
        }
    }

    /// How many attempts failed that were not an outage's.
    fn spent(&self, failures: &[Streak]) -> u32 {
        let own = failures.iter().filter(|streak| !self.breaker.is_outage(**streak)).count();
        u32::try_from(own).unwrap_or(u32::MAX)
    }

    /// One attempt, which the breaker lets through.
    pub(super) async fn attempt(&self, ticket: Ticket, message: &Message, from: From) -> Tried {
        let mut attempt = self.apply.attempt(&self.inbox, message).await;
        if let Ok(once) = attempt {
            let after = self.terms.after_dead_letter;
            attempt = self.inbox.replayed(&message.work, &message.record, once, after).await;
        }
        if matches!(attempt, Ok(Once::Fresh(_))) {
            ticket.succeeded();
            metrics::consumed(&self.consumer, Consumed::Fresh);
            return Tried::Settled(Met::Fresh);
        }
        // A lease knows of attempts that other processes made.
        let attempts = match &attempt {
            Err(Error::Spent { attempts, .. }) => *attempts,
            _ => message.work.attempts,
        };
        let is_outage = matches!(attempt, Ok(Once::Failed(Failure::Outage(_))));
        if let Ok(Once::Dead { cause, error }) = attempt {
            metrics::consumed(&self.consumer, Met::Dead.consumed());
            return Tried::Dead { cause, error };
        }
        let next = next(attempt);
        match &next {
            Next::Advance(met) => metrics::consumed(&self.consumer, met.consumed()),
            Next::Wait { reason, .. } => self.waits(*reason),
            Next::GiveUp { .. } => {}
        }
        match next {
            Next::Advance(met) => Tried::Settled(met),
            Next::Wait { reason, error } if is_outage => {
                ticket.outage(hash(&message.record), &error);
                Tried::Again { reason, error }
            }
            Next::Wait { reason: Reason::Handler, error } => {
                let key = hash(&message.record);
                let streak = match from {
                    From::Lane => ticket.failed(key, &error),
                    From::Aside => ticket.failed_again(key, &error),
                };
                Tried::Failed { error, streak }
            }
            Next::Wait { reason, error } => Tried::Again { reason, error },
            Next::GiveUp { cause, error } => Tried::GiveUp { cause, error, attempts },
        }
    }

    /// Whether many messages could be settled in one attempt. If not, none was applied by it, and each tells for itself why.
    pub(super) async fn are_settled(&self, messages: &[Message], stop: &mut Stop) -> bool {
        if messages.len() < 2 {
            return messages.is_empty();
        }
        let Some(ticket) = stop.unless(self.breaker.admit()).await else { return false };
        match self.apply.attempt_all(&self.inbox, messages).await {
            Ok(Together::Settled(answers)) => {
                ticket.succeeded();
                for once in answers {
                    if let Next::Advance(met) = next(Ok(once)) {
                        metrics::consumed(&self.consumer, met.consumed());
                    }
                }
                true
            }
            Ok(Together::OneByOne) => false,
            Err(error) => {
                tracing::debug!(error = %chain(&error), messages = messages.len(), "a batch is tried one by one");
                false
            }
        }
    }

    /// Whether a dead letter of this record holds its key up. That of a replay never does, because what died first still does.
    pub(super) fn after(&self, record: &Record) -> AfterDeadLetter {
        if record.is_from_replay_topic() { AfterDeadLetter::Continue } else { self.terms.after_dead_letter }
    }

    /// The same of whatever comes from this topic.
    pub(super) fn after_on(&self, topic: &str) -> AfterDeadLetter {
        match replay::original_topic(topic, &self.consumer) {
            Some(_) => AfterDeadLetter::Continue,
            None => self.terms.after_dead_letter,
        }
    }

    /// Something failed for the time being.
    fn waits(&self, reason: Reason) {
        metrics::retried(&self.consumer, reason.retry());
        if reason == Reason::InProgress {
            metrics::consumed(&self.consumer, Consumed::InProgress);
        }
    }

    /// Sets a record aside, for as long as it takes. Nothing: a stop was asked for.
    async fn set_aside(&self, message: &Message, place: Place<'_>, stop: &mut Stop) -> Option<Parked> {
        let mut waits = Waits::new(&self.retry);
        loop {
            match self.inbox.park(&message.work, &message.record, place, self.after(&message.record)).await {
                Ok(parked) => {
                    if parked == Parked::Aside {
                        metrics::parked(&self.consumer, place.aside());
                    }
                    return Some(parked);
                }
                Err(error) => {
                    self.waits(Reason::Database);
                    let delay = waits.wait(&Position::of(message), Reason::Database, &chain(&error));
                    if stop.sleep(delay).await == Rest::Stopped {
                        return None;
                    }
                }
            }
        }
    }

    /// Gives a record up, and holds its key up where that was asked for.
    async fn die(
        &self,
        message: &Message,
        cause: Cause,
        error: String,
        since: Option<Instant>,
        stop: &mut Stop,
    ) -> Progress {
        let failed_since = since.unwrap_or_else(Instant::now);
        let mut death = Death::of(message, cause, error, failed_since);
        let progress = self.give_up(&mut death, stop).await;
        // A conflict has no row to be marked, so its key is held up apart.
        let is_apart = self.after(&message.record) == AfterDeadLetter::Block && death.work.is_none();
        if progress != Progress::Settled || !is_apart {
            return progress;
        }
        let place = Place::Dead { cause, error: &death.error, failed_for: failed_since.elapsed() };
        match self.set_aside(message, place, stop).await {
            Some(_) => Progress::Aside,
            None => Progress::Abandoned,
        }
    }

    /// Dead letter first, acknowledged; then the mark. Both for as long as it takes.
    pub(super) async fn give_up(&self, death: &mut Death, stop: &mut Stop) -> Progress {
        let mut waits = Waits::new(&self.retry);
        let after = self.after(&death.record);
        loop {
            match self.try_to_give_up(death, after).await {
                Ok(Buried::Now) if death.work.is_some() && after == AfterDeadLetter::Block => {
                    return Progress::Aside;
                }
                Ok(_) => return Progress::Settled,
                Err((reason, error)) => {
                    let delay = waits.wait(&death.position(), reason, &error);
                    if stop.sleep(delay).await == Rest::Stopped {
                        return Progress::Abandoned;
                    }
                }
            }
        }
    }

    /// One try of what is left of it. Where its key is to be held up, that and the mark are one transaction.
    pub(super) async fn try_to_give_up(
        &self,
        death: &mut Death,
        after: AfterDeadLetter,
    ) -> Result<Buried, (Reason, String)> {
        if !death.is_written {
            let topic = self.letters.topic(death.record.original_topic());
            self.write_letter(&topic, death).await.inspect_err(|(reason, _)| self.waits(*reason))?;
            death.is_written = true;
            metrics::dead_letter(&self.consumer, death.cause);
            tracing::warn!(at = %death.position(), cause = %death.cause, error = %death.error, %topic, "dead letter written");
        }
        let Some(work) = &death.work else {
            if let Some(item) = death.replay {
                let settled = self.inbox.settle_replayed(item, death.replay_end(), Some(&death.error)).await;
                settled.map_err(|error| (Reason::Database, chain(&error)))?;
            }
            metrics::consumed(&self.consumer, death.consumed());
            return Ok(Buried::Now);
        };
        let hold_up = HoldUp { record: &death.record, failed_for: death.failed_since.elapsed() };
        let hold_up = (after == AfterDeadLetter::Block).then_some(hold_up);
        let buried = self.inbox.bury(work, death.cause, &death.error, hold_up).await.map_err(|error| {
            self.waits(Reason::Database);
            (Reason::Database, chain(&error))
        })?;
        if buried == Buried::Now {
            metrics::consumed(&self.consumer, death.consumed());
        } else {
            metrics::fenced(&self.consumer, Fenced::Bury);
            metrics::consumed(&self.consumer, Consumed::Duplicate);
            tracing::warn!(at = %death.position(), "settled by somebody else meanwhile; its dead letter is one too many");
        }
        Ok(buried)
    }

    async fn write_letter(&self, topic: &str, death: &Death) -> Result<(), (Reason, String)> {
        let failed_at = self.inbox.now().await.map_err(|error| (Reason::Database, chain(&error)))?;
        let record = &death.record;
        let origin = match death.replay {
            Some(item) => {
                self.inbox.origin_of(item).await.map_err(|error| (Reason::Database, chain(&error)))?
            }
            None => None,
        };
        let since = failed_at.checked_sub(death.failed_since.elapsed().try_into().unwrap_or_default());
        let since = since.unwrap_or(failed_at);
        let first_failed_at = origin.as_ref().and_then(|origin| origin.first_failed_at).unwrap_or(since);
        let (original_partition, original_offset, original_timestamp_ms) = match origin {
            Some(FirstDeath { partition: Some(partition), offset: Some(offset), timestamp_ms, .. }) => {
                (partition, offset, timestamp_ms)
            }
            _ => (record.partition(), record.offset(), record.timestamp_ms()),
        };
        let letter = Letter {
            cause: death.cause,
            error: &death.error,
            attempts: death.attempts,
            original_topic: record.original_topic(),
            original_partition,
            original_offset,
            original_timestamp_ms,
            original_timestamp_type: record.timestamp_type(),
            consumer: &self.consumer,
            group: self.letters.group(),
            first_failed_at: first_failed_at.min(since),
            failed_at,
        };
        self.letters.write(topic, record, &letter).await.map_err(|error| (Reason::DeadLetter, chain(&error)))
    }
}

/// A record that nobody can apply.
pub(super) struct Death {
    record: Arc<Record>,
    /// The item by which an operator brought it.
    replay: Option<replay::Item>,
    /// None where there is no row to mark.
    work: Option<Work>,
    cause: Cause,
    pub(super) error: String,
    attempts: u32,
    failed_since: Instant,
    /// Its dead letter is acknowledged.
    is_written: bool,
}

impl Death {
    pub(super) fn of(message: &Message, cause: Cause, error: String, failed_since: Instant) -> Self {
        Self {
            record: Arc::clone(&message.record),
            replay: message.work.replay,
            // The row of a conflict belongs to the payload that came first.
            work: (cause != Cause::Conflict).then(|| message.work.clone()),
            cause,
            error,
            attempts: message.work.attempts,
            failed_since,
            is_written: false,
        }
    }

    fn consumed(&self) -> Consumed {
        if self.cause == Cause::Conflict { Consumed::Conflict } else { Consumed::Dead }
    }

    fn replay_end(&self) -> ReplayEnd {
        if self.cause == Cause::Conflict { ReplayEnd::Conflict } else { ReplayEnd::DeadAgain }
    }

    fn position(&self) -> Position<'_> {
        Position { record: &self.record, key: self.work.as_ref().map(|work| work.key.as_str()) }
    }
}

/// Tells keys apart for the breaker; records without one are each their own.
fn hash(record: &Record) -> u64 {
    let mut hasher = DefaultHasher::new();
    match record.key() {
        Some(key) => key.hash(&mut hasher),
        None => (record.partition(), record.offset()).hash(&mut hasher),
    }
    hasher.finish()
}

//! Tries records that were set aside again, whichever process set them aside: by a lease on each, not by partition.
//!
//! It takes the first of each key that is due, tries it once as a lane would, and ends it (done, or dead with its letter), which
//! makes the next of its key due, or gives it back for later. Every process of a consumer does this; a lease keeps them apart.
//! One that runs out, because a handler took longer than it or the process died, lets another one try: the inbox row keeps the
//! effect single, and what the first says afterwards is refused.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use baton_protocol::dead_letter::Cause;
use baton_protocol::report::chain;
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::lane::Stop;
use super::next::{OUTAGE, Position};
use super::worker::{DOUBT, Death, From, Tried, Worker};
use crate::apply::Apply;
use crate::inbox::{AfterDeadLetter, End, Error, Taken, Written};
use crate::message::Message;
use crate::metrics::{self, AsideTry, Fenced};

/// How often is looked for what another process has set aside or left behind.
const LOOK_EVERY: Duration = Duration::from_millis(500);
/// How soon what is to be given back is tried again while the database is away: sooner than another process takes it.
const OWED_FOR: Duration = Duration::from_millis(100);
/// How often is looked for what is blocked behind nothing.
const SWEEP_EVERY: Duration = Duration::from_secs(60);
/// How many are tried at once.
const AT_ONCE: usize = 8;

impl<A: Apply> Worker<A> {
    /// Until it is asked to stop; then what is in hand is finished. Dropped, it cancels what is in hand.
    pub(crate) async fn retry_parked(self: Arc<Self>, topics: Vec<String>, mut stop: Stop) {
        let mut tries = JoinSet::new();
        let mut outage = OUTAGE.delays();
        let (mut look_at, mut sweep_at) = (Instant::now(), Instant::now());
        loop {
            tokio::select! {
                biased;
                () = stop.requested() => break,
                // Its key's next one is due.
                Some(tried) = tries.join_next() => {
                    let due: Duration = tried.unwrap_or(LOOK_EVERY);
                    look_at = look_at.min(Instant::now() + due);
                    if due > Duration::ZERO {
                        continue;
                    }
                }
                () = self.set_aside.notified() => {}
                () = tokio::time::sleep_until(look_at), if tries.len() < AT_ONCE => {}
            }
            // While everything fails nothing is taken, but for when somebody may try.
            let Some(ticket) = stop.unless(self.breaker.admit()).await else { break };
            drop(ticket);
            look_at = Instant::now() + LOOK_EVERY;
            // What is to be given back comes first: to take it once more would spend the attempt.
            if self.owed.load(Ordering::Relaxed) > 0 {
                continue;
            }
            if Instant::now() >= sweep_at {
                sweep_at = Instant::now() + SWEEP_EVERY;
                self.sweep(&topics).await;
            }
            let room = AT_ONCE.saturating_sub(tries.len());
            match self.inbox.take_parked(&topics, i64::try_from(room).unwrap_or(i64::MAX)).await {
                Ok(taken) => {
                    outage.reset();
                    for taken in taken {
                        let (worker, stop) = (Arc::clone(&self), stop.clone());
                        tries.spawn(async move { worker.try_parked(taken, stop).await });
                    }
                }
                Err(error) => {
                    tracing::warn!(error = %chain(&error), "records that were set aside wait until this can be read");
                    look_at = Instant::now() + outage.next_delay().max(LOOK_EVERY);
                }
            }
        }
        while tries.join_next().await.is_some() {}
    }

    /// Rarely finds anything; what it cannot do now it does the next time.
    async fn sweep(&self, topics: &[String]) {
        let after = self.terms.after_dead_letter;
        let (replays, others): (Vec<_>, Vec<_>) =
            topics.iter().cloned().partition(|topic| self.after_on(topic) != after);
        for (topics, after) in [(others, after), (replays, AfterDeadLetter::Continue)] {
            self.sweep_of(&topics, after).await;
        }
    }

    async fn sweep_of(&self, topics: &[String], after: AfterDeadLetter) {
        if topics.is_empty() {
            return;
        }
        match self.inbox.sweep_parked(topics, after).await {
            Ok(0) => {}
            Ok(records) => tracing::info!(records, "records that were blocked behind nothing are tried"),
            Err(error) => tracing::debug!(error = %chain(&error), "parked records cannot be swept now"),
        }
    }

    /// In how long it, or the next of its key, is due.
    async fn try_parked(&self, taken: Taken, mut stop: Stop) -> Duration {
        // The take has counted it.
        let before = taken.attempts.saturating_sub(1);
        // It was set aside with an identity.
        let Ok(mut message) = self.message(&taken.record) else {
            let error = "its identity can no longer be read: look at what the consumer's settings were when it was set aside";
            tracing::error!(at = %Position { record: &taken.record, key: None }, error);
            return self.give_back(&taken, before, Some(error), self.retry.delay(10), &mut stop).await;
        };
        message.work.attempts = taken.attempts;
        if before >= self.terms.attempts {
            message.work.attempts = before;
            let error = "its attempts are spent, the last ones without a word: its process died, or took longer than its lease";
            return self.bury_parked(&taken, &message, Cause::Exhausted, error.to_owned(), &mut stop).await;
        }
        let Some(ticket) = stop.unless(self.breaker.admit()).await else {
            return self.give_back(&taken, before, None, Duration::ZERO, &mut stop).await;
        };
        // It may be somebody else's soon, or may have been changed: it is taken anew.
        if taken.asked.elapsed() > self.inbox.ttl() / 2 {
            drop(ticket);
            return self.give_back(&taken, before, None, Duration::ZERO, &mut stop).await;
        }
        let tried = self.attempt(ticket, &message, From::Aside).await;
        let (at, attempts) = (Position::of(&message), message.work.attempts);
        match tried {
            Tried::Settled(met) => {
                tracing::info!(%at, ?met, attempts, "a record that was set aside is settled");
                self.end(&taken, End::Done, attempts).await
            }
            // Its letter is written; who wrote it did not come to say so here.
            Tried::Dead { cause, error } => {
                self.end(&taken, End::Dead { cause: &cause, error: error.as_deref() }, before).await
            }
            Tried::GiveUp { cause, error, attempts } => {
                message.work.attempts = attempts;
                self.bury_parked(&taken, &message, cause, error, &mut stop).await
            }
            Tried::Again { reason, error } => {
                tracing::debug!(%at, error, ?reason, "a record that was set aside waits on");
                self.give_back(&taken, before, Some(&error), OUTAGE.delay(3), &mut stop).await
            }
            Tried::Failed { error, streak } => {
                let delay = self.retry.delay(before);
                // Its lease goes on meanwhile.
                if self.breaker.settled(streak, DOUBT.min(self.inbox.ttl() / 4)).await {
                    return self.give_back(&taken, before, None, delay.min(OUTAGE.cap), &mut stop).await;
                }
                if attempts >= self.terms.attempts {
                    return self.bury_parked(&taken, &message, Cause::Exhausted, error, &mut stop).await;
                }
                tracing::warn!(%at, error, ?delay, attempts, "a record that was set aside failed again");
                self.give_back(&taken, attempts, Some(&error), delay, &mut stop).await
            }
        }
    }

    /// Once: what cannot be written now is given back, and does not keep others from being tried.
    async fn bury_parked(
        &self,
        taken: &Taken,
        message: &Message,
        cause: Cause,
        error: String,
        stop: &mut Stop,
    ) -> Duration {
        let now = Instant::now();
        let failed_since = now.checked_sub(taken.failed_for).unwrap_or(now);
        let attempts = message.work.attempts;
        let mut death = Death::of(message, cause, error, failed_since);
        // Its key is held up by its row in `inbox.parked`.
        match self.try_to_give_up(&mut death, AfterDeadLetter::Continue).await {
            Ok(_) => {
                let end = End::Dead { cause: cause.as_str(), error: Some(&death.error) };
                self.end(taken, end, attempts).await
            }
            Err((_, why)) => {
                let at = Position::of(message);
                tracing::error!(%at, error = why, "the dead letter cannot be written; its key waits until it can be");
                self.give_back(taken, taken.attempts.saturating_sub(1), None, OUTAGE.cap, stop).await
            }
        }
    }

    /// Where that cannot be written, the lease runs out, and the next try finds the work settled.
    async fn end(&self, taken: &Taken, end: End<'_>, attempts: u32) -> Duration {
        let ended = self.inbox.end_parked(taken, end, attempts, self.after(&taken.record)).await;
        let result = match end {
            End::Done => AsideTry::Done,
            End::Dead { .. } => AsideTry::Dead,
        };
        self.said(taken, ended, result);
        Duration::ZERO
    }

    /// The take has counted the attempt, so an outage of the database would spend it if this were not written: it is tried until it is,
    /// or somebody else has taken the record.
    async fn give_back(
        &self,
        taken: &Taken,
        attempts: u32,
        error: Option<&str>,
        delay: Duration,
        stop: &mut Stop,
    ) -> Duration {
        self.owed.fetch_add(1, Ordering::Relaxed);
        let mut postponed = self.inbox.postpone(taken, attempts, error, delay).await;
        while postponed.as_ref().is_err_and(Error::is_an_outage)
            && stop.unless(tokio::time::sleep(OWED_FOR)).await.is_some()
        {
            postponed = self.inbox.postpone(taken, attempts, error, delay).await;
        }
        self.owed.fetch_sub(1, Ordering::Relaxed);
        self.said(taken, postponed, AsideTry::Postponed);
        delay.max(Duration::from_millis(1))
    }

    fn said(&self, taken: &Taken, written: Result<Written, Error>, result: AsideTry) {
        let at = Position { record: &taken.record, key: None };
        match written {
            Ok(Written::Yes) => metrics::parked_retried(&self.consumer, result),
            Ok(Written::Fenced) => {
                metrics::fenced(&self.consumer, Fenced::Parked);
                tracing::debug!(%at, "its lease ran out meanwhile; whoever has it now goes on");
            }
            Err(error) => {
                tracing::debug!(%at, error = %chain(&error), "it is tried again when its lease is over");
            }
        }
    }
}

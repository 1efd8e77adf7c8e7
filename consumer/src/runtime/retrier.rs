//! Tries records that were set aside again, whichever process set them aside: by a lease on each, not by partition.
//!
//! It takes the first of each key that is due, tries it once as a lane would, and ends it (done, or dead with its letter), which
//! makes the next of its key due, or gives it back for later. Every process of a consumer does this; a lease keeps them apart.
//! One that runs out, because a handler took longer than it or the process died, lets another one try: the inbox row keeps the
//! effect single, and what the first says afterwards is refused.

use std::sync::Arc;
use std::time::Duration;

use baton_protocol::dead_letter::Cause;
use baton_protocol::report::chain;
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::lane::Stop;
use super::next::{OUTAGE, Position};
use super::worker::{DOUBT, Death, Progress, Tried, Worker};
use crate::apply::Apply;
use crate::inbox::{End, Error, Taken, Written};
use crate::message::Message;
use crate::metrics::{self, AsideTry, Fenced};

/// How often is looked for what another process has set aside or left behind.
const LOOK_EVERY: Duration = Duration::from_millis(500);
/// How many are tried at once.
const AT_ONCE: usize = 8;

impl<A: Apply> Worker<A> {
    /// Until it is asked to stop; then what is in hand is finished. Dropped, it cancels what is in hand.
    pub(crate) async fn retry_parked(self: Arc<Self>, topics: Vec<String>, mut stop: Stop) {
        let mut tries = JoinSet::new();
        let mut outage = OUTAGE.delays();
        let mut look_at = Instant::now();
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
            // While everything fails nothing is taken, so that no lease is held for nothing.
            let Some(ticket) = stop.unless(self.breaker.admit()).await else { break };
            drop(ticket);
            look_at = Instant::now() + LOOK_EVERY;
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

    /// In how long it, or the next of its key, is due.
    async fn try_parked(&self, taken: Taken, mut stop: Stop) -> Duration {
        let record = &taken.record;
        // It was set aside with an identity.
        let Ok(mut message) = self.message(record) else {
            return self
                .give_back(&taken, taken.attempts, "its identity can no longer be read", LOOK_EVERY)
                .await;
        };
        message.work.attempts = taken.attempts.saturating_add(1);
        let Some(ticket) = stop.unless(self.breaker.admit()).await else {
            return self.give_back(&taken, taken.attempts, "asked to stop", Duration::ZERO).await;
        };
        let mut tried = self.attempt(ticket, &message).await;
        if matches!(tried, Tried::GiveUp { cause: Cause::TooOld, .. }) {
            // It waited for longer than the horizon. That it was not applied is known by its row here: a purge spares what
            // settles a record that is set aside.
            message.work.forget_time();
            tried = self.attempt(self.breaker.admit().await, &message).await;
        }
        let (at, attempts) = (Position::of(&message), message.work.attempts);
        match tried {
            Tried::Settled(met) => {
                tracing::info!(%at, ?met, attempts, "a record that was set aside is settled");
                self.end(&taken, End::Done, attempts).await
            }
            Tried::GiveUp { cause, error, attempts } => {
                message.work.attempts = attempts;
                self.bury_parked(&taken, &message, cause, error, &mut stop).await
            }
            Tried::Again { reason, error } => {
                tracing::debug!(%at, error, ?reason, "a record that was set aside waits on");
                self.give_back(&taken, taken.attempts, &error, OUTAGE.delay(3)).await
            }
            Tried::Failed { error, streak } => {
                // Its lease goes on meanwhile.
                if self.breaker.settled(streak, DOUBT.min(self.inbox.ttl() / 4)).await {
                    return self.give_back(&taken, taken.attempts, &error, LOOK_EVERY).await;
                }
                if attempts >= self.terms.attempts {
                    return self.bury_parked(&taken, &message, Cause::Exhausted, error, &mut stop).await;
                }
                let delay = self.retry.delay(taken.attempts);
                tracing::warn!(%at, error, ?delay, attempts, "a record that was set aside failed again");
                self.give_back(&taken, attempts, &error, delay).await
            }
        }
    }

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
        let death = Death::of(message, cause, error, failed_since);
        if self.give_up(&death, stop).await == Progress::Settled {
            self.end(taken, End::Dead { cause, error: &death.error }, attempts).await
        } else {
            self.give_back(taken, taken.attempts, &death.error, Duration::ZERO).await
        }
    }

    /// Where that cannot be written, the lease runs out, and the next try finds the work settled.
    async fn end(&self, taken: &Taken, end: End<'_>, attempts: u32) -> Duration {
        let ended = self.inbox.end_parked(taken, end, attempts, self.terms.after_dead_letter).await;
        let result = match end {
            End::Done => AsideTry::Done,
            End::Dead { .. } => AsideTry::Dead,
        };
        self.said(taken, ended, result);
        Duration::ZERO
    }

    async fn give_back(&self, taken: &Taken, attempts: u32, error: &str, delay: Duration) -> Duration {
        let postponed = self.inbox.postpone(taken, attempts, error, delay).await;
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

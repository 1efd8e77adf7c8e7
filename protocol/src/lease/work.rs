//! One leased piece of work: a lease, a budget of attempts, and what came of it.
//!
//! The states and what leads from one to the other are [`lifecycle::lease`](crate::lifecycle::lease), and a property test
//! holds these functions to that table. A claim answers in this order: another payload is a conflict whatever
//! the state (R11), what is settled is never run again, what is held is left alone (R1), what has spent its attempts is
//! buried (R8), and only then is anything run. Result and mark are one write, and the last one (R9).
//!
//! On failure of a worker nothing needs to happen: its lease runs out and the next claim is the recovery (R20, R23).

use std::num::NonZeroU32;
use std::time::Duration;

use super::Terms;
use super::ownership::{self, Fenced, Holder, Lease};
use crate::fingerprint::Fingerprint;
use crate::lifecycle::IllegalTransition;
use crate::lifecycle::lease::{Event, State};

/// A piece of work as the store has it. `R` is its result.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Work<R> {
    lease: Lease,
    fingerprint: Fingerprint,
    attempts: u32,
    outcome: Outcome<R>,
}

/// What came of it so far.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Outcome<R> {
    Open,
    Done { result: R, by: Holder },
    Dead,
}

/// What a claim found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Claim<R> {
    /// It is the claimer's to run.
    Claimed {
        /// By this it renews and completes.
        holder: Holder,
        /// Counted from 1.
        attempt: u32,
    },
    /// Somebody is at it.
    Held {
        /// From exactly then on it can be claimed.
        until: Duration,
    },
    /// It was done before, and this is the stored result.
    Duplicate(R),
    /// It was given up, now or before.
    Dead {
        /// How many times it was run.
        attempts: u32,
    },
    /// The key was used with another payload.
    Conflict,
}

impl<R: Clone> Work<R> {
    /// Work that nobody has claimed yet, on a payload with this fingerprint.
    #[must_use]
    pub fn new(fingerprint: Fingerprint) -> Self {
        Self { lease: Lease::default(), fingerprint, attempts: 0, outcome: Outcome::Open }
    }

    /// Where it stands at `now`.
    #[must_use]
    pub fn state(&self, now: Duration) -> State {
        match self.outcome {
            Outcome::Open => self.lease.state(now),
            Outcome::Done { .. } => State::Done,
            Outcome::Dead => State::Dead,
        }
    }

    /// How many times it was claimed to be run.
    #[must_use]
    pub fn attempts(&self) -> u32 {
        self.attempts
    }

    /// The generation of the last claim that ran it.
    #[must_use]
    pub fn generation(&self) -> i64 {
        self.lease.generation
    }

    /// Whose result is stored.
    #[must_use]
    pub fn completed_by(&self) -> Option<&Holder> {
        match &self.outcome {
            Outcome::Done { by, .. } => Some(by),
            Outcome::Open | Outcome::Dead => None,
        }
    }

    /// Takes the work, or says why not. `budget` is how many attempts it gets in all.
    pub fn claim(
        &mut self,
        owner: &str,
        payload: &Fingerprint,
        budget: NonZeroU32,
        now: Duration,
        terms: Terms,
    ) -> Claim<R> {
        if *payload != self.fingerprint {
            return Claim::Conflict;
        }
        match &self.outcome {
            Outcome::Done { result, .. } => return Claim::Duplicate(result.clone()),
            Outcome::Dead => return Claim::Dead { attempts: self.attempts },
            Outcome::Open => {}
        }
        // Only what can be claimed can be buried by somebody who does not hold it.
        if self.attempts >= budget.get() && self.state(now).next(Event::Claimed).is_ok() {
            self.outcome = Outcome::Dead;
            return Claim::Dead { attempts: self.attempts };
        }
        match self.lease.claim(owner.to_owned(), None, now, terms) {
            ownership::Claim::Held { until } => Claim::Held { until },
            ownership::Claim::Won { holder, .. } => {
                self.attempts += 1;
                Claim::Claimed { holder, attempt: self.attempts }
            }
        }
    }

    /// A heartbeat: the holder still progresses. Answered is the new end of the lease.
    ///
    /// # Errors
    ///
    /// When the work is not the holder's any more.
    pub fn renew(&mut self, holder: &Holder, now: Duration, terms: Terms) -> Result<Duration, Fenced> {
        self.permits(holder, now)?;
        self.lease.renew(holder, now, terms)
    }

    /// Stores the result and marks the work as done.
    ///
    /// # Errors
    ///
    /// When the work is not the holder's any more: what stands there stays as it is.
    pub fn complete(&mut self, holder: &Holder, result: R, now: Duration) -> Result<(), Fenced> {
        self.permits(holder, now)?;
        self.outcome = Outcome::Done { result, by: holder.clone() };
        Ok(())
    }

    /// Gives the work back for another try. The attempt stays spent (R31).
    ///
    /// # Errors
    ///
    /// When the work is not the holder's any more.
    pub fn release(&mut self, holder: &Holder, now: Duration) -> Result<(), Fenced> {
        self.permits(holder, now)?;
        self.lease.release(holder, now)
    }

    /// Gives the work up: no attempt will succeed.
    ///
    /// # Errors
    ///
    /// When the work is not the holder's any more.
    pub fn bury(&mut self, holder: &Holder, now: Duration) -> Result<(), Fenced> {
        self.permits(holder, now)?;
        self.outcome = Outcome::Dead;
        Ok(())
    }

    /// An operator wants dead work run again: the next claim has it, under a later generation than any before, and attempts
    /// begin anew.
    ///
    /// # Errors
    ///
    /// When it is not dead; nothing changes then.
    pub fn requeue(&mut self, now: Duration) -> Result<(), IllegalTransition> {
        self.state(now).next(Event::Requeued)?;
        self.outcome = Outcome::Open;
        self.lease.vacate();
        self.attempts = 0;
        Ok(())
    }

    fn permits(&self, holder: &Holder, now: Duration) -> Result<(), Fenced> {
        match self.outcome {
            Outcome::Open => self.lease.permits(holder, now),
            Outcome::Done { .. } | Outcome::Dead => Err(Fenced::Settled),
        }
    }
}

#[cfg(test)]
mod tests;

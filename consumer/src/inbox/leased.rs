//! Work whose effects lie outside this database: owned by a lease, asked after before it is run again.
//!
//! ```text
//! claim ─┬─ nobody ever had it ─────────────────────▶ action ─┬─ done ──▶ outcome + mark, by owner and generation
//!        ├─ left behind ─▶ lookup ─┬─ not applied ─▶ action   └─ failed, panicked ──▶ free at once
//!        │                         ├─ applied ──────▶ outcome + mark: nothing runs
//!        │                         └─ still unknown ▶ free at once: nothing ran, no attempt is spent
//!        ├─ left behind, attempts spent ─▶ Dead: nothing runs, nobody is asked
//!        ├─ dead, and an operator replays it ─▶ as what is left behind
//!        └─ held │ done │ dead │ another payload: as without a lease
//! ```
//!
//! Nothing is run a second time unasked, whatever the first attempt said of itself. No transaction is open while the action
//! runs. The lease ends by the database's clock unless the action reports progress ([`Lease::progress`]), so that work that
//! hangs is taken over and work that is slow is not. Whoever lost its lease cannot renew, complete or release: each is one
//! statement that names owner, generation and payload and asks for a valid lease.
//!
//! *On failure.* Of a process that dies anywhere here the lease is left, and the next claim after it is the recovery. An answer
//! that came late is not trusted: the lease may be over ([`Inbox::is_fresh`]). A completion whose reply is lost is asked after
//! by generation.

use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::time::Duration;

use futures_util::FutureExt;
use tokio::time::{Instant, timeout};

use super::replayed::{End as Replayed, Until};
use super::session::Session;
use super::statements::{self, Claim, Holder, Leased};
use super::{Error, Inbox, Once, Work, met, panic_message};
use crate::metrics::{self, Fenced};
use crate::{Failure, Outcome, Verdict};

/// What the service that takes the effects says of one key.
#[derive(Debug)]
#[non_exhaustive]
pub enum Reconciled {
    /// It took effect; the outcome, if any, is stored as the action's own would be.
    Applied(Option<Outcome>),
    /// It did not, and what was on its way will not any more: the action may run.
    NotApplied,
    /// It cannot be told now. Nothing runs, and the next claim asks again.
    StillUnknown,
}

/// Asks the service that takes the effects whether one key took effect there.
///
/// Called before an action is run again, by whomever and however the earlier attempt ended, for as long as its row is there: after a
/// purge ([`Inbox::purge`]) a repeat without a record's time is a first attempt, and is not asked after. It must be the place that
/// decides: the payment provider by its idempotency key, not a cache. `NotApplied` must stay true until the action is run.
///
/// A closure `|key| async move { … }` is one.
pub trait Reconcile: Send + Sync {
    /// Whether `key` took effect. It has three quarters of [`Inbox::lease_ttl`] for its answer; without one by then it is
    /// dropped, as [`Reconciled::StillUnknown`]. The key is unique within a scope: one service for two scopes needs two of these.
    fn lookup(&self, key: &str) -> impl Future<Output = Reconciled> + Send;
}

impl<F, R> Reconcile for F
where
    F: Fn(String) -> R + Send + Sync,
    R: Future<Output = Reconciled> + Send,
{
    fn lookup(&self, key: &str) -> impl Future<Output = Reconciled> + Send {
        self(key.to_owned())
    }
}

/// What becomes of work whose attempts are spent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WhenSpent {
    /// The claim marks it as dead.
    Bury,
    /// The claim says so ([`Error::Spent`]): its dead letter comes first.
    Tell,
}

/// The lease under which an action runs.
#[derive(Debug)]
pub struct Lease<'a> {
    inbox: &'a Inbox,
    work: &'a Work,
    holder: Holder,
    attempt: u32,
}

impl Lease<'_> {
    /// The key to give to the service that takes the effects, so that a repeated call is told from a new one. Unique within
    /// its scope.
    #[must_use]
    pub fn idempotency_key(&self) -> &str {
        &self.work.key
    }

    /// Counted from 1.
    #[must_use]
    pub fn attempt(&self) -> u32 {
        self.attempt
    }

    /// Rises with every claim of this work, for as long as its row is kept: a service that keeps the highest it has seen can
    /// refuse an owner that came back.
    #[must_use]
    pub fn generation(&self) -> i64 {
        self.holder.generation
    }

    /// Says that the work moves on, and has the lease from now for its whole length. To be called between steps that take
    /// less than [`Inbox::lease_ttl`] each: a lease that nobody renews is taken over.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`] when the work is somebody else's by now, or may be: stop, the rest is theirs. [`Error::Renew`] when the
    /// database did not answer: the lease may run out.
    ///
    /// # Cancel safety
    ///
    /// Dropped half-way it may have renewed the lease or not; nothing else.
    pub async fn progress(&mut self) -> Result<(), Error> {
        self.renew(0).await
    }

    /// Renews, and counts what is about to be run. An answer that took as long as the lease says nothing.
    async fn renew(&mut self, attempts: i32) -> Result<(), Error> {
        let key = || self.work.key.clone();
        let asked = Instant::now();
        let renewed = statements::renew(self.inbox, self.work, &self.holder, attempts)
            .await
            .map_err(|source| Error::Renew { key: key(), source })?;
        if renewed && asked.elapsed() < self.inbox.lease_ttl {
            Ok(())
        } else {
            Err(Error::Lost { key: key() })
        }
    }

    /// Stores outcome and mark. One that comes too late is counted apart.
    async fn complete(&self, outcome: Option<&Outcome>, replayed: Replayed) -> Result<(), Error> {
        let completed = self.complete_or_ask(outcome, replayed).await;
        if matches!(completed, Err(Error::Lost { .. })) {
            metrics::fenced(self.inbox.consumer(), Fenced::CompleteLeased);
        }
        completed
    }

    /// A reply that is lost is asked after.
    async fn complete_or_ask(&self, outcome: Option<&Outcome>, replayed: Replayed) -> Result<(), Error> {
        let (inbox, work, key) = (self.inbox, self.work, || self.work.key.clone());
        let lost = match statements::complete_leased(inbox, work, &self.holder, outcome, replayed).await {
            Ok(true) => return Ok(()),
            Ok(false) => None,
            Err(source) => Some(source),
        };
        // A commit that came through although its reply did not.
        match (statements::completed(inbox, work, &self.holder).await, lost) {
            (Ok(true), _) => Ok(()),
            (_, None) => Err(Error::Lost { key: key() }),
            // Once more. That waits for a commit that is still on its way, and is then refused by what it wrote.
            (Ok(false), Some(source)) => {
                match statements::complete_leased(inbox, work, &self.holder, outcome, replayed).await {
                    Ok(true) => Ok(()),
                    Ok(false) => match statements::completed(inbox, work, &self.holder).await {
                        Ok(true) => Ok(()),
                        Ok(false) => Err(Error::Lost { key: key() }),
                        Err(_) => Err(Error::Commit { key: key(), source }),
                    },
                    Err(_) => Err(Error::Commit { key: key(), source }),
                }
            }
            (Err(_), Some(source)) => Err(Error::Commit { key: key(), source }),
        }
    }

    /// Gives the work back. Where that fails, the lease runs out.
    async fn release(&self, refund: i32) {
        match statements::release(self.inbox, self.work, &self.holder, refund).await {
            Ok(true) => {}
            Ok(false) => {
                tracing::debug!(key = self.work.key, "the lease had run out before it was given back");
            }
            Err(error) => {
                tracing::debug!(key = self.work.key, %error, "cannot give the lease back; it runs out");
            }
        }
    }
}

impl Inbox {
    /// How long a lease lasts without progress, unless set otherwise.
    pub const DEFAULT_LEASE_TTL: Duration = Duration::from_secs(30);

    /// How many attempts leased work gets, unless set otherwise.
    pub const DEFAULT_ATTEMPTS: u32 = 10;

    /// How long leased work stays with its owner without [`Lease::progress`]; also how long a takeover may take. At least
    /// 100 ms; default [`DEFAULT_LEASE_TTL`](Self::DEFAULT_LEASE_TTL), 30 s.
    #[must_use]
    pub fn lease_ttl(mut self, ttl: Duration) -> Self {
        self.lease_ttl = ttl.max(Duration::from_millis(100));
        self
    }

    /// How often leased work is run in all before it is given up as dead, at least 1; default
    /// [`DEFAULT_ATTEMPTS`](Self::DEFAULT_ATTEMPTS), 10. Counted in the database, whoever ran it.
    #[must_use]
    pub fn attempts(mut self, attempts: u32) -> Self {
        self.budget = attempts.max(1);
        self
    }

    /// Names this process in leases, for operators: what is written there is the name, a slash and a random part, new for each
    /// `Inbox`, so that a name that is used again can do nothing by its earlier leases. Default: no name.
    #[must_use]
    pub fn owner(mut self, name: &str) -> Self {
        self.owner = format!("{name}/{}", uuid::Uuid::new_v4().simple()).into();
        self
    }

    /// Runs `action` for `key` with effects outside this database: a payment provider, a mail service. One caller at a time
    /// runs it, by a lease. Whoever comes after an attempt that was not marked as done asks `reconcile` first, and runs it only
    /// if nothing took effect.
    ///
    /// The action gives [`Lease::idempotency_key`] to the service with every call, and reports progress. Done stores the
    /// outcome. Whatever else it says or does, a panic included, frees the key at once, and the next call asks `reconcile`.
    /// After [`attempts`](Self::attempts) the key is dead and never run again; the row says so, no dead letter does.
    ///
    /// One consumer and scope belong to this or to [`run_once`](Self::run_once), which does not take over what a lease has left
    /// behind: it answers [`Error::Leased`].
    ///
    /// `scope`, `key` and `payload` are as for [`run_once`](Self::run_once), and so is how long it is remembered: a call after the purge runs
    /// without asking. A failed key may be called again at once: when,
    /// is the caller's to say.
    ///
    /// ```no_run
    /// # use baton_consumer::inbox::{Inbox, Lease, Once, Reconciled};
    /// # use baton_consumer::Verdict;
    /// # async fn charge(key: &str) -> Result<String, std::io::Error> { Ok(key.to_owned()) }
    /// # async fn find_charge(key: &str) -> Result<Option<String>, std::io::Error> { Ok(Some(key.to_owned())) }
    /// # async fn example(inbox: Inbox) -> Result<(), baton_consumer::inbox::Error> {
    /// let asked = |key: String| async move {
    ///     match find_charge(&key).await {
    ///         Ok(Some(_)) => Reconciled::Applied(None),
    ///         Ok(None) => Reconciled::NotApplied,
    ///         Err(_) => Reconciled::StillUnknown,
    ///     }
    /// };
    /// let once = inbox
    ///     .run_leased("payments", "pay-7", b"{\"cents\":100}", &asked, async |lease: &mut Lease<'_>| {
    ///         match charge(lease.idempotency_key()).await {
    ///             Ok(receipt) => Verdict::done_with(&receipt),
    ///             Err(error) => Verdict::unknown(error),
    ///         }
    ///     })
    ///     .await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Lost`]: the lease ran out before the work was marked; what the action did, if it ran, stands. [`Error::Commit`]: the
    /// claim or the mark may be written or not. Any other [`Error`]: nothing ran here. In every case call again with the same
    /// key: what was done is found done, or asked after.
    ///
    /// # Cancel safety
    ///
    /// Dropped half-way, the lease runs out and the next call asks `reconcile`.
    pub async fn run_leased<R, A>(
        &self,
        scope: &str,
        key: &str,
        payload: &[u8],
        reconcile: &R,
        action: A,
    ) -> Result<Once, Error>
    where
        R: Reconcile,
        A: AsyncFnOnce(&mut Lease<'_>) -> Verdict,
    {
        let work = Work::brought(scope, key, payload, self.compare)?;
        self.settle_leased(&work, reconcile, action, WhenSpent::Bury).await
    }

    /// The one path of the runtime and of [`run_leased`](Self::run_leased).
    pub(crate) async fn settle_leased<R, A>(
        &self,
        work: &Work,
        reconcile: &R,
        action: A,
        when_spent: WhenSpent,
    ) -> Result<Once, Error>
    where
        R: Reconcile,
        A: AsyncFnOnce(&mut Lease<'_>) -> Verdict,
    {
        let Leased { holder, run_before } = match self.claim_leased(work, when_spent).await? {
            Ok(leased) => leased,
            Err(once) => return Ok(once),
        };
        let is_new = holder.generation == 1;
        // Those that ended without a word, and those that the caller knows of.
        let run_before = run_before.saturating_add(work.attempts.saturating_sub(1));
        let mut lease = Lease { inbox: self, work, holder, attempt: run_before.saturating_add(1) };
        if run_before >= self.budget {
            lease.release(0).await;
            return Err(Error::Spent { key: work.key.clone(), attempts: run_before });
        }
        #[cfg(feature = "plants")]
        let runs_unasked = self.has(crate::plant::Plant::NoLookUp);
        #[cfg(not(feature = "plants"))]
        let runs_unasked = false;
        if !is_new && !runs_unasked {
            let asked = AssertUnwindSafe(async { reconcile.lookup(&work.key).await }).catch_unwind();
            match timeout(self.lease_ttl.mul_f64(0.75), asked).await {
                Ok(Ok(Reconciled::Applied(outcome))) => {
                    lease.complete(outcome.as_ref(), Replayed::Duplicate).await?;
                    return Ok(Once::Duplicate(outcome));
                }
                // It took its time: the action has the whole lease.
                Ok(Ok(Reconciled::NotApplied)) => lease.renew(1).await?,
                Ok(Ok(Reconciled::StillUnknown)) | Err(_) => {
                    lease.release(0).await;
                    return Ok(Once::InProgress);
                }
                Ok(Err(panic)) => {
                    lease.release(0).await;
                    return Ok(Once::Failed(Failure::Panicked(panic_message(panic.as_ref()))));
                }
            }
        }
        let ran = AssertUnwindSafe(async { action(&mut lease).await }).catch_unwind().await;
        let failure = match ran {
            Ok(Verdict::Done(outcome)) => {
                lease.complete(outcome.as_ref(), Replayed::Applied).await?;
                return Ok(Once::Fresh(outcome));
            }
            Ok(Verdict::Failed(failure)) => failure,
            Err(panic) => Failure::Panicked(panic_message(panic.as_ref())),
        };
        // Behind Kafka failures that are told are counted by whoever tries again, who knows of outages.
        lease.release(i32::from(when_spent == WhenSpent::Tell)).await;
        Ok(Once::Failed(failure))
    }

    /// A short transaction of its own: nothing is open while the action runs.
    async fn claim_leased(&self, work: &Work, when_spent: WhenSpent) -> Result<Result<Leased, Once>, Error> {
        let budget = match when_spent {
            WhenSpent::Bury => self.budget,
            WhenSpent::Tell => u32::MAX,
        };
        loop {
            let mut session = Session::open(&self.pool).await?;
            let mut tx = session.begin(&self.begin).await?;
            // However long the pool took: the lease counts from here.
            let asked = Instant::now();
            let first = Holder { owner: self.owner.to_string(), generation: 1 };
            let leased = match statements::claim(&mut tx, self, work, Some(&*self.owner)).await? {
                // It commits before its effects, so no completion would find what this claim could not see.
                Claim::Ours if statements::is_too_old(&mut tx, self, work).await? => Err(Claim::TooOld),
                Claim::Ours => Ok(Leased { holder: first, run_before: 0 }),
                Claim::InProgress { is_left_behind: true } => {
                    statements::take(&mut tx, self, work, budget).await?
                }
                Claim::Dead { cause, error } if work.replay.is_some() => {
                    match self.revive(&mut tx, work, Until::Lease(&self.owner)).await? {
                        Some(generation) => {
                            let holder = Holder { owner: self.owner.to_string(), generation };
                            Ok(Leased { holder, run_before: 0 })
                        }
                        None => Err(Claim::Dead { cause, error }),
                    }
                }
                other => Err(other),
            };
            // Its row must not stay.
            if matches!(leased, Err(Claim::TooOld)) {
                let rolled_back = tx.rollback().await;
                session.ended(rolled_back);
                return Ok(Err(Once::TooOld));
            }
            // It waited for another transaction, and its lease has run all the time. Nobody has seen it: once more.
            if leased.is_ok() && !self.is_fresh(asked) {
                let rolled_back = tx.rollback().await;
                session.ended(rolled_back);
                continue;
            }
            tx.commit().await.map_err(|source| Error::Commit { key: work.key.clone(), source })?;
            session.ended(Ok(()));
            return match leased {
                // The answer was long on its way: somebody else may have it, and be done.
                Ok(_) if !self.is_fresh(asked) => Err(Error::Lost { key: work.key.clone() }),
                Ok(leased) => Ok(Ok(leased)),
                Err(claim) => Ok(Err(met(claim).unwrap_or(Once::InProgress))),
            };
        }
    }

    /// Whether what was asked for at that moment has most of its lease before it.
    fn is_fresh(&self, asked: Instant) -> bool {
        asked.elapsed() < self.lease_ttl / 2
    }
}

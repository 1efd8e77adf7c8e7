//! Work whose effects lie outside this database: owned by a lease, asked after before it is run again.
//!
//! ```text
//! claim ─┬─ nobody has it ──────────────────────────▶ action ─┬─ done ───────▶ outcome + mark, by owner and generation
//!        ├─ left behind, in doubt ─▶ lookup ─┬─ not applied ─┘ ├─ transient, permanent: nothing took effect ──▶ free at once
//!        │                                   ├─ applied ───────┼─▶ outcome + mark: nothing runs
//!        │                                   └─ still unknown ─┼─▶ free at once, in doubt; the attempt is not spent
//!        ├─ left behind, not in doubt ─▶ action                └─ unknown, panicked ──▶ free at once, in doubt
//!        ├─ left behind, attempts spent ─▶ Dead, nothing runs
//!        └─ held │ done │ dead │ another payload: as without a lease
//! ```
//!
//! No transaction is open while the action runs. The lease ends by the database's clock unless the action reports progress
//! ([`Lease::progress`]), so that work that hangs is taken over and work that is slow is not. Whoever lost its lease cannot
//! renew, complete or release: each is one statement that names owner and generation and asks for a valid lease.
//!
//! *On failure.* A process that dies leaves its owner in the row, in doubt: the next claim after the lease asks
//! [`Reconcile::lookup`] before anything runs. A completion whose reply is lost is asked after by generation.

use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::time::Duration;

use baton_protocol::fingerprint::Fingerprint;
use futures_util::FutureExt;

use super::session::Session;
use super::statements::{self, Claim, Holder, Leased};
use super::{Error, Inbox, KEY_LIMIT, Once, SCOPE_LIMIT, Work, check, met, panic_message};
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
/// Called before an action is run again that somebody else, or an earlier attempt, may have got through. It must be the
/// place that decides: the payment provider by its idempotency key, not a cache. `NotApplied` must stay true until the
/// action is run.
///
/// A closure `|key| async move { … }` is one.
pub trait Reconcile: Send + Sync {
    /// Whether `key` took effect.
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

/// The lease under which an action runs.
#[derive(Debug)]
pub struct Lease<'a> {
    inbox: &'a Inbox,
    work: &'a Work,
    holder: Holder,
    attempt: u32,
}

impl Lease<'_> {
    /// The key to give to the service that takes the effects, so that a repeated call is told from a new one.
    #[must_use]
    pub fn idempotency_key(&self) -> &str {
        &self.work.key
    }

    /// Counted from 1.
    #[must_use]
    pub fn attempt(&self) -> u32 {
        self.attempt
    }

    /// Rises with every claim of this work: a service that keeps the highest it has seen can refuse an owner that came back.
    #[must_use]
    pub fn generation(&self) -> i64 {
        self.holder.generation
    }

    /// Says that the work moves on, and has the lease from now for its whole length. To be called between steps that take
    /// less than [`Inbox::lease_ttl`] each: a lease that nobody renews is taken over.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`] when the work is somebody else's by now: stop, the rest is theirs. [`Error::Renew`] when the
    /// database did not answer: the lease may run out.
    ///
    /// # Cancel safety
    ///
    /// Dropped half-way it may have renewed the lease or not; nothing else.
    pub async fn progress(&mut self) -> Result<(), Error> {
        let key = || self.work.key.clone();
        let renewed = statements::renew(self.inbox, self.work, &self.holder)
            .await
            .map_err(|source| Error::Renew { key: key(), source })?;
        if renewed { Ok(()) } else { Err(Error::Lost { key: key() }) }
    }

    /// Stores outcome and mark. A reply that is lost is asked after.
    async fn complete(&self, outcome: Option<&Outcome>) -> Result<(), Error> {
        let (inbox, work, key) = (self.inbox, self.work, || self.work.key.clone());
        let lost = match statements::complete_leased(inbox, work, &self.holder, outcome).await {
            Ok(true) => return Ok(()),
            Ok(false) => None,
            Err(source) => Some(source),
        };
        // A commit that came through although its reply did not.
        match (statements::completed(inbox, work, &self.holder).await, lost) {
            (Ok(true), _) => Ok(()),
            (_, None) => Err(Error::Lost { key: key() }),
            // The commit that was on its way has ended by now, or the session that sent it has: once more.
            (Ok(false), Some(source)) => {
                match statements::complete_leased(inbox, work, &self.holder, outcome).await {
                    Ok(true) => Ok(()),
                    _ => Err(Error::Complete { key: key(), source }),
                }
            }
            (Err(_), Some(source)) => Err(Error::Commit { key: key(), source }),
        }
    }

    /// Gives the work back. Where that fails, the lease runs out, in doubt.
    async fn release(&self, doubt: Doubt) {
        let unspent = i32::from(doubt == Doubt::NotRun);
        let in_doubt = doubt != Doubt::None;
        match statements::release(self.inbox, self.work, &self.holder, in_doubt, unspent).await {
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

/// Whether something may have taken effect that the row does not say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Doubt {
    None,
    Unknown,
    /// It was in doubt before, and this attempt only asked.
    NotRun,
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

    /// Names this process in leases, for operators; 1 to 255 bytes are usual. Default: random. What authorises is the
    /// generation: a name that is used again can do nothing by its earlier leases.
    #[must_use]
    pub fn owner(mut self, owner: &str) -> Self {
        self.owner = owner.into();
        self
    }

    /// Runs `action` for `key` with effects outside this database: a payment provider, a mail service. One caller at a time
    /// runs it, by a lease. Whoever takes it over asks `reconcile` first, and runs it only if nothing took effect.
    ///
    /// The action gives [`Lease::idempotency_key`] to the service with every call, and reports progress. Its verdict: done
    /// stores the outcome; transient and permanent say that *nothing* took effect; unknown (a time-out after the request was
    /// sent) has `reconcile` asked by the next call. A panic counts as unknown. After [`attempts`](Self::attempts) the key is
    /// dead and never run again.
    ///
    /// `scope`, `key` and `payload` are as for [`run_once`](Self::run_once). A failed key may be called again at once: when,
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
    /// [`Error::Lost`]: the lease ran out before the work was marked; what the action did stands, and the next call with this
    /// key asks after it. Any other [`Error`] of the claim: nothing ran here. [`Error::Complete`] and [`Error::Commit`]: the
    /// action was done, its mark may be missing; call again with the same key.
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
        check("scope", scope, 0, SCOPE_LIMIT)?;
        check("key", key, 1, KEY_LIMIT)?;
        let work = Work {
            scope: scope.to_owned(),
            key: key.to_owned(),
            fingerprint: Fingerprint::exact(Some(payload)),
            attempts: 1,
            origin: None,
        };
        let Leased { holder, attempt, in_doubt } = match self.claim_leased(&work).await? {
            Ok(leased) => leased,
            Err(once) => return Ok(once),
        };
        let mut lease = Lease { inbox: self, work: &work, holder, attempt };
        if in_doubt {
            match AssertUnwindSafe(reconcile.lookup(key)).catch_unwind().await {
                Ok(Reconciled::Applied(outcome)) => {
                    lease.complete(outcome.as_ref()).await?;
                    return Ok(Once::Duplicate(outcome));
                }
                // It took its time: what is left of the lease is the action's.
                Ok(Reconciled::NotApplied) => lease.progress().await?,
                Ok(Reconciled::StillUnknown) => {
                    lease.release(Doubt::NotRun).await;
                    return Ok(Once::InProgress);
                }
                Err(panic) => {
                    lease.release(Doubt::NotRun).await;
                    return Ok(Once::Failed(Failure::Panicked(panic_message(panic.as_ref()))));
                }
            }
        }
        match AssertUnwindSafe(action(&mut lease)).catch_unwind().await {
            Ok(Verdict::Done(outcome)) => {
                lease.complete(outcome.as_ref()).await?;
                Ok(Once::Fresh(outcome))
            }
            Ok(Verdict::Failed(failure)) => {
                let nothing_took_effect = matches!(failure, Failure::Transient(_) | Failure::Permanent(_));
                lease.release(if nothing_took_effect { Doubt::None } else { Doubt::Unknown }).await;
                Ok(Once::Failed(failure))
            }
            Err(panic) => {
                lease.release(Doubt::Unknown).await;
                Ok(Once::Failed(Failure::Panicked(panic_message(panic.as_ref()))))
            }
        }
    }

    /// A short transaction of its own: nothing is open while the action runs.
    async fn claim_leased(&self, work: &Work) -> Result<Result<Leased, Once>, Error> {
        let mut session = Session::open(&self.pool).await?;
        let mut tx = session.begin(&self.begin).await?;
        let claim = statements::claim(&mut tx, self, work, Some(&*self.owner)).await?;
        let first = Holder { owner: self.owner.to_string(), generation: 1 };
        let leased = match claim {
            Claim::Ours => Ok(Leased { holder: first, attempt: 1, in_doubt: false }),
            Claim::InProgress { is_left_behind: true } => statements::take(&mut tx, self, work).await?,
            other => Err(other),
        };
        tx.commit().await.map_err(|source| Error::Commit { key: work.key.clone(), source })?;
        session.ended(Ok(()));
        Ok(leased.map_err(|claim| met(claim).unwrap_or(Once::InProgress)))
    }
}

//! The inbox: what one consumer has applied, by idempotency key, so that nothing is applied twice.
//!
//! The row of `inbox.message` is authoritative. Claim, effects and completion are one transaction (READ COMMITTED,
//! synchronous commit), so others see work as settled or not at all:
//!
//! ```text
//! claim ─┬─ nobody has it ───▶ action ─┬─ done ──▶ outcome + mark, the last write ──▶ COMMIT
//!        │                             └─ failed or panicked ──▶ ROLLBACK: no trace
//!        ├─ nobody, and a duplicate may have been purged ─▶ ROLLBACK, TooOld
//!        ├─ done, same payload ──────▶ Duplicate, with the stored outcome
//!        ├─ dead, same payload ──────▶ Dead, until an operator requeues or replays it (`replayed`): then as if nobody had it
//!        ├─ in progress elsewhere ───▶ InProgress
//!        └─ another payload ─────────▶ Conflict, whatever the state
//! ```
//!
//! A concurrent claim of the same work waits on the unique index until the first transaction ends. Every path goes
//! through `queries/message_claim.sql`, or for many at a time through `queries/batch_claim.sql` ([`Inbox::run_batch`]): these
//! two compare fingerprints, and nothing else decides.
//!
//! *On failure.* A lost connection rolls back on the server. A COMMIT whose reply is lost may have taken place: the row
//! decides, so the work is claimed again and is then found done, or is run. No transaction is ever raced against a timer
//! on this side: the server ends one that stalls, and a connection whose transaction did not end in order is closed, not
//! returned to the pool.

mod batch;
pub(crate) mod horizon;
mod kept;
mod leased;
mod parked;
mod replayed;
mod session;
mod statements;

pub use batch::{Answer, Batch, Fresh, Item};
pub use horizon::{Left, Purged};
pub(crate) use leased::WhenSpent;
pub use leased::{Lease, Reconcile, Reconciled};
pub use parked::AfterDeadLetter;
pub(crate) use parked::{End, HoldUp, Parked, Place, Taken, Written};
pub(crate) use replayed::{End as ReplayEnd, Origin as FirstDeath};

use std::fmt;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use baton_protocol::dead_letter::Cause;
use baton_protocol::fingerprint::{self, Compare, Fingerprint};
use baton_protocol::replay;
use futures_util::FutureExt;
use sqlx::{PgPool, Postgres, Transaction};
use time::OffsetDateTime;

use crate::verdict::is_transient;
use crate::{Failure, Outcome, Verdict};
use kept::Kept;
use replayed::End as Replayed;
use session::Session;
use statements::{Claim, Completed};

/// The longest consumer name, in bytes: it is part of topic names.
pub const CONSUMER_LIMIT: usize = 249;

/// The longest scope, in bytes: the longest topic and the longest type fit.
pub const SCOPE_LIMIT: usize = 1280;

/// The longest key, in bytes.
pub const KEY_LIMIT: usize = 1024;

/// What [`Inbox::run_once`] found or did.
#[derive(Debug)]
#[non_exhaustive]
pub enum Once {
    /// The action ran here, and its effects, outcome and mark are committed.
    Fresh(Option<Outcome>),
    /// It was applied before, or by somebody else at the same moment; this is the outcome stored then.
    Duplicate(Option<Outcome>),
    /// Somebody else is at it. Nothing ran; ask again later.
    InProgress,
    /// The key was used with another payload. Nothing ran.
    Conflict,
    /// It was given up before: a dead letter tells of it, or, where [`Inbox::run_leased`] has spent its attempts, the row.
    /// Nothing ran.
    Dead {
        /// Why it was given up, as in `dlt-cause`.
        cause: String,
        /// What the handler said.
        error: Option<String>,
    },
    /// It has no row, and its record's time is at or below that of something purged ([`Inbox::purge`]): it may have been applied
    /// before. Nothing was applied. Only of records: what is brought by a caller has no such time.
    TooOld,
    /// The action ran here and failed: everything it did through the transaction is rolled back. What it did elsewhere, by a
    /// lease, is asked after by the next call; so it is where a look-up panicked.
    Failed(Failure),
}

/// What the database did not do. Nothing was applied, unless a variant says otherwise; the same call may be made again
/// with the same key. Of a batch the key is the first one, with how many more there are.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No connection.
    #[error("no connection to the inbox database; check that it is up and that the pool is large enough")]
    Connect(#[source] sqlx::Error),
    /// The transaction could not be begun.
    #[error("cannot begin the inbox transaction")]
    Begin(#[source] sqlx::Error),
    /// The claim failed.
    #[error("cannot claim {key:?} in scope {scope:?}")]
    Claim {
        /// The scope.
        scope: String,
        /// The idempotency key.
        key: String,
        /// The database's answer.
        #[source]
        source: sqlx::Error,
    },
    /// A row is in a state that this version does not know.
    #[error(
        "inbox row of {key:?} is in the unknown state {state:?}; bring every consumer of this database to one version"
    )]
    UnknownState {
        /// The idempotency key.
        key: String,
        /// The state.
        state: String,
    },
    /// The completion mark could not be written, so the transaction was rolled back.
    #[error(
        "cannot mark {key:?} as done; an error that the action passed over may have failed its transaction"
    )]
    Complete {
        /// The idempotency key.
        key: String,
        /// The database's answer.
        #[source]
        source: sqlx::Error,
    },
    /// The claim is no longer this transaction's: the action committed or rolled back by itself.
    #[error(
        "the action on {key:?} ended its transaction itself, so its effects and its mark are apart; take COMMIT and ROLLBACK out of it"
    )]
    Fenced {
        /// The idempotency key.
        key: String,
    },
    /// COMMIT was sent and its reply did not arrive. It may have been applied: ask again with the same key.
    #[error(
        "it is not known whether the transaction of {key:?} was committed; the same call with the same key tells"
    )]
    Commit {
        /// The idempotency key.
        key: String,
        /// What happened to the connection.
        #[source]
        source: sqlx::Error,
    },
    /// The lease ran out before the work was marked as done, and it may be somebody else's by now. What the action did outside
    /// stands: the next call with this key asks after it.
    #[error("the lease of {key:?} was lost: its work went on for longer than the lease without saying so")]
    Lost {
        /// The idempotency key.
        key: String,
    },
    /// A lease has left the work behind, and only [`Inbox::run_leased`] may ask what became of it. Nothing ran.
    #[error(
        "{key:?} was begun by run_leased, which has to take it over; a consumer and scope belong to one way of owning"
    )]
    Leased {
        /// The idempotency key.
        key: String,
    },
    /// The lease could not be renewed. It may run out.
    #[error("cannot renew the lease of {key:?}")]
    Renew {
        /// The idempotency key.
        key: String,
        /// The database's answer.
        #[source]
        source: sqlx::Error,
    },
    /// The payload cannot be compared as set. Nothing ran; this payload is refused each time.
    #[error("the payload of {key:?} cannot be compared")]
    Payload {
        /// The idempotency key.
        key: String,
        /// What is wrong with it.
        #[source]
        source: fingerprint::Error,
    },
    /// What became of a replayed record cannot be written down, or where it came from cannot be read.
    #[error("cannot read or write inbox.replay_item, the items of replay plans")]
    Replay(#[source] sqlx::Error),
    /// The row could not be marked as dead.
    #[error("cannot mark {key:?} as dead")]
    Bury {
        /// The idempotency key.
        key: String,
        /// The database's answer.
        #[source]
        source: sqlx::Error,
    },
    /// Records that were set aside cannot be read or written.
    #[error("cannot read or write inbox.parked, the records that were set aside")]
    Parked(#[source] sqlx::Error),
    /// Its attempts are spent, and whether the last one took effect is not known. Nothing ran.
    #[error("{attempts} attempts on {key:?} are spent; whether the last one took effect is not known")]
    Spent {
        /// The idempotency key.
        key: String,
        /// How many they were.
        attempts: u32,
    },
    /// A batch could not be purged. Those before it are; the next purge goes on.
    #[error(
        "cannot purge the inbox; check that `baton migrate inbox` has brought it up to date and that the role may delete there, as baton_consumer may"
    )]
    Purge(#[source] sqlx::Error),
    /// The database's clock could not be read.
    #[error("cannot read the database's clock")]
    Clock(#[source] sqlx::Error),
    /// A name, scope or key that the table does not take.
    #[error(
        "{what} of {bytes} bytes does not fit the inbox; it takes 1 to {limit} bytes without NUL (a scope may be empty)"
    )]
    Text {
        /// `consumer`, `scope` or `key`.
        what: &'static str,
        /// Its length.
        bytes: usize,
        /// The longest that fits.
        limit: usize,
    },
}

/// One consumer's inbox in one database.
///
/// Used by the Kafka runtime, and without Kafka by [`run_once`](Self::run_once), for HTTP handlers, schedulers, imports:
/// the code path is the same. Effects outside this database go through [`run_leased`](Self::run_leased).
#[derive(Clone)]
pub struct Inbox {
    consumer: Arc<str>,
    pool: PgPool,
    kept: Arc<Kept>,
    compare: Compare,
    begin: Arc<str>,
    begin_claim: Arc<str>,
    owner: Arc<str>,
    lease_ttl: Duration,
    budget: u32,
    #[cfg(feature = "plants")]
    plant: Option<crate::plant::Plant>,
}

/// One piece of work as the inbox knows it.
#[derive(Debug, Clone)]
pub(crate) struct Work {
    pub(crate) scope: String,
    pub(crate) key: String,
    pub(crate) fingerprint: Fingerprint,
    pub(crate) attempts: u32,
    pub(crate) origin: Option<Origin>,
    /// The item of a plan by which an operator brings it again, as its record says.
    pub(crate) replay: Option<replay::Item>,
}

impl Work {
    /// Brought by a caller rather than by a record.
    fn brought(scope: &str, key: &str, payload: &[u8], compare: Compare) -> Result<Self, Error> {
        check("scope", scope, 0, SCOPE_LIMIT)?;
        check("key", key, 1, KEY_LIMIT)?;
        let fingerprint = compare
            .fingerprint(Some(payload))
            .map_err(|source| Error::Payload { key: key.to_owned(), source })?;
        Ok(Self {
            scope: scope.to_owned(),
            key: key.to_owned(),
            fingerprint,
            attempts: 1,
            origin: None,
            replay: None,
        })
    }
}

/// Where work came from, kept beside it for operators and for the horizon.
#[derive(Debug, Clone)]
pub(crate) struct Origin {
    pub(crate) topic: String,
    pub(crate) partition: i32,
    pub(crate) offset: i64,
    pub(crate) timestamp_ms: Option<i64>,
}

/// Whether a mark was needed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Buried {
    Now,
    /// Somebody else has settled it meanwhile; their mark stands.
    SettledBefore,
}

impl Inbox {
    /// How long the server waits for a stalled client or statement before it ends the transaction.
    pub const DEFAULT_STALL: Duration = Duration::from_secs(60);

    /// The inbox of `consumer` in the database of `pool`, which `baton migrate inbox` has prepared.
    ///
    /// A connection whose transaction has ended waits up to 10 ms for the next one, up to 50 ms in all, before it goes back to the pool,
    /// and only while the pool could give out another: so hooks of the pool (`before_acquire`, `after_release`) do not run for each
    /// piece of work.
    ///
    /// # Errors
    ///
    /// [`Error::Text`] when the name does not fit.
    pub fn new(consumer: &str, pool: PgPool) -> Result<Self, Error> {
        check("consumer", consumer, 1, CONSUMER_LIMIT)?;
        Ok(Self {
            consumer: consumer.into(),
            pool,
            kept: Arc::default(),
            compare: Compare::default(),
            begin: session::begin_sql(Self::DEFAULT_STALL),
            begin_claim: session::begin_claim_sql(Self::DEFAULT_STALL),
            owner: uuid::Uuid::new_v4().simple().to_string().into(),
            lease_ttl: Self::DEFAULT_LEASE_TTL,
            budget: Self::DEFAULT_ATTEMPTS,
            #[cfg(feature = "plants")]
            plant: None,
        })
    }

    #[cfg(feature = "plants")]
    pub(crate) fn plant(mut self, plant: Option<crate::plant::Plant>) -> Self {
        self.plant = plant;
        self
    }

    #[cfg(feature = "plants")]
    pub(crate) fn has(&self, plant: crate::plant::Plant) -> bool {
        self.plant == Some(plant)
    }

    /// Ends a transaction on the server when one statement takes longer than this, or when the action leaves it idle for
    /// longer. COMMIT is not counted. At least 1 ms; default [`DEFAULT_STALL`](Self::DEFAULT_STALL), 60 s.
    #[must_use]
    pub fn stall_timeout(mut self, stall: Duration) -> Self {
        self.begin = session::begin_sql(stall);
        self.begin_claim = session::begin_claim_sql(stall);
        self
    }

    /// What of a payload is compared when its key is met again. Default: its exact bytes. What was settled under another setting
    /// and comes again is a conflict.
    ///
    /// ```
    /// # use baton_consumer::{Compare, Inbox};
    /// # fn example(inbox: Inbox) -> Inbox {
    /// inbox.fingerprint(Compare::CanonicalJson)
    /// # }
    /// ```
    #[must_use]
    pub fn fingerprint(mut self, compare: Compare) -> Self {
        self.compare = compare;
        self
    }

    /// Runs `action` once for `key`, however often and by however many it is called: the winner runs it in the
    /// transaction that also stores the outcome; everyone else gets that outcome, or is told why not.
    ///
    /// `scope` separates keys that mean different things (at most 1,280 bytes, may be empty); `key` is 1 byte to 1 KiB; the
    /// exact bytes of `payload`, or what [`fingerprint`](Self::fingerprint) says, are what makes a second call the same work.
    /// What was done is remembered until it is purged ([`purge`](Self::purge)): a call after that runs again.
    ///
    /// ```no_run
    /// # use baton_consumer::inbox::{Inbox, Once};
    /// # use baton_consumer::Verdict;
    /// # async fn example(inbox: Inbox) -> Result<(), baton_consumer::inbox::Error> {
    /// let once = inbox
    ///     .run_once("payments", "pay-7", b"{\"cents\":100}", async |tx| {
    ///         match sqlx::query("INSERT INTO payment (cents) VALUES (100)").execute(&mut **tx).await {
    ///             Ok(_) => Verdict::done_with("paid"),
    ///             Err(error) => error.into(),
    ///         }
    ///     })
    ///     .await?;
    /// match once {
    ///     Once::Fresh(outcome) | Once::Duplicate(outcome) => println!("{outcome:?}"),
    ///     Once::InProgress => println!("ask again"),
    ///     Once::Conflict => println!("another payload under this key"),
    ///     other => println!("{other:?}"),
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error`]: nothing was applied, but for [`Error::Commit`] and [`Error::Fenced`], where it may have been. Call
    /// again with the same key.
    ///
    /// # Cancel safety
    ///
    /// Dropped half-way, its connection is closed and the server rolls back, unless COMMIT was already on its way.
    pub async fn run_once<A>(&self, scope: &str, key: &str, payload: &[u8], action: A) -> Result<Once, Error>
    where
        A: AsyncFnOnce(&mut Transaction<'_, Postgres>) -> Verdict,
    {
        let work = Work::brought(scope, key, payload, self.compare)?;
        match self.settle(&work, action).await {
            Err(Error::Commit { key, source }) => self.look_up(&work, key, source).await,
            settled => settled,
        }
    }

    /// Claims, runs and completes in one transaction. The one path of the runtime and of [`run_once`](Self::run_once).
    pub(crate) async fn settle<A>(&self, work: &Work, action: A) -> Result<Once, Error>
    where
        A: AsyncFnOnce(&mut Transaction<'_, Postgres>) -> Verdict,
    {
        let mut session = Session::follow(&self.pool, &self.kept).await?;
        let mut tx = session.begin(&self.begin_claim).await?;
        #[cfg(feature = "plants")]
        if self.has(crate::plant::Plant::Unclaimed) {
            let verdict = action(&mut tx).await;
            tx.commit().await.map_err(|source| Error::Commit { key: work.key.clone(), source })?;
            session.ended(Ok(()));
            return Ok(match verdict {
                Verdict::Done(outcome) => Once::Fresh(outcome),
                Verdict::Failed(failure) => Once::Failed(failure),
            });
        }
        let claim = self.claim_or_revive(&mut tx, work).await?;
        let is_left_behind = matches!(claim, Claim::InProgress { is_left_behind: true });
        if let Some(once) = met(claim) {
            let rolled_back = tx.rollback().await;
            session.ended(rolled_back);
            return if is_left_behind { Err(Error::Leased { key: work.key.clone() }) } else { Ok(once) };
        }
        match AssertUnwindSafe(async { action(&mut tx).await }).catch_unwind().await {
            Ok(Verdict::Done(outcome)) => {
                let refused = match self.complete(&mut tx, work, outcome.as_ref()).await {
                    Ok(Completed::Done) => None,
                    Ok(Completed::TooOld) => Some(Ok(Once::TooOld)),
                    Err(error) => Some(failed_or(error)),
                };
                if let Some(refused) = refused {
                    let rolled_back = tx.rollback().await;
                    session.ended(rolled_back);
                    return refused;
                }
                if let Err(source) = tx.commit().await {
                    return failed_or(Error::Commit { key: work.key.clone(), source });
                }
                session.ended(Ok(()));
                Ok(Once::Fresh(outcome))
            }
            Ok(Verdict::Failed(failure)) => {
                let rolled_back = tx.rollback().await;
                session.ended(rolled_back);
                Ok(Once::Failed(failure))
            }
            // The panic may have left the connection in the middle of a message: it is closed, not kept.
            Err(panic) => Ok(Once::Failed(Failure::Panicked(panic_message(panic.as_ref())))),
        }
    }

    /// Outcome, mark and, of a replayed record, what became of its item.
    async fn complete(
        &self,
        tx: &mut Transaction<'_, Postgres>,
        work: &Work,
        outcome: Option<&Outcome>,
    ) -> Result<Completed, Error> {
        let completed = statements::complete(tx, &self.consumer, work, outcome).await?;
        if completed == Completed::Done {
            replayed::settle(tx, &self.consumer, work.replay, Replayed::Applied, None)
                .await
                .map_err(Error::Replay)?;
        }
        Ok(completed)
    }

    /// Marks work as dead, after its dead letter was acknowledged, and holds its key up if that is wanted.
    pub(crate) async fn bury(
        &self,
        work: &Work,
        cause: Cause,
        error: &str,
        hold_up: Option<HoldUp<'_>>,
    ) -> Result<Buried, Error> {
        let failed = |source| Error::Bury { key: work.key.clone(), source };
        let mut session = Session::open(&self.pool).await?;
        let mut tx = session.begin(&self.begin).await?;
        if let Some(HoldUp { record, .. }) = hold_up {
            self.lock_key(&mut tx, record.topic(), record.key()).await?;
        }
        let mut buried =
            statements::bury(&mut tx, &self.consumer, work, cause, error).await.map_err(failed)?;
        if work.replay.is_some() {
            buried = self.bury_replayed(&mut tx, work, cause, error, buried).await?;
        }
        if let (Some(HoldUp { record, failed_for }), Buried::Now) = (hold_up, buried) {
            let place = Place::Dead { cause, error, failed_for };
            self.park_within(&mut tx, work, record, place, AfterDeadLetter::Block).await?;
        }
        tx.commit().await.map_err(failed)?;
        session.ended(Ok(()));
        Ok(buried)
    }

    pub(crate) fn ttl(&self) -> Duration {
        self.lease_ttl
    }

    pub(crate) fn consumer(&self) -> &str {
        &self.consumer
    }

    fn ttl_ms(&self) -> i64 {
        i64::try_from(self.lease_ttl.as_millis()).unwrap_or(i64::MAX)
    }

    /// The database's time.
    pub(crate) async fn now(&self) -> Result<OffsetDateTime, Error> {
        statements::now(&self.pool).await.map_err(Error::Clock)
    }

    /// After a COMMIT without a reply the row decides. Waits, on the unique index, for a commit that still goes on.
    async fn look_up(&self, work: &Work, key: String, lost: sqlx::Error) -> Result<Once, Error> {
        let unknown = |source| Error::Commit { key, source };
        let Ok(mut session) = Session::open(&self.pool).await else { return Err(unknown(lost)) };
        let Ok(mut tx) = session.begin(&self.begin).await else { return Err(unknown(lost)) };
        let claim = statements::claim(&mut tx, self, work, None).await;
        let rolled_back = tx.rollback().await;
        session.ended(rolled_back);
        claim.ok().and_then(met).ok_or_else(|| unknown(lost))
    }
}

impl fmt::Debug for Inbox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Inbox").field("consumer", &self.consumer).finish_non_exhaustive()
    }
}

/// What to answer when the work is not ours to run.
fn met(claim: Claim) -> Option<Once> {
    match claim {
        Claim::Ours => None,
        Claim::Done(outcome) => Some(Once::Duplicate(outcome)),
        Claim::Dead { cause, error } => Some(Once::Dead { cause, error }),
        Claim::InProgress { .. } => Some(Once::InProgress),
        Claim::Conflict => Some(Once::Conflict),
        Claim::TooOld => Some(Once::TooOld),
    }
}

/// What the effects did wrong shows only at the end when a constraint is deferred: that is the action's failure.
fn failed_or(error: Error) -> Result<Once, Error> {
    is_actions_fault(error).map(|source| Once::Failed(Failure::permanent(source)))
}

/// The database's answer where the effects are to blame for it.
fn is_actions_fault(error: Error) -> Result<sqlx::Error, Error> {
    match error {
        Error::Complete { source, .. } | Error::Commit { source, .. }
            if source.as_database_error().is_some() && !is_transient(&source) =>
        {
            Ok(source)
        }
        error => Err(error),
    }
}

fn check(what: &'static str, text: &str, least: usize, limit: usize) -> Result<(), Error> {
    if !(least..=limit).contains(&text.len()) || text.contains('\0') {
        return Err(Error::Text { what, bytes: text.len(), limit });
    }
    Ok(())
}

/// The text of a panic, where it has one.
pub(crate) fn panic_message(panic: &(dyn std::any::Any + Send)) -> String {
    panic
        .downcast_ref::<&str>()
        .map(|text| (*text).to_owned())
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "a value that is not text".to_owned())
}

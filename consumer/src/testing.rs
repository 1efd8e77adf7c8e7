//! Tests of a handler without a broker: records of one's own making, one attempt each, and deaths at the worst moments.
//!
//! ```text
//! message(…) ─▶ Record ─▶ Kit ─▶ identity, scope, fingerprint ─▶ inbox: claim ─▶ decode, handler ─┬─▶ mark, COMMIT ─┬─▶ Delivered
//!                                                                                                 │                 │
//!                                                                               crash_before_commit   crash_after_commit
//! ```
//!
//! What runs is what runs behind Kafka: the same decoding, the same claim, the same transaction or lease, on a real Postgres. So a
//! test needs a database with the inbox (`baton migrate inbox`, or `baton_migrations::migrate_inbox`) and the handler's own
//! tables; the inbox's rows say what was applied, and they stay until the test drops its database or takes another consumer name.
//!
//! ```no_run
//! use baton_consumer::testing::{self, Delivered, Kit};
//! use baton_consumer::{Delivery, Handler, Json, Verdict};
//! use sqlx::{PgPool, Postgres, Transaction};
//!
//! #[derive(serde::Deserialize)]
//! struct Order { order_id: String, cents: i64 }
//!
//! struct Billing;
//!
//! impl Handler for Billing {
//!     type Payload = Json<Order>;
//!
//!     async fn handle(&self, delivery: &Delivery<Json<Order>>, tx: &mut Transaction<'_, Postgres>) -> Verdict {
//!         let Json(order) = delivery.payload();
//!         let invoice = sqlx::query("INSERT INTO invoice (order_id, cents) VALUES ($1, $2)");
//!         match invoice.bind(&order.order_id).bind(order.cents).execute(&mut **tx).await {
//!             Ok(_) => Verdict::done_with(&order.order_id),
//!             Err(error) => error.into(),
//!         }
//!     }
//! }
//!
//! async fn invoices(pool: &PgPool) -> i64 {
//!     sqlx::query_scalar("SELECT count(*) FROM invoice").fetch_one(pool).await.unwrap()
//! }
//!
//! # /*
//! #[tokio::test]
//! # */
//! async fn an_order_is_billed_once_whatever_dies() {
//!     let pool = PgPool::connect(&std::env::var("DATABASE_URL").unwrap()).await.unwrap();
//!     let kit = Kit::transactional("billing", pool.clone(), Billing);
//!     let placed = testing::message("orders", "customer-7").message_type("order.placed").idempotency_key("order-7");
//!     let record = placed.clone().json(&serde_json::json!({"order_id": "7", "cents": 100}));
//!
//!     kit.crash_before_commit(&record).await;
//!     assert_eq!(invoices(&pool).await, 0, "no trace of what was not committed");
//!
//!     assert!(matches!(kit.deliver(&record).await, Delivered::Applied(Some(_))));
//!     assert!(matches!(kit.deliver(&record).await, Delivered::Duplicate(Some(_))));
//!
//!     let other = placed.json(&serde_json::json!({"order_id": "7", "cents": 999}));
//!     assert!(matches!(kit.deliver(&other).await, Delivered::Conflict));
//!     assert_eq!(invoices(&pool).await, 1);
//! }
//! ```
//!
//! *With a lease* ([`Kit::leased`]) the effect lies elsewhere and outlives the crash. What is left is a lease, which
//! [`Kit::end_leases`] ends at once; the next delivery then asks [`Reconcile::lookup`](crate::inbox::Reconcile::lookup) before
//! anything runs again.
//!
//! *What this cannot show.* One record at a time is brought, by hand: so nothing here of the order of a key's records, of retries
//! and when they are over, of records set aside, of dead letters, of an outage's breaker, of offsets and rebalances. These are the
//! runtime's own, and a handler that is right here is right there.

mod draft;
mod seam;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use baton_protocol::report::chain;
use futures_util::future::{Either, join, select};
use sqlx::PgPool;

use crate::inbox::{self, Once};
use crate::message::Message;
use crate::{Failure, Fingerprints, Handler, Inbox, LeasedHandler, Outcome, Record, Scope, Verdict};
pub use draft::{Draft, message};
use seam::{Attempt, Leased, Transactional};
use tokio::sync::oneshot;

/// What became of a record that was brought once.
#[derive(Debug)]
#[non_exhaustive]
#[must_use]
pub enum Delivered {
    /// The handler ran, and its effects, outcome and mark are committed. Behind Kafka the offset moves.
    Applied(Option<Outcome>),
    /// It was applied before, or, asked after, was found applied; this is the outcome stored then. The offset moves.
    Duplicate(Option<Outcome>),
    /// Its idempotency key was used with another payload: nothing ran. Behind Kafka a dead letter, `conflict`.
    Conflict,
    /// Somebody else is at it, or it cannot be told whether it took effect: nothing ran. Behind Kafka its key waits.
    InProgress,
    /// It was given up before: nothing ran.
    Dead {
        /// Why, as in `dlt-cause`.
        cause: String,
        /// What the handler said.
        error: Option<String>,
    },
    /// It is as old as what was purged: nothing was applied. Behind Kafka a dead letter, `too_old`.
    TooOld,
    /// The handler failed or panicked, or the payload cannot be decoded: what it did through its transaction is rolled back. Behind
    /// Kafka it is tried again or becomes a dead letter, as [`Failure`] says.
    Failed(Failure),
    /// It has no idempotency key that can be read, for this reason: nothing ran. Behind Kafka a dead letter, `no_identity`.
    NoIdentity(String),
    /// The database did not do it, or the handler has ended its own transaction. Behind Kafka it is tried again.
    Error(inbox::Error),
}

impl Delivered {
    /// The outcome, now or stored before.
    #[must_use]
    pub fn outcome(&self) -> Option<&Outcome> {
        match self {
            Self::Applied(outcome) | Self::Duplicate(outcome) => outcome.as_ref(),
            _ => None,
        }
    }
}

impl From<Result<Once, inbox::Error>> for Delivered {
    fn from(attempt: Result<Once, inbox::Error>) -> Self {
        match attempt {
            Ok(Once::Fresh(outcome)) => Self::Applied(outcome),
            Ok(Once::Duplicate(outcome)) => Self::Duplicate(outcome),
            Ok(Once::InProgress) => Self::InProgress,
            Ok(Once::Conflict) => Self::Conflict,
            Ok(Once::Dead { cause, error }) => Self::Dead { cause, error },
            Ok(Once::TooOld) => Self::TooOld,
            Ok(Once::Failed(failure)) => Self::Failed(failure),
            Err(error) => Self::Error(error),
        }
    }
}

/// One handler and its inbox. Settings mean what they do on a [`Builder`](crate::Builder), and have the same defaults.
pub struct Kit {
    inbox: Inbox,
    scope: Scope,
    fingerprints: Fingerprints,
    pool: PgPool,
    apply: Box<dyn Attempt>,
}

impl Kit {
    /// For a handler whose effects are in the database of `pool`, where the inbox is.
    ///
    /// # Panics
    ///
    /// When the inbox does not take the consumer's name.
    #[must_use]
    pub fn transactional(consumer: &str, pool: PgPool, handler: impl Handler) -> Self {
        Self::new(consumer, pool, Box::new(Transactional(Arc::new(handler))))
    }

    /// For a handler whose effects lie elsewhere. `pool` is the inbox's.
    ///
    /// # Panics
    ///
    /// When the inbox does not take the consumer's name.
    #[must_use]
    pub fn leased(consumer: &str, pool: PgPool, handler: impl LeasedHandler) -> Self {
        Self::new(consumer, pool, Box::new(Leased(Arc::new(handler))))
    }

    fn new(consumer: &str, pool: PgPool, apply: Box<dyn Attempt>) -> Self {
        let inbox = Inbox::new(consumer, pool.clone()).unwrap_or_else(|error| panic!("{}", chain(&error)));
        Self { inbox, scope: Scope::default(), fingerprints: Fingerprints::default(), pool, apply }
    }

    /// Which keys are compared with each other.
    #[must_use]
    pub fn scope(mut self, scope: Scope) -> Self {
        self.scope = scope;
        self
    }

    /// What of a record is compared when its idempotency key is met again.
    #[must_use]
    pub fn fingerprint(mut self, fingerprints: impl Into<Fingerprints>) -> Self {
        self.fingerprints = fingerprints.into();
        self
    }

    /// How long a lease lasts without progress.
    #[must_use]
    pub fn lease_ttl(mut self, ttl: Duration) -> Self {
        self.inbox = self.inbox.lease_ttl(ttl);
        self
    }

    /// Brings a record once, as its first attempt.
    pub async fn deliver(&self, record: &Record) -> Delivered {
        self.deliver_attempt(record, 1).await
    }

    /// Brings a record once more: [`Delivery::attempt`](crate::Delivery::attempt) is `attempt`.
    pub async fn deliver_attempt(&self, record: &Record, attempt: u32) -> Delivered {
        match self.message(record, attempt) {
            Ok(message) => self.apply.attempt(&self.inbox, &message, None).await.into(),
            Err(error) => Delivered::NoIdentity(error),
        }
    }

    /// Brings a record twice at the same moment, as two processes do after a rebalance. Takes two connections of the pool.
    pub async fn deliver_at_once(&self, record: &Record) -> [Delivered; 2] {
        join(self.deliver(record), self.deliver(record)).await.into()
    }

    /// Brings a record to a process that is killed when the handler has said its verdict, which is given back, and before anything
    /// is committed: the transaction is dropped with its connection, and a lease is left behind.
    ///
    /// # Panics
    ///
    /// When the handler was not called, or panicked.
    pub async fn crash_before_commit(&self, record: &Record) -> Verdict {
        let message = self.message(record, 1).unwrap_or_else(|error| panic!("no identity: {error}"));
        let (seam, said) = oneshot::channel();
        let attempt = self.apply.attempt(&self.inbox, &message, Some(seam));
        match select(said, attempt).await {
            // Here the attempt is dropped.
            Either::Left((Ok(verdict), _)) => verdict,
            Either::Left((Err(_), attempt)) => not_reached(attempt.await),
            Either::Right((attempt, _)) => not_reached(attempt),
        }
    }

    /// Brings a record to a process that is killed right after the commit, before it could say so: no offset has moved, and the
    /// record comes again.
    ///
    /// # Panics
    ///
    /// When nothing was committed.
    pub async fn crash_after_commit(&self, record: &Record) {
        match self.deliver(record).await {
            Delivered::Applied(_) => {}
            other => panic!("nothing was committed: {other:?}"),
        }
    }

    /// Ends every lease of this consumer that a crash has left behind, by the database's clock, as if its time were over. How many
    /// there were. One that is at work at this moment loses its lease too.
    ///
    /// # Errors
    ///
    /// The database's.
    pub async fn end_leases(&self) -> Result<u64, sqlx::Error> {
        sqlx::query(include_str!("../queries/testing_end_leases.sql"))
            .bind(self.inbox.consumer())
            .execute(&self.pool)
            .await
            .map(|done| done.rows_affected())
    }

    fn message(&self, record: &Record, attempt: u32) -> Result<Message, String> {
        let mut message = Message::of(&Arc::new(record.clone()), &self.scope, &self.fingerprints)?;
        message.work.attempts = attempt;
        Ok(message)
    }
}

fn not_reached(attempt: Result<Once, inbox::Error>) -> Verdict {
    panic!("the handler did not come to its end: {:?}", Delivered::from(attempt))
}

impl fmt::Debug for Kit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Kit").field("inbox", &self.inbox).finish_non_exhaustive()
    }
}

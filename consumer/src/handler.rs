//! What a user writes: one message in, effects through the transaction, a verdict out.

use std::fmt;
use std::future::Future;
use std::marker::PhantomData;
use std::sync::Arc;

use futures_util::future::BoxFuture;
use sqlx::{Postgres, Transaction};

use crate::inbox::{Lease, Reconcile};
use crate::{Decode, Delivery, Failure, Verdict};

/// Applies one message in the transaction that also marks it as applied: both commit, or neither does.
///
/// Whatever is done through `tx` is done once. What is done elsewhere (a call, a mail) is not: it may be done again after
/// a rollback. Neither commit nor roll back `tx` by SQL of your own; savepoints are fine.
///
/// A panic is caught, where panics unwind: the transaction is rolled back and the record goes to the dead-letter topic with
/// cause `panic`.
///
/// ```
/// use baton_consumer::{Delivery, Failure, Handler, Json, Verdict};
/// use sqlx::{Postgres, Transaction};
///
/// #[derive(serde::Deserialize)]
/// struct Order { id: i64, amount_cents: i64 }
///
/// struct Billing;
///
/// impl Billing {
///     async fn bill(&self, order: &Order, tx: &mut Transaction<'_, Postgres>) -> Result<(), Failure> {
///         if order.amount_cents < 0 {
///             return Err(Failure::permanent("negative amount"));
///         }
///         sqlx::query("INSERT INTO invoice (order_id, amount_cents) VALUES ($1, $2)")
///             .bind(order.id)
///             .bind(order.amount_cents)
///             .execute(&mut **tx)
///             .await?;
///         Ok(())
///     }
/// }
///
/// impl Handler for Billing {
///     type Payload = Json<Order>;
///
///     async fn handle(&self, delivery: &Delivery<Json<Order>>, tx: &mut Transaction<'_, Postgres>) -> Verdict {
///         self.bill(&delivery.payload().0, tx).await.into()
///     }
/// }
/// ```
pub trait Handler: Send + Sync + 'static {
    /// What the payload is decoded to: [`Json`](crate::Json), [`Raw`](crate::Raw), or your own.
    type Payload: Decode;

    /// Applies one message. It is called again for the same message until the verdict settles it.
    ///
    /// # Cancel safety
    ///
    /// It is only dropped half-way when a drain deadline is over; its transaction is then never committed.
    fn handle(
        &self,
        delivery: &Delivery<Self::Payload>,
        tx: &mut Transaction<'_, Postgres>,
    ) -> impl Future<Output = Verdict> + Send;
}

impl<H: Handler> Handler for Arc<H> {
    type Payload = H::Payload;

    async fn handle(&self, delivery: &Delivery<H::Payload>, tx: &mut Transaction<'_, Postgres>) -> Verdict {
        H::handle(self, delivery, tx).await
    }
}

/// Makes a [`Handler`] of a closure.
///
/// ```
/// use baton_consumer::{Raw, Verdict, handler_fn};
///
/// let handler = handler_fn::<Raw, _>(|delivery, tx| {
///     Box::pin(async move {
///         let seen = sqlx::query("INSERT INTO seen (key) VALUES ($1)").bind(delivery.idempotency_key());
///         match seen.execute(&mut **tx).await {
///             Ok(_) => Verdict::done(),
///             Err(error) => error.into(),
///         }
///     })
/// });
/// # let _ = handler;
/// ```
pub fn handler_fn<P, F>(f: F) -> HandlerFn<P, F>
where
    P: Decode,
    F: for<'a> Fn(&'a Delivery<P>, &'a mut Transaction<'_, Postgres>) -> BoxFuture<'a, Verdict>
        + Send
        + Sync
        + 'static,
{
    HandlerFn { f, payload: PhantomData }
}

/// A closure as a [`Handler`]; made by [`handler_fn`].
pub struct HandlerFn<P, F> {
    f: F,
    payload: PhantomData<fn(P)>,
}

impl<P, F> fmt::Debug for HandlerFn<P, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("HandlerFn")
    }
}

impl<P, F> Handler for HandlerFn<P, F>
where
    P: Decode,
    F: for<'a> Fn(&'a Delivery<P>, &'a mut Transaction<'_, Postgres>) -> BoxFuture<'a, Verdict>
        + Send
        + Sync
        + 'static,
{
    type Payload = P;

    async fn handle(&self, delivery: &Delivery<P>, tx: &mut Transaction<'_, Postgres>) -> Verdict {
        (self.f)(delivery, tx).await
    }
}

/// Applies many messages in the transaction that also marks them all: what is fast with one statement for hundreds of rows.
///
/// The messages are of one partition, in its order, none of them applied before. All commit, or none does: after any failure or
/// panic each is brought alone, so that only the one at fault is tried again or dead-lettered. A handler therefore does for one
/// what it does for many.
///
/// ```
/// use baton_consumer::{BatchHandler, Delivery, Failure, Json};
/// use sqlx::{Postgres, Transaction};
///
/// #[derive(serde::Deserialize)]
/// struct Order { id: i64, amount_cents: i64 }
///
/// struct Billing;
///
/// impl BatchHandler for Billing {
///     type Payload = Json<Order>;
///
///     async fn handle(&self, orders: &[Delivery<Json<Order>>], tx: &mut Transaction<'_, Postgres>) -> Result<(), Failure> {
///         let ids: Vec<i64> = orders.iter().map(|order| order.payload().0.id).collect();
///         let cents: Vec<i64> = orders.iter().map(|order| order.payload().0.amount_cents).collect();
///         sqlx::query("INSERT INTO invoice (order_id, amount_cents) SELECT * FROM unnest($1::bigint[], $2::bigint[])")
///             .bind(ids)
///             .bind(cents)
///             .execute(&mut **tx)
///             .await?;
///         Ok(())
///     }
/// }
/// ```
pub trait BatchHandler: Send + Sync + 'static {
    /// What each payload is decoded to: [`Json`](crate::Json), [`Raw`](crate::Raw), or your own.
    type Payload: Decode;

    /// Applies messages, at least one.
    ///
    /// # Errors
    ///
    /// What applies to one message alone applies when it is brought alone; of several, nothing is known of which it was.
    ///
    /// # Cancel safety
    ///
    /// It is only dropped half-way when a drain deadline is over; its transaction is then never committed.
    fn handle(
        &self,
        deliveries: &[Delivery<Self::Payload>],
        tx: &mut Transaction<'_, Postgres>,
    ) -> impl Future<Output = Result<(), Failure>> + Send;
}

/// Applies one message by effects outside the inbox's database: a payment provider, a mail service.
///
/// One process at a time runs it for one message, by a [`Lease`](crate::inbox::Lease), whose key it hands to the service with
/// every call and whose [`progress`](crate::inbox::Lease::progress) it reports when it takes longer than the lease. Whenever an
/// attempt was not marked as done, whatever it said, [`Reconcile::lookup`] is asked before the next one runs.
///
/// A verdict means what it does for a [`Handler`], but nothing is rolled back: a failure that is tried
/// again, a panic too, is asked after first. A permanent one is a dead letter at once, and nobody is asked: say
/// [`Verdict::unknown`] where the effect may have taken place.
///
/// ```
/// use baton_consumer::inbox::{Lease, Reconcile, Reconciled};
/// use baton_consumer::{Delivery, Json, LeasedHandler, Verdict};
///
/// #[derive(serde::Deserialize)]
/// struct Payment { cents: i64 }
///
/// struct Provider;
/// # impl Provider {
/// #     async fn charge(&self, _: &str, _: i64) -> Result<String, std::io::Error> { Ok(String::new()) }
/// #     async fn find(&self, _: &str) -> Result<Option<String>, std::io::Error> { Ok(None) }
/// # }
///
/// impl Reconcile for Provider {
///     async fn lookup(&self, key: &str) -> Reconciled {
///         match self.find(key).await {
///             Ok(Some(_)) => Reconciled::Applied(None),
///             Ok(None) => Reconciled::NotApplied,
///             Err(_) => Reconciled::StillUnknown,
///         }
///     }
/// }
///
/// impl LeasedHandler for Provider {
///     type Payload = Json<Payment>;
///
///     async fn handle(&self, delivery: &Delivery<Json<Payment>>, lease: &mut Lease<'_>) -> Verdict {
///         let Json(payment) = delivery.payload();
///         match self.charge(lease.idempotency_key(), payment.cents).await {
///             Ok(receipt) => Verdict::done_with(&receipt),
///             Err(error) => Verdict::unknown(error),
///         }
///     }
/// }
/// ```
pub trait LeasedHandler: Reconcile + 'static {
    /// What the payload is decoded to: [`Json`](crate::Json), [`Raw`](crate::Raw), or your own.
    type Payload: Decode;

    /// Applies one message. It is called again for the same message until it is settled.
    ///
    /// # Cancel safety
    ///
    /// It is only dropped half-way when a drain deadline is over; the lease then runs out, and the next attempt asks.
    fn handle(
        &self,
        delivery: &Delivery<Self::Payload>,
        lease: &mut Lease<'_>,
    ) -> impl Future<Output = Verdict> + Send;
}

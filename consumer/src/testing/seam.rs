//! Where a process may be killed: the handler has said its verdict, and nothing of it is committed.
//!
//! The handler is wrapped, not the path around it: what is claimed, run and committed is the runtime's own
//! ([`crate::apply`]). A wrapped handler that is to die hands out its verdict and never returns; whoever brought the record
//! then drops the attempt, as the end of a process does.

use std::future::pending;
use std::sync::{Arc, Mutex, PoisonError};

use futures_util::future::BoxFuture;
use sqlx::{Postgres, Transaction};
use tokio::sync::oneshot;

use crate::apply::{Apply, ByLease, InTransaction};
use crate::inbox::{Error, Lease, Once, Reconcile, Reconciled};
use crate::message::Message;
use crate::{Delivery, Handler, Inbox, LeasedHandler, Verdict};

/// Takes the verdict of a handler that dies with it.
pub(super) type Seam = oneshot::Sender<Verdict>;

/// One attempt, which ends at the seam where there is one.
pub(super) trait Attempt: Send + Sync {
    fn attempt<'a>(
        &'a self,
        inbox: &'a Inbox,
        message: &'a Message,
        seam: Option<Seam>,
    ) -> BoxFuture<'a, Result<Once, Error>>;
}

/// A handler with effects in the inbox's database.
pub(super) struct Transactional<H>(pub(super) Arc<H>);

/// A handler with effects elsewhere.
pub(super) struct Leased<H>(pub(super) Arc<H>);

impl<H: Handler> Attempt for Transactional<H> {
    fn attempt<'a>(
        &'a self,
        inbox: &'a Inbox,
        message: &'a Message,
        seam: Option<Seam>,
    ) -> BoxFuture<'a, Result<Once, Error>> {
        let mortal = Mortal::new(&self.0, seam);
        Box::pin(async move { InTransaction(mortal).attempt(inbox, message).await })
    }
}

impl<H: LeasedHandler> Attempt for Leased<H> {
    fn attempt<'a>(
        &'a self,
        inbox: &'a Inbox,
        message: &'a Message,
        seam: Option<Seam>,
    ) -> BoxFuture<'a, Result<Once, Error>> {
        let mortal = Mortal::new(&self.0, seam);
        Box::pin(async move { ByLease(mortal).attempt(inbox, message).await })
    }
}

/// A handler that dies where it has a seam.
struct Mortal<H> {
    handler: Arc<H>,
    seam: Mutex<Option<Seam>>,
}

impl<H> Mortal<H> {
    fn new(handler: &Arc<H>, seam: Option<Seam>) -> Self {
        Self { handler: Arc::clone(handler), seam: Mutex::new(seam) }
    }

    async fn say(&self, verdict: Verdict) -> Verdict {
        let seam = self.seam.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(seam) = seam else { return verdict };
        // Whoever does not listen has dropped this already.
        let _ = seam.send(verdict);
        pending().await
    }
}

impl<H: Handler> Handler for Mortal<H> {
    type Payload = H::Payload;

    async fn handle(&self, delivery: &Delivery<H::Payload>, tx: &mut Transaction<'_, Postgres>) -> Verdict {
        let verdict = self.handler.handle(delivery, tx).await;
        self.say(verdict).await
    }
}

impl<H: LeasedHandler> LeasedHandler for Mortal<H> {
    type Payload = H::Payload;

    async fn handle(&self, delivery: &Delivery<H::Payload>, lease: &mut Lease<'_>) -> Verdict {
        let verdict = self.handler.handle(delivery, lease).await;
        self.say(verdict).await
    }
}

impl<H: Reconcile> Reconcile for Mortal<H> {
    async fn lookup(&self, key: &str) -> Reconciled {
        self.handler.lookup(key).await
    }
}

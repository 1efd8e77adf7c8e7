//! The two ways of owning a message while a handler applies it, as the runtime sees them: one attempt each.
//!
//! What cannot be decoded is claimed as well: it may be known, or another payload's key.

use std::future::Future;

use sqlx::{Postgres, Transaction};
use tokio::time::Instant;

use crate::inbox::{Error, Lease, Once, WhenSpent};
use crate::message::Message;
use crate::{Handler, Inbox, LeasedHandler, Verdict, metrics, trace};

/// One attempt on one message.
pub(crate) trait Apply: Send + Sync + 'static {
    fn attempt(&self, inbox: &Inbox, message: &Message) -> impl Future<Output = Result<Once, Error>> + Send;
}

/// Effects in the database of the inbox.
pub(crate) struct InTransaction<H>(pub(crate) H);

impl<H: Handler> Apply for InTransaction<H> {
    async fn attempt(&self, inbox: &Inbox, message: &Message) -> Result<Once, Error> {
        let action = async |tx: &mut Transaction<'_, Postgres>| {
            let handling = async {
                match message.delivery() {
                    Ok(delivery) => self.0.handle(&delivery, tx).await,
                    Err(failure) => failure.into(),
                }
            };
            timed(inbox, handling).await
        };
        trace::attempt(inbox.consumer(), message, inbox.settle(&message.work, action)).await
    }
}

/// Effects elsewhere.
pub(crate) struct ByLease<H>(pub(crate) H);

impl<H: LeasedHandler> Apply for ByLease<H> {
    async fn attempt(&self, inbox: &Inbox, message: &Message) -> Result<Once, Error> {
        let action = async |lease: &mut Lease<'_>| {
            let handling = async {
                match message.delivery() {
                    Ok(delivery) => self.0.handle(&delivery, lease).await,
                    Err(failure) => failure.into(),
                }
            };
            timed(inbox, handling).await
        };
        let settled = inbox.settle_leased(&message.work, &self.0, action, WhenSpent::Tell);
        trace::attempt(inbox.consumer(), message, settled).await
    }
}

/// Measures how long a handler is at work.
async fn timed(inbox: &Inbox, handling: impl Future<Output = Verdict>) -> Verdict {
    let began = Instant::now();
    let verdict = handling.await;
    metrics::handled(inbox.consumer(), began.elapsed());
    verdict
}

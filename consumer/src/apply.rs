//! The two ways of owning a message while a handler applies it, as the runtime sees them: one attempt each.
//!
//! What cannot be decoded is claimed as well: it may be known, or another payload's key.

use std::future::Future;

use crate::inbox::{Error, Lease, Once, WhenSpent};
use crate::message::Message;
use crate::{Handler, Inbox, LeasedHandler};

/// One attempt on one message.
pub(crate) trait Apply: Send + Sync + 'static {
    fn attempt(&self, inbox: &Inbox, message: &Message) -> impl Future<Output = Result<Once, Error>> + Send;
}

/// Effects in the database of the inbox.
pub(crate) struct InTransaction<H>(pub(crate) H);

impl<H: Handler> Apply for InTransaction<H> {
    async fn attempt(&self, inbox: &Inbox, message: &Message) -> Result<Once, Error> {
        inbox
            .settle(&message.work, async |tx| match message.delivery() {
                Ok(delivery) => self.0.handle(&delivery, tx).await,
                Err(failure) => failure.into(),
            })
            .await
    }
}

/// Effects elsewhere.
pub(crate) struct ByLease<H>(pub(crate) H);

impl<H: LeasedHandler> Apply for ByLease<H> {
    async fn attempt(&self, inbox: &Inbox, message: &Message) -> Result<Once, Error> {
        let action = async |lease: &mut Lease<'_>| match message.delivery() {
            Ok(delivery) => self.0.handle(&delivery, lease).await,
            Err(failure) => failure.into(),
        };
        inbox.settle_leased(&message.work, &self.0, action, WhenSpent::Tell).await
    }
}

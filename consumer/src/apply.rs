//! The two ways of owning a message while a handler applies it, as the runtime sees them: one attempt each.

use std::future::Future;

use baton_protocol::dead_letter::Cause;

use crate::inbox::{Error, Lease, Once, WhenSpent, Work};
use crate::{Decode, Delivery, Handler, Inbox, LeasedHandler, Verdict};

/// A record's payload decoded, or why it cannot be.
pub(crate) type Decoded<P> = Result<Delivery<P>, (Cause, String)>;

/// One attempt on one message. What cannot be decoded is claimed as well: it may be known, or another payload's key.
pub(crate) trait Apply: Send + Sync + 'static {
    type Payload: Decode;

    fn attempt(
        &self,
        inbox: &Inbox,
        work: &Work,
        decoded: &Decoded<Self::Payload>,
    ) -> impl Future<Output = Result<Once, Error>> + Send;
}

/// Effects in the database of the inbox.
pub(crate) struct InTransaction<H>(pub(crate) H);

impl<H: Handler> Apply for InTransaction<H> {
    type Payload = H::Payload;

    async fn attempt(
        &self,
        inbox: &Inbox,
        work: &Work,
        decoded: &Decoded<H::Payload>,
    ) -> Result<Once, Error> {
        inbox
            .settle(work, async |tx| match decoded {
                Ok(delivery) => self.0.handle(delivery, tx).await,
                Err((_, error)) => Verdict::permanent(error.clone()),
            })
            .await
    }
}

/// Effects elsewhere.
pub(crate) struct ByLease<H>(pub(crate) H);

impl<H: LeasedHandler> Apply for ByLease<H> {
    type Payload = H::Payload;

    async fn attempt(
        &self,
        inbox: &Inbox,
        work: &Work,
        decoded: &Decoded<H::Payload>,
    ) -> Result<Once, Error> {
        let action = async |lease: &mut Lease<'_>| match decoded {
            Ok(delivery) => self.0.handle(delivery, lease).await,
            Err((_, error)) => Verdict::permanent(error.clone()),
        };
        inbox.settle_leased(work, &self.0, action, WhenSpent::Tell).await
    }
}

//! The shapes of handlers, as the runtime sees them: one attempt on one message, and where it can, one on many.
//!
//! What cannot be decoded is claimed as well: it may be known, or another payload's key.

use std::future::Future;

use sqlx::{Postgres, Transaction};
use tokio::time::Instant;

use crate::inbox::{Batch, Error, Lease, Once, WhenSpent, Work};
use crate::message::Message;
use crate::{BatchHandler, Failure, Handler, Inbox, LeasedHandler, Verdict, metrics, trace};

/// What became of messages that were tried together.
#[derive(Debug)]
pub(crate) enum Together {
    /// Each is applied, or was found settled.
    Settled(Vec<Once>),
    /// None was applied by this: each is to be tried alone, in order.
    OneByOne,
}

/// One attempt on one message.
pub(crate) trait Apply: Send + Sync + 'static {
    fn attempt(&self, inbox: &Inbox, message: &Message) -> impl Future<Output = Result<Once, Error>> + Send;

    /// How many messages it can be given at once.
    fn most(&self) -> usize {
        1
    }

    /// One attempt on many, in order.
    fn attempt_all(
        &self,
        _inbox: &Inbox,
        _messages: &[Message],
    ) -> impl Future<Output = Result<Together, Error>> + Send {
        std::future::ready(Ok(Together::OneByOne))
    }
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
        match trace::attempt(inbox.consumer(), message, settled).await {
            // The effect may have taken place before it: the next attempt asks.
            Ok(Once::Failed(panic @ Failure::Panicked(_))) => {
                Ok(Once::Failed(Failure::unknown(panic.to_string())))
            }
            settled => settled,
        }
    }
}

/// Effects of many messages in the database of the inbox.
pub(crate) struct InBatches<H> {
    pub(crate) handler: H,
    pub(crate) most: usize,
}

impl<H: BatchHandler> Apply for InBatches<H> {
    async fn attempt(&self, inbox: &Inbox, message: &Message) -> Result<Once, Error> {
        let action = async |tx: &mut Transaction<'_, Postgres>| {
            let handling = async {
                match message.delivery() {
                    Ok(delivery) => Verdict::from(self.handler.handle(&[delivery], tx).await),
                    Err(failure) => failure.into(),
                }
            };
            timed(inbox, handling).await
        };
        trace::attempt(inbox.consumer(), message, inbox.settle(&message.work, action)).await
    }

    fn most(&self) -> usize {
        self.most
    }

    async fn attempt_all(&self, inbox: &Inbox, messages: &[Message]) -> Result<Together, Error> {
        let works: Vec<&Work> = messages.iter().map(|message| &message.work).collect();
        let is_settled = |answer: &Result<Once, Error>| {
            matches!(answer, Ok(Once::Fresh(_) | Once::Duplicate(_) | Once::Dead { .. }))
        };
        let batch = inbox
            .settle_batch(&works, async |fresh, answers, tx| {
                // What comes after one of its key that is held must not be applied before it.
                if !answers.iter().flatten().all(is_settled) {
                    return Err(Failure::transient("one of the batch has to be tried alone"));
                }
                let mut deliveries = Vec::with_capacity(fresh.len());
                for item in fresh {
                    deliveries.push(messages[item.index()].delivery()?);
                }
                timed(inbox, self.handler.handle(&deliveries, tx)).await
            })
            .await?;
        Ok(match batch {
            Batch::Settled(answers) if answers.iter().all(is_settled) => {
                Together::Settled(answers.into_iter().flatten().collect())
            }
            Batch::Settled(_) | Batch::Failed(_) => Together::OneByOne,
        })
    }
}

/// Measures how long a handler is at work.
async fn timed<T>(inbox: &Inbox, handling: impl Future<Output = T>) -> T {
    let began = Instant::now();
    let verdict = handling.await;
    metrics::handled(inbox.consumer(), began.elapsed());
    verdict
}

//! What a handler is told of the attempt that it makes, and by what it says that it moves on.
//!
//! The lease belongs to the task that runs the service. A handler reaches it through a channel, which that task hears beside
//! the service: both are polled, so that a renewal that waits for a connection does not stop a handler that has it.

use std::convert::Infallible;
use std::future::{Future, pending};

use tokio::sync::{mpsc, oneshot};

use super::key::IdempotencyKey;
use crate::inbox::{Error, Lease};

type Reply = oneshot::Sender<Result<(), Error>>;

/// In the extensions of a request that runs under a key.
#[derive(Debug, Clone)]
pub struct Idempotency {
    key: IdempotencyKey,
    attempt: u32,
    renewals: mpsc::Sender<Reply>,
}

impl Idempotency {
    /// The key of this request.
    #[must_use]
    pub fn key(&self) -> &IdempotencyKey {
        &self.key
    }

    /// Counted from 1. Above that somebody was asked, and nothing had taken effect.
    #[must_use]
    pub fn attempt(&self) -> u32 {
        self.attempt
    }

    /// Says that the work moves on, and has the lease from now for its whole length. To be called between steps that take less
    /// than [`Inbox::lease_ttl`](crate::Inbox::lease_ttl) each.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`] when the work is somebody else's by now, or may be, or is answered already: stop. [`Error::Renew`] when
    /// the database did not answer: the lease may run out.
    ///
    /// # Cancel safety
    ///
    /// Dropped half-way the lease may be renewed or not; nothing else.
    pub async fn progress(&self) -> Result<(), Error> {
        let lost = || Error::Lost { key: self.key.as_str().to_owned() };
        let (reply, renewed) = oneshot::channel();
        self.renewals.send(reply).await.map_err(|_| lost())?;
        renewed.await.map_err(|_| lost())?
    }
}

/// Does `work` under a lease that its handle can renew.
pub(super) async fn under<T, W>(
    lease: &mut Lease<'_>,
    key: IdempotencyKey,
    work: impl FnOnce(Idempotency) -> W,
) -> T
where
    W: Future<Output = T>,
{
    let (renewals, mut asked) = mpsc::channel::<Reply>(1);
    let work = work(Idempotency { key, attempt: lease.attempt(), renewals });
    let renewing = async {
        while let Some(reply) = asked.recv().await {
            // Whoever asked may have gone.
            let _ = reply.send(lease.progress().await);
        }
        // Every handle is gone.
        pending::<Infallible>().await
    };
    tokio::select! {
        done = work => done,
        never = renewing => match never {},
    }
}

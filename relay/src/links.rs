//! What ties a shard to its session: what it is told, what it may use, and why it was let go.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use baton_protocol::envelope::Envelope;
use baton_protocol::lifecycle::Word as _;
use baton_protocol::lifecycle::message::Cause;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinHandle;
use tokio::time::Instant;
use uuid::Uuid;

use crate::aside::{Aside, Slated};
use crate::cursor::Cursor;
use crate::fenced::{Fences, Operation};
use crate::health::Beat;
use crate::metrics::Metrics;
use crate::parked;
use crate::pipeline::Which;
use crate::publish::Failure;
use crate::refusal;
use crate::settings::Settings;
use crate::stopped::{self, Stopped, StoppedShards};
use crate::tail::Confirmed;
use crate::topics::Topics;
use crate::window::Window;
use crate::{advance, read};

/// What the owner of the lease tells the shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Order {
    Run,
    /// Finish what is in flight, up to the deadline, and end.
    Drain,
    /// End now.
    Let(Ended),
}

/// Why a shard was let go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ended {
    /// Asked to, and done.
    Drained,
    /// Somebody else owns it, or nobody: a write of ours matched no row.
    Fenced,
    /// The lease could not be renewed in time.
    Distrusted,
    /// The session ended.
    Abandoned,
}

/// So many producers of a session may be on their way out before a shard waits that replaces one more: each has threads of its own.
const ON_THEIR_WAY_OUT: usize = 16;

/// Producers that are being destroyed, which blocks for up to half a second each. Nothing is in flight in them any more, so neither
/// does a shard that is let go keep its lease for it, nor a new producer wait; the session waits for them at its end.
#[derive(Debug, Default)]
pub(crate) struct Destroying(Mutex<Vec<JoinHandle<()>>>);

impl Destroying {
    /// Destroys one. Where another takes its place and many are on their way out, waits for the one that has been longest.
    pub(crate) async fn destroy(&self, producer: impl Send + 'static, is_replaced: bool) {
        let task = tokio::task::spawn_blocking(move || drop(producer));
        let longest = {
            let mut tasks = self.tasks();
            tasks.retain(|task| !task.is_finished());
            tasks.push(task);
            (is_replaced && tasks.len() > ON_THEIR_WAY_OUT).then(|| tasks.remove(0))
        };
        if let Some(longest) = longest {
            drop(longest.await);
        }
    }

    /// Waits until all are gone.
    pub(crate) async fn end(&self) {
        let tasks = std::mem::take(&mut *self.tasks());
        for task in tasks {
            drop(task.await);
        }
    }

    fn tasks(&self) -> MutexGuard<'_, Vec<JoinHandle<()>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The topics that operators have paused.
pub(crate) type Paused = Arc<RwLock<BTreeSet<String>>>;

/// What ties a shard to its session.
pub(crate) struct Links {
    pub settings: Arc<Settings>,
    pub envelope: Arc<Envelope>,
    pub shard: i16,
    pub generation: i64,
    pub token: Uuid,
    pub reads: mpsc::Sender<read::Request>,
    pub advances: mpsc::Sender<advance::Request>,
    pub stops: mpsc::Sender<stopped::Report>,
    /// What is set aside, and tried from there.
    pub parked: mpsc::Sender<parked::Request>,
    /// The keys that wait.
    pub aside: Aside,
    pub paused: Paused,
    pub fences: Arc<Fences>,
    pub destroying: Arc<Destroying>,
    pub confirmed: Arc<Confirmed>,
    pub order: watch::Receiver<Order>,
    pub trust: watch::Receiver<Instant>,
    pub topics: Arc<Topics>,
    pub stopped: StoppedShards,
    pub metrics: Arc<Metrics>,
    pub beat: Beat,
}

impl Links {
    /// Asks for the cursor to be written, and for these to be set aside with it.
    pub(crate) async fn advance(
        &self,
        cursor: Cursor,
        slated: Vec<Slated>,
    ) -> oneshot::Receiver<advance::Outcome> {
        let (reply, receiver) = oneshot::channel();
        let request = advance::Request {
            shard: self.shard,
            generation: self.generation,
            token: self.token,
            cursor,
            slated,
            reply,
        };
        // An advancer that is gone drops the reply.
        drop(self.advances.send(request).await);
        receiver
    }

    /// The durable cursor is here now. Where it has passed the message that stopped the shard, the shard flows again.
    pub(crate) fn flows(&self, cursor: &Cursor) {
        if let Some(Stopped { id, topic, attempts, .. }) = stopped::passed(&self.stopped, self.shard, cursor)
        {
            tracing::info!(
                shard = self.shard, %id, topic, attempts,
                "the shard flows again, past the message that had stopped it"
            );
        }
    }

    /// Whether an operator has paused the topic, as far as is known: it is looked at once a second.
    pub(crate) fn is_paused(&self, topic: &str) -> bool {
        self.paused.read().unwrap_or_else(PoisonError::into_inner).contains(topic)
    }

    /// A message is set aside because it is refused. Said aloud at the first of its topic and at each doubling.
    pub(crate) fn refused(&self, which: Which, topic: &str, cause: Cause, error: &str) {
        self.metrics.message_refused(cause);
        if !self.topics.is_news(topic) {
            return;
        }
        let (shard, id, position, advice) = (self.shard, which.id, which.position, refusal::advice(cause));
        let cause_word = cause.as_str();
        if cause.may_pass() {
            tracing::warn!(
                shard, %id, position, topic, cause = cause_word,
                "kafka does not take a message, it is parked with what follows of its key, and tried again: {error}; {advice}"
            );
        } else {
            tracing::error!(
                shard, %id, position, topic, cause = cause_word,
                "kafka does not take a message, it is dead and what follows of its key waits: {error}; {advice}; then run \
                 `baton parked requeue {id}`, or discard it"
            );
        }
    }

    /// A statement of this shard was refused: that ends it.
    pub(crate) fn fenced(&self, operation: Operation) -> Ended {
        self.fences.note(self.shard, self.generation, operation);
        Ended::Fenced
    }

    /// The failure that ends a producer's life, with the number of its row.
    #[cfg(not(feature = "plants"))]
    #[expect(clippy::unused_self, reason = "the planted build reads the plant here")]
    pub(crate) fn failure(&self, window: &Window<Failure>) -> Option<(u64, Failure)> {
        window.failure().cloned()
    }

    #[cfg(feature = "plants")]
    pub(crate) fn failure(&self, window: &Window<Failure>) -> Option<(u64, Failure)> {
        window.failure().cloned().filter(|(number, _)| !self.overlooks(*number, window))
    }
}

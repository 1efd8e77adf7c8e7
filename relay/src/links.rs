//! What ties a shard to its session: what it is told, what it may use, and why it was let go.

use std::collections::{BTreeMap, HashMap};
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use baton_protocol::envelope::Envelope;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use uuid::Uuid;

use crate::publish::Failure;
use crate::settings::Settings;
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

/// A message that stops its shard.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stopped {
    /// The message.
    pub id: Uuid,
    /// Its topic.
    pub topic: String,
    /// Why, as one word.
    pub cause: &'static str,
    /// What an operator can do about it.
    pub advice: &'static str,
}

/// The shards that a refused message has stopped.
pub(crate) type StoppedShards = Arc<Mutex<BTreeMap<i16, Stopped>>>;

/// What the broker said of a topic.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Topic {
    pub partitions: NonZeroU32,
    /// Long ago: ask again. The answer may be used until the next one is there.
    pub stale: bool,
}

/// The topics that the broker is known to have.
#[derive(Debug)]
pub(crate) struct Topics {
    known: Mutex<HashMap<String, (NonZeroU32, Instant)>>,
    /// How long an answer of the broker is taken for fresh: so soon is a raised number of partitions used.
    fresh: Duration,
}

impl Topics {
    pub(crate) fn new(fresh: Duration) -> Self {
        Self { known: Mutex::default(), fresh }
    }

    pub(crate) fn get(&self, topic: &str, now: Instant) -> Option<Topic> {
        let (partitions, asked) = *self.lock().get(topic)?;
        Some(Topic { partitions, stale: now.saturating_duration_since(asked) > self.fresh })
    }

    pub(crate) fn learn(&self, topic: &str, partitions: NonZeroU32) {
        self.lock().insert(topic.to_owned(), (partitions, Instant::now()));
    }

    pub(crate) fn forget(&self, topic: &str) {
        self.lock().remove(topic);
    }

    /// The broker is to be asked anew about every topic.
    pub(crate) fn forget_all(&self) {
        self.lock().clear();
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, (NonZeroU32, Instant)>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Messages that Kafka has acknowledged since the relay started.
#[derive(Debug, Default)]
pub(crate) struct Published(AtomicU64);

impl Published {
    pub(crate) fn count(&self, messages: usize) {
        self.0.fetch_add(messages as u64, Ordering::Relaxed);
    }

    pub(crate) fn total(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// What ties a shard to its session.
pub(crate) struct Links {
    pub settings: Arc<Settings>,
    pub envelope: Arc<Envelope>,
    pub shard: i16,
    pub generation: i64,
    pub token: Uuid,
    pub reads: mpsc::Sender<read::Request>,
    pub advances: mpsc::Sender<advance::Request>,
    pub order: watch::Receiver<Order>,
    pub trust: watch::Receiver<Instant>,
    pub topics: Arc<Topics>,
    pub stopped: StoppedShards,
    pub published: Arc<Published>,
}

impl Links {
    /// The failure that ends a producer's life, with the number of its row.
    #[cfg(not(feature = "plants"))]
    #[expect(clippy::unused_self, reason = "the planted build reads the plant here")]
    pub(crate) fn failure(&self, window: &Window<Failure>) -> Option<(u64, Failure)> {
        window.failure().cloned()
    }

    #[cfg(feature = "plants")]
    pub(crate) fn failure(&self, window: &Window<Failure>) -> Option<(u64, Failure)> {
        let failure = window.failure().cloned()?;
        // The planted bug: what expired is noticed only once a later row was acknowledged.
        let ignored = self.settings.plant == Some(crate::plant::Plant::FiniteMessageTimeout)
            && window.unreported() > 0
            && window.last_acked().is_none_or(|last| last < failure.0);
        (!ignored).then_some(failure)
    }
}

//! One shard, from the claim of its lease until it is let go: one producer after another.
//!
//! ```text
//!   claimed ─▶ publishing ──failed──▶ waiting ─▶ publishing (new producer, from the durable cursor)
//!                  │                     │
//!                  └─ drained │ fenced │ trust ended │ abandoned ─▶ let go
//! ```
//!
//! A message that Kafka refuses for its own sake stops its shard: an ERROR says which and what to do, and it is tried
//! again with growing delays, so that the shard flows once the operator has mended the cause. Nothing is skipped.

use std::collections::{BTreeMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use baton_protocol::envelope::Envelope;
use baton_protocol::retry;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use uuid::Uuid;

use crate::cursor::Cursor;
use crate::pipeline::{Pipeline, Stop, Which};
use crate::publish::{Cause, Failure, Publisher};
use crate::settings::Settings;
use crate::window::Window;
use crate::{advance, database, read};

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
}

/// The shards that a refused message has stopped.
pub(crate) type StoppedShards = Arc<Mutex<BTreeMap<i16, Stopped>>>;

/// The topics that the broker is known to have.
#[derive(Debug, Default)]
pub(crate) struct Topics(Mutex<HashSet<String>>);

impl Topics {
    pub(crate) fn is_known(&self, topic: &str) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).contains(topic)
    }

    pub(crate) fn learn(&self, topic: &str) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(topic.to_owned());
    }

    fn forget(&self, topic: &str) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(topic);
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

/// Publishes a shard until it is let go.
pub(crate) async fn run(links: Links, mut cursor: Cursor) -> Result<Ended, database::Error> {
    let mut broken =
        retry::Policy { base: Duration::from_millis(200), factor: 2.0, cap: Duration::from_secs(5) }.delays();
    let mut refusals =
        retry::Policy { base: Duration::from_secs(1), factor: 2.0, cap: Duration::from_secs(30) }.delays();
    let mut careful = 0;
    loop {
        let publisher = match Publisher::new(&links.settings, Arc::clone(&links.envelope)) {
            Ok(publisher) => publisher,
            Err(error) => {
                tracing::error!(shard = links.shard, "cannot make a kafka producer: {error}");
                match wait(&links, broken.next_delay()).await {
                    Some(ended) => return Ok(ended),
                    None => continue,
                }
            }
        };
        let (stop, durable) = Pipeline::new(&links, publisher, cursor.clone(), careful).run().await?;
        if durable != cursor {
            cursor = durable;
            broken.reset();
            refusals.reset();
            resume(&links);
        }
        let (failure, which, unacked) = match stop {
            Stop::Ended(ended) => {
                resume(&links);
                return Ok(ended);
            }
            Stop::Failed { failure, which, unacked } => (failure, which, unacked),
        };
        let delay = match failure {
            Failure::Refused { cause: Cause::TooLarge, .. } if unacked > 1 => {
                // The broker's limit counts the batch. What was in flight goes again one by one.
                careful = unacked;
                tracing::warn!(
                    shard = links.shard,
                    rows = unacked,
                    "kafka refused a batch as too large, its messages go again one by one"
                );
                Duration::ZERO
            }
            Failure::Refused { topic, cause, error } => {
                careful = 1;
                links.topics.forget(&topic);
                stop_loudly(&links, which, topic, cause, &error);
                refusals.next_delay()
            }
            Failure::Broken { error } => {
                careful = 0;
                tracing::warn!(shard = links.shard, "the kafka producer failed and is replaced: {error}");
                broken.next_delay()
            }
        };
        if let Some(ended) = wait(&links, delay).await {
            resume(&links);
            return Ok(ended);
        }
    }
}

fn stop_loudly(links: &Links, which: Option<Which>, topic: String, cause: Cause, error: &str) {
    let id = which.map(|w| w.id).unwrap_or_default();
    let position = which.map(|w| w.position);
    tracing::error!(
        shard = links.shard, message = %id, ?position, topic, cause = cause.as_str(),
        "kafka does not take this message, its shard waits and tries again: {error}; {}", cause.advice()
    );
    let stopped = Stopped { id, topic, cause: cause.as_str() };
    links.stopped.lock().unwrap_or_else(PoisonError::into_inner).insert(links.shard, stopped);
}

fn resume(links: &Links) {
    links.stopped.lock().unwrap_or_else(PoisonError::into_inner).remove(&links.shard);
}

/// Waits, unless the shard is let go meanwhile. Nothing is in flight here, so a drain ends at once.
async fn wait(links: &Links, delay: Duration) -> Option<Ended> {
    let (mut order, mut trust) = (links.order.clone(), links.trust.clone());
    let until = Instant::now() + delay;
    loop {
        let trusted_until = *trust.borrow_and_update();
        match *order.borrow_and_update() {
            Order::Run => {}
            Order::Drain => return Some(Ended::Drained),
            Order::Let(ended) => return Some(ended),
        }
        if Instant::now() >= trusted_until {
            return Some(Ended::Distrusted);
        }
        if Instant::now() >= until {
            return None;
        }
        tokio::select! {
            () = tokio::time::sleep_until(until.min(trusted_until)) => {}
            changed = order.changed() => if changed.is_err() { return Some(Ended::Abandoned) },
            changed = trust.changed() => if changed.is_err() { return Some(Ended::Abandoned) },
        }
    }
}

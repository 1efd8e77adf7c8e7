//! The topics that the broker is known to have, shared by all shards: nothing is handed over for a topic before the
//! broker has said that it is there and how many partitions it has.
//!
//! ```text
//!   unknown ──asked──▶ known ──after a while──▶ stale (still used, asked again)
//!      ▲                 └── refused, or a producer broke: forgotten ──┘
//! ```
//!
//! No answer is an outage, never a missing topic.

use std::collections::HashMap;
use std::num::NonZeroU32;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use baton_protocol::lifecycle::message::Cause;
use rdkafka::error::KafkaError;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::publish::Publisher;

/// How long the broker may take to say whether a topic exists.
const PATIENCE: Duration = Duration::from_secs(5);

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

/// What the broker says of a topic when it is asked.
#[derive(Debug)]
pub(crate) struct Checked {
    pub topic: String,
    pub seen: Result<Seen, KafkaError>,
}

/// An answer of the broker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Seen {
    Partitions(NonZeroU32),
    Refused(Cause),
}

/// Asks the broker about a topic, on a thread that may block.
pub(crate) fn check(publisher: &Arc<Publisher>, topic: &str) -> JoinHandle<Checked> {
    let (publisher, topic) = (Arc::clone(publisher), topic.to_owned());
    tokio::spawn(async move {
        let asked = topic.clone();
        let asked = tokio::task::spawn_blocking(move || publisher.topic(&asked, PATIENCE));
        let seen = asked.await.unwrap_or(Err(KafkaError::Canceled));
        if seen.is_err() {
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
        Checked { topic, seen }
    })
}

/// The answer, or never when nothing was asked.
pub(crate) async fn checked(asked: &mut Option<JoinHandle<Checked>>) -> Checked {
    let Some(handle) = asked else { return std::future::pending().await };
    let checked = handle.await;
    *asked = None;
    // Only a panic ends the task early; then nothing is known.
    checked.unwrap_or(Checked { topic: String::new(), seen: Err(KafkaError::Canceled) })
}

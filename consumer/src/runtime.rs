//! From Kafka to the handlers and back.
//!
//! ```text
//! poll thread ──record──▶ lane (a task for each partition; of each key one record after the other) ──▶ inbox, handler, dead letter
//!      ▲                    │                                                        │ fails for long       ▲
//!      └── settled, ended ──┘                                                        ▼                      │
//!  offsets: contiguous, committed by the poll thread only                      inbox.parked ──▶ retrier ────┘
//! ```
//!
//! One OS thread owns the consumer: it polls, takes part in rebalances, pauses and resumes, and alone commits offsets, so
//! a slow handler never keeps it from polling and the group never loses a member for it. Lanes are tasks of the caller's
//! tokio runtime and never touch Kafka's consumer. A lane is known by a number of its own, not by its partition: what a
//! lane reports after its partition was revoked reaches nothing, also when the partition has come back. Replay topics have a
//! consumer and a thread of their own ([`crate::run`] says why).
//!
//! *Rebalance.* On revocation the lanes concerned finish the record in hand, at most until the drain deadline; what is
//! settled is committed, unless the assignment was lost; the rest is dropped and read again by the next owner. A lane
//! that is still busy then goes on alone, and its transaction is deduplicated like any other.
//!
//! *Shutdown.* As a revocation of everything; then the consumer leaves the group. What outlives the deadline is
//! cancelled: its connection is closed, and the server rolls back.

pub(crate) mod breaker;
pub(crate) mod budget;
pub(crate) mod lane;
pub(crate) mod worker;

mod assignment;
mod membership;
mod next;
mod offsets;
mod poll;
mod queues;
mod retrier;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::future::join_all;
use rdkafka::ClientConfig;
use rdkafka::config::{FromClientConfigAndContext, RDKafkaLogLevel};
use rdkafka::consumer::BaseConsumer;
use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use crate::run::Error;
use crate::{Health, metrics};
use assignment::Assignment;
use budget::Limits;
use lane::Spawn;
use membership::Context;
use poll::Poller;

/// Tells lanes apart for the life of a consumer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct LaneId(pub(crate) u64);

pub(crate) struct Settings {
    pub(crate) consumer: String,
    /// What its own series are labelled with.
    pub(crate) label: String,
    pub(crate) health: Health,
    pub(crate) config: ClientConfig,
    pub(crate) topics: Vec<String>,
    pub(crate) limits: Limits,
    pub(crate) drain_deadline: Duration,
}

/// How long the group's coordinator may take to see the consumer off.
const CLOSE_PATIENCE: Duration = Duration::from_secs(10);
/// How long a cancelled handler may take to notice.
const CANCEL_PATIENCE: Duration = Duration::from_secs(1);

/// A poll thread and its lanes. Dropped, it asks the thread to stop, and does not wait for it.
pub(crate) struct Running {
    stop: StopFlag,
    drained: oneshot::Receiver<Drained>,
    closed: oneshot::Receiver<()>,
}

/// What the poll thread leaves when nothing is read any more.
pub(crate) struct Drained {
    pub(crate) result: Result<(), Error>,
    pub(crate) stragglers: Vec<JoinHandle<()>>,
}

#[derive(Debug)]
struct StopFlag(Arc<AtomicBool>);

impl Drop for StopFlag {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl Running {
    pub(crate) async fn start(settings: Settings, spawn: Spawn) -> Result<Self, Error> {
        let Settings { consumer, label, health, config, topics, limits, drain_deadline } = settings;
        let assignment = Assignment::new(Handle::current(), spawn, limits);
        metrics::describe(&label);
        let context = Context::new(consumer, label, health, assignment, drain_deadline);
        let making =
            tokio::task::spawn_blocking(move || BaseConsumer::from_config_and_context(&config, context));
        let client = making.await.map_err(|_| Error::Thread)?.map_err(Error::Client)?;

        let flag = Arc::new(AtomicBool::new(false));
        let (tell_drained, drained) = oneshot::channel();
        let (tell_closed, closed) = oneshot::channel();
        let poller = Poller::new(client, topics, drain_deadline, Arc::clone(&flag));
        let body = move || {
            let (consumer, end) = poller.run();
            let _ = tell_drained.send(end);
            drop(consumer);
            let _ = tell_closed.send(());
        };
        std::thread::Builder::new()
            .name("baton-consumer".to_owned())
            .spawn(body)
            .map_err(|_| Error::Thread)?;
        Ok(Self { stop: StopFlag(flag), drained, closed })
    }

    /// Waits until the thread has stopped reading by itself, which only an error makes it do.
    pub(crate) async fn failed(&mut self) -> Drained {
        (&mut self.drained)
            .await
            .unwrap_or_else(|_| Drained { result: Err(Error::Thread), stragglers: Vec::new() })
    }

    /// Asks the thread to drain and waits for it. It keeps its own deadline.
    pub(crate) async fn drain(&mut self) -> Drained {
        self.stop.0.store(true, Ordering::Relaxed);
        self.failed().await
    }

    /// Cancels what outlived the deadline and waits, boundedly, for the consumer to leave its group.
    pub(crate) async fn close(self, drained: Drained) -> Result<(), Error> {
        for straggler in &drained.stragglers {
            straggler.abort();
        }
        if timeout(CANCEL_PATIENCE, join_all(drained.stragglers)).await.is_err() {
            tracing::error!("a handler blocks its thread and cannot be cancelled; it must not block");
        }
        if timeout(CLOSE_PATIENCE, self.closed).await.is_err() {
            tracing::warn!(
                "the consumer did not leave its group within {CLOSE_PATIENCE:?}; the group will notice by its session time-out"
            );
        }
        drained.result
    }
}

/// librdkafka's own lines. What an operator must see comes by other ways; these are for looking closely.
pub(crate) fn librdkafka_log(level: RDKafkaLogLevel, facility: &str, message: &str) {
    tracing::debug!(target: "librdkafka", ?level, facility, "{message}");
}

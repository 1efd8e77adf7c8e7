//! The relay as a process: one session after another, until it is told to stop.
//!
//! At start what cannot be used is an error, with what to do. From then on a lost database or broker is ridden out: the
//! session ends, and after a capped, jittered delay the next one claims anew.

use std::collections::BTreeMap;
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use baton_protocol::report::chain;
use baton_protocol::retry;
use futures_util::FutureExt as _;
use tokio::time::Instant;

use crate::links::{Published, Stopped, StoppedShards, Topics};
use crate::session::{self, Closed, Process};
use crate::{Settings, database, publish, settings};

/// How long database and broker may take to appear when the relay starts.
const START_PATIENCE: Duration = Duration::from_secs(10);

/// When a relay ends by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Until {
    /// Only when it is told to.
    Shutdown,
    /// Once everything that was committed and visible at the start is published, by whichever relay.
    Empty,
}

/// What a relay did.
#[derive(Debug)]
#[non_exhaustive]
pub struct Summary {
    /// Messages that Kafka acknowledged to this relay.
    pub published: u64,
    /// The messages that hold their shards up, by shard. Empty unless it ended by [`Until::Empty`] with only these left.
    pub stopped: BTreeMap<i16, Stopped>,
}

/// Why a relay did not start, or could not go on.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A setting that cannot be used.
    #[error("the configuration cannot be used")]
    Settings(#[from] settings::Error),
    /// The database cannot be used.
    #[error("the outbox database cannot be used")]
    Database(#[from] database::Error),
    /// The broker cannot be used.
    #[error(
        "kafka at {brokers} did not answer (check kafka.brokers or KAFKA_BROKERS, and that the broker runs)"
    )]
    Kafka {
        /// The bootstrap servers.
        brokers: String,
        /// What librdkafka said.
        #[source]
        source: rdkafka::error::KafkaError,
    },
}

/// Publishes until `shutdown` resolves, or until [`Until`] says so. Then it drains, hands its leases back and returns.
///
/// # Errors
/// When the settings, the database or the broker cannot be used at start, or the database can no longer be used for a
/// reason that waiting does not mend.
///
/// # Cancel safety
/// Dropping the future is like a crash: nothing is lost, leases expire, and what was handed over since the last durable
/// cursor may be published again. Prefer `shutdown`.
pub async fn run(
    settings: Settings,
    until: Until,
    shutdown: impl Future<Output = ()> + Send,
) -> Result<Summary, Error> {
    settings.validate()?;
    let mut shutdown = pin!(shutdown.fuse());
    let topics = Topics::new(settings.topics_fresh());
    let mut process = Process {
        settings: Arc::new(settings),
        generations: BTreeMap::new(),
        published: Arc::new(Published::default()),
        stopped: StoppedShards::default(),
        topics: Arc::new(topics),
        target: None,
        until_empty: until == Until::Empty,
    };
    let mut delays =
        retry::Policy { base: Duration::from_millis(200), factor: 2.0, cap: Duration::from_secs(5) }.delays();
    tokio::select! {
        started = start(&process.settings, &mut delays) => started?,
        () = &mut shutdown => return Ok(summary(&process, Closed::Shutdown)),
    }
    tracing::info!(owner = process.settings.owner, "the relay runs");
    delays.reset();
    loop {
        let began = Instant::now();
        let error = match session::run(&mut process, shutdown.as_mut()).await {
            Ok(closed) => return Ok(summary(&process, closed)),
            Err(error) if error.passes() => error,
            Err(error) => return Err(error.into()),
        };
        if began.elapsed() > Duration::from_secs(30) {
            delays.reset();
        }
        let delay = delays.next_delay();
        tracing::warn!(
            ?delay,
            "the database was lost, what was in flight is discarded and claimed anew: {}",
            chain(&error)
        );
        tokio::select! {
            () = tokio::time::sleep(delay) => {}
            () = &mut shutdown => return Ok(summary(&process, Closed::Shutdown)),
        }
    }
}

/// Waits for database and broker, briefly.
async fn start(settings: &Arc<Settings>, delays: &mut retry::Delays) -> Result<(), Error> {
    let until = Instant::now() + START_PATIENCE;
    loop {
        let checked = async {
            let mut connection = database::connect(settings, "start", START_PATIENCE).await?;
            database::inspect(&mut connection, START_PATIENCE).await
        };
        match checked.await {
            Ok(outbox) => {
                tracing::info!(database = outbox.database, shards = outbox.shards, "found the outbox");
                break;
            }
            Err(error) if error.passes() && Instant::now() < until => {
                tracing::warn!("waiting for the database: {}", chain(&error));
                tokio::time::sleep(delays.next_delay()).await;
            }
            Err(error) => return Err(error.into()),
        }
    }
    let asked = Arc::clone(settings);
    let reachable = tokio::task::spawn_blocking(move || publish::reach(&asked, START_PATIENCE)).await;
    reachable
        .unwrap_or(Err(rdkafka::error::KafkaError::Canceled))
        .map_err(|source| Error::Kafka { brokers: settings.brokers.clone(), source })
}

fn summary(process: &Process, closed: Closed) -> Summary {
    let stopped = match closed {
        Closed::OnlyStopped(stopped) => stopped,
        Closed::Shutdown | Closed::Emptied => BTreeMap::new(),
    };
    Summary { published: process.published.total(), stopped }
}

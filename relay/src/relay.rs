//! The relay as a process: one session after another, until it is told to stop.
//!
//! At start what cannot be used is an error, with what to do. Once it has claimed, everything is ridden out: the session
//! ends, and after a capped, jittered delay the next one claims anew. What passes by itself (a lost connection, a server
//! that restarts) is a WARN; what an operator must mend (a revoked privilege, a schema that is gone) is an ERROR that says
//! how, and the delays grow, because coming back at once would not help. `--until-empty` is a command and ends with it.
//!
//! ```text
//!  start ──▶ session ──lost──▶ delay, at most min(TTL/2, 5 s) ──▶ session …
//!    └ cannot be used: error        └ back to the shortest after a session that claimed and lasted a second
//! ```

use std::collections::BTreeMap;
use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;

use baton_protocol::retry;
use futures_util::FutureExt as _;
use futures_util::future::FusedFuture;
use tokio::time::Instant;

use crate::database::told;
use crate::fenced::Fences;
use crate::health::Health;
use crate::http::Server;
use crate::metrics::Metrics;
use crate::reach::{self, Unreachable};
use crate::session::{self, Closed, Process};
use crate::stopped::{Stopped, StoppedShards};
use crate::topics::Topics;
use crate::until_empty::SetAside;
use crate::{Settings, database, http, settings};

/// How long database and broker may take to appear when the relay starts.
const START_PATIENCE: Duration = Duration::from_secs(10);

/// A session that claimed and lasted this long was of use: the delays begin anew.
const WORTH_A_RESET: Duration = Duration::from_secs(1);

/// So did one that lasted this long, whatever ended it.
const LONG_SESSION: Duration = Duration::from_secs(30);

/// When a relay ends by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Until {
    /// Only when it is told to.
    Shutdown,
    /// Once everything that was committed and visible at the start is published or set aside, by whichever relay.
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
    /// What is set aside of the whole outbox. None unless it ended by [`Until::Empty`] with everything else published.
    pub set_aside: SetAside,
    /// It was told to end, whatever is left.
    pub is_interrupted: bool,
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
        "kafka at {brokers} did not answer: {why} (check kafka.brokers or KAFKA_BROKERS, and that the broker runs)"
    )]
    Kafka {
        /// The bootstrap servers.
        brokers: String,
        /// What is wrong with each of them, as far as can be seen from here.
        why: String,
        /// What librdkafka said.
        #[source]
        source: rdkafka::error::KafkaError,
    },
    /// The address for HTTP cannot be had.
    #[error(transparent)]
    Http(#[from] http::Error),
}

/// Publishes until `shutdown` resolves, or until [`Until`] says so. Then it drains, hands its leases back and returns.
///
/// # Errors
/// When the settings, the database or the broker cannot be used at start; with [`Until::Empty`] also when the database can
/// no longer be used for a reason that waiting does not mend.
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
    let settings = Arc::new(settings);
    let fences = Arc::<Fences>::default();
    let metrics = Arc::new(Metrics::new(Arc::clone(&fences)));
    let health = Arc::new(Health::new(&settings));
    // Before anything that may take long, so that what is waited for can be asked. One that ends by itself serves nobody:
    // it would only be in the way of the next.
    let server = match until {
        Until::Shutdown => Some(Server::start(&settings, &health, &metrics).await?),
        Until::Empty => None,
    };
    let topics = Topics::new(settings.topics_fresh());
    let process = Process {
        settings,
        generations: BTreeMap::new(),
        namesake: crate::namesake::Namesake::default(),
        metrics,
        beat: health.watch("the main loop"),
        health,
        stopped: StoppedShards::default(),
        fences,
        confirmed: Arc::default(),
        claimed: false,
        topics: Arc::new(topics),
        target: None,
        until_empty: until == Until::Empty,
    };
    let ended = publish(process, pin!(shutdown.fuse())).await;
    if let Some(server) = server {
        server.stop().await;
    }
    ended
}

/// One session after another.
async fn publish<S>(mut process: Process, mut shutdown: Pin<&mut S>) -> Result<Summary, Error>
where
    S: FusedFuture<Output = ()> + Send,
{
    let mut delays = between_sessions(&process.settings).delays();
    let mut has_claimed = false;
    tokio::select! {
        started = start(&process, &mut delays) => started?,
        () = &mut shutdown => return Ok(summary(&process, Closed::Shutdown)),
    }
    tracing::info!(
        owner = process.settings.owner,
        "the relay runs; a crash repeats at most {} messages of each shard, those handed to kafka since its last durable cursor",
        process.settings.in_flight_rows
    );
    delays.reset();
    loop {
        let began = Instant::now();
        process.beat.at(began);
        let error = match session::run(&mut process, shutdown.as_mut()).await {
            Ok(closed) => return Ok(summary(&process, closed)),
            Err(error) => error,
        };
        if shutdown.is_terminated() {
            // Told to stop, which is told once: another session would run for ever. Nothing is in flight any more.
            tracing::warn!(
                "the database was lost while the relay drained, its leases run out: {}",
                told(&error)
            );
            return Ok(summary(&process, Closed::Shutdown));
        }
        process.health.lost(&error);
        has_claimed |= process.claimed;
        if !error.passes() && (process.until_empty || !has_claimed) {
            return Err(error.into());
        }
        let of_use = process.claimed && error.passes() && began.elapsed() > WORTH_A_RESET;
        if of_use || began.elapsed() > LONG_SESSION {
            delays.reset();
        }
        let delay = delays.next_delay();
        process.beat.at(Instant::now());
        if error.passes() {
            tracing::warn!(
                ?delay,
                "the database was lost, what was in flight is discarded and claimed anew: {}",
                told(&error)
            );
        } else {
            tracing::error!(
                ?delay,
                "the database cannot be used as it is, the relay goes on trying: {}{}",
                told(&error),
                error.advice()
            );
        }
        tokio::select! {
            () = tokio::time::sleep(delay) => {}
            () = &mut shutdown => return Ok(summary(&process, Closed::Shutdown)),
        }
    }
}

/// Waits for database and broker, briefly.
async fn start(process: &Process, delays: &mut retry::Delays) -> Result<(), Error> {
    let settings = &process.settings;
    let until = Instant::now() + START_PATIENCE;
    loop {
        let checked = async {
            let mut connection = database::connect(settings, "start", START_PATIENCE).await?;
            let mut another = database::connect(settings, "start", START_PATIENCE).await?;
            database::own_sessions(settings, &mut connection, &mut another, START_PATIENCE).await?;
            database::inspect(&mut connection, START_PATIENCE).await
        };
        match checked.await {
            Ok(outbox) => {
                tracing::info!(database = outbox.database, shards = outbox.shards, "found the outbox");
                process.health.found();
                break;
            }
            Err(error) if error.passes() && Instant::now() < until => {
                tracing::warn!("waiting for the database: {}", told(&error));
                process.health.lost(&error);
                tokio::time::sleep(delays.next_delay()).await;
            }
            Err(error) => return Err(error.into()),
        }
    }
    reach::reach(settings, START_PATIENCE).await.map_err(|Unreachable { why, source }| Error::Kafka {
        brokers: settings.brokers.clone(),
        why,
        source,
    })
}

/// The delays between sessions. Short beside the lease, so that a relay that lost its database again and again is still back
/// in time to take over what another one left.
fn between_sessions(settings: &Settings) -> retry::Policy {
    let cap = (settings.lease_ttl / 2).clamp(Duration::from_millis(500), Duration::from_secs(5));
    retry::Policy { base: Duration::from_millis(200), factor: 2.0, cap }
}

fn summary(process: &Process, closed: Closed) -> Summary {
    let is_interrupted = closed == Closed::Shutdown;
    let (stopped, set_aside) = match closed {
        Closed::OnlyStopped(stopped) => (stopped, SetAside::default()),
        Closed::Emptied(set_aside) => (BTreeMap::new(), set_aside),
        Closed::Shutdown => (BTreeMap::new(), SetAside::default()),
    };
    Summary { published: process.metrics.published_total(), stopped, set_aside, is_interrupted }
}

//! Running a consumer: checks at start, then reading until it is asked to stop.
//!
//! At start everything that would fail later is looked at once and told as one error: database, inbox tables, brokers,
//! topics. From then on an outage of any of them is waited out. What ends a running consumer by itself is only what no
//! waiting cures.
//!
//! Replay topics are read in a group of their own, `<group>.replay`. In one group with the topics a member could be given all of the
//! one and none of the other, because what shares partitions out counts them and does not ask of which topic they are.

use std::fmt;
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use baton_protocol::dead_letter;
use rdkafka::error::KafkaError;
use sqlx::{Connection, PgConnection, PgPool};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use crate::build::{Builder, Factory, Tasks};
use crate::dead_letter::DeadLetters;
use crate::kafka::Member;
use crate::runtime::budget::Limits;
use crate::runtime::lane::Stop;
use crate::runtime::{Drained, Running, Settings};
use crate::{DeadLetterFormat, DeadLetterTopics, Health, Inbox, Kafka, topics};

/// Why a consumer did not start, or ended by itself.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The database cannot be reached.
    #[error(
        "cannot connect to the inbox database; check its address, that it is up, and the role's password"
    )]
    Database(#[source] sqlx::Error),
    /// The database took longer to answer than it may.
    #[error("the inbox database did not answer within {patience:?}; check its address and that it is up")]
    DatabaseSilent {
        /// How long was waited.
        patience: Duration,
    },
    /// The inbox tables are missing.
    #[error("the database has no inbox, or one of an earlier version; run `baton migrate inbox` on it")]
    NotMigrated,
    /// The database is a standby.
    #[error("the database is in recovery, so nothing can be written; connect to the primary")]
    InRecovery,
    /// The role may not write to the inbox.
    #[error("the database role may not read and write the inbox; grant it baton_consumer")]
    NotAllowed,
    /// The inbox cannot be looked at.
    #[error("cannot look at the inbox; the database role must be a member of baton_consumer")]
    Check(#[source] sqlx::Error),
    /// The brokers cannot be reached.
    #[error(
        "cannot reach Kafka at {brokers}; check the address, that the brokers are up, and TLS and SASL settings"
    )]
    Brokers {
        /// The brokers that were given.
        brokers: String,
        /// librdkafka's words.
        #[source]
        source: KafkaError,
    },
    /// Topics to read that do not exist.
    #[error("no such topic: {}; create it, or correct the name", topics.join(", "))]
    MissingTopics {
        /// Their names.
        topics: Vec<String>,
    },
    /// A topic that the brokers do not tell about.
    #[error("cannot read topic {topic}; check that it exists and that this consumer's principal may read it")]
    Topic {
        /// Its name.
        topic: String,
        /// librdkafka's words.
        #[source]
        source: KafkaError,
    },
    /// A Kafka client cannot be made of the settings.
    #[error("librdkafka refuses the settings")]
    Client(#[source] KafkaError),
    /// The subscription was refused.
    #[error("cannot subscribe to the topics")]
    Subscribe(#[source] KafkaError),
    /// librdkafka cannot go on, for example because another process runs under the same `group.instance.id`.
    #[error("the Kafka client cannot go on; start the consumer again")]
    Fatal(#[source] KafkaError),
    /// A partition's task ended without being asked to.
    #[error(
        "the task of {topic}[{partition}] ended by itself; the tokio runtime is shutting down, or this is a defect: start the consumer again"
    )]
    Lane {
        /// The topic.
        topic: String,
        /// The partition.
        partition: i32,
    },
    /// What tries records that were set aside ended without being asked to.
    #[error(
        "the task that retries parked records ended by itself, which is a defect: start the consumer again"
    )]
    Retrier,
    /// The poll thread could not be started, or has panicked.
    #[error("the poll thread did not start or has ended; start the consumer again")]
    Thread,
}

/// How long the database may take to answer at start.
const DATABASE_PATIENCE: Duration = Duration::from_secs(10);

/// Reads topics and applies each message once. Made by [`Consumer::builder`].
pub struct Consumer {
    pub(crate) name: String,
    pub(crate) pool: PgPool,
    pub(crate) health: Health,
    pub(crate) kafka: Kafka,
    pub(crate) topics: Vec<String>,
    pub(crate) member: Member,
    pub(crate) own_topics: DeadLetterTopics,
    pub(crate) format: DeadLetterFormat,
    pub(crate) drain_deadline: Duration,
    pub(crate) limits: Limits,
    pub(crate) inbox: Inbox,
    pub(crate) factory: Factory,
}

impl Consumer {
    /// A consumer named `name`: the owner of its inbox rows, part of the names of its dead-letter topics, and by default
    /// its consumer group. `pool` is the database of the inbox and of the handlers' effects; it takes at most one
    /// connection for each partition, replay topics included, times [`Builder::concurrency`], 8 for records that were set aside, and 2 to look for these and
    /// to purge; where there are fewer they wait. A leased handler holds none while it runs.
    #[must_use]
    pub fn builder(name: impl Into<String>, pool: PgPool, kafka: Kafka) -> Builder {
        Builder::new(name.into(), pool, kafka)
    }

    /// Says whether it moves and is of use, also over HTTP; to be taken before [`run`](Self::run).
    #[must_use]
    pub fn health(&self) -> Health {
        self.health.clone()
    }

    /// Reads until `shutdown` is ready. Then records in hand are finished, at most until the drain deadline, offsets are
    /// committed, and the consumer leaves its group.
    ///
    /// Returns at the latest about 25 s after the drain deadline, whatever the brokers do; usually at once.
    ///
    /// # Errors
    ///
    /// [`enum@Error`]: it did not start, or it cannot go on. An outage while it runs is waited out instead.
    ///
    /// # Cancel safety
    ///
    /// Dropped, it stops by itself in the background, in the same way, but nobody waits for it, and what outlives the drain
    /// deadline is not cancelled. Use `shutdown`.
    pub async fn run(self, shutdown: impl Future<Output = ()> + Send) -> Result<(), Error> {
        let mut shutdown = pin!(shutdown);
        let drain_deadline = self.drain_deadline;
        let _ends = self.health.until_dropped();
        let (mut reading, letters, mut retrier) = tokio::select! {
            biased;
            () = &mut shutdown => return Ok(()),
            started = self.start() => started?,
        };
        let (ended, defect) = tokio::select! {
            ended = reading.failed() => (Some(ended), Ok(())),
            () = &mut shutdown => (None, Ok(())),
            () = retrier.ended() => (None, Err(Error::Retrier)),
        };
        // Records that were parked wait for nobody's partition; all have the same patience, at the same time.
        let (drained, ()) = tokio::join!(reading.drain(ended), retrier.finish(drain_deadline));
        let closed = reading.close(drained).await.and(defect);
        // Its producer is waited for when it is dropped.
        drop(tokio::task::spawn_blocking(move || drop(letters)).await);
        closed
    }

    async fn start(self) -> Result<(Reading, Arc<DeadLetters>, RetrierTask), Error> {
        check_database(&self.pool).await?;
        let replay_topics =
            topics::prepare(&self.kafka, &self.name, &self.topics, self.own_topics, self.format).await?;
        let letters = DeadLetters::new(&self.kafka, &self.name, &self.member.group, self.format);
        let letters = Arc::new(letters.map_err(Error::Client)?);
        let Tasks { lanes, retrier } = (self.factory)(self.inbox, Arc::clone(&letters));
        let replays = Member {
            group: dead_letter::replay_group(&self.member.group),
            instance: self.member.instance.clone(),
        };
        let replay_settings = Settings {
            consumer: self.name.clone(),
            label: format!("{}.replay", self.name),
            // Nobody asks for it: what is replayed is looked after by an operator.
            health: Health::new(self.pool.clone(), self.drain_deadline),
            config: self.kafka.consumer(&replays),
            topics: replay_topics,
            limits: self.limits.of_replays(),
            drain_deadline: self.drain_deadline,
        };
        let settings = Settings {
            consumer: self.name.clone(),
            label: self.name.clone(),
            health: self.health,
            config: self.kafka.consumer(&self.member),
            topics: self.topics,
            limits: self.limits,
            drain_deadline: self.drain_deadline,
        };
        let topics = Running::start(settings, Arc::clone(&lanes)).await?;
        let replays = if replay_settings.topics.is_empty() {
            None
        } else {
            Some(Running::start(replay_settings, lanes).await?)
        };
        let (stop, stopped) = watch::channel(false);
        let retrier = RetrierTask { stop, task: tokio::spawn(retrier(Stop(stopped))) };
        tracing::info!(consumer = self.name, group = self.member.group, "consumer started");
        Ok((Reading { topics, replays }, letters, retrier))
    }
}

/// What is read: the topics, and apart from them the replay topics that there are.
struct Reading {
    topics: Running,
    replays: Option<Running>,
}

/// The one that has stopped by itself.
enum Ended {
    Topics(Drained),
    Replays(Drained),
}

impl Reading {
    /// Waits until one of them has stopped reading by itself, which only an error makes it do.
    async fn failed(&mut self) -> Ended {
        let Self { topics, replays } = self;
        let Some(replays) = replays else { return Ended::Topics(topics.failed().await) };
        tokio::select! {
            biased;
            drained = topics.failed() => Ended::Topics(drained),
            drained = replays.failed() => Ended::Replays(drained),
        }
    }

    /// Asks whatever still reads to drain, and waits for it. Each keeps its own deadline.
    async fn drain(&mut self, ended: Option<Ended>) -> (Drained, Option<Drained>) {
        let Self { topics, replays } = self;
        let (drained, drained_replays) = match ended {
            Some(Ended::Topics(drained)) => (Some(drained), None),
            Some(Ended::Replays(drained)) => (None, Some(drained)),
            None => (None, None),
        };
        let topics = async {
            match drained {
                Some(drained) => drained,
                None => topics.drain().await,
            }
        };
        let replays = async {
            match (drained_replays, replays) {
                (Some(drained), _) => Some(drained),
                (None, Some(replays)) => Some(replays.drain().await),
                (None, None) => None,
            }
        };
        tokio::join!(topics, replays)
    }

    /// Leaves the groups.
    async fn close(self, (drained, drained_replays): (Drained, Option<Drained>)) -> Result<(), Error> {
        let replays = async {
            match self.replays.zip(drained_replays) {
                Some((replays, drained)) => replays.close(drained).await,
                None => Ok(()),
            }
        };
        let (closed, closed_replays) = tokio::join!(self.topics.close(drained), replays);
        closed.and(closed_replays)
    }
}

/// The task that tries records that were set aside again. Dropped, it is asked to stop.
struct RetrierTask {
    stop: watch::Sender<bool>,
    task: JoinHandle<()>,
}

impl RetrierTask {
    /// Only by a defect, unless it was asked to.
    async fn ended(&mut self) {
        let _ = (&mut self.task).await;
    }

    /// What outlives the deadline is cancelled.
    async fn finish(mut self, deadline: Duration) {
        self.stop.send_replace(true);
        if !self.task.is_finished() && timeout(deadline, &mut self.task).await.is_err() {
            self.task.abort();
            let _ = timeout(Duration::from_secs(1), self.task).await;
        }
    }
}

/// On a connection of its own, because a pool hides why it has none.
pub(crate) async fn check_database(pool: &PgPool) -> Result<(), Error> {
    let look = async {
        let mut connection =
            PgConnection::connect_with(&pool.connect_options()).await.map_err(Error::Database)?;
        let (migrated, in_recovery, allowed): (bool, bool, bool) =
            sqlx::query_as(include_str!("../queries/inbox_check.sql"))
                .fetch_one(&mut connection)
                .await
                .map_err(Error::Check)?;
        if !migrated {
            return Err(Error::NotMigrated);
        }
        if in_recovery {
            return Err(Error::InRecovery);
        }
        if !allowed {
            return Err(Error::NotAllowed);
        }
        connection.close().await.map_err(Error::Check)
    };
    timeout(DATABASE_PATIENCE, look)
        .await
        .unwrap_or(Err(Error::DatabaseSilent { patience: DATABASE_PATIENCE }))
}

impl fmt::Debug for Consumer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Consumer")
            .field("name", &self.name)
            .field("group", &self.member.group)
            .field("topics", &self.topics)
            .field("kafka", &self.kafka)
            .finish_non_exhaustive()
    }
}

//! The cluster as tests see it: topics made and deleted, groups, counts.
//!
//! rdkafka's consumer and metadata calls block, so each runs on a thread for such calls and has an end.

use std::time::Duration;

use rdkafka::admin::{
    AdminClient, AdminOptions, AlterConfig, NewPartitions, NewTopic, ResourceSpecifier, TopicReplication,
};
use rdkafka::client::DefaultClientContext;
use rdkafka::config::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::{Offset, TopicPartitionList};
use tokio::task::spawn_blocking;

use crate::database::is_stale;
use crate::failure::{Failure, Outcome};
use crate::record::{Draft, Record};
use crate::transfer::{Refusals, read_to_the_end, watermarks, write};
use crate::wait::eventually;

const PREFIX: &str = "baton-test-";

/// How long one request to the broker may take.
pub(crate) const REQUEST: Duration = Duration::from_secs(15);

/// How long a read or a write of a whole topic may take.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// A Kafka cluster.
#[derive(Debug, Clone)]
pub struct Kafka {
    brokers: String,
}

impl Kafka {
    /// The cluster of these bootstrap servers.
    #[must_use]
    pub fn new(brokers: &str) -> Self {
        Self { brokers: brokers.to_owned() }
    }

    pub(crate) fn config(&self) -> ClientConfig {
        let mut config = ClientConfig::new();
        config
            .set("bootstrap.servers", &self.brokers)
            .set("allow.auto.create.topics", "false")
            // Its default of a minute would be waited out after a broker's restart.
            .set("reconnect.backoff.max.ms", "500");
        config
    }

    fn admin(&self) -> Outcome<AdminClient<DefaultClientContext>> {
        Ok(self.config().create()?)
    }

    /// Makes a topic with one replica and waits until the broker names all of its partitions. `settings` are the
    /// topic's own, such as `max.message.bytes`.
    ///
    /// # Errors
    ///
    /// When the broker refuses or does not answer.
    pub(crate) async fn create_topic(
        &self,
        name: &str,
        partitions: usize,
        settings: &[(&str, &str)],
    ) -> Outcome {
        let admin = self.admin()?;
        let count = i32::try_from(partitions)?;
        let topic = settings
            .iter()
            .fold(NewTopic::new(name, count, TopicReplication::Fixed(1)), |topic, (key, value)| {
                topic.set(key, value)
            });
        for made in admin.create_topics([&topic], &options()).await? {
            made.map_err(|(name, code)| Failure::new(format!("create topic {name}: {code}")))?;
        }
        self.shows(name, partitions).await
    }

    async fn shows(&self, name: &str, partitions: usize) -> Outcome {
        eventually(format!("the broker to show {name}"), PATIENCE, async || {
            let seen = self.partitions(name).await?;
            if seen == partitions {
                Ok(())
            } else {
                crate::fail!("it shows {seen} of {partitions} partitions")
            }
        })
        .await
    }

    /// Raises the number of a topic's partitions and waits until the broker names all of them.
    ///
    /// # Errors
    ///
    /// When the broker refuses or does not answer.
    pub async fn raise_partitions(&self, name: &str, partitions: usize) -> Outcome {
        let raised = NewPartitions::new(name, partitions);
        for made in self.admin()?.create_partitions([&raised], &options()).await? {
            made.map_err(|(name, code)| Failure::new(format!("raise partitions of {name}: {code}")))?;
        }
        self.shows(name, partitions).await
    }

    /// Sets a topic's own settings, such as `max.message.bytes`; the others go back to their defaults.
    ///
    /// # Errors
    ///
    /// When the broker refuses or does not answer.
    pub async fn set_topic(&self, name: &str, settings: &[(&str, &str)]) -> Outcome {
        let config =
            settings.iter().fold(AlterConfig::new(ResourceSpecifier::Topic(name)), |config, (key, value)| {
                config.set(key, value)
            });
        for set in self.admin()?.alter_configs([&config], &options()).await? {
            set.map_err(|(_, code)| Failure::new(format!("set {name}: {code}")))?;
        }
        Ok(())
    }

    /// Deletes a topic.
    ///
    /// # Errors
    ///
    /// When the broker refuses or does not answer.
    pub async fn delete_topic(&self, name: &str) -> Outcome {
        let admin = self.admin()?;
        for deleted in admin.delete_topics(&[name], &options()).await? {
            deleted.map_err(|(name, code)| Failure::new(format!("delete topic {name}: {code}")))?;
        }
        Ok(())
    }

    /// How many partitions the topic has; 0 when there is no such topic.
    ///
    /// # Errors
    ///
    /// When the broker does not answer.
    pub async fn partitions(&self, topic: &str) -> Outcome<usize> {
        let (config, topic) = (self.config(), topic.to_owned());
        blocking(move || {
            let consumer: BaseConsumer = config.create()?;
            let metadata = consumer.fetch_metadata(Some(&topic), REQUEST)?;
            let found = metadata.topics().iter().find(|found| found.name() == topic);
            Ok(found.filter(|found| found.error().is_none()).map_or(0, |found| found.partitions().len()))
        })
        .await
    }

    /// How many offsets the topic's partitions hold in all (markers of transactions included).
    ///
    /// # Errors
    ///
    /// When the broker does not answer.
    pub async fn count(&self, topic: &str) -> Outcome<i64> {
        let (config, topic) = (self.config(), topic.to_owned());
        blocking(move || {
            let consumer: BaseConsumer = config.create()?;
            Ok(watermarks(&consumer, &topic)?.into_iter().map(|(_, low, high)| high - low).sum())
        })
        .await
    }

    /// How many records a group has not committed yet.
    ///
    /// # Errors
    ///
    /// When the broker does not answer.
    pub async fn lag(&self, group: &str, topic: &str) -> Outcome<i64> {
        let (mut config, topic) = (self.config(), topic.to_owned());
        config.set("group.id", group);
        blocking(move || {
            let consumer: BaseConsumer = config.create()?;
            let ends = watermarks(&consumer, &topic)?;
            let mut partitions = TopicPartitionList::new();
            for (partition, ..) in &ends {
                partitions.add_partition(&topic, *partition);
            }
            let committed = consumer.committed_offsets(partitions, REQUEST)?;
            Ok(ends
                .iter()
                .map(|(partition, low, high)| {
                    match committed.find_partition(&topic, *partition).map(|found| found.offset()) {
                        Some(Offset::Offset(at)) => high - at,
                        _ => high - low,
                    }
                })
                .sum())
        })
        .await
    }

    /// All records that are in the topic now, partition by partition in order of offset.
    ///
    /// # Errors
    ///
    /// When the topic is not there or cannot be read to its end in a minute.
    pub async fn records(&self, topic: &str) -> Outcome<Vec<Record>> {
        let (mut config, topic) = (self.config(), topic.to_owned());
        config
            .set("group.id", "baton-tests")
            .set("enable.auto.commit", "false")
            .set("enable.partition.eof", "true")
            .set("auto.offset.reset", "error");
        blocking(move || read_to_the_end(&config.create()?, &topic)).await
    }

    /// Writes these records in order and waits for their acknowledgements.
    ///
    /// # Errors
    ///
    /// The first refusal.
    pub async fn produce(&self, topic: &str, drafts: Vec<Draft>) -> Outcome {
        self.produce_as(None, topic, drafts).await
    }

    /// The same in one transaction, whose marker is then the last offset of each partition written to.
    ///
    /// # Errors
    ///
    /// The first refusal, or that of the transaction.
    pub async fn produce_in_transaction(&self, topic: &str, drafts: Vec<Draft>) -> Outcome {
        self.produce_as(Some(format!("{topic}-transaction")), topic, drafts).await
    }

    async fn produce_as(&self, transaction: Option<String>, topic: &str, drafts: Vec<Draft>) -> Outcome {
        let (mut config, topic) = (self.config(), topic.to_owned());
        config.set("enable.idempotence", "true").set("partitioner", "murmur2_random").set("linger.ms", "5");
        if let Some(id) = &transaction {
            config.set("transactional.id", id);
        }
        blocking(move || {
            write(&config.create_with_context(Refusals::default())?, &topic, &drafts, transaction.is_some())
        })
        .await
    }

    /// Deletes every topic that begins with `prefix`, those that consumers made included. Best effort.
    pub(crate) async fn delete_topics_of(&self, prefix: &str) -> Outcome {
        let names = self.topics().await?;
        let doomed: Vec<&str> =
            names.iter().map(String::as_str).filter(|name| name.starts_with(prefix)).collect();
        if !doomed.is_empty() {
            self.admin()?.delete_topics(&doomed, &options()).await?;
        }
        Ok(())
    }

    /// Deletes every consumer group that begins with `prefix` and has no member any more. Best effort.
    pub(crate) async fn delete_groups_of(&self, prefix: &str) -> Outcome {
        let (config, prefix) = (self.config(), prefix.to_owned());
        let doomed: Vec<String> = blocking(move || {
            let consumer: BaseConsumer = config.create()?;
            let groups = consumer.fetch_group_list(None, REQUEST)?;
            let names = groups.groups().iter().map(|group| group.name().to_owned());
            Ok(names.filter(|name| name.starts_with(&prefix)).collect())
        })
        .await?;
        if !doomed.is_empty() {
            let doomed: Vec<&str> = doomed.iter().map(String::as_str).collect();
            self.admin()?.delete_groups(&doomed, &options()).await?;
        }
        Ok(())
    }

    /// Deletes what tests of long ago left behind. Best effort.
    pub(crate) async fn sweep(&self, now: i64) -> Outcome {
        let names = self.topics().await?;
        let stale: Vec<&str> = names
            .iter()
            .map(String::as_str)
            .filter(|name| is_stale(name.strip_prefix(PREFIX), '-', now))
            .collect();
        if !stale.is_empty() {
            self.admin()?.delete_topics(&stale, &options()).await?;
        }
        Ok(())
    }

    /// The names of all topics of the cluster.
    pub(crate) async fn topics(&self) -> Outcome<Vec<String>> {
        let config = self.config();
        blocking(move || {
            let consumer: BaseConsumer = config.create()?;
            let metadata = consumer.fetch_metadata(None, REQUEST)?;
            Ok(metadata.topics().iter().map(|topic| topic.name().to_owned()).collect())
        })
        .await
    }
}

/// What the names of one test's topics begin with.
pub(crate) fn topic_prefix(epoch: i64, random: &str) -> String {
    format!("{PREFIX}{epoch}-{random}-")
}

fn options() -> AdminOptions {
    AdminOptions::new().request_timeout(Some(REQUEST)).operation_timeout(Some(REQUEST))
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> Outcome<T> + Send + 'static) -> Outcome<T> {
    spawn_blocking(work).await?
}

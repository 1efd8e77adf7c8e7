//! Topics for a test: made, filled, read from end to end, deleted.
//!
//! rdkafka's consumer and metadata calls block, so each runs on a thread for such calls and has an end. A bounded read
//! stops when the *position* in every partition has reached the end offset that was asked for at its start, or when the
//! broker says that this is the end: offsets have gaps (transaction markers, compaction), so "offset = end − 1" may never come.

use std::collections::HashSet;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::client::{ClientContext, DefaultClientContext};
use rdkafka::config::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::KafkaError;
use rdkafka::message::{Header, Headers, Message, OwnedHeaders};
use rdkafka::producer::{BaseProducer, BaseRecord, DeliveryResult, Producer, ProducerContext};
use rdkafka::types::RDKafkaErrorCode;
use rdkafka::{Offset, TopicPartitionList};
use tokio::task::spawn_blocking;
use tokio::time::Instant;

use crate::database::is_stale;
use crate::failure::{Failure, Outcome};
use crate::wait::eventually;

const PREFIX: &str = "baton-test-";

/// How long one request to the broker may take.
const REQUEST: Duration = Duration::from_secs(15);

/// How long a read or a write of a whole topic may take.
const PATIENCE: Duration = Duration::from_secs(60);

/// One record, as any consumer sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// The partition it lies in.
    pub partition: i32,
    /// Its offset there.
    pub offset: i64,
    /// Its timestamp in milliseconds since 1970.
    pub timestamp_ms: Option<i64>,
    /// `None` = null.
    pub key: Option<Vec<u8>>,
    /// `None` = null, a tombstone.
    pub payload: Option<Vec<u8>>,
    /// In order, repeats included.
    pub headers: Vec<(String, Option<Vec<u8>>)>,
}

impl Record {
    /// The last header of that name, if it is text.
    #[must_use]
    pub fn header(&self, name: &str) -> Option<&str> {
        let (_, value) = self.headers.iter().rev().find(|(given, _)| given == name)?;
        std::str::from_utf8(value.as_deref()?).ok()
    }

    /// All headers as text, for comparisons.
    #[must_use]
    pub fn header_texts(&self) -> Vec<(String, Option<String>)> {
        let text = |bytes: &Vec<u8>| String::from_utf8_lossy(bytes).into_owned();
        self.headers.iter().map(|(name, value)| (name.clone(), value.as_ref().map(text))).collect()
    }

    /// The key as text; null and what is no UTF-8 give `None`.
    #[must_use]
    pub fn key_text(&self) -> Option<&str> {
        std::str::from_utf8(self.key.as_deref()?).ok()
    }

    /// The payload as text; null and what is no UTF-8 give `None`.
    #[must_use]
    pub fn payload_text(&self) -> Option<&str> {
        std::str::from_utf8(self.payload.as_deref()?).ok()
    }
}

/// One record to write. Build it with [`Draft::new`].
#[derive(Debug, Clone)]
pub struct Draft {
    key: Option<Vec<u8>>,
    payload: Option<Vec<u8>>,
    headers: Vec<(String, Option<Vec<u8>>)>,
}

impl Draft {
    /// A record with key and payload and no headers.
    #[must_use]
    pub fn new(key: &str, payload: impl Into<Vec<u8>>) -> Self {
        Self { key: Some(key.into()), payload: Some(payload.into()), headers: Vec::new() }
    }

    /// One more header.
    #[must_use]
    pub fn header(mut self, name: &str, value: &str) -> Self {
        self.headers.push((name.to_owned(), Some(value.into())));
        self
    }
}

/// A Kafka cluster.
#[derive(Debug, Clone)]
pub struct Kafka {
    brokers: String,
}

impl Kafka {
    pub(crate) fn new(brokers: &str) -> Self {
        Self { brokers: brokers.to_owned() }
    }

    fn config(&self) -> ClientConfig {
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
            let producer: BaseProducer<Refusals> = config.create_with_context(Refusals::default())?;
            if transaction.is_some() {
                producer.init_transactions(PATIENCE)?;
                producer.begin_transaction()?;
            }
            for draft in &drafts {
                send(&producer, &topic, draft)?;
            }
            producer.flush(PATIENCE)?;
            if transaction.is_some() {
                producer.commit_transaction(PATIENCE)?;
            }
            match producer.context().first() {
                None => Ok(()),
                Some(refusal) => crate::fail!("write to {topic}: {refusal}"),
            }
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

/// Partition, first offset, end offset.
fn watermarks(consumer: &BaseConsumer, topic: &str) -> Outcome<Vec<(i32, i64, i64)>> {
    let metadata = consumer.fetch_metadata(Some(topic), REQUEST)?;
    let found = metadata.topics().iter().find(|found| found.name() == topic);
    let Some(found) = found.filter(|found| found.error().is_none()) else {
        crate::fail!("there is no topic {topic}");
    };
    found
        .partitions()
        .iter()
        .map(|partition| {
            let (low, high) = consumer.fetch_watermarks(topic, partition.id(), REQUEST)?;
            Ok((partition.id(), low, high))
        })
        .collect()
}

fn read_to_the_end(consumer: &BaseConsumer, topic: &str) -> Outcome<Vec<Record>> {
    let mut ahead: HashSet<i32> = HashSet::new();
    let mut assignment = TopicPartitionList::new();
    let ends = watermarks(consumer, topic)?;
    for (partition, low, high) in &ends {
        if low < high {
            ahead.insert(*partition);
            assignment.add_partition_offset(topic, *partition, Offset::Offset(*low))?;
        }
    }
    consumer.assign(&assignment)?;

    let mut records = Vec::new();
    let deadline = Instant::now() + PATIENCE;
    while !ahead.is_empty() {
        if Instant::now() > deadline {
            crate::fail!(
                "{topic} was not read to its end in {PATIENCE:?}: {} records, partitions {ahead:?} left",
                records.len()
            );
        }
        match consumer.poll(Duration::from_millis(200)) {
            None => {}
            Some(Ok(message)) => {
                let position = message.offset() + 1;
                if ends.iter().any(|(p, _, high)| *p == message.partition() && position >= *high) {
                    ahead.remove(&message.partition());
                }
                records.push(record(&message));
            }
            Some(Err(KafkaError::PartitionEOF(partition))) => {
                ahead.remove(&partition);
            }
            Some(Err(error)) => return Err(Failure::from(error).during(format!("read {topic}"))),
        }
    }
    // Records that came after the start belong to the next read.
    records.retain(|record| ends.iter().any(|(p, _, high)| *p == record.partition && record.offset < *high));
    records.sort_by_key(|record| (record.partition, record.offset));
    Ok(records)
}

fn record(message: &impl Message) -> Record {
    Record {
        partition: message.partition(),
        offset: message.offset(),
        timestamp_ms: message.timestamp().to_millis(),
        key: message.key().map(<[u8]>::to_vec),
        payload: message.payload().map(<[u8]>::to_vec),
        headers: message.headers().map_or_else(Vec::new, |headers| {
            headers.iter().map(|h| (h.key.to_owned(), h.value.map(<[u8]>::to_vec))).collect()
        }),
    }
}

/// Remembers the first record that was not acknowledged.
#[derive(Debug, Default)]
struct Refusals(Mutex<Option<KafkaError>>);

impl Refusals {
    fn first(&self) -> Option<KafkaError> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl ClientContext for Refusals {}

impl ProducerContext for Refusals {
    type DeliveryOpaque = ();

    fn delivery(&self, result: &DeliveryResult<'_>, (): ()) {
        if let Err((error, _)) = result {
            self.0.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_with(|| error.clone());
        }
    }
}

fn send(producer: &BaseProducer<Refusals>, topic: &str, draft: &Draft) -> Outcome {
    let headers = draft
        .headers
        .iter()
        .fold(OwnedHeaders::new(), |all, (key, value)| all.insert(Header { key, value: value.as_ref() }));
    let mut record = BaseRecord::<Vec<u8>, Vec<u8>>::to(topic).headers(headers);
    record.key = draft.key.as_ref();
    record.payload = draft.payload.as_ref();
    loop {
        match producer.send(record) {
            Ok(()) => return Ok(()),
            Err((KafkaError::MessageProduction(RDKafkaErrorCode::QueueFull), refused)) => {
                record = refused;
                producer.poll(Duration::from_millis(50));
            }
            Err((error, _)) => return Err(error.into()),
        }
    }
}

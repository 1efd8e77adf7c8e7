//! Reads a topic from its beginning to the end it had when the reading began.
//!
//! The end is frozen first, so that a topic that keeps growing is read in bounded time. Offsets have gaps (transaction
//! markers, compaction), so a partition is done when the position has reached its end or Kafka reports its end, never
//! when a certain offset was seen.

use std::collections::HashMap;
use std::time::Duration;

use rdkafka::client::ClientContext;
use rdkafka::config::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer as _, ConsumerContext};
use rdkafka::error::KafkaError;
use rdkafka::message::{BorrowedMessage, Headers as _, Message as _};
use rdkafka::types::RDKafkaErrorCode;
use rdkafka::{Offset, TopicPartitionList};
use tokio::time::Instant;

use crate::judge::{Content, Record};
use crate::order::{Order, order_of_key};

/// How long a broker may say nothing at all.
const PATIENCE: Duration = Duration::from_secs(30);
/// How long one poll waits.
const POLL: Duration = Duration::from_millis(500);

/// A topic that cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No client could be made of the addresses.
    #[error("KAFKA_BROKERS cannot be used; set it to host:port[,host:port…]")]
    Client(#[source] KafkaError),
    /// The brokers do not answer.
    #[error(
        "cannot reach Kafka at {brokers} (from KAFKA_BROKERS); does it run there, and are host and port right"
    )]
    Unreachable {
        /// Where it was looked for.
        brokers: String,
        /// What librdkafka said.
        source: KafkaError,
    },
    /// Reading stopped with an error.
    #[error("cannot read topic {topic}")]
    Read {
        /// The topic.
        topic: String,
        /// What librdkafka said.
        source: KafkaError,
    },
    /// Reading stopped without one.
    #[error("Kafka sent nothing of topic {topic} for {} s although more is there; check the broker and the leaders of the topic's partitions", PATIENCE.as_secs())]
    Stalled {
        /// The topic.
        topic: String,
    },
}

/// A topic's records up to the end it had at the start.
#[derive(Debug)]
pub enum Reading {
    /// There is no such topic.
    NoTopic,
    /// In offset order within each partition.
    Records(Vec<Record>),
}

/// Reads all of `topic`. Blocks: call it where that is allowed.
///
/// # Errors
/// When the brokers cannot be reached or stop answering.
pub fn read(brokers: &str, topic: &str) -> Result<Reading, Error> {
    let consumer: BaseConsumer<Quiet> = ClientConfig::new()
        .set("bootstrap.servers", brokers)
        // Nothing is committed under it; librdkafka wants a name.
        .set("group.id", "orders-check")
        .set("enable.auto.commit", "false")
        .set("enable.partition.eof", "true")
        .set("auto.offset.reset", "earliest")
        .set("allow.auto.create.topics", "false")
        .create_with_context(Quiet)
        .map_err(Error::Client)?;
    let unreachable = |source| Error::Unreachable { brokers: brokers.to_owned(), source };
    let failed = |source| Error::Read { topic: topic.to_owned(), source };

    let metadata = consumer.fetch_metadata(Some(topic), PATIENCE).map_err(unreachable)?;
    let partitions = metadata.topics().iter().filter(|t| t.name() == topic && t.error().is_none());
    let partitions: Vec<i32> = partitions.flat_map(|t| t.partitions()).map(|p| p.id()).collect();
    if partitions.is_empty() {
        return Ok(Reading::NoTopic);
    }

    let mut from = TopicPartitionList::new();
    let mut ends = HashMap::new();
    for partition in partitions {
        let (low, high) = consumer.fetch_watermarks(topic, partition, PATIENCE).map_err(failed)?;
        if low < high {
            from.add_partition_offset(topic, partition, Offset::Offset(low)).map_err(failed)?;
            ends.insert(partition, high);
        }
    }
    consumer.assign(&from).map_err(failed)?;

    let mut records = Vec::new();
    let mut heard = Instant::now();
    while !ends.is_empty() {
        if heard.elapsed() >= PATIENCE {
            return Err(Error::Stalled { topic: topic.to_owned() });
        }
        let Some(event) = consumer.poll(POLL) else { continue };
        match event {
            Ok(message) => {
                heard = Instant::now();
                let end = ends.get(&message.partition()).copied().unwrap_or_default();
                if message.offset() < end {
                    records.push(Record { partition: message.partition(), content: content(&message) });
                }
                if message.offset() + 1 >= end {
                    ends.remove(&message.partition());
                }
            }
            Err(KafkaError::PartitionEOF(partition)) => {
                ends.remove(&partition);
            }
            // librdkafka tells of a lost connection and goes on by itself.
            Err(e) if passes(&e) => {}
            Err(e) => return Err(failed(e)),
        }
    }
    Ok(Reading::Records(records))
}

/// Logs nothing: the end of a partition is an error to librdkafka, and what is one comes out of `poll`.
struct Quiet;

impl ClientContext for Quiet {
    fn error(&self, _: KafkaError, _: &str) {}
}

impl ConsumerContext for Quiet {}

fn passes(error: &KafkaError) -> bool {
    matches!(
        error.rdkafka_error_code(),
        Some(
            RDKafkaErrorCode::BrokerTransportFailure
                | RDKafkaErrorCode::AllBrokersDown
                | RDKafkaErrorCode::Resolve
                | RDKafkaErrorCode::OperationTimedOut
        )
    )
}

fn content(message: &BorrowedMessage<'_>) -> Content {
    let named = message
        .headers()
        .and_then(|headers| headers.iter().find(|header| header.key == "idempotency-key"))
        .and_then(|header| header.value)
        .and_then(|value| std::str::from_utf8(value).ok())
        .and_then(order_of_key);
    let order = message.payload().and_then(|payload| serde_json::from_slice::<Order>(payload).ok());
    match (named, order) {
        // The key decides where the order is heard, so it must be the customer's.
        (Some(named), Some(order))
            if named == order.facts.order_id && message.key() == Some(order.facts.customer.as_bytes()) =>
        {
            Content::Order(order.facts)
        }
        (Some(named), _) => Content::Garbled(named),
        (None, Some(order)) => Content::Garbled(order.facts.order_id),
        (None, None) => Content::Foreign,
    }
}

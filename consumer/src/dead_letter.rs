//! Writes dead letters: what nobody could apply, kept exactly, in `<topic>.<consumer>.dlt`, or as Spring Kafka does it.
//!
//! A dead letter is acknowledged by every in-sync replica before anything else happens: before its inbox row is marked,
//! and before the record's offset moves. What stops in between is written again, with the same identity: never lost, at
//! worst there twice. When it cannot be written the caller waits and tries again; nothing here gives up or skips.

use std::sync::{Arc, Mutex, PoisonError};

use baton_protocol::dead_letter::{self, Format, Letter};
use rdkafka::ClientContext;
use rdkafka::config::{FromClientConfigAndContext, RDKafkaLogLevel};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::message::{DeliveryResult, Header};
use rdkafka::producer::{BaseRecord, NoCustomPartitioner, Producer, ProducerContext, ThreadedProducer};
use tokio::sync::oneshot;

use crate::{Kafka, Record};

/// Why a dead letter is not there yet.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum Error {
    /// The topic did not take it.
    #[error("dead-letter topic {topic} does not take the record; {}", remedy(.source))]
    Refused {
        topic: String,
        #[source]
        source: KafkaError,
    },
    /// The producer was replaced after a fatal error, and this record with it.
    #[error("the producer of dead letters was replaced before {topic} acknowledged the record")]
    Replaced { topic: String },
    /// The producer cannot be built again after a fatal error.
    #[error("cannot make a new producer of dead letters")]
    Producer(#[source] KafkaError),
    /// A time that no header can say.
    #[error("cannot describe the dead letter")]
    Describe(#[source] dead_letter::Error),
}

/// The producer of one consumer's dead letters.
pub(crate) struct DeadLetters {
    kafka: Kafka,
    client_id: String,
    consumer: String,
    group: String,
    format: Format,
    producer: Mutex<Arc<ThreadedProducer<Context>>>,
}

impl DeadLetters {
    /// Makes the producer; it connects when it is first needed.
    pub(crate) fn new(
        kafka: &Kafka,
        consumer: &str,
        group: &str,
        format: Format,
    ) -> Result<Self, KafkaError> {
        let client_id = format!("baton-consumer-{consumer}-dlt");
        let producer = Mutex::new(Arc::new(producer(kafka, &client_id)?));
        let (consumer, group) = (consumer.to_owned(), group.to_owned());
        Ok(Self { kafka: kafka.clone(), client_id, consumer, group, format, producer })
    }

    /// Where those of a topic go.
    pub(crate) fn topic(&self, original: &str) -> String {
        self.format.topic(original, &self.consumer)
    }

    /// The group whose member gives records up.
    pub(crate) fn group(&self) -> &str {
        &self.group
    }

    /// Writes one dead letter and waits for its acknowledgement, at most about 30 s.
    ///
    /// # Cancel safety
    ///
    /// Dropped half-way, the dead letter may or may not be written.
    pub(crate) async fn write(&self, topic: &str, record: &Record, letter: &Letter<'_>) -> Result<(), Error> {
        let mut headers = Some(record.headers_without(dead_letter::is_of_a_death));
        letter
            .write_as(self.format, &mut |name, value| {
                headers =
                    headers.take().map(|headers| headers.insert(Header { key: name, value: Some(value) }));
            })
            .map_err(Error::Describe)?;
        let (report, acknowledged) = oneshot::channel();
        let mut outgoing = BaseRecord::with_opaque_to(topic, Box::new(report));
        outgoing.key = record.key();
        outgoing.payload = record.payload().map(AsRef::as_ref);
        outgoing.timestamp = record.timestamp_ms();
        outgoing.headers = headers;

        let refused = |source| Error::Refused { topic: topic.to_owned(), source };
        let producer = self.current();
        let sent: Result<(), KafkaError> = producer.send(outgoing).map_err(|(error, _)| error);
        let delivered = match sent {
            Ok(()) => acknowledged.await.map_err(|_| Error::Replaced { topic: topic.to_owned() })?,
            Err(error) => Err(error),
        };
        let Err(error) = delivered else { return Ok(()) };
        let replaced = self.replace_if_dead(&producer);
        // A producer waits for its thread when it is dropped.
        drop(tokio::task::spawn_blocking(move || drop(producer)));
        replaced.and(Err(refused(error)))
    }

    fn current(&self) -> Arc<ThreadedProducer<Context>> {
        Arc::clone(&self.producer.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// An idempotent producer that has met a fatal error never sends again.
    fn replace_if_dead(&self, failed: &Arc<ThreadedProducer<Context>>) -> Result<(), Error> {
        if failed.client().fatal_error().is_none() {
            return Ok(());
        }
        let mut current = self.producer.lock().unwrap_or_else(PoisonError::into_inner);
        if Arc::ptr_eq(&current, failed) {
            *current = Arc::new(producer(&self.kafka, &self.client_id).map_err(Error::Producer)?);
        }
        Ok(())
    }
}

fn producer(kafka: &Kafka, client_id: &str) -> Result<ThreadedProducer<Context>, KafkaError> {
    ThreadedProducer::from_config_and_context(&kafka.producer(client_id), Context)
}

/// What somebody can do about it.
fn remedy(error: &KafkaError) -> &'static str {
    match error.rdkafka_error_code() {
        Some(
            RDKafkaErrorCode::UnknownTopic
            | RDKafkaErrorCode::UnknownTopicOrPartition
            | RDKafkaErrorCode::UnknownPartition,
        ) => "create it, with as many partitions as the original",
        Some(RDKafkaErrorCode::TopicAuthorizationFailed | RDKafkaErrorCode::ClusterAuthorizationFailed) => {
            "allow this consumer's principal to write to it"
        }
        Some(RDKafkaErrorCode::MessageSizeTooLarge | RDKafkaErrorCode::InvalidMessageSize) => {
            "raise its max.message.bytes above the original topic's"
        }
        Some(RDKafkaErrorCode::InvalidTimestamp) => {
            "let it take any timestamp (message.timestamp.before.max.ms, message.timestamp.after.max.ms)"
        }
        Some(RDKafkaErrorCode::PolicyViolation) => "its policy refuses what the original topic took",
        _ => "see that its brokers are up and have enough in-sync replicas",
    }
}

struct Context;

impl ClientContext for Context {
    fn log(&self, level: RDKafkaLogLevel, facility: &str, message: &str) {
        crate::runtime::librdkafka_log(level, facility, message);
    }

    fn error(&self, error: KafkaError, reason: &str) {
        tracing::debug!(%error, reason, "producer of dead letters");
    }
}

impl ProducerContext<NoCustomPartitioner> for Context {
    type DeliveryOpaque = Box<oneshot::Sender<Result<(), KafkaError>>>;

    fn delivery(&self, result: &DeliveryResult<'_>, report: Self::DeliveryOpaque) {
        let result = result.as_ref().map(|_| ()).map_err(|(error, _)| error.clone());
        // Nobody waits any more where a lane was dropped at its deadline.
        let _ = report.send(result);
    }
}

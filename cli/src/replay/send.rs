//! Produces replayed records and waits until all in-sync replicas have them.

use std::time::Duration;

use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::message::{Header, OwnedHeaders};
use rdkafka::producer::{FutureProducer, FutureRecord, Producer as _};

use super::Error;
use super::letters::{Cluster, Full, Quiet};
use baton_protocol::replay::Stamp;

/// How long an acknowledgement may take; well within a claim.
const PATIENCE: Duration = Duration::from_secs(10);

/// One idempotent producer.
pub(super) struct Sender {
    producer: FutureProducer<Quiet>,
}

/// What became of one record that was handed over.
#[derive(Debug)]
pub(super) enum Sent {
    Acknowledged,
    /// It is not on the topic.
    Refused(KafkaError),
    /// It may be on the topic or not.
    Unknown(KafkaError),
}

impl Sender {
    pub(super) fn new(cluster: &Cluster) -> Result<Self, Error> {
        let mut config = cluster.config();
        config
            .set("partitioner", "murmur2_random")
            // The broker's limit decides, not the client's.
            .set("message.max.bytes", "1000000000")
            .set("acks", "all")
            .set("enable.idempotence", "true")
            .set("message.timeout.ms", PATIENCE.as_millis().to_string())
            .set("topic.metadata.propagation.max.ms", "5000");
        Ok(Self { producer: config.create_with_context(Quiet).map_err(Error::Client)? })
    }

    /// Sends records in order, and says what became of each once all of them are told.
    ///
    /// # Cancel safety
    ///
    /// Dropped half-way, some are sent and some not.
    pub(super) async fn send(&self, topic: &str, records: &[(&Full, Stamp<'_>)]) -> Vec<Sent> {
        let mut handed = Vec::with_capacity(records.len());
        for (full, stamp) in records {
            let mut headers = Some(OwnedHeaders::new_with_capacity(full.headers.len() + 4));
            let letter = full.headers.iter().map(|(name, value)| (name.as_str(), value.as_deref()));
            stamp.write(letter, &mut |key, value| {
                headers = headers.take().map(|headers| headers.insert(Header { key, value }));
            });
            let mut record = FutureRecord::<[u8], [u8]>::to(topic);
            record.key = full.key.as_deref();
            record.payload = full.payload.as_deref();
            record.headers = headers;
            handed.push(self.producer.send_result(record).map_err(|(error, _)| error));
        }
        let mut sent = Vec::with_capacity(handed.len());
        for handed in handed {
            sent.push(match handed {
                Err(error) => Sent::Refused(error),
                Ok(report) => match report.await {
                    Ok(Ok(_)) => Sent::Acknowledged,
                    Ok(Err((error, _))) if is_refusal(&error) => Sent::Refused(error),
                    Ok(Err((error, _))) => Sent::Unknown(error),
                    Err(_) => Sent::Unknown(KafkaError::Canceled),
                },
            });
        }
        sent
    }

    /// Ends the producer. Waits for its thread, so off the runtime's.
    pub(super) async fn close(self) {
        let closing = tokio::task::spawn_blocking(move || {
            drop(self.producer.flush(Duration::from_secs(1)));
            drop(self.producer);
        });
        drop(closing.await);
    }
}

/// Whether the record is surely not there.
fn is_refusal(error: &KafkaError) -> bool {
    matches!(
        error.rdkafka_error_code(),
        Some(
            RDKafkaErrorCode::MessageSizeTooLarge
                | RDKafkaErrorCode::InvalidMessageSize
                | RDKafkaErrorCode::UnknownTopic
                | RDKafkaErrorCode::UnknownTopicOrPartition
                | RDKafkaErrorCode::UnknownPartition
                | RDKafkaErrorCode::TopicAuthorizationFailed
                | RDKafkaErrorCode::ClusterAuthorizationFailed
                | RDKafkaErrorCode::InvalidTimestamp
                | RDKafkaErrorCode::InvalidRecord
                | RDKafkaErrorCode::PolicyViolation
        )
    )
}

/// What somebody can do about a refusal.
pub(super) fn remedy(error: &KafkaError) -> &'static str {
    match error.rdkafka_error_code() {
        Some(
            RDKafkaErrorCode::UnknownTopic
            | RDKafkaErrorCode::UnknownTopicOrPartition
            | RDKafkaErrorCode::UnknownPartition,
        ) => "create the topic, with as many partitions as the original",
        Some(RDKafkaErrorCode::TopicAuthorizationFailed | RDKafkaErrorCode::ClusterAuthorizationFailed) => {
            "allow this principal to write to it"
        }
        Some(RDKafkaErrorCode::MessageSizeTooLarge | RDKafkaErrorCode::InvalidMessageSize) => {
            "raise its max.message.bytes"
        }
        _ => "see why the brokers refuse it",
    }
}

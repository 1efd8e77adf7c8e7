//! Reading a topic to its end and writing to one, as blocking calls that have an end of their own.
//!
//! A bounded read stops when the *position* in every partition has reached the end offset that was asked for at its start,
//! or when the broker says that this is the end: offsets have gaps (transaction markers, compaction), so "offset = end − 1"
//! may never come.

use std::collections::HashSet;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use rdkafka::client::ClientContext;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::KafkaError;
use rdkafka::message::{Header, Message, OwnedHeaders};
use rdkafka::producer::{BaseProducer, BaseRecord, DeliveryResult, Producer, ProducerContext};
use rdkafka::types::RDKafkaErrorCode;
use rdkafka::{Offset, TopicPartitionList};
use tokio::time::Instant;

use crate::failure::{Failure, Outcome};
use crate::kafka::{PATIENCE, REQUEST};
use crate::record::{Draft, Record};

/// Partition, first offset, end offset.
pub(crate) fn watermarks(consumer: &BaseConsumer, topic: &str) -> Outcome<Vec<(i32, i64, i64)>> {
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

pub(crate) fn read_to_the_end(consumer: &BaseConsumer, topic: &str) -> Outcome<Vec<Record>> {
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
                records.push(Record::of(&message));
            }
            Some(Err(KafkaError::PartitionEOF(partition))) => {
                ahead.remove(&partition);
            }
            // A connection was lost; librdkafka makes another one, and the deadline bounds how often.
            Some(Err(KafkaError::MessageConsumption(
                RDKafkaErrorCode::AllBrokersDown | RDKafkaErrorCode::BrokerTransportFailure,
            ))) => {}
            Some(Err(error)) => return Err(Failure::from(error).during(format!("read {topic}"))),
        }
    }
    // Records that came after the start belong to the next read.
    records.retain(|record| ends.iter().any(|(p, _, high)| *p == record.partition && record.offset < *high));
    records.sort_by_key(|record| (record.partition, record.offset));
    Ok(records)
}

/// Remembers the first record that was not acknowledged.
#[derive(Debug, Default)]
pub(crate) struct Refusals(Mutex<Option<KafkaError>>);

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

/// Writes in order, in one transaction or in none, and waits until all is acknowledged.
pub(crate) fn write(
    producer: &BaseProducer<Refusals>,
    topic: &str,
    drafts: &[Draft],
    in_transaction: bool,
) -> Outcome {
    if in_transaction {
        producer.init_transactions(PATIENCE)?;
        producer.begin_transaction()?;
    }
    for draft in drafts {
        send(producer, topic, draft)?;
    }
    producer.flush(PATIENCE)?;
    if in_transaction {
        producer.commit_transaction(PATIENCE)?;
    }
    match producer.context().first() {
        None => Ok(()),
        Some(refusal) => crate::fail!("write to {topic}: {refusal}"),
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

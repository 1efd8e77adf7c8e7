//! Reads a dead-letter topic: from offset to offset, without a group's offsets and without leaving any.
//!
//! A partition is done when its position has reached the end asked for, or where Kafka says that there is no more: the last offsets
//! may be markers of transactions, which are never handed out.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use rdkafka::client::ClientContext;
use rdkafka::config::RDKafkaLogLevel;
use rdkafka::consumer::{BaseConsumer, Consumer, ConsumerContext};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::message::{BorrowedMessage, Headers as _};
use rdkafka::{ClientConfig, Message as _, Offset, TopicPartitionList};
use tokio::time::Instant;

use super::Error;
use super::choose::SeenHeaders;

/// How long one question to the brokers may take.
pub(super) const PATIENCE: Duration = Duration::from_secs(15);
/// How long a topic may give nothing before that is an error.
const SILENCE: Duration = Duration::from_secs(30);
const POLL: Duration = Duration::from_millis(100);
/// From how many records between two that are wanted on they are not read through.
const GAP: i64 = 2_000;

/// A Kafka cluster.
#[derive(Clone)]
pub(super) struct Cluster {
    pub(super) brokers: String,
    pub(super) properties: BTreeMap<String, String>,
}

impl Cluster {
    /// The settings that pass through, and where it is.
    pub(super) fn config(&self) -> ClientConfig {
        let mut config = ClientConfig::new();
        for (name, value) in &self.properties {
            config.set(name, value);
        }
        config
            .set("bootstrap.servers", &self.brokers)
            .set("client.id", "baton-replay")
            .set("allow.auto.create.topics", "false");
        config
    }

    /// A reader of whatever partitions it is given; it commits nothing.
    pub(super) fn reader(&self) -> Result<Reader, Error> {
        let mut config = self.config();
        config
            .set("group.id", "baton-replay")
            .set("enable.auto.commit", "false")
            .set("enable.auto.offset.store", "false")
            .set("enable.partition.eof", "true")
            .set("auto.offset.reset", "error")
            .set("fetch.wait.max.ms", "100");
        config.create_with_context(Quiet).map(|consumer| Reader { consumer }).map_err(Error::Client)
    }
}

/// What librdkafka says goes to whoever looks closely; what matters comes back as an error.
pub(super) struct Quiet;

impl ClientContext for Quiet {
    fn log(&self, level: RDKafkaLogLevel, facility: &str, message: &str) {
        tracing::debug!(target: "librdkafka", ?level, facility, "{message}");
    }

    fn error(&self, error: KafkaError, reason: &str) {
        tracing::debug!(target: "librdkafka", %error, reason);
    }
}

impl ConsumerContext for Quiet {}

/// Reads. Its calls block.
pub(super) struct Reader {
    consumer: BaseConsumer<Quiet>,
}

/// A part of a partition: from the first offset on, up to the second and without it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Stretch {
    pub(super) partition: i32,
    pub(super) from: i64,
    pub(super) to: i64,
}

/// The headers of a record, in order.
pub(super) type Headers = Vec<(String, Option<Vec<u8>>)>;

/// A letter that is to be sent.
#[derive(Debug, Clone)]
pub(super) struct Full {
    pub(super) key: Option<Vec<u8>>,
    pub(super) payload: Option<Vec<u8>>,
    pub(super) headers: Headers,
}

impl Reader {
    /// What each partition of a topic holds at this moment. None: there is no such topic.
    pub(super) fn extent(&self, topic: &str) -> Result<Option<Vec<Stretch>>, Error> {
        let metadata = self.consumer.fetch_metadata(Some(topic), PATIENCE).map_err(Error::Brokers)?;
        let Some(found) = metadata.topics().iter().find(|found| found.name() == topic) else {
            return Ok(None);
        };
        match found.error().map(|error| KafkaError::MetadataFetch(error.into())) {
            None => {}
            Some(error) if is_missing(&error) => return Ok(None),
            Some(source) => return Err(Error::Read { topic: topic.to_owned(), source }),
        }
        let mut stretches = Vec::with_capacity(found.partitions().len());
        for partition in found.partitions() {
            let partition = partition.id();
            let (from, to) =
                self.consumer.fetch_watermarks(topic, partition, PATIENCE).map_err(Error::Brokers)?;
            stretches.push(Stretch { partition, from, to });
        }
        Ok(Some(stretches))
    }

    /// Shows every record of these stretches, in order within a partition.
    pub(super) fn each(
        &self,
        topic: &str,
        stretches: &[Stretch],
        mut show: impl FnMut(&BorrowedMessage<'_>),
    ) -> Result<(), Error> {
        let failed = |source| Error::Read { topic: topic.to_owned(), source };
        let mut open: HashMap<i32, i64> = HashMap::new();
        let mut list = TopicPartitionList::new();
        for stretch in stretches.iter().filter(|stretch| stretch.from < stretch.to) {
            let from = Offset::Offset(stretch.from);
            list.add_partition_offset(topic, stretch.partition, from).map_err(failed)?;
            open.insert(stretch.partition, stretch.to);
        }
        if open.is_empty() {
            return Ok(());
        }
        self.consumer.assign(&list).map_err(failed)?;
        // A pause outlives an assignment.
        self.consumer.resume(&list).map_err(failed)?;
        let mut heard = Instant::now();
        while !open.is_empty() {
            let done = match self.consumer.poll(POLL) {
                None if heard.elapsed() > SILENCE => {
                    return Err(Error::Silent { topic: topic.to_owned(), seconds: SILENCE.as_secs() });
                }
                None => continue,
                Some(Ok(message)) => {
                    let (partition, offset) = (message.partition(), message.offset());
                    let Some(to) = open.get(&partition).copied() else { continue };
                    if offset < to {
                        show(&message);
                    }
                    (offset + 1 >= to).then_some(partition)
                }
                Some(Err(KafkaError::PartitionEOF(partition))) => Some(partition),
                Some(Err(error)) if is_passing(&error) => {
                    tracing::debug!(%error, topic, "reading goes on");
                    continue;
                }
                Some(Err(source)) => return Err(failed(source)),
            };
            heard = Instant::now();
            if let Some(partition) = done
                && open.remove(&partition).is_some()
            {
                let mut list = TopicPartitionList::new();
                list.add_partition(topic, partition);
                self.consumer.pause(&list).map_err(failed)?;
            }
        }
        self.consumer.unassign().map_err(failed)
    }

    /// The records at these places, as far as they are there.
    pub(super) fn full(
        &self,
        topic: &str,
        places: &BTreeSet<(i32, i64)>,
    ) -> Result<HashMap<(i32, i64), Full>, Error> {
        let mut found = HashMap::with_capacity(places.len());
        for stretches in passes(places) {
            self.each(topic, &stretches, |message| {
                let place = (message.partition(), message.offset());
                if places.contains(&place)
                    && let Some(headers) = headers(message)
                {
                    let headers =
                        headers.into_iter().map(|(name, value)| (name.to_owned(), value.map(<[u8]>::to_vec)));
                    let full = Full {
                        key: message.key().map(<[u8]>::to_vec),
                        payload: message.payload().map(<[u8]>::to_vec),
                        headers: headers.collect(),
                    };
                    found.insert(place, full);
                }
            })?;
        }
        Ok(found)
    }
}

/// A record's headers; none where a name is not text, which rdkafka offers no way to ask, and panics on.
pub(super) fn headers<'m>(message: &'m BorrowedMessage<'_>) -> Option<SeenHeaders<'m>> {
    match message.headers() {
        None => Some(Vec::new()),
        Some(headers) => catch_unwind(AssertUnwindSafe(|| {
            headers.iter().map(|header| (header.key, header.value)).collect()
        }))
        .ok(),
    }
}

/// The stretches that hold these places, a pass after the other, with at most one of each partition in a pass: large gaps are
/// not read through.
fn passes(places: &BTreeSet<(i32, i64)>) -> Vec<Vec<Stretch>> {
    let mut passes: Vec<Vec<Stretch>> = Vec::new();
    let mut of_partition: HashMap<i32, usize> = HashMap::new();
    for &(partition, offset) in places {
        let pass = of_partition.entry(partition).or_insert(0);
        let open = passes
            .get_mut(*pass)
            .and_then(|pass| pass.iter_mut().find(|stretch: &&mut Stretch| stretch.partition == partition));
        match open {
            Some(stretch) if offset - stretch.to <= GAP => stretch.to = offset + 1,
            open => {
                if open.is_some() {
                    *pass += 1;
                }
                if passes.len() <= *pass {
                    passes.push(Vec::new());
                }
                passes[*pass].push(Stretch { partition, from: offset, to: offset + 1 });
            }
        }
    }
    passes
}

fn is_missing(error: &KafkaError) -> bool {
    matches!(
        error.rdkafka_error_code(),
        Some(RDKafkaErrorCode::UnknownTopicOrPartition | RDKafkaErrorCode::UnknownTopic)
    )
}

/// What librdkafka tries again by itself.
fn is_passing(error: &KafkaError) -> bool {
    matches!(
        error.rdkafka_error_code(),
        Some(
            RDKafkaErrorCode::BrokerTransportFailure
                | RDKafkaErrorCode::AllBrokersDown
                | RDKafkaErrorCode::OperationTimedOut
                | RDKafkaErrorCode::RequestTimedOut
                | RDKafkaErrorCode::NotLeaderForPartition
                | RDKafkaErrorCode::LeaderNotAvailable
                | RDKafkaErrorCode::Resolve
                | RDKafkaErrorCode::CoordinatorNotAvailable
                | RDKafkaErrorCode::NotCoordinator
                // Nothing is committed, so the group does not matter.
                | RDKafkaErrorCode::GroupAuthorizationFailed
        )
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_read_in_stretches_and_large_gaps_are_not() {
        let stretch = |partition, from, to| Stretch { partition, from, to };
        let places = BTreeSet::from([(0, 5), (0, 7), (0, 9_000), (1, 3), (1, 3 + GAP), (2, 1)]);
        assert_eq!(
            passes(&places),
            [
                vec![stretch(0, 5, 8), stretch(1, 3, 4 + GAP), stretch(2, 1, 2)],
                vec![stretch(0, 9_000, 9_001)]
            ]
        );
        assert!(passes(&BTreeSet::new()).is_empty());
    }
}

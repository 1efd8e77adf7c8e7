//! The broker's side of a run: how many records a topic has, and when they were appended by the broker's own clock.

use std::time::Duration;

use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::client::DefaultClientContext;
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::error::RDKafkaErrorCode;
use rdkafka::message::{BorrowedMessage, Headers as _};
use rdkafka::{ClientConfig, Message as _, Offset, TopicPartitionList};

use crate::lab::Result;

const PARTITIONS: i32 = 4;
const PATIENCE: Duration = Duration::from_secs(30);

/// The end of each partition at some moment.
pub(crate) type Ends = Vec<i64>;

pub(crate) struct Broker {
    brokers: String,
    consumer: BaseConsumer,
}

impl Broker {
    pub(crate) fn new(brokers: &str) -> Result<Self> {
        let consumer = ClientConfig::new()
            .set("bootstrap.servers", brokers)
            .set("group.id", "bench")
            .set("enable.auto.commit", "false")
            .create()?;
        Ok(Self { brokers: brokers.to_owned(), consumer })
    }

    fn admin(&self) -> Result<AdminClient<DefaultClientContext>> {
        Ok(ClientConfig::new().set("bootstrap.servers", &self.brokers).create()?)
    }

    /// Makes a topic whose records carry the time at which they were appended.
    pub(crate) async fn make_topic(&self, topic: &str) -> Result<()> {
        let new = NewTopic::new(topic, PARTITIONS, TopicReplication::Fixed(1))
            .set("message.timestamp.type", "LogAppendTime")
            .set("max.message.bytes", "10000000");
        for made in self.admin()?.create_topics([&new], &AdminOptions::new()).await? {
            made.map_err(|(topic, code)| format!("cannot create topic {topic}: {code}"))?;
        }
        Ok(())
    }

    /// Deletes a topic; one that is not there is none.
    pub(crate) async fn drop_topic(&self, topic: &str) -> Result<()> {
        for dropped in self.admin()?.delete_topics(&[topic], &AdminOptions::new()).await? {
            match dropped {
                Ok(_) | Err((_, RDKafkaErrorCode::UnknownTopicOrPartition)) => {}
                Err((topic, code)) => return Err(format!("cannot delete topic {topic}: {code}").into()),
            }
        }
        Ok(())
    }

    pub(crate) fn ends(&self, topic: &str) -> Result<Ends> {
        (0..PARTITIONS).map(|p| Ok(self.consumer.fetch_watermarks(topic, p, PATIENCE)?.1)).collect()
    }

    /// Milliseconds from the first to the last append between two moments.
    pub(crate) fn append_span(&self, topic: &str, from: &Ends, to: &Ends) -> Result<f64> {
        let mut first = i64::MAX;
        let mut last = i64::MIN;
        for (partition, (from, to)) in (0..).zip(from.iter().zip(to)).filter(|(_, (from, to))| from < to) {
            first = first.min(self.appended_at(topic, partition, *from)?);
            last = last.max(self.appended_at(topic, partition, to - 1)?);
        }
        #[expect(clippy::cast_precision_loss, reason = "milliseconds of a benchmark")]
        Ok((last - first).max(1) as f64)
    }

    fn appended_at(&self, topic: &str, partition: i32, offset: i64) -> Result<i64> {
        let mut assignment = TopicPartitionList::new();
        assignment.add_partition_offset(topic, partition, Offset::Offset(offset))?;
        self.consumer.assign(&assignment)?;
        let message = self.consumer.poll(PATIENCE).ok_or("no record came back")??;
        let at = appended(&message)?;
        drop(message);
        self.consumer.unassign()?;
        Ok(at)
    }

    /// The append times of all records between two moments, ascending, in milliseconds.
    pub(crate) fn append_times(&self, topic: &str, from: &Ends, to: &Ends) -> Result<Vec<i64>> {
        let mut times = Vec::new();
        self.each(topic, from, to, |message| {
            times.push(appended(message)?);
            Ok(())
        })?;
        times.sort_unstable();
        Ok(times)
    }

    /// The append time of each record between two moments, in milliseconds since 1970, with the number that its payload
    /// begins with.
    pub(crate) fn numbered(&self, topic: &str, from: &Ends, to: &Ends) -> Result<Vec<(usize, i64)>> {
        let mut times = Vec::new();
        self.each(topic, from, to, |message| {
            let number = message.payload().and_then(|payload| payload.first_chunk::<8>());
            let number = u64::from_be_bytes(*number.ok_or("a record without a number")?);
            times.push((usize::try_from(number)?, appended(message)?));
            Ok(())
        })?;
        Ok(times)
    }

    /// Who published what when, between two moments.
    pub(crate) fn records(&self, topic: &str, from: &Ends, to: &Ends) -> Result<Vec<Record>> {
        let mut records = Vec::new();
        self.each(topic, from, to, |message| {
            let headers = message.headers().ok_or("a record without headers")?;
            let source = headers.iter().find(|header| header.key == "ce_source").and_then(|h| h.value);
            records.push(Record {
                key: String::from_utf8_lossy(message.key().unwrap_or_default()).into_owned(),
                source: String::from_utf8_lossy(source.unwrap_or_default()).into_owned(),
                at: appended(message)?,
            });
            Ok(())
        })?;
        Ok(records)
    }

    fn each(
        &self,
        topic: &str,
        from: &Ends,
        to: &Ends,
        mut take: impl FnMut(&BorrowedMessage<'_>) -> Result<()>,
    ) -> Result<()> {
        let mut assignment = TopicPartitionList::new();
        for (partition, (from, _)) in (0..).zip(from.iter().zip(to)).filter(|(_, (from, to))| from < to) {
            assignment.add_partition_offset(topic, partition, Offset::Offset(*from))?;
        }
        let mut wanted = between(from, to);
        if wanted > 0 {
            self.consumer.assign(&assignment)?;
        }
        while wanted > 0 {
            let message = self.consumer.poll(PATIENCE).ok_or("no record came back")??;
            // What came later than that moment is on the topic as well.
            if to.get(usize::try_from(message.partition())?).is_some_and(|end| message.offset() < *end) {
                take(&message)?;
                wanted -= 1;
            }
        }
        self.consumer.unassign()?;
        Ok(())
    }
}

/// What a record says about who published it when.
pub(crate) struct Record {
    pub(crate) key: String,
    pub(crate) source: String,
    /// When it was appended, in milliseconds since 1970.
    pub(crate) at: i64,
}

fn appended(message: &BorrowedMessage<'_>) -> Result<i64> {
    message.timestamp().to_millis().ok_or_else(|| "a record without a timestamp".into())
}

/// How many records came between two moments.
pub(crate) fn between(from: &Ends, to: &Ends) -> i64 {
    to.iter().zip(from).map(|(to, from)| to - from).sum()
}

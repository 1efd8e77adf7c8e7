//! One record as Kafka handed it over: owned, immutable, cheap to pass around.
//!
//! Kafka's bytes are authoritative. Headers are kept as librdkafka's own copy of them, so that a dead letter carries the
//! same bytes, also where a header's name is not text; such a record shows no headers and has no identity.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use baton_protocol::dead_letter::TimestampType;
use baton_protocol::replay;
use bytes::Bytes;
use rdkafka::message::{BorrowedMessage, Header, Headers, OwnedHeaders};
use rdkafka::{Message, Timestamp};
use time::OffsetDateTime;

/// One record of a topic.
#[derive(Clone)]
pub struct Record {
    topic: Arc<str>,
    /// Where it was read from a replay topic: the topic that it belongs to.
    original_topic: Option<Arc<str>>,
    partition: i32,
    offset: i64,
    timestamp_ms: Option<i64>,
    timestamp_type: TimestampType,
    key: Option<Bytes>,
    payload: Option<Bytes>,
    headers: Kept,
    size: usize,
}

/// A record's headers and whether their names are text.
#[derive(Clone)]
enum Kept {
    None,
    Text(Arc<OwnedHeaders>),
    Unreadable(Arc<OwnedHeaders>),
}

/// What one record costs beside its bytes, so that many small ones are counted too.
const OVERHEAD: usize = 256;

impl Record {
    pub(crate) fn copy(message: &BorrowedMessage<'_>, topic: Arc<str>) -> Self {
        let (headers, headers_size) = match message.headers() {
            None => (Kept::None, 0),
            Some(headers) => {
                // rdkafka offers no way to ask, and panics on a name that is not UTF-8.
                let size = catch_unwind(AssertUnwindSafe(|| {
                    headers.iter().map(|header| size_of_header(&header)).sum()
                }));
                let kept = Arc::new(headers.detach());
                size.map_or_else(
                    |_| (Kept::Unreadable(Arc::clone(&kept)), 0),
                    |size| (Kept::Text(Arc::clone(&kept)), size),
                )
            }
        };
        let key = message.key().map(Bytes::copy_from_slice);
        let payload = message.payload().map(Bytes::copy_from_slice);
        let size = OVERHEAD
            + headers_size
            + key.as_ref().map_or(0, Bytes::len)
            + payload.as_ref().map_or(0, Bytes::len);
        Self {
            topic,
            original_topic: None,
            partition: message.partition(),
            offset: message.offset(),
            timestamp_ms: message.timestamp().to_millis(),
            timestamp_type: match message.timestamp() {
                Timestamp::NotAvailable => TimestampType::None,
                Timestamp::CreateTime(_) => TimestampType::Create,
                Timestamp::LogAppendTime(_) => TimestampType::LogAppend,
            },
            key,
            payload,
            headers,
            size,
        }
    }

    /// A record that was kept elsewhere, as it was.
    pub(crate) fn restored(
        topic: Arc<str>,
        partition: i32,
        offset: i64,
        timestamp_ms: Option<i64>,
        key: Option<Bytes>,
        payload: Option<Bytes>,
        headers: &[(String, Option<Vec<u8>>)],
    ) -> Self {
        let size = OVERHEAD
            + key.as_ref().map_or(0, Bytes::len)
            + payload.as_ref().map_or(0, Bytes::len)
            + headers
                .iter()
                .map(|(name, value)| name.len() + value.as_ref().map_or(0, Vec::len))
                .sum::<usize>();
        let kept =
            headers.iter().fold(OwnedHeaders::new_with_capacity(headers.len()), |kept, (name, value)| {
                kept.insert(Header { key: name, value: value.as_deref() })
            });
        let headers = if headers.is_empty() { Kept::None } else { Kept::Text(Arc::new(kept)) };
        let timestamp_type = timestamp_ms.map_or(TimestampType::None, |_| TimestampType::Create);
        Self {
            topic,
            original_topic: None,
            partition,
            offset,
            timestamp_ms,
            timestamp_type,
            key,
            payload,
            headers,
            size,
        }
    }

    /// The same, read by `consumer`, whose replay topics belong to others.
    pub(crate) fn read_by(mut self, consumer: &str) -> Self {
        self.original_topic = replay::original_topic(&self.topic, consumer).map(Arc::from);
        self
    }

    #[cfg(test)]
    pub(crate) fn bare(topic: &str, partition: i32, offset: i64) -> Self {
        let topic = topic.into();
        Self {
            topic,
            original_topic: None,
            partition,
            offset,
            timestamp_ms: None,
            timestamp_type: TimestampType::None,
            key: None,
            payload: None,
            headers: Kept::None,
            size: OVERHEAD,
        }
    }

    #[cfg(test)]
    pub(crate) fn set_key(&mut self, key: Option<Vec<u8>>) {
        self.key = key.map(Bytes::from);
    }

    pub(crate) fn shared_key(&self) -> Option<&Bytes> {
        self.key.as_ref()
    }

    /// The topic that it was read from.
    #[must_use]
    pub fn topic(&self) -> &str {
        &self.topic
    }

    /// The topic that the message belongs to: of a record that an operator replays the one that it died on first, else the one that
    /// it was read from.
    #[must_use]
    pub fn original_topic(&self) -> &str {
        self.original_topic.as_deref().unwrap_or(&self.topic)
    }

    /// Whether it was read from the replay topic.
    pub(crate) fn is_from_replay_topic(&self) -> bool {
        self.original_topic.is_some()
    }

    /// The partition that it was read from.
    #[must_use]
    pub fn partition(&self) -> i32 {
        self.partition
    }

    /// Its offset within the partition.
    #[must_use]
    pub fn offset(&self) -> i64 {
        self.offset
    }

    /// Its timestamp in milliseconds since 1970; none where Kafka has none.
    #[must_use]
    pub fn timestamp_ms(&self) -> Option<i64> {
        self.timestamp_ms
    }

    /// What its timestamp is the time of; not kept of a record that was set aside.
    pub(crate) fn timestamp_type(&self) -> TimestampType {
        self.timestamp_type
    }

    /// Its timestamp; none where Kafka has none or where it lies outside the years ±9999.
    #[must_use]
    pub fn timestamp(&self) -> Option<OffsetDateTime> {
        OffsetDateTime::from_unix_timestamp_nanos(i128::from(self.timestamp_ms?) * 1_000_000).ok()
    }

    /// Its key, the ordering scope; an empty key is a key.
    #[must_use]
    pub fn key(&self) -> Option<&[u8]> {
        self.key.as_deref()
    }

    /// Its value; none is a tombstone, which an empty one is not.
    #[must_use]
    pub fn payload(&self) -> Option<&Bytes> {
        self.payload.as_ref()
    }

    /// Its headers in order, repeats included; a value may be null.
    pub fn headers(&self) -> impl Iterator<Item = (&str, Option<&[u8]>)> {
        let headers = match &self.headers {
            Kept::Text(headers) => Some(headers.as_ref()),
            Kept::None | Kept::Unreadable(_) => None,
        };
        headers.into_iter().flat_map(|headers| headers.iter()).map(|header| (header.key, header.value))
    }

    /// The value of the first header of that name; none if there is no such header or its value is null.
    #[must_use]
    pub fn header(&self, name: &str) -> Option<&[u8]> {
        self.headers().find(|(given, _)| *given == name).and_then(|(_, value)| value)
    }

    /// Bytes that it holds in memory.
    pub(crate) fn size(&self) -> usize {
        self.size
    }

    /// False where a header's name is not UTF-8: [`headers`](Self::headers) shows none then.
    pub(crate) fn headers_are_text(&self) -> bool {
        !matches!(self.headers, Kept::Unreadable(_))
    }

    /// Its headers as they came, but for those whose name `drop` picks out.
    pub(crate) fn headers_without(&self, drop: fn(&str) -> bool) -> OwnedHeaders {
        match &self.headers {
            Kept::None => OwnedHeaders::new(),
            Kept::Unreadable(headers) => OwnedHeaders::clone(headers),
            Kept::Text(headers) if headers.iter().any(|header| drop(header.key)) => headers
                .iter()
                .filter(|header| !drop(header.key))
                .fold(OwnedHeaders::new_with_capacity(headers.count()), OwnedHeaders::insert),
            Kept::Text(headers) => OwnedHeaders::clone(headers),
        }
    }
}

fn size_of_header(header: &Header<'_, &[u8]>) -> usize {
    header.key.len() + header.value.map_or(0, <[u8]>::len)
}

impl fmt::Debug for Record {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Record")
            .field("topic", &self.topic)
            .field("partition", &self.partition)
            .field("offset", &self.offset)
            .field("payload_bytes", &self.payload.as_ref().map(Bytes::len))
            .finish_non_exhaustive()
    }
}

//! Records of one's own making, with the headers that a relay writes.

use std::fmt::Display;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use baton_protocol::envelope::{Envelope, Outgoing};
use baton_protocol::report::chain;
use bytes::Bytes;
use serde::Serialize;
use time::OffsetDateTime;
use uuid::Uuid;

use crate::Record;

/// A record in the making; from [`message`].
#[derive(Debug, Clone)]
#[must_use]
pub struct Draft {
    topic: String,
    key: Option<String>,
    id: Uuid,
    message_type: Option<String>,
    idempotency_key: Option<String>,
    headers: Vec<(String, serde_json::Value)>,
    partition: i32,
    offset: i64,
    timestamp: Option<OffsetDateTime>,
}

/// A message as a producer enqueues it and a relay publishes it: a CloudEvent with an id of its own, which is its identity unless
/// it is given an idempotency key. At offset 0 of partition 0, without a timestamp, and so never too old.
///
/// ```
/// use baton_consumer::testing;
///
/// let placed = testing::message("orders", "customer-7").message_type("order.placed").idempotency_key("order-7");
/// let record = placed.clone().json(&serde_json::json!({"cents": 100}));
/// assert_eq!(record.header("ce_type"), Some(&b"order.placed"[..]));
/// let same_key_other_payload = placed.json(&serde_json::json!({"cents": 200}));
/// assert_ne!(record.payload(), same_key_other_payload.payload());
/// ```
pub fn message(topic: impl Into<String>, key: impl Into<String>) -> Draft {
    Draft {
        topic: topic.into(),
        key: Some(key.into()),
        id: Uuid::new_v4(),
        message_type: None,
        idempotency_key: None,
        headers: Vec::new(),
        partition: 0,
        offset: 0,
        timestamp: None,
    }
}

impl Draft {
    /// Without a key: no order is asked for.
    pub fn keyless(mut self) -> Self {
        self.key = None;
        self
    }

    /// `ce_type`. Default: the topic, as a relay has it.
    pub fn message_type(mut self, message_type: impl Into<String>) -> Self {
        self.message_type = Some(message_type.into());
        self
    }

    /// What it is deduplicated by. Default: its own id, which every draft has and its clones share.
    pub fn idempotency_key(mut self, key: impl Into<String>) -> Self {
        self.idempotency_key = Some(key.into());
        self
    }

    /// One more header, byte for byte. One of the envelope's names takes its place, where a relay lets it.
    pub fn header(mut self, name: impl Into<String>, value: impl AsRef<[u8]>) -> Self {
        self.headers.push((name.into(), serde_json::json!({ "base64": STANDARD.encode(value) })));
        self
    }

    /// Where it was read from.
    pub fn at(mut self, partition: i32, offset: i64) -> Self {
        self.partition = partition;
        self.offset = offset;
        self
    }

    /// When it was enqueued, as the record's timestamp says.
    pub fn timestamp(mut self, timestamp: OffsetDateTime) -> Self {
        self.timestamp = Some(timestamp);
        self
    }

    /// With this value, as JSON.
    ///
    /// # Panics
    ///
    /// As [`bytes`](Self::bytes), and when the value cannot be written as JSON.
    #[must_use]
    pub fn json<T: Serialize + ?Sized>(self, payload: &T) -> Record {
        self.bytes(serde_json::to_vec(payload).unwrap_or_else(refused))
    }

    /// With these bytes.
    ///
    /// # Panics
    ///
    /// When the outbox would refuse a header of that name (`ce_id`, say, which has a column of its own).
    #[must_use]
    pub fn bytes(self, payload: impl Into<Vec<u8>>) -> Record {
        self.record(Some(payload.into().into()))
    }

    /// A tombstone.
    ///
    /// # Panics
    ///
    /// As [`bytes`](Self::bytes).
    #[must_use]
    pub fn tombstone(self) -> Record {
        self.record(None)
    }

    fn record(self, payload: Option<Bytes>) -> Record {
        let timestamp_ms =
            self.timestamp.and_then(|at| i64::try_from(at.unix_timestamp_nanos() / 1_000_000).ok());
        let own = serde_json::to_string(&self.headers).unwrap_or_else(refused);
        let outgoing = Outgoing {
            id: self.id,
            idempotency_key: self.idempotency_key.as_deref(),
            topic: &self.topic,
            r#type: self.message_type.as_deref(),
            has_payload: payload.is_some(),
            created_ms: timestamp_ms.unwrap_or_default(),
            headers: Some(&own),
        };
        let mut headers = Vec::new();
        Envelope::cloud_events("/testing", "application/json", false)
            .write(&outgoing, &mut |name, value| {
                headers.push((name.to_owned(), value.map(<[u8]>::to_vec)));
            })
            .unwrap_or_else(|error| refused(chain(&error)));
        let (topic, key) = (self.topic.into(), self.key.map(Into::into));
        Record::restored(topic, self.partition, self.offset, timestamp_ms, key, payload, &headers)
    }
}

fn refused<T>(error: impl Display) -> T {
    panic!("no such record can be: {error}")
}

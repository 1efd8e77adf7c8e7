//! What a handler is given: a decoded payload and the record it came from.

use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use time::OffsetDateTime;

use crate::Record;

/// One message on its way to a handler, on one attempt.
pub struct Delivery<P> {
    payload: P,
    record: Arc<Record>,
    idempotency_key: String,
    message_type: Option<String>,
    attempt: u32,
}

impl<P> Delivery<P> {
    pub(crate) fn new(
        payload: P,
        record: Arc<Record>,
        idempotency_key: String,
        message_type: Option<String>,
    ) -> Self {
        Self { payload, record, idempotency_key, message_type, attempt: 1 }
    }

    pub(crate) fn set_attempt(&mut self, attempt: u32) {
        self.attempt = attempt;
    }

    /// The decoded payload.
    #[must_use]
    pub fn payload(&self) -> &P {
        &self.payload
    }

    /// The payload's bytes; none is a tombstone.
    #[must_use]
    pub fn raw(&self) -> Option<&Bytes> {
        self.record.payload()
    }

    /// The whole record.
    #[must_use]
    pub fn record(&self) -> &Record {
        &self.record
    }

    /// The same on every retry, redelivery and replay of this message: hand it to whatever else is called.
    #[must_use]
    pub fn idempotency_key(&self) -> &str {
        &self.idempotency_key
    }

    /// The message's type: `ce_type`, or Debezium's `eventType`.
    #[must_use]
    pub fn message_type(&self) -> Option<&str> {
        self.message_type.as_deref()
    }

    /// 1 for the first attempt. Counted by this process: a redelivery to another one starts at 1.
    #[must_use]
    pub fn attempt(&self) -> u32 {
        self.attempt
    }

    /// The topic that the message belongs to.
    #[must_use]
    pub fn topic(&self) -> &str {
        self.record.topic()
    }

    /// The partition that it was read from.
    #[must_use]
    pub fn partition(&self) -> i32 {
        self.record.partition()
    }

    /// Its offset within the partition.
    #[must_use]
    pub fn offset(&self) -> i64 {
        self.record.offset()
    }

    /// The record's timestamp: when the message was enqueued.
    #[must_use]
    pub fn timestamp(&self) -> Option<OffsetDateTime> {
        self.record.timestamp()
    }

    /// The record's key, the ordering scope.
    #[must_use]
    pub fn key(&self) -> Option<&[u8]> {
        self.record.key()
    }

    /// The record's headers in order, repeats included; a value may be null.
    pub fn headers(&self) -> impl Iterator<Item = (&str, Option<&[u8]>)> {
        self.record.headers()
    }

    /// The value of the first header of that name; none if there is no such header or its value is null.
    #[must_use]
    pub fn header(&self, name: &str) -> Option<&[u8]> {
        self.record.header(name)
    }
}

impl<P> fmt::Debug for Delivery<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Delivery")
            .field("idempotency_key", &self.idempotency_key)
            .field("message_type", &self.message_type)
            .field("attempt", &self.attempt)
            .field("record", &self.record)
            .finish_non_exhaustive()
    }
}

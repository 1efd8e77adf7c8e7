//! What a handler is given: a decoded payload and the record it came from.

use std::fmt;
use std::sync::Arc;

use baton_protocol::envelope::Identity;
use bytes::Bytes;
use time::OffsetDateTime;

use crate::{Decode, Failure, Record};

/// One message on its way to a handler, on one attempt.
pub struct Delivery<P> {
    payload: P,
    record: Arc<Record>,
    identity: Arc<Identity>,
    attempt: u32,
}

impl<P: Decode> Delivery<P> {
    /// The one place where payloads are decoded. A panic of a [`Decode`] is left to whoever catches the handler's.
    pub(crate) fn decode(
        record: Arc<Record>,
        identity: Arc<Identity>,
        attempt: u32,
    ) -> Result<Self, Failure> {
        let payload = P::decode(&record).map_err(Failure::undecodable)?;
        Ok(Self { payload, record, identity, attempt })
    }
}

impl<P> Delivery<P> {
    /// The same one for a handler that takes another payload.
    pub(crate) fn decode_as<Q: Decode>(&self) -> Result<Delivery<Q>, Failure> {
        Delivery::decode(Arc::clone(&self.record), Arc::clone(&self.identity), self.attempt)
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
        &self.identity.key
    }

    /// The message's type: `ce_type`, or Debezium's `eventType`.
    #[must_use]
    pub fn message_type(&self) -> Option<&str> {
        self.identity.r#type.as_deref()
    }

    /// 1 for the first attempt; one more than what failed before, those of an outage left out, so that a number may come twice. Until
    /// the record is set aside this process counts, and a redelivery starts at 1; from then on its row does. Behind a lease
    /// [`Lease::attempt`](crate::inbox::Lease::attempt) is the durable number.
    #[must_use]
    pub fn attempt(&self) -> u32 {
        self.attempt
    }

    /// The topic that the message belongs to, also where it comes again by way of the replay topic
    /// ([`Record::topic`] is the one that it was read from).
    #[must_use]
    pub fn topic(&self) -> &str {
        self.record.original_topic()
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
            .field("idempotency_key", &self.identity.key)
            .field("message_type", &self.identity.r#type)
            .field("attempt", &self.attempt)
            .field("record", &self.record)
            .finish_non_exhaustive()
    }
}

//! A message, and how one is put together.

use serde::Serialize;
use uuid::Uuid;

use crate::Error;
use crate::headers::{Header, HeaderValue};

/// What is published as one record. Made by [`Message::builder`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Message {
    pub(crate) id: Option<Uuid>,
    pub(crate) idempotency_key: Option<String>,
    pub(crate) topic: String,
    pub(crate) key: Option<String>,
    pub(crate) r#type: Option<String>,
    pub(crate) payload: Option<Vec<u8>>,
    pub(crate) headers: Vec<Header>,
}

impl Message {
    /// A message for a topic: 1 to 249 of `a-z A-Z 0-9 . _ -`, but not `.` or `..`.
    ///
    /// The builder ends with what the record's value is: [`Builder::json`], [`Builder::bytes`] or
    /// [`Builder::tombstone`].
    pub fn builder(topic: impl Into<String>) -> Builder {
        Builder {
            message: Self {
                id: None,
                idempotency_key: None,
                topic: topic.into(),
                key: None,
                r#type: None,
                payload: None,
                headers: Vec::new(),
            },
        }
    }
}

/// A message that has no value yet.
#[derive(Debug, Clone)]
#[must_use = "a builder does nothing until it is given a value: json, bytes or tombstone"]
pub struct Builder {
    message: Message,
}

impl Builder {
    /// The record's key, at most 64 KiB: what it is about, and the scope in which order is kept. An empty key is a key.
    /// Default: none, and no order.
    pub fn key(mut self, key: impl Into<String>) -> Self {
        self.message.key = Some(key.into());
        self
    }

    /// What happened, as `ce_type` says it, 1 byte to 1 KiB. Default: the topic.
    pub fn r#type(mut self, r#type: impl Into<String>) -> Self {
        self.message.r#type = Some(r#type.into());
        self
    }

    /// What consumers deduplicate by, 1 byte to 1 KiB: the same for everything that must take effect once, also when
    /// your own request is tried again. Default: the id, which is new for every row.
    pub fn idempotency_key(mut self, key: impl Into<String>) -> Self {
        self.message.idempotency_key = Some(key.into());
        self
    }

    /// The message's id, `ce_id` on the record. Default: a random one for each time the message is enqueued. One that
    /// you give is not checked to be new: two rows with the same id are one message to whoever deduplicates.
    pub fn id(mut self, id: Uuid) -> Self {
        self.message.id = Some(id);
        self
    }

    /// Adds a header. Order and repeats are kept. `ce_id`, `ce_type`, `ce_specversion` and `idempotency-key` are
    /// refused, for they have methods here; any other takes the place of what the relay would write.
    ///
    /// The value is text, bytes, or [`HeaderValue::Null`].
    pub fn header(mut self, name: impl Into<String>, value: impl Into<HeaderValue>) -> Self {
        self.message.headers.push((name.into(), value.into()));
        self
    }

    /// The value is this, written as JSON; at most 64 MiB.
    ///
    /// # Errors
    ///
    /// When the value cannot be written as JSON.
    pub fn json<T: Serialize + ?Sized>(self, value: &T) -> Result<Message, Error> {
        let payload = serde_json::to_vec(value)
            .map_err(|source| Error::Encode { topic: self.message.topic.clone(), source })?;
        Ok(self.bytes(payload))
    }

    /// The value is these bytes, at most 64 MiB. Say what they are in a `content-type` header, unless they are JSON.
    #[must_use]
    pub fn bytes(mut self, payload: impl Into<Vec<u8>>) -> Message {
        self.message.payload = Some(payload.into());
        self.message
    }

    /// The value is null: what the key stands for is gone.
    #[must_use]
    pub fn tombstone(self) -> Message {
        self.message
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn a_payload_that_is_no_json_is_an_error_that_names_the_topic() {
        let no_json = BTreeMap::from([((1, 2), 3)]);
        let error = Message::builder("orders").json(&no_json).unwrap_err();
        assert!(matches!(&error, Error::Encode { topic, .. } if topic == "orders"), "{error}");
    }

    #[test]
    fn a_message_has_what_it_was_given_and_a_tombstone_has_no_payload() {
        let message = Message::builder("t").key("").header("h", "1").header("h", "2").json("text").unwrap();
        assert_eq!(message.payload.as_deref(), Some(br#""text""#.as_slice()));
        assert_eq!((message.key.as_deref(), message.headers.len()), (Some(""), 2));
        assert_eq!(Message::builder("t").bytes([]).payload, Some(vec![]));
        assert_eq!(Message::builder("t").tombstone().payload, None);
    }
}

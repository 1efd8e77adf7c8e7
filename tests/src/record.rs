//! Records as tests compare them, and as they write them.

use rdkafka::message::{Headers, Message};

/// One record, as any consumer sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// The partition it lies in.
    pub partition: i32,
    /// Its offset there.
    pub offset: i64,
    /// Its timestamp in milliseconds since 1970.
    pub timestamp_ms: Option<i64>,
    /// `None` = null.
    pub key: Option<Vec<u8>>,
    /// `None` = null, a tombstone.
    pub payload: Option<Vec<u8>>,
    /// In order, repeats included.
    pub headers: Vec<(String, Option<Vec<u8>>)>,
}

impl Record {
    /// What rdkafka lends, kept.
    pub(crate) fn of(message: &impl Message) -> Self {
        Self {
            partition: message.partition(),
            offset: message.offset(),
            timestamp_ms: message.timestamp().to_millis(),
            key: message.key().map(<[u8]>::to_vec),
            payload: message.payload().map(<[u8]>::to_vec),
            headers: message.headers().map_or_else(Vec::new, |headers| {
                headers.iter().map(|h| (h.key.to_owned(), h.value.map(<[u8]>::to_vec))).collect()
            }),
        }
    }

    /// The last header of that name, if it is text.
    #[must_use]
    pub fn header(&self, name: &str) -> Option<&str> {
        let (_, value) = self.headers.iter().rev().find(|(given, _)| given == name)?;
        std::str::from_utf8(value.as_deref()?).ok()
    }

    /// All headers as text, for comparisons.
    #[must_use]
    pub fn header_texts(&self) -> Vec<(String, Option<String>)> {
        let text = |bytes: &Vec<u8>| String::from_utf8_lossy(bytes).into_owned();
        self.headers.iter().map(|(name, value)| (name.clone(), value.as_ref().map(text))).collect()
    }

    /// The key as text; null and what is no UTF-8 give `None`.
    #[must_use]
    pub fn key_text(&self) -> Option<&str> {
        std::str::from_utf8(self.key.as_deref()?).ok()
    }

    /// The payload as text; null and what is no UTF-8 give `None`.
    #[must_use]
    pub fn payload_text(&self) -> Option<&str> {
        std::str::from_utf8(self.payload.as_deref()?).ok()
    }
}

/// One record to write. Build it with [`Draft::new`].
#[derive(Debug, Clone)]
pub struct Draft {
    pub(crate) key: Option<Vec<u8>>,
    pub(crate) payload: Option<Vec<u8>>,
    pub(crate) headers: Vec<(String, Option<Vec<u8>>)>,
}

impl Draft {
    /// A record with key and payload and no headers.
    #[must_use]
    pub fn new(key: &str, payload: impl Into<Vec<u8>>) -> Self {
        Self { key: Some(key.into()), payload: Some(payload.into()), headers: Vec::new() }
    }

    /// One more header.
    #[must_use]
    pub fn header(self, name: &str, value: &str) -> Self {
        self.header_bytes(name, value.as_bytes())
    }

    /// One more header, whose value is no text.
    #[must_use]
    pub fn header_bytes(mut self, name: &str, value: &[u8]) -> Self {
        self.headers.push((name.to_owned(), Some(value.into())));
        self
    }
}

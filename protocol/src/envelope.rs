//! Which headers a record carries: CloudEvents 1.0, Kafka binding, binary mode.
//!
//! ```text
//! ce_specversion  1.0
//! ce_id           the message's id
//! ce_source       a setting, by default /<database>
//! ce_type         the message's type, or its topic
//! ce_time         when it was enqueued, only where the setting asks for it
//! content-type    a setting, by default application/json; none on a tombstone
//! idempotency-key only where it differs from the id
//! …               the row's own headers, byte for byte, in order
//! ```
//!
//! A row's header takes the place of the envelope's of the same name; `ce_id`, `ce_type`, `ce_specversion` and
//! `idempotency-key` have columns of their own, so the table refuses them as headers, and so does this module: a
//! second identity on a record would be a forged one. The table's constraints are authoritative for the shape of the
//! row's headers; what does not have it is an error here and never a record without its headers.
//!
//! Names and formats are public: golden tests hold them.

mod identity;
mod row_headers;
#[cfg(test)]
mod tests;

use uuid::Uuid;

pub use identity::{Identity, identity};

use crate::rfc3339;

const SPECVERSION: &str = "ce_specversion";
const ID: &str = "ce_id";
const SOURCE: &str = "ce_source";
const TYPE: &str = "ce_type";
const TIME: &str = "ce_time";
const CONTENT_TYPE: &str = "content-type";
const IDEMPOTENCY_KEY: &str = "idempotency-key";

/// How a relay turns messages into records' headers. Built once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Envelope {
    source: Box<str>,
    content_type: Box<str>,
    time: Time,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Time {
    Written,
    Omitted,
}

/// What the headers of one message are made of. Its key, payload and timestamp go into the record itself.
#[derive(Debug, Clone, Copy)]
pub struct Outgoing<'a> {
    /// The message's id.
    pub id: Uuid,
    /// The producer's idempotency key, where it gave one.
    pub idempotency_key: Option<&'a str>,
    /// The topic it goes to.
    pub topic: &'a str,
    /// The CloudEvents type; none is the topic.
    pub r#type: Option<&'a str>,
    /// Whether there is a payload; without one the record is a tombstone.
    pub has_payload: bool,
    /// When it was enqueued, milliseconds since 1970.
    pub created_ms: i64,
    /// The row's `headers`, as Postgres prints jsonb.
    pub headers: Option<&'a str>,
}

/// Why the headers of a message cannot be written. Nothing has been called back then.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The row's headers are neither an object nor an array of pairs, or a value is none.
    #[error(
        "headers of message {id} are not an object or an array of pairs with string, null or {{\"base64\": …}} values; put the constraints of outbox.message back in force"
    )]
    Headers {
        /// The message's id.
        id: Uuid,
        /// Where the text departs from it.
        #[source]
        source: serde_json::Error,
    },
    /// A header of the row has the name of something that has a column of its own.
    #[error("header {name:?} of message {id} has a column of its own and is refused as a header")]
    Reserved {
        /// The message's id.
        id: Uuid,
        /// The header's name.
        name: String,
    },
    /// The time of the row cannot be said in RFC 3339.
    #[error("created_at of message {id} ({created_ms} ms since 1970) lies outside the years 0 to 9999")]
    Time {
        /// The message's id.
        id: Uuid,
        /// The time.
        created_ms: i64,
    },
}

impl Envelope {
    /// CloudEvents in binary mode. `source` is `ce_source`, `content_type` that of every payload that says no other;
    /// `with_time` adds `ce_time`, which repeats the record's own timestamp.
    #[must_use]
    pub fn cloud_events(source: &str, content_type: &str, with_time: bool) -> Self {
        let time = if with_time { Time::Written } else { Time::Omitted };
        Self { source: source.into(), content_type: content_type.into(), time }
    }

    /// The headers whose bytes are the same on every record that has them: `ce_specversion` and `ce_source` on all,
    /// `content-type` on all but tombstones, unless a row's header takes their place.
    #[must_use]
    pub fn constant_headers(&self) -> [(&'static str, &[u8]); 3] {
        [
            (SPECVERSION, b"1.0".as_slice()),
            (SOURCE, self.source.as_bytes()),
            (CONTENT_TYPE, self.content_type.as_bytes()),
        ]
    }

    /// Calls back once for each header of the message's record, in order; `None` is a header with a null value.
    ///
    /// A message without headers of its own costs no allocation and no parsing.
    ///
    /// # Errors
    ///
    /// When the row is not what the table's constraints say. Nothing has been called back then.
    pub fn write(
        &self,
        message: &Outgoing<'_>,
        header: &mut impl FnMut(&str, Option<&[u8]>),
    ) -> Result<(), Error> {
        let id = message.id;
        let row = match message.headers {
            Some(text) => row_headers::parse(text).map_err(|source| Error::Headers { id, source })?,
            None => Vec::new(),
        };
        if let Some((name, _)) = row.iter().find(|(name, _)| is_reserved(name)) {
            return Err(Error::Reserved { id, name: name.clone().into_owned() });
        }
        let replaced = |name: &str| row.iter().any(|(given, _)| given == name);
        let time = match self.time {
            Time::Written if !replaced(TIME) => {
                let created_ms = message.created_ms;
                Some(rfc3339::from_millis(created_ms).ok_or(Error::Time { id, created_ms })?)
            }
            Time::Written | Time::Omitted => None,
        };
        let mut id_buffer = Uuid::encode_buffer();
        let id_text: &str = id.hyphenated().encode_lower(&mut id_buffer);

        header(SPECVERSION, Some(b"1.0"));
        header(ID, Some(id_text.as_bytes()));
        if !replaced(SOURCE) {
            header(SOURCE, Some(self.source.as_bytes()));
        }
        header(TYPE, Some(message.r#type.unwrap_or(message.topic).as_bytes()));
        if let Some(time) = time {
            header(TIME, Some(time.as_bytes()));
        }
        if message.has_payload && !replaced(CONTENT_TYPE) {
            header(CONTENT_TYPE, Some(self.content_type.as_bytes()));
        }
        if let Some(key) = message.idempotency_key.filter(|key| *key != id_text) {
            header(IDEMPOTENCY_KEY, Some(key.as_bytes()));
        }
        for (name, value) in &row {
            header(name, value.as_deref());
        }
        Ok(())
    }
}

fn is_reserved(name: &str) -> bool {
    matches!(name, SPECVERSION | ID | TYPE | IDEMPOTENCY_KEY)
}

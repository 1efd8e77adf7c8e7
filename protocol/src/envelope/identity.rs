//! Which identity a consumer reads from a record's headers.

use super::{ID, IDEMPOTENCY_KEY, SOURCE, TYPE};

/// Debezium's outbox router writes these two.
const DEBEZIUM_ID: &str = "id";
const DEBEZIUM_TYPE: &str = "eventType";

/// The longest key, in bytes: what the inbox takes, and the longest `idempotency_key` of the outbox.
const KEY_LIMIT: usize = 1024;

/// What a record is deduplicated by.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Identity {
    /// One of, in this order: the text of `idempotency-key`; `<ce_source>#<ce_id>`, where `%` and `#` of the source are
    /// written `%25` and `%23`, so that two different pairs never give one key; the text of Debezium's `id`.
    /// From 1 to 1024 bytes.
    pub key: String,
    /// The text of `ce_type`, else of Debezium's `eventType`, if the record has one.
    pub r#type: Option<String>,
}

/// Reads the identity of a record, the same however often and by whatever way it travels, because only what its
/// producer wrote counts: of a repeated header the first, whatever was appended on the way.
///
/// `None` when the record names none: the consumer must not guess one. That is also so when the header that decides is
/// there but cannot be a key (null, empty, not UTF-8, with a NUL, over 1024 bytes): falling back to a weaker identity
/// would apply twice what its producer meant to be one.
#[must_use]
pub fn identity<'a>(headers: impl IntoIterator<Item = (&'a str, Option<&'a [u8]>)>) -> Option<Identity> {
    let mut found = Found::default();
    for (name, value) in headers {
        let place = match name {
            IDEMPOTENCY_KEY => &mut found.idempotency_key,
            SOURCE => &mut found.source,
            ID => &mut found.id,
            DEBEZIUM_ID => &mut found.debezium_id,
            TYPE => &mut found.r#type,
            DEBEZIUM_TYPE => &mut found.debezium_type,
            _ => continue,
        };
        place.get_or_insert(value);
    }
    let r#type = found.r#type.or(found.debezium_type).and_then(text).map(str::to_owned);
    Some(Identity { key: found.key()?, r#type })
}

/// The first value of each header that counts: not there, null, or bytes.
#[derive(Default)]
struct Found<'a> {
    idempotency_key: Option<Option<&'a [u8]>>,
    source: Option<Option<&'a [u8]>>,
    id: Option<Option<&'a [u8]>>,
    debezium_id: Option<Option<&'a [u8]>>,
    r#type: Option<Option<&'a [u8]>>,
    debezium_type: Option<Option<&'a [u8]>>,
}

impl Found<'_> {
    fn key(&self) -> Option<String> {
        let key = if let Some(key) = self.idempotency_key {
            text(key)?.to_owned()
        } else if let (Some(source), Some(id)) = (self.source, self.id) {
            format!("{}#{}", text(source)?.replace('%', "%25").replace('#', "%23"), text(id)?)
        } else {
            text(self.debezium_id?)?.to_owned()
        };
        (key.len() <= KEY_LIMIT).then_some(key)
    }
}

/// A value that can stand in a text column of the inbox and says something.
fn text(value: Option<&[u8]>) -> Option<&str> {
    let text = std::str::from_utf8(value?).ok()?;
    (!text.is_empty() && !text.contains('\0')).then_some(text)
}

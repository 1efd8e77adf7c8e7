//! From a record's bytes to what a handler takes.
//!
//! What cannot be decoded is never tried again: the same bytes fail the same way. The record goes to the dead-letter
//! topic with cause `undecodable`, byte for byte.

use bytes::Bytes;
use serde::de::DeserializeOwned;

use crate::{BoxError, Record};

/// What a handler takes as its payload. Implement it for formats other than JSON, or for an enum whose variant the
/// record's `ce_type` decides.
pub trait Decode: Sized + Send + Sync + 'static {
    /// Reads the payload. The whole record is at hand: its headers may say how. Called once for each attempt.
    ///
    /// # Errors
    ///
    /// When the record cannot be understood; the text becomes `dlt-error`.
    fn decode(record: &Record) -> Result<Self, BoxError>;
}

/// A JSON payload. A tombstone is read as JSON `null`, so `Json<Option<T>>` takes tombstones and `Json<T>` refuses them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Json<T>(pub T);

impl<T: DeserializeOwned + Send + Sync + 'static> Decode for Json<T> {
    fn decode(record: &Record) -> Result<Self, BoxError> {
        from_json(record.payload().map(Bytes::as_ref)).map(Self)
    }
}

fn from_json<T: DeserializeOwned>(payload: Option<&[u8]>) -> Result<T, BoxError> {
    match payload {
        Some(payload) => serde_json::from_slice(payload)
            .map_err(|error| format!("payload is not the expected JSON: {error}").into()),
        None => serde_json::from_str("null").map_err(|error| {
            format!("payload is null (a tombstone), which only Json<Option<_>> takes: {error}").into()
        }),
    }
}

/// The bytes as they are; none is a tombstone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Raw(pub Option<Bytes>);

impl Decode for Raw {
    fn decode(record: &Record) -> Result<Self, BoxError> {
        Ok(Self(record.payload().cloned()))
    }
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;

    #[derive(Debug, PartialEq, Deserialize)]
    struct Order {
        id: u32,
    }

    #[test]
    fn a_tombstone_is_none_for_an_option_and_refused_for_anything_else() {
        assert_eq!(from_json::<Option<Order>>(None).unwrap(), None);
        assert!(from_json::<Order>(None).unwrap_err().to_string().contains("tombstone"));
    }

    #[test]
    fn an_empty_payload_is_no_json() {
        assert!(from_json::<Option<Order>>(Some(b"")).is_err());
    }

    #[test]
    fn json_is_read_and_what_is_not_json_is_refused() {
        assert_eq!(from_json::<Order>(Some(br#"{"id":7}"#)).unwrap(), Order { id: 7 });
        assert!(from_json::<Order>(Some(b"{\"id\":7} and more")).is_err());
        assert!(from_json::<Order>(Some(b"\xff")).is_err());
    }
}

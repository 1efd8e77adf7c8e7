//! Headers as the `headers` column holds them: an array of pairs, so that order and repeats are kept.
//!
//! A value is written as a string where jsonb can hold it, else as `{"base64": "…"}`; the record carries the same bytes
//! either way.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::ser::{Serialize, SerializeMap as _, Serializer};

/// A header's name and value.
pub(crate) type Header = (String, HeaderValue);

/// The value of a header.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HeaderValue {
    /// A header that is there and has no value.
    Null,
    /// These bytes.
    Bytes(Vec<u8>),
}

impl From<&str> for HeaderValue {
    fn from(text: &str) -> Self {
        Self::Bytes(text.into())
    }
}

impl From<String> for HeaderValue {
    fn from(text: String) -> Self {
        Self::Bytes(text.into())
    }
}

impl From<&[u8]> for HeaderValue {
    fn from(bytes: &[u8]) -> Self {
        Self::Bytes(bytes.into())
    }
}

impl<const N: usize> From<&[u8; N]> for HeaderValue {
    fn from(bytes: &[u8; N]) -> Self {
        Self::Bytes(bytes.into())
    }
}

impl From<Vec<u8>> for HeaderValue {
    fn from(bytes: Vec<u8>) -> Self {
        Self::Bytes(bytes)
    }
}

impl<T: Into<Self>> From<Option<T>> for HeaderValue {
    fn from(value: Option<T>) -> Self {
        value.map_or(Self::Null, Into::into)
    }
}

impl Serialize for HeaderValue {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let bytes = match self {
            Self::Null => return serializer.serialize_unit(),
            Self::Bytes(bytes) => bytes,
        };
        match std::str::from_utf8(bytes) {
            // jsonb cannot hold a NUL.
            Ok(text) if !text.contains('\0') => serializer.serialize_str(text),
            Ok(_) | Err(_) => {
                let mut object = serializer.serialize_map(Some(1))?;
                object.serialize_entry("base64", &STANDARD.encode(bytes))?;
                object.end()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use baton_protocol::envelope::{Envelope, Outgoing};
    use proptest::prelude::*;
    use uuid::Uuid;

    use super::*;

    fn value() -> impl Strategy<Value = HeaderValue> {
        prop_oneof![
            Just(HeaderValue::Null),
            any::<String>().prop_map(HeaderValue::from),
            "[a\0]{0,4}".prop_map(HeaderValue::from),
            any::<Vec<u8>>().prop_map(HeaderValue::from),
        ]
    }

    proptest! {
        #[test]
        fn a_record_carries_the_headers_that_were_given(headers in proptest::collection::vec(("[a-c]{0,2}", value()), 0..5)) {
            let text = serde_json::to_string(&headers).unwrap();
            prop_assert!(!text.contains(r"\u0000"), "jsonb cannot hold a NUL: {text}");
            let message = Outgoing {
                id: Uuid::nil(),
                idempotency_key: None,
                topic: "t",
                r#type: None,
                has_payload: false,
                created_ms: 0,
                headers: Some(&text),
            };
            let mut record = Vec::new();
            let mut header = |name: &str, value: Option<&[u8]>| {
                record.push((name.to_owned(), value.map_or(HeaderValue::Null, HeaderValue::from)));
            };
            Envelope::cloud_events("/test", "application/json", false).write(&message, &mut header).unwrap();
            prop_assert_eq!(record.split_off(4), headers);
        }
    }

    #[test]
    fn a_value_is_made_from_whatever_is_at_hand() {
        let bytes = || HeaderValue::Bytes(b"v".to_vec());
        assert_eq!(HeaderValue::from("v"), bytes());
        assert_eq!(HeaderValue::from("v".to_owned()), bytes());
        assert_eq!(HeaderValue::from(b"v"), bytes());
        assert_eq!(HeaderValue::from(b"v".as_slice()), bytes());
        assert_eq!(HeaderValue::from(b"v".to_vec()), bytes());
        assert_eq!(HeaderValue::from(Some("v")), bytes());
        assert_eq!(HeaderValue::from(None::<&str>), HeaderValue::Null);
    }
}

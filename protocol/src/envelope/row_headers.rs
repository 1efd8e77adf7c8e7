//! The `headers` column: an object, or an array of pairs where order or repeats matter; `null` is none.
//!
//! A value is a string (its UTF-8 bytes), `null` (a header with a null value), or `{"base64": "…"}` (any bytes; white
//! space is skipped, because Postgres' `encode(…, 'base64')` breaks lines). Order is kept as the text has it.

use std::borrow::Cow;
use std::fmt;

use base64::Engine as _;
use base64::alphabet::STANDARD;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use serde::de::{self, Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};

/// A header's name and value.
pub(super) type Header<'a> = (Cow<'a, str>, Option<Cow<'a, [u8]>>);

/// The headers of one row, from the text of its jsonb.
pub(super) fn parse(text: &str) -> Result<Vec<Header<'_>>, serde_json::Error> {
    serde_json::from_str::<Headers<'_>>(text).map(|headers| headers.0)
}

/// As Postgres decodes it: padding is required, bits left over are not looked at.
const BASE64: GeneralPurpose = GeneralPurpose::new(
    &STANDARD,
    GeneralPurposeConfig::new()
        .with_decode_allow_trailing_bits(true)
        .with_decode_padding_mode(DecodePaddingMode::RequireCanonical),
);

struct Headers<'a>(Vec<Header<'a>>);

impl<'de> Deserialize<'de> for Headers<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(HeadersVisitor)
    }
}

struct HeadersVisitor;

impl<'de> Visitor<'de> for HeadersVisitor {
    type Value = Headers<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object, an array of pairs, or null")
    }

    fn visit_unit<E: de::Error>(self) -> Result<Self::Value, E> {
        Ok(Headers(Vec::new()))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut headers = Vec::new();
        while let Some((Text(name), Value(value))) = map.next_entry()? {
            headers.push((name, value));
        }
        Ok(Headers(headers))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut pairs: A) -> Result<Self::Value, A::Error> {
        let mut headers = Vec::new();
        while let Some((Text(name), Value(value))) = pairs.next_element()? {
            headers.push((name, value));
        }
        Ok(Headers(headers))
    }
}

struct Text<'a>(Cow<'a, str>);

impl<'de> Deserialize<'de> for Text<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_str(TextVisitor)
    }
}

struct TextVisitor;

impl<'de> Visitor<'de> for TextVisitor {
    type Value = Text<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string")
    }

    fn visit_borrowed_str<E: de::Error>(self, text: &'de str) -> Result<Self::Value, E> {
        Ok(Text(Cow::Borrowed(text)))
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Self::Value, E> {
        Ok(Text(Cow::Owned(text.to_owned())))
    }
}

struct Value<'a>(Option<Cow<'a, [u8]>>);

impl<'de> Deserialize<'de> for Value<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ValueVisitor)
    }
}

struct ValueVisitor;

impl<'de> Visitor<'de> for ValueVisitor {
    type Value = Value<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string, null, or {\"base64\": \"…\"}")
    }

    fn visit_unit<E: de::Error>(self) -> Result<Self::Value, E> {
        Ok(Value(None))
    }

    fn visit_borrowed_str<E: de::Error>(self, text: &'de str) -> Result<Self::Value, E> {
        Ok(Value(Some(Cow::Borrowed(text.as_bytes()))))
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Self::Value, E> {
        Ok(Value(Some(Cow::Owned(text.as_bytes().to_vec()))))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let Some((Text(name), Text(encoded))) = map.next_entry()? else {
            return Err(de::Error::invalid_length(0, &self));
        };
        if name != "base64" || map.next_key::<Text<'_>>()?.is_some() {
            return Err(de::Error::custom("expected \"base64\" and nothing else"));
        }
        let digits: Vec<u8> =
            encoded.bytes().filter(|b| !matches!(b, b' ' | b'\t' | b'\r' | b'\n')).collect();
        BASE64.decode(digits).map(|bytes| Value(Some(Cow::Owned(bytes)))).map_err(de::Error::custom)
    }
}

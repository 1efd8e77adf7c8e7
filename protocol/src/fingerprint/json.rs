//! The one spelling of a JSON value.
//!
//! UTF-8 JSON without whitespace. Members stand in the order of their names' code points. Strings escape `"`, `\` and what is
//! below U+0020 (`\b`, `\t`, `\n`, `\f`, `\r`, else `\u00xx` in lower case) and nothing else. Zero is `0`; any other number
//! is its digits without zeros at either end, and the power of ten behind an `e` unless that is 0: `17`, `1e2`, `-15e-1`. So
//! a number takes no more space than it was given, however large it is.
//!
//! serde_json reads; it is asked for one level at a time, so that numbers keep their text (`f64` would make one of
//! 9007199254740993 and 9007199254740992). A byte is read once for each level that it stands in, so at most [`DEEPEST`] times.

use std::borrow::Cow;
use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;

/// How many objects and arrays may stand within each other: as many as serde_json reads into a type.
pub const DEEPEST: usize = 127;

/// Why a payload cannot be compared as JSON.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// It is no JSON, or no JSON alone: half a value, bytes behind it, a string that is not Unicode.
    #[error("payload is no JSON, so it cannot be compared as JSON")]
    NotJson(#[source] serde_json::Error),
    /// A member has two values, and readers differ in which of them counts.
    #[error("payload has the member {name:?} more than once in one object, so it cannot be compared as JSON")]
    Repeated {
        /// The member's name.
        name: String,
    },
    /// It is nested deeper than [`DEEPEST`].
    #[error("payload is nested more than {DEEPEST} levels deep, so it cannot be compared as JSON")]
    Deep,
    /// The power of ten of a number, written without zeros at its end, is beyond 64 bits.
    #[error("payload holds a number whose exponent has more than 64 bits, so it cannot be compared as JSON")]
    Exponent,
}

impl From<serde_json::Error> for Error {
    fn from(error: serde_json::Error) -> Self {
        Self::NotJson(error)
    }
}

/// The canonical spelling of a JSON text. Two texts have the same one when their values are the same, and only then.
///
/// ```
/// use baton_protocol::fingerprint::canonical_json;
///
/// assert_eq!(canonical_json(br#" {"b": 10.50, "a": "\u00e9\/"} "#)?, r#"{"a":"é/","b":105e-1}"#);
/// assert_eq!(canonical_json(b"[1, 1.0, 1e0, -0, 1e999999999]")?, "[1,1,1,0,1e999999999]");
/// # Ok::<(), baton_protocol::fingerprint::Error>(())
/// ```
///
/// # Errors
///
/// [`enum@Error`]: what is not exactly one JSON value, repeats a member, or cannot be held.
pub fn canonical_json(payload: &[u8]) -> Result<String, Error> {
    let value: &RawValue = serde_json::from_slice(payload)?;
    let mut text = String::with_capacity(payload.len());
    write_value(value, DEEPEST, &mut text)?;
    Ok(text)
}

/// `levels` is how many more may be nested in here.
fn write_value(value: &RawValue, levels: usize, to: &mut String) -> Result<(), Error> {
    let text = value.get();
    let deeper = levels.checked_sub(1).ok_or(Error::Deep);
    match text.as_bytes().first() {
        Some(b'{') => write_object(serde_json::from_str(text)?, deeper?, to),
        Some(b'[') => write_array(&serde_json::from_str::<Vec<&RawValue>>(text)?, deeper?, to),
        Some(b'"') => write_string(&serde_json::from_str::<Text<'_>>(text)?, to),
        Some(b'-' | b'0'..=b'9') => write_number(text, to),
        _ => {
            to.push_str(text);
            Ok(())
        }
    }
}

fn write_object(Members(mut members): Members<'_>, levels: usize, to: &mut String) -> Result<(), Error> {
    members.sort_unstable_by(|(a, _), (b, _)| a.cmp(b));
    if let Some([(name, _), _]) = members.array_windows().find(|[(a, _), (b, _)]| a == b) {
        return Err(Error::Repeated { name: name.0.to_string() });
    }
    to.push('{');
    for (place, (name, value)) in members.iter().enumerate() {
        if place > 0 {
            to.push(',');
        }
        write_string(name, to)?;
        to.push(':');
        write_value(value, levels, to)?;
    }
    to.push('}');
    Ok(())
}

fn write_array(values: &[&RawValue], levels: usize, to: &mut String) -> Result<(), Error> {
    to.push('[');
    for (place, value) in values.iter().enumerate() {
        if place > 0 {
            to.push(',');
        }
        write_value(value, levels, to)?;
    }
    to.push(']');
    Ok(())
}

fn write_string(Text(text): &Text<'_>, to: &mut String) -> Result<(), Error> {
    to.push_str(&serde_json::to_string(text)?);
    Ok(())
}

/// The text is a number by JSON's grammar.
fn write_number(text: &str, to: &mut String) -> Result<(), Error> {
    let (sign, text) = text.strip_prefix('-').map_or(("", text), |text| ("-", text));
    let (mantissa, exponent) = text.split_once(['e', 'E']).unwrap_or((text, "0"));
    let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    let digits = [whole, fraction].concat();
    let upper = digits.trim_end_matches('0');
    let significant = upper.trim_start_matches('0');
    if significant.is_empty() {
        to.push('0');
        return Ok(());
    }
    // What is refused is the value, so however it is spelled.
    let shift = (digits.len() - upper.len()) as i128 - fraction.len() as i128;
    let exponent =
        exponent.parse().ok().and_then(|given: i128| i64::try_from(given.checked_add(shift)?).ok());
    let exponent = exponent.ok_or(Error::Exponent)?;
    to.extend([sign, significant]);
    if exponent != 0 {
        to.extend(["e", &exponent.to_string()]);
    }
    Ok(())
}

/// A string by its characters, borrowed where nothing in it is escaped.
#[derive(Deserialize, PartialEq, Eq, PartialOrd, Ord)]
struct Text<'a>(#[serde(borrow)] Cow<'a, str>);

/// An object's members as they come, repeats included.
struct Members<'a>(Vec<(Text<'a>, &'a RawValue)>);

impl<'a> Deserialize<'a> for Members<'a> {
    fn deserialize<D: Deserializer<'a>>(deserializer: D) -> Result<Self, D::Error> {
        struct Reader;

        impl<'a> Visitor<'a> for Reader {
            type Value = Members<'a>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'a>>(self, mut map: A) -> Result<Members<'a>, A::Error> {
                let mut members = Vec::new();
                while let Some(member) = map.next_entry()? {
                    members.push(member);
                }
                Ok(Members(members))
            }
        }

        deserializer.deserialize_map(Reader)
    }
}

//! Every configuration key, with its type and default.
//!
//! These structs are the only list there is: the known keys are what `Config::default()` serialises to, and a test keeps
//! `baton.example.toml` equal to them.

use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;
use std::num::{NonZeroU32, NonZeroUsize};
use std::str::FromStr;
use std::time::Duration;

use baton_relay::Settings;
use baton_relay::settings::Listen;
use serde::de::Visitor;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::duration::Span;
use super::size::Size;
use crate::args::LogFormat;

/// The whole configuration, as the file spells it.
#[derive(Clone, Default, Serialize, Deserialize)]
pub(crate) struct Config {
    pub(crate) outbox: Database,
    pub(crate) inbox: Database,
    pub(crate) kafka: Kafka,
    pub(crate) relay: Relay,
    pub(crate) lease: Lease,
    pub(crate) poll: Poll,
    pub(crate) publish: Publish,
    pub(crate) park: Park,
    pub(crate) http: Http,
    pub(crate) log: Log,
}

/// `[outbox]` and `[inbox]`.
#[derive(Clone, Default, Serialize, Deserialize)]
pub(crate) struct Database {
    pub(crate) database_url: Option<String>,
}

/// `[kafka]`.
#[derive(Clone, Default, Serialize, Deserialize)]
pub(crate) struct Kafka {
    pub(crate) brokers: Option<String>,
    pub(crate) properties: BTreeMap<String, Property>,
}

/// `[relay]`.
#[derive(Clone, Serialize, Deserialize)]
pub(crate) struct Relay {
    /// `None`: made up anew by each process.
    pub(crate) owner: Option<String>,
    /// `None`: `/<database>`.
    pub(crate) source: Option<String>,
    pub(crate) content_type: String,
    #[serde(deserialize_with = "from_text")]
    pub(crate) ce_time: bool,
    pub(crate) drain_deadline: Span,
}

/// `[lease]`.
#[derive(Clone, Serialize, Deserialize)]
pub(crate) struct Lease {
    pub(crate) ttl: Span,
    /// `None`: a fifth of `ttl`.
    pub(crate) margin: Option<Span>,
}

impl Lease {
    /// The margin that applies: the one set, or a fifth of the TTL.
    pub(crate) fn margin(&self) -> Span {
        self.margin.unwrap_or(Span(self.ttl.0 / 5))
    }
}

/// `[poll]`.
#[derive(Clone, Serialize, Deserialize)]
pub(crate) struct Poll {
    pub(crate) floor: Span,
    pub(crate) ceiling: Span,
}

/// `[publish]`.
#[derive(Clone, Serialize, Deserialize)]
pub(crate) struct Publish {
    pub(crate) page_rows: Count,
    pub(crate) in_flight_rows: Count,
    pub(crate) in_flight_bytes: Size,
    pub(crate) in_flight_bytes_total: Size,
}

/// `[park]`.
#[derive(Clone, Serialize, Deserialize)]
pub(crate) struct Park {
    pub(crate) attempts: Attempts,
    pub(crate) base: Span,
    pub(crate) cap: Span,
    pub(crate) rows: Count,
    pub(crate) keep: Span,
    pub(crate) dead_for: Term,
}

/// `[http]`.
#[derive(Clone, Default, Serialize, Deserialize)]
pub(crate) struct Http {
    pub(crate) listen: Address,
}

/// `[log]`.
#[derive(Clone, Default, Serialize, Deserialize)]
pub(crate) struct Log {
    #[serde(deserialize_with = "from_text")]
    pub(crate) format: LogFormat,
}

// The relay's own defaults are the defaults; they are not said twice.
impl Default for Relay {
    fn default() -> Self {
        let Settings { source, content_type, ce_time, drain_deadline, .. } = Settings::default();
        Self { owner: None, source, content_type, ce_time, drain_deadline: Span(drain_deadline) }
    }
}

impl Default for Lease {
    fn default() -> Self {
        Self { ttl: Span(Settings::default().lease_ttl), margin: None }
    }
}

impl Default for Poll {
    fn default() -> Self {
        let Settings { poll_floor, poll_ceiling, .. } = Settings::default();
        Self { floor: Span(poll_floor), ceiling: Span(poll_ceiling) }
    }
}

impl Default for Publish {
    fn default() -> Self {
        let Settings { page_rows, in_flight_rows, in_flight_bytes, in_flight_bytes_total, .. } =
            Settings::default();
        Self {
            page_rows: Count(page_rows),
            in_flight_rows: Count(in_flight_rows),
            in_flight_bytes: Size(in_flight_bytes),
            in_flight_bytes_total: Size(in_flight_bytes_total),
        }
    }
}

impl Default for Park {
    fn default() -> Self {
        let Settings { park_attempts, park_base, park_cap, park_rows, park_keep, park_dead_for, .. } =
            Settings::default();
        Self {
            attempts: Attempts(park_attempts),
            base: Span(park_base),
            cap: Span(park_cap),
            rows: Count(park_rows),
            keep: Span(park_keep),
            dead_for: Term(park_dead_for),
        }
    }
}

/// A duration, or `off`: for ever.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Term(pub(crate) Option<Duration>);

impl FromStr for Term {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text.trim() == "off" {
            return Ok(Self(None));
        }
        let Span(term) = text.parse::<Span>().map_err(|error| format!("{error}, or off"))?;
        Ok(Self(Some(term)))
    }
}

impl<'de> Deserialize<'de> for Term {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        from_text(deserializer)
    }
}

impl Serialize for Term {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.0 {
            None => serializer.serialize_str("off"),
            Some(term) => serializer.collect_str(&Span(term)),
        }
    }
}

/// A whole number, at least 1, of attempts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Attempts(pub(crate) NonZeroU32);

impl FromStr for Attempts {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        text.trim()
            .parse()
            .map(Self)
            .map_err(|_| format!("`{text}` is not a whole number from 1 to {}", u32::MAX))
    }
}

impl<'de> Deserialize<'de> for Attempts {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        from_text(deserializer)
    }
}

impl Serialize for Attempts {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.0.serialize(serializer)
    }
}

/// A whole number, at least 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Count(pub(crate) NonZeroUsize);

impl FromStr for Count {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        text.trim().parse().map(Self).map_err(|_| format!("`{text}` is not a whole number of at least 1"))
    }
}

/// Where to listen, or `off`.
#[derive(Clone, Default)]
pub(crate) struct Address(pub(crate) Listen);

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        text.parse().map(Self)
    }
}

/// The value of a librdkafka setting. TOML's numbers and booleans are as good as strings: librdkafka takes text.
#[derive(Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Property(pub(crate) String);

impl<'de> Deserialize<'de> for Property {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        from_text(deserializer).map(Self)
    }
}

impl<'de> Deserialize<'de> for Count {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        from_text(deserializer)
    }
}

impl<'de> Deserialize<'de> for Address {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        from_text(deserializer)
    }
}

impl<'de> Deserialize<'de> for Span {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        from_text(deserializer)
    }
}

impl<'de> Deserialize<'de> for Size {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        from_text(deserializer)
    }
}

impl Serialize for Count {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.0.serialize(serializer)
    }
}

impl Serialize for Address {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&self.0)
    }
}

impl Serialize for Span {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl Serialize for Size {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// Reads a value from its text. What comes from the environment is always text, what comes from TOML may be a number:
/// both are taken the same way, so that one place says what is wrong with either.
fn from_text<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: FromStr<Err: fmt::Display>,
{
    deserializer.deserialize_any(Text(PhantomData))
}

struct Text<T>(PhantomData<T>);

impl<T: FromStr<Err: fmt::Display>> Visitor<'_> for Text<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a single value")
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<T, E> {
        text.parse().map_err(E::custom)
    }

    fn visit_i64<E: serde::de::Error>(self, number: i64) -> Result<T, E> {
        self.visit_str(&number.to_string())
    }

    fn visit_u64<E: serde::de::Error>(self, number: u64) -> Result<T, E> {
        self.visit_str(&number.to_string())
    }

    fn visit_f64<E: serde::de::Error>(self, number: f64) -> Result<T, E> {
        self.visit_str(&number.to_string())
    }

    fn visit_bool<E: serde::de::Error>(self, flag: bool) -> Result<T, E> {
        self.visit_str(if flag { "true" } else { "false" })
    }
}

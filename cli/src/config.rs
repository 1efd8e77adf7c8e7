//! The effective configuration: which keys there are, where each value came from, and what is wrong with one.
//!
//! Guarantees: a key that is not known is an error, never ignored; every error names the key and its origin (the file, a
//! variable, a flag); no error and no listing shows a secret. The relay is authoritative for its own ranges
//! ([`Settings::validate`]); this module adds where an offending value came from.

mod duration;
mod keys;
mod secret;
mod show;
mod size;
mod sources;
mod unknown;

use std::path::PathBuf;

use baton_relay::{Settings, settings};
use figment::value::{Dict, Tag, Value};
use figment::{Figment, Profile, Provider as _};

pub(crate) use duration::Span;
pub(crate) use keys::Config;
pub(crate) use secret::{is_secret, mask_urls};
pub(crate) use sources::Sources;

use unknown::{Stray, Wrong};

/// The origin of what nobody set.
const DEFAULT: &str = "default";

/// A configuration that cannot be used. The process exits with 2.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("there is no configuration file {} (named by --config); write it, or leave --config out", path.display())]
    Absent { path: PathBuf },
    #[error("cannot read the configuration file {}", path.display())]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{}, line {line}, is not valid TOML: {message}", path.display())]
    Syntax { path: PathBuf, line: usize, message: String },
    #[error("environment variable {name} is not valid UTF-8")]
    NotText { name: String },
    #[error("the defaults cannot be written down; this is a bug in baton")]
    Defaults,
    #[error("unknown key {key} in {origin}{}; `baton config` shows the known ones", suggest(nearest.as_deref()))]
    UnknownKey { key: String, origin: String, nearest: Option<String> },
    #[error("unknown environment variable {name}{}; BATON_<SECTION>__<KEY> sets a key, `baton config` shows the known ones", suggest(nearest.as_deref()))]
    UnknownVariable { name: String, nearest: Option<String> },
    #[error("{key} in {origin} is a section: set the keys in it")]
    SectionExpected { key: String, origin: String },
    #[error("{key} in {origin} is a key, not a section: give it a value")]
    ValueExpected { key: String, origin: String },
    #[error("{key} from {origin}: {reason}")]
    Invalid { key: String, origin: String, reason: String },
    #[error("{what} is not given; set {how}")]
    Missing { what: &'static str, how: &'static str },
}

fn suggest(nearest: Option<&str>) -> String {
    nearest.map(|nearest| format!(" (did you mean {nearest}?)")).unwrap_or_default()
}

/// A configuration with the origin of each of its values.
pub(crate) struct Effective {
    pub(crate) config: Config,
    merged: Figment,
}

/// Which database a command is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    Outbox,
    Inbox,
}

/// A database URL and where it came from. Not printable: it may hold a password.
pub(crate) struct DatabaseUrl {
    pub(crate) url: String,
    pub(crate) origin: String,
}

impl Effective {
    /// Puts all sources together.
    pub(crate) fn load(sources: &Sources) -> Result<Self, Error> {
        let merged = sources.given()?.into_iter().fold(Figment::new(), Figment::merge);
        let known =
            Value::serialize(Config::default()).ok().and_then(Value::into_dict).ok_or(Error::Defaults)?;
        if let Some(stray) = unknown::first_stray(&values(&merged), &known) {
            return Err(stray_error(&merged, stray));
        }
        let config = merged.extract().map_err(|e| value_error(&e))?;
        Ok(Self { config, merged })
    }

    /// Where the value of `key` came from, in words.
    pub(crate) fn origin(&self, key: &str) -> String {
        let values = values(&self.merged);
        // The names of librdkafka settings hold dots themselves.
        let value = match key.strip_prefix("kafka.properties.") {
            Some(property) => {
                lookup(&values, "kafka.properties").and_then(|v| v.as_dict()).and_then(|d| d.get(property))
            }
            None => lookup(&values, key),
        };
        match value {
            None => DEFAULT.to_owned(),
            // What is wrong with a section is wrong with what was set in it.
            Some(Value::Dict(_, section)) => {
                let origins = section.values().map(|value| origin_of(&self.merged, value.tag()));
                let mut set: Vec<String> = origins.filter(|origin| origin != DEFAULT).collect();
                set.dedup();
                if set.is_empty() { DEFAULT.to_owned() } else { set.join(" and ") }
            }
            Some(value) => origin_of(&self.merged, value.tag()),
        }
    }

    /// The database of `side`.
    pub(crate) fn database_url(&self, side: Side) -> Result<DatabaseUrl, Error> {
        let (key, url, how) = match side {
            Side::Outbox => (
                "outbox.database_url",
                &self.config.outbox.database_url,
                "DATABASE_URL, --database-url, or database_url under [outbox] in baton.toml, to postgres://user:password@host:5432/database",
            ),
            Side::Inbox => (
                "inbox.database_url",
                &self.config.inbox.database_url,
                "DATABASE_URL, --database-url, or database_url under [inbox] in baton.toml, to postgres://user:password@host:5432/database",
            ),
        };
        let url =
            url.clone().filter(|url| !url.is_empty()).ok_or(Error::Missing { what: "the database", how })?;
        Ok(DatabaseUrl { url, origin: self.origin(key) })
    }

    /// What a relay is to be told, checked.
    pub(crate) fn relay_settings(&self) -> Result<Settings, Error> {
        let brokers = self.config.kafka.brokers.clone().filter(|brokers| !brokers.is_empty()).ok_or(
            Error::Missing {
                what: "the Kafka cluster",
                how: "KAFKA_BROKERS, or brokers under [kafka] in baton.toml, to host:port[,host:port…]",
            },
        )?;
        let settings = Settings {
            database_url: self.database_url(Side::Outbox)?.url,
            brokers,
            ..self.settings_without_addresses()
        };
        self.validate(&settings)?;
        Ok(settings)
    }

    /// Checks every range, whether or not it is known yet where database and brokers are.
    pub(crate) fn check_ranges(&self) -> Result<(), Error> {
        self.validate(&self.settings_without_addresses())
    }

    /// The same but for where database and brokers are, unchecked.
    pub(crate) fn settings_without_addresses(&self) -> Settings {
        let Config { relay, lease, poll, publish, park, http, kafka, .. } = &self.config;
        let defaults = Settings::default();
        Settings {
            kafka_properties: kafka
                .properties
                .iter()
                .map(|(name, value)| (name.clone(), value.0.clone()))
                .collect(),
            owner: relay.owner.clone().unwrap_or_else(|| defaults.owner.clone()),
            source: relay.source.clone(),
            content_type: relay.content_type.clone(),
            ce_time: relay.ce_time,
            lease_ttl: lease.ttl.0,
            lease_margin: lease.margin().0,
            poll_floor: poll.floor.0,
            poll_ceiling: poll.ceiling.0,
            page_rows: publish.page_rows.0,
            in_flight_rows: publish.in_flight_rows.0,
            in_flight_bytes: publish.in_flight_bytes.0,
            in_flight_bytes_total: publish.in_flight_bytes_total.0,
            park_attempts: park.attempts.0,
            park_base: park.base.0,
            park_cap: park.cap.0,
            park_rows: park.rows.0,
            park_keep: park.keep.0,
            park_dead_for: park.dead_for.0,
            drain_deadline: relay.drain_deadline.0,
            http_listen: http.listen.0.clone(),
            ..defaults
        }
    }

    fn validate(&self, settings: &Settings) -> Result<(), Error> {
        let invalid = |key: String, reason: String| Error::Invalid { origin: self.origin(&key), key, reason };
        settings.validate().map_err(|e| match e {
            settings::Error::Property { name, value, reason } => {
                invalid(format!("kafka.properties.{name}"), format!("{value} is refused: {reason}"))
            }
            settings::Error::Range { key, reason } => invalid(key.to_owned(), reason),
            settings::Error::Librdkafka { message } => {
                // librdkafka's sentence starts with the setting's name.
                let name =
                    self.config.kafka.properties.keys().find(|name| message.starts_with(&format!("{name}:")));
                match name {
                    Some(name) => invalid(
                        format!("kafka.properties.{name}"),
                        message[name.len() + 1..].trim().to_owned(),
                    ),
                    None => invalid("kafka.properties".to_owned(), message),
                }
            }
        })
    }
}

fn values(merged: &Figment) -> Dict {
    merged.data().ok().and_then(|mut profiles| profiles.remove(&Profile::Default)).unwrap_or_default()
}

fn lookup<'v>(values: &'v Dict, key: &str) -> Option<&'v Value> {
    let (first, rest) = key.split_once('.').map_or((key, None), |(first, rest)| (first, Some(rest)));
    match (values.get(first)?, rest) {
        (value, None) => Some(value),
        (Value::Dict(_, inner), Some(rest)) => lookup(inner, rest),
        _ => None,
    }
}

fn origin_of(merged: &Figment, tag: Tag) -> String {
    merged.get_metadata(tag).map_or_else(|| DEFAULT.to_owned(), |metadata| metadata.name.to_string())
}

fn stray_error(merged: &Figment, Stray { key, tag, wrong }: Stray) -> Error {
    let origin = origin_of(merged, tag);
    match wrong {
        Wrong::Unknown { nearest } => match sources::variable_of(&origin) {
            Some(name) => Error::UnknownVariable {
                name: name.to_owned(),
                nearest: nearest.map(|nearest| sources::variable_for(&nearest)),
            },
            None => Error::UnknownKey { key, origin, nearest },
        },
        Wrong::SectionExpected => Error::SectionExpected { key, origin },
        Wrong::ValueExpected => Error::ValueExpected { key, origin },
    }
}

/// figment's own words would show the value, which may be a secret.
fn value_error(error: &figment::Error) -> Error {
    use figment::error::Kind;
    let key = error.path.join(".");
    let origin =
        error.metadata.as_ref().map_or_else(|| "the configuration".to_owned(), |m| m.name.to_string());
    let reason = match &error.kind {
        Kind::Message(reason) => reason.clone(),
        Kind::InvalidType(_, expected) | Kind::InvalidValue(_, expected) => format!("must be {expected}"),
        _ => "cannot be used".to_owned(),
    };
    Error::Invalid { key, origin, reason }
}

#[cfg(test)]
mod tests;

//! The configuration as `baton config` shows it: each key, its value with secrets masked, and where it came from.

use figment::value::{Empty, Value};
use serde::Serialize;

use super::secret::{MASK, is_secret, mask_urls};
use super::{Config, Effective, Error};

/// One key.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Row {
    /// `section.key`.
    pub(crate) key: String,
    /// Masked where it holds a secret; `None` where nothing is set and nothing is assumed.
    pub(crate) value: Option<String>,
    /// Where the value came from, in words.
    pub(crate) origin: String,
}

impl Effective {
    /// All keys in alphabetical order.
    pub(crate) fn rows(&self) -> Result<Vec<Row>, Error> {
        // What was read, written out again: `10000ms` shows as `10s`, whichever way it was given.
        let values = Value::serialize(&self.config).map_err(|_| Error::Defaults)?;
        let mut rows = Vec::new();
        self.collect("", &values, &mut rows);
        Ok(rows)
    }

    fn collect(&self, path: &str, value: &Value, rows: &mut Vec<Row>) {
        if let Value::Dict(_, inner) = value {
            for (name, value) in inner {
                let key = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
                self.collect(&key, value, rows);
            }
            return;
        }
        let (value, origin) = match (text(value), path) {
            (Some(value), _) => (Some(masked(path, &value)), self.origin(path)),
            (None, "lease.margin") => {
                (Some(self.config.lease.margin().to_string()), "default: a fifth of lease.ttl".to_owned())
            }
            (None, "relay.owner") => {
                (None, "default: <host>-<pid>-<random>, new for each process".to_owned())
            }
            (None, "relay.source") => (None, "default: /<database>".to_owned()),
            (None, _) => (None, "not set".to_owned()),
        };
        rows.push(Row { key: path.to_owned(), value, origin });
    }
}

impl Config {
    /// The names of all keys, in alphabetical order; those of librdkafka settings are librdkafka's to know.
    #[cfg(test)]
    pub(super) fn known_keys() -> Vec<String> {
        fn walk(path: &str, value: &Value, keys: &mut Vec<String>) {
            match value {
                Value::Dict(_, inner) if !inner.is_empty() => {
                    for (name, value) in inner {
                        walk(
                            &if path.is_empty() { name.clone() } else { format!("{path}.{name}") },
                            value,
                            keys,
                        );
                    }
                }
                _ => keys.push(path.to_owned()),
            }
        }
        let mut keys = Vec::new();
        walk("", &Value::serialize(Self::default()).unwrap(), &mut keys);
        keys
    }
}

fn masked(key: &str, value: &str) -> String {
    if key.ends_with(".database_url") {
        // Without a scheme it is no URL of ours, and there is no telling where its password stands.
        return if value.contains("://") { mask_urls(value).into_owned() } else { MASK.to_owned() };
    }
    match key.strip_prefix("kafka.properties.") {
        Some(property) if is_secret(property) => MASK.to_owned(),
        _ => mask_urls(value).into_owned(),
    }
}

fn text(value: &Value) -> Option<String> {
    match value {
        Value::String(_, text) => Some(text.clone()),
        Value::Char(_, c) => Some(c.to_string()),
        Value::Bool(_, flag) => Some(flag.to_string()),
        Value::Num(_, number) => {
            number.to_u128().map(|n| n.to_string()).or_else(|| number.to_f64().map(|n| n.to_string()))
        }
        Value::Empty(_, Empty::None | Empty::Unit) | Value::Dict(..) | Value::Array(..) => None,
    }
}

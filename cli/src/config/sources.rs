//! Where values come from, weakest first: defaults, `DATABASE_URL` and `KAFKA_BROKERS`, the file, `BATON_…` variables, flags.
//!
//! Every source becomes a [`Given`]: keys and an origin in words, which figment then carries along with each value.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use figment::value::{Dict, Map, Value};
use figment::{Metadata, Profile, Provider};

use super::{Config, Error};

/// What the process was started with, read once.
#[derive(Default)]
pub(crate) struct Sources {
    /// The configuration file's path and text, where there is one.
    pub(crate) file: Option<(PathBuf, String)>,
    /// Environment variables that concern us, in order of their names.
    pub(crate) environment: Vec<(String, String)>,
    /// `--database-url`.
    pub(crate) database_url: Option<String>,
    /// `--log-format`, as text.
    pub(crate) log_format: Option<&'static str>,
}

impl Sources {
    /// Reads the file and picks our variables out of `environment`.
    pub(crate) fn read(
        file: Option<&Path>,
        environment: impl IntoIterator<Item = (OsString, OsString)>,
    ) -> Result<Self, Error> {
        let path = file.unwrap_or(Path::new("baton.toml"));
        let file = match std::fs::read_to_string(path) {
            Ok(text) => Some((path.to_owned(), text)),
            // None is needed, so the default one may be absent; one that was asked for may not.
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => match file {
                None => None,
                Some(path) => return Err(Error::Absent { path: path.to_owned() }),
            },
            Err(source) => return Err(Error::Read { path: path.to_owned(), source }),
        };
        let mut variables = Vec::new();
        for (name, value) in environment {
            let Some(name) = name.to_str().filter(|name| is_ours(name)) else { continue };
            let value = value.into_string().map_err(|_| Error::NotText { name: name.to_owned() })?;
            if !injected_by_kubernetes(name, &value) {
                variables.push((name.to_owned(), value));
            }
        }
        variables.sort();
        Ok(Self { file, environment: variables, database_url: None, log_format: None })
    }

    /// All that was given, weakest first.
    pub(super) fn given(&self) -> Result<Vec<Given>, Error> {
        let mut all = vec![Given::defaults()?];
        for (name, value) in &self.environment {
            let keys: &[&str] = match name.as_str() {
                "DATABASE_URL" => &["outbox.database_url", "inbox.database_url"],
                "KAFKA_BROKERS" => &["kafka.brokers"],
                _ => continue,
            };
            // An empty variable is how many shells and compose files say "not set".
            if !value.is_empty() {
                all.push(Given::text(variable(name), keys, value));
            }
        }
        if let Some((path, text)) = &self.file {
            all.push(Given::file(path, text)?);
        }
        for (name, value) in self.environment.iter().filter(|(name, _)| name.starts_with(PREFIX)) {
            all.push(match Key::of_variable(name) {
                Key::Property(property) => Given::property(variable(name), property, value),
                Key::Other(key) => Given::text(variable(name), &[&key], value),
            });
        }
        if let Some(url) = &self.database_url {
            all.push(Given::text(
                "--database-url".to_owned(),
                &["outbox.database_url", "inbox.database_url"],
                url,
            ));
        }
        if let Some(format) = self.log_format {
            all.push(Given::text("--log-format".to_owned(), &["log.format"], format));
        }
        Ok(all)
    }
}

const PREFIX: &str = "BATON_";
const VARIABLE: &str = "environment variable ";

fn variable(name: &str) -> String {
    format!("{VARIABLE}{name}")
}

/// The variable's name, if the origin is a variable of ours.
pub(super) fn variable_of(origin: &str) -> Option<&str> {
    origin.strip_prefix(VARIABLE).filter(|name| name.starts_with(PREFIX))
}

/// How the key is spelt in the environment.
pub(super) fn variable_for(key: &str) -> String {
    format!("{PREFIX}{}", key.replace('.', "__").to_ascii_uppercase())
}

fn is_ours(name: &str) -> bool {
    name.starts_with(PREFIX) || name == "DATABASE_URL" || name == "KAFKA_BROKERS"
}

/// Kubernetes tells every container about every Service. One named `baton` (or `baton-relay`, …) yields variables with
/// our prefix that nobody wrote for us.
fn injected_by_kubernetes(name: &str, value: &str) -> bool {
    let Some(rest) = name.strip_prefix(PREFIX) else { return false };
    if rest == "PORT" || rest.starts_with("PORT_") || rest.starts_with("SERVICE_") {
        return true;
    }
    // A Service `baton-x`: no key of ours has a single underscore between section and key.
    let is_link = ["tcp://", "udp://", "sctp://"].iter().any(|scheme| value.starts_with(scheme));
    let is_port = rest.rsplit_once("_PORT").is_some_and(|(_, tail)| {
        tail.is_empty() && is_link || ["_TCP", "_UDP", "_SCTP"].iter().any(|protocol| tail.contains(protocol))
    });
    !rest.contains("__") && (is_port || rest.ends_with("_SERVICE_HOST") || rest.contains("_SERVICE_PORT"))
}

enum Key {
    /// A librdkafka setting. Its dots cannot stand in a shell's variable name, so underscores stand for them:
    /// `BATON_KAFKA__PROPERTIES__SASL_PASSWORD` is `sasl.password`.
    Property(String),
    Other(String),
}

impl Key {
    fn of_variable(name: &str) -> Self {
        let name = name.strip_prefix(PREFIX).unwrap_or(name).to_ascii_lowercase();
        match name.strip_prefix("kafka__properties__") {
            Some(property) if property.contains('.') => Self::Property(property.to_owned()),
            Some(property) => Self::Property(property.replace("__", ".").replace('_', ".")),
            None => Self::Other(name.replace("__", ".")),
        }
    }
}

/// Values of one origin.
pub(super) struct Given {
    origin: String,
    values: Dict,
}

impl Given {
    fn defaults() -> Result<Self, Error> {
        let values =
            Value::serialize(Config::default()).ok().and_then(Value::into_dict).ok_or(Error::Defaults)?;
        Ok(Self { origin: super::DEFAULT.to_owned(), values })
    }

    fn file(path: &Path, text: &str) -> Result<Self, Error> {
        use figment::providers::{Format as _, Toml};
        let mut values: Dict = Toml::from_str(text).map_err(|e| Error::Syntax {
            path: path.to_owned(),
            // Never the line itself, which the parser would show: it may hold a password.
            line: e
                .span()
                .and_then(|span| text.get(..span.start))
                .map_or(1, |before| before.matches('\n').count() + 1),
            message: e.message().to_owned(),
        })?;
        // `sasl.mechanism = "PLAIN"` without quotes is a table to TOML, and the setting `sasl.mechanism` to people.
        if let Some(Value::Dict(_, kafka)) = values.get_mut("kafka")
            && let Some(Value::Dict(_, properties)) = kafka.get_mut("properties")
        {
            *properties = flatten(std::mem::take(properties));
        }
        Ok(Self { origin: path.display().to_string(), values })
    }

    fn text(origin: String, keys: &[&str], value: &str) -> Self {
        let mut values = Dict::new();
        for key in keys {
            let (section, key) = key.split_once('.').unwrap_or((key, ""));
            let value = Value::from(value);
            if key.is_empty() {
                values.insert(section.to_owned(), value);
            } else {
                values.insert(section.to_owned(), figment::util::nest(key, value));
            }
        }
        Self { origin, values }
    }

    fn property(origin: String, property: String, value: &str) -> Self {
        let properties = Dict::from([(property, Value::from(value))]);
        let kafka = Dict::from([("properties".to_owned(), Value::from(properties))]);
        Self { origin, values: Dict::from([("kafka".to_owned(), Value::from(kafka))]) }
    }
}

impl Provider for Given {
    fn metadata(&self) -> Metadata {
        Metadata::named(self.origin.clone())
    }

    fn data(&self) -> figment::Result<Map<Profile, Dict>> {
        Ok(Profile::Default.collect(self.values.clone()))
    }
}

fn flatten(nested: Dict) -> Dict {
    let mut flat = Dict::new();
    for (name, value) in nested {
        match value {
            Value::Dict(_, inner) => {
                flat.extend(
                    flatten(inner).into_iter().map(|(rest, value)| (format!("{name}.{rest}"), value)),
                );
            }
            value => {
                flat.insert(name, value);
            }
        }
    }
    flat
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_kubernetes_injects_for_a_service_is_no_setting_of_ours() {
        for (name, value) in [
            ("BATON_PORT", "tcp://10.0.0.1:9464"),
            ("BATON_PORT_9464_TCP_ADDR", "10.0.0.1"),
            ("BATON_SERVICE_HOST", "10.0.0.1"),
            ("BATON_SERVICE_PORT_HTTP", "9464"),
            ("BATON_RELAY_PORT", "tcp://10.0.0.1:9464"),
            ("BATON_RELAY_PORT_9464_TCP", "tcp://10.0.0.1:9464"),
            ("BATON_RELAY_SERVICE_HOST", "10.0.0.1"),
            ("BATON_RELAY_SERVICE_PORT", "9464"),
        ] {
            assert!(injected_by_kubernetes(name, value), "{name}");
        }
    }

    #[test]
    fn a_misspelt_setting_is_not_taken_for_a_service() {
        for (name, value) in [
            ("BATON_LEASE_TTL", "5s"),
            ("BATON_RELAY_PORT", "9464"),
            ("BATON_HTTP__PORT", "9464"),
            ("DATABASE_URL", "x"),
        ] {
            assert!(!injected_by_kubernetes(name, value), "{name}");
        }
    }

    #[test]
    fn underscores_stand_for_the_dots_of_a_librdkafka_setting() {
        for name in [
            "BATON_KAFKA__PROPERTIES__SASL_PASSWORD",
            "BATON_KAFKA__PROPERTIES__sasl.password",
            "BATON_KAFKA__PROPERTIES__SASL__PASSWORD",
        ] {
            assert!(matches!(Key::of_variable(name), Key::Property(p) if p == "sasl.password"), "{name}");
        }
    }
}

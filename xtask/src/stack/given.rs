//! The stack that somebody else runs: `DATABASE_URL` and `KAFKA_BROKERS` from the environment.
//!
//! They are used as they are and never started or ended. No message contains the URL, which has a password.

use std::env;

use super::Stack;
use super::probe::{self, Answer};
use crate::error::{Error, Result};

/// # Errors
///
/// When only one of the two is given: the other half would silently be another stack.
pub(crate) fn from_environment() -> Result<Option<Stack>> {
    let value = |name| env::var(name).ok().filter(|value| !value.is_empty());
    pair(value("DATABASE_URL"), value("KAFKA_BROKERS"))
}

fn pair(database_url: Option<String>, kafka_brokers: Option<String>) -> Result<Option<Stack>> {
    match (database_url, kafka_brokers) {
        (Some(database_url), Some(kafka_brokers)) => {
            Ok(Some(Stack { database_url, kafka_brokers, ours: false }))
        }
        (None, None) => Ok(None),
        (Some(_), None) => Err(Error::Usage(
            "DATABASE_URL is set but KAFKA_BROKERS is not: set both, or neither for a stack of our own"
                .to_owned(),
        )),
        (None, Some(_)) => Err(Error::Usage(
            "KAFKA_BROKERS is set but DATABASE_URL is not: set both, or neither for a stack of our own"
                .to_owned(),
        )),
    }
}

/// Asks both servers whether they serve and says so.
pub(crate) fn check(stack: &Stack) -> Result<()> {
    match postgres_address(&stack.database_url)? {
        None => crate::say!("postgres is given by a socket path, which is not checked"),
        Some(address) => match probe::postgres(&address) {
            Answer::Ready => crate::say!("postgres is reachable at {address} (given by DATABASE_URL)"),
            Answer::NotReady(why) => {
                return Err(Error::failed(format!(
                    "postgres does not serve at {address} (given by DATABASE_URL): {why}; start it or unset \
                     DATABASE_URL and KAFKA_BROKERS"
                )));
            }
        },
    }
    let mut reasons = Vec::new();
    for broker in stack.kafka_brokers.split(',').map(str::trim).filter(|broker| !broker.is_empty()) {
        let address = if broker.contains(':') { broker.to_owned() } else { format!("{broker}:9092") };
        match probe::kafka(&address) {
            Answer::Ready => {
                crate::say!("kafka is reachable at {address} (given by KAFKA_BROKERS)");
                return Ok(());
            }
            Answer::NotReady(why) => reasons.push(format!("{address}: {why}")),
        }
    }
    Err(Error::failed(format!(
        "kafka does not serve at any broker of KAFKA_BROKERS ({}); start it or unset DATABASE_URL and \
         KAFKA_BROKERS",
        reasons.join("; ")
    )))
}

/// `host:port` of a URL, or nothing for a socket path.
pub(crate) fn postgres_address(url: &str) -> Result<Option<String>> {
    let rest = ["postgres://", "postgresql://"].iter().find_map(|scheme| url.strip_prefix(scheme));
    let Some(rest) = rest else {
        return Err(Error::Usage("DATABASE_URL must begin with postgres:// or postgresql://".to_owned()));
    };
    let (before_query, query) = rest.split_once('?').unwrap_or((rest, ""));
    let authority = before_query.split('/').next().unwrap_or_default();
    let host = authority.rsplit('@').next().unwrap_or_default();
    let in_query = query.split('&').find_map(|pair| pair.strip_prefix("host="));
    let host = if host.is_empty() { in_query.unwrap_or("localhost") } else { host };
    if host.starts_with('/') || host.to_ascii_uppercase().starts_with("%2F") {
        return Ok(None);
    }
    let has_port = host.rsplit_once(':').is_some_and(|(_, port)| !port.is_empty() && !port.ends_with(']'));
    Ok(Some(if has_port { host.to_owned() } else { format!("{}:5432", host.trim_end_matches(':')) }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_address_is_read_out_of_the_url() {
        for (url, address) in [
            ("postgres://u:p@db.example:6000/x", Some("db.example:6000")),
            ("postgresql://u@db.example/x?sslmode=require", Some("db.example:5432")),
            ("postgres://u:p%40@[::1]:1/x", Some("[::1]:1")),
            ("postgres://u:p@[::1]/x", Some("[::1]:5432")),
            ("postgres:///x", Some("localhost:5432")),
            ("postgres:///x?host=/run/postgresql", None),
            ("postgres://u@%2Frun%2Fpostgresql/x", None),
        ] {
            assert_eq!(postgres_address(url).unwrap().as_deref(), address, "{url}");
        }
    }

    #[test]
    fn another_kind_of_url_is_a_usage_error_that_does_not_show_it() {
        let error = postgres_address("mysql://u:secret@h/x").unwrap_err();
        assert_eq!(error.exit_code(), 2);
        assert!(!error.to_string().contains("secret"));
    }

    #[test]
    fn half_a_stack_is_refused() {
        assert_eq!(pair(Some("x".to_owned()), None).unwrap_err().exit_code(), 2);
        assert_eq!(pair(None, Some("x".to_owned())).unwrap_err().exit_code(), 2);
        assert!(pair(None, None).unwrap().is_none());
    }
}

//! Whether the broker answers at all, and if not, in plain words why.
//!
//! librdkafka says "broker transport failure" for a misspelt name as for a broker that is down. So where it got no answer,
//! each address is looked at once more: whether its name is known, and whether anybody listens there.

use std::fmt;
use std::io::ErrorKind;
use std::net::{TcpStream, ToSocketAddrs as _};
use std::sync::Arc;
use std::time::Duration;

use rdkafka::ClientContext;
use rdkafka::config::RDKafkaLogLevel;
use rdkafka::error::KafkaError;
use rdkafka::producer::{BaseProducer, DeliveryResult, Producer as _, ProducerContext};

use crate::settings::Settings;

/// How many addresses are looked at; a cluster of more is not misspelt in all of them.
const LOOKED_AT: usize = 3;

/// How long an address gets to accept a connection.
const CONNECT: Duration = Duration::from_secs(2);

/// Where librdkafka goes without a port.
const DEFAULT_PORT: u16 = 9092;

/// No answer.
#[derive(Debug)]
pub(crate) struct Unreachable {
    /// What is wrong with each address.
    pub why: String,
    /// What librdkafka said.
    pub source: KafkaError,
}

/// Asks the broker for its metadata, for at most `patience`.
pub(crate) async fn reach(settings: &Arc<Settings>, patience: Duration) -> Result<(), Unreachable> {
    let settings = Arc::clone(settings);
    let asked = tokio::task::spawn_blocking(move || {
        let answer = settings
            .producer_config()
            .create::<BaseProducer>()
            .and_then(|producer| producer.client().fetch_metadata(None, patience).map(drop));
        answer.map_err(|source| Unreachable { why: look(&settings.brokers), source })
    });
    asked
        .await
        .unwrap_or_else(|panic| Err(Unreachable { why: panic.to_string(), source: KafkaError::Canceled }))
}

/// What is wrong with each of the addresses. Blocks.
fn look(brokers: &str) -> String {
    let addresses: Vec<&str> =
        brokers.split(',').map(str::trim).filter(|address| !address.is_empty()).collect();
    let seen: Vec<String> = addresses
        .iter()
        .take(LOOKED_AT)
        .map(|address| match Address::parse(address) {
            Some(address) => format!("{address}: {}", address.look()),
            None => format!("{address} is not host:port"),
        })
        .collect();
    if seen.is_empty() { "no address is given, write host:port".to_owned() } else { seen.join("; ") }
}

/// One of the bootstrap servers.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Address {
    host: String,
    port: Option<u16>,
}

impl Address {
    /// `host:port`, the port left out or not, a protocol in front or not. `None`: it is nothing of the kind.
    fn parse(text: &str) -> Option<Self> {
        let text = text.split_once("://").map_or(text, |(_, rest)| rest);
        let (host, port) = match text.strip_prefix('[') {
            Some(rest) => {
                let (host, rest) = rest.split_once(']')?;
                (host, rest.strip_prefix(':'))
            }
            None => text.split_once(':').map_or((text, None), |(host, port)| (host, Some(port))),
        };
        let port = port.map(str::parse).transpose().ok()?;
        (!host.is_empty()).then(|| Self { host: host.to_owned(), port })
    }

    fn look(&self) -> String {
        let port = self.port.unwrap_or(DEFAULT_PORT);
        let found = match (self.host.as_str(), port).to_socket_addrs() {
            Err(error) => return format!("the name cannot be resolved (DNS: {error})"),
            Ok(found) => found,
        };
        let mut seen = "the name stands for no address".to_owned();
        for address in found {
            seen = match TcpStream::connect_timeout(&address, CONNECT) {
                Ok(_) => {
                    return "somebody accepts connections there, but does not answer as Kafka does (TLS and SASL are set in \
                            kafka.properties: security.protocol)"
                        .to_owned();
                }
                Err(error) if error.kind() == ErrorKind::ConnectionRefused => {
                    format!("nobody listens on port {port}")
                }
                Err(error) if error.kind() == ErrorKind::TimedOut => {
                    format!("port {port} does not accept connections within {CONNECT:?}")
                }
                Err(error) => error.to_string(),
            };
        }
        if self.port.is_none() {
            format!("{seen} (no port was given, so {DEFAULT_PORT} was tried)")
        } else {
            seen
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.port {
            Some(port) => write!(f, "{}:{port}", self.host),
            None => f.write_str(&self.host),
        }
    }
}

/// Of a client that only asks: what librdkafka says by itself is the shards' to report, and no answer is an answer.
pub(crate) struct Quiet;

impl ClientContext for Quiet {
    fn log(&self, level: RDKafkaLogLevel, facility: &str, line: &str) {
        tracing::debug!(?level, facility, "librdkafka: {line}");
    }

    fn error(&self, error: KafkaError, reason: &str) {
        tracing::debug!("librdkafka: {error}: {reason}");
    }
}

impl ProducerContext for Quiet {
    type DeliveryOpaque = ();

    fn delivery(&self, _: &DeliveryResult<'_>, (): ()) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_as_librdkafka_reads_them() {
        let address = |host: &str, port| Some(Address { host: host.to_owned(), port });
        for (text, expected) in [
            ("kafka:9092", address("kafka", Some(9092))),
            ("kafka", address("kafka", None)),
            ("SASL_SSL://kafka.example:9093", address("kafka.example", Some(9093))),
            ("[::1]:9092", address("::1", Some(9092))),
            ("[::1]", address("::1", None)),
            ("kafka:", None),
            ("kafka:http", None),
            (":9092", None),
        ] {
            assert_eq!(Address::parse(text), expected, "{text}");
        }
    }

    #[test]
    fn what_is_wrong_with_each_address_is_said() {
        let seen = look("no-such-host.invalid:9092, 127.0.0.1:1, kafka:http");
        for words in [
            "no-such-host.invalid:9092: the name cannot be resolved",
            "127.0.0.1:1: nobody listens on port 1",
            "kafka:http is not host:port",
        ] {
            assert!(seen.contains(words), "{words:?} is missing: {seen}");
        }
        assert!(look(" ,").contains("no address is given"));
    }
}

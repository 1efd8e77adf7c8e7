//! What a relay is told: plain data with defaults, and the checks that need neither database nor broker.
//!
//! librdkafka settings pass through, except those on which order and at-least-once delivery rest: the relay sets these
//! itself, and a value that would undo them is refused at start with the reason.

mod listen;

use std::collections::BTreeMap;
use std::fmt;
use std::num::{NonZeroU32, NonZeroUsize};
use std::time::Duration;

use baton_protocol::lease::{self, Terms};
use baton_protocol::retry;
use rdkafka::ClientConfig;

pub use listen::Listen;

/// Everything a relay needs to know.
#[derive(Clone)]
pub struct Settings {
    /// Where the outbox is, as a Postgres URL. May hold a password: never printed.
    pub database_url: String,
    /// Kafka bootstrap servers, `host:port[,host:port…]`.
    pub brokers: String,
    /// librdkafka settings passed through (TLS, SASL, compression, …). May hold secrets: never printed.
    pub kafka_properties: BTreeMap<String, String>,
    /// Names this relay in leases, logs and `status`. Default: `<host>-<pid>-<random>`. May be used again by a
    /// restarted process: what authorises a write is owner *and* generation.
    pub owner: String,
    /// `ce_source` of every record, 1 to 512 bytes. `None` is `/<database>`.
    pub source: Option<String>,
    /// `content-type` of a record whose row does not set one. Default `application/json`.
    pub content_type: String,
    /// Whether records carry `ce_time`. Default no: the record's own timestamp is the row's `created_at`.
    pub ce_time: bool,
    /// How long a lease lasts in the database unless renewed. At least 1 s, default 10 s. Renewed every third of it.
    pub lease_ttl: Duration,
    /// How much less than that this process trusts it. Default a fifth of the TTL.
    pub lease_margin: Duration,
    /// Delay between two polls that found something, or while traffic is fresh. Default 1 ms.
    pub poll_floor: Duration,
    /// The longest delay between polls of an idle outbox. Default 250 ms.
    pub poll_ceiling: Duration,
    /// Most rows a read takes of one shard. Default 2,000.
    pub page_rows: NonZeroUsize,
    /// Most rows of a shard handed to Kafka since its last durable cursor. Default 20,000. A crash repeats at most so many
    /// of each shard, and so many may be in flight.
    pub in_flight_rows: NonZeroUsize,
    /// Most bytes read and not yet acknowledged, a shard. Default 16 MiB. One larger message still passes, alone.
    pub in_flight_bytes: NonZeroUsize,
    /// The same over all shards of this relay. Default 48 MiB.
    pub in_flight_bytes_total: NonZeroUsize,
    /// How often a message is tried that Kafka refuses for a cause that may pass, the first time included, until it is dead.
    /// Default 10.
    pub park_attempts: NonZeroU32,
    /// The longest wait before the second attempt; doubled before each further one. At least 1 ms, default 500 ms.
    pub park_base: Duration,
    /// What that never exceeds. At most 365 days, default 5 min.
    pub park_cap: Duration,
    /// Most messages of a shard that are set aside; then the shard stops. Those of a paused topic do not count. Default 10,000.
    pub park_rows: NonZeroUsize,
    /// For how long a message that was set aside and is published or discarded stays to be asked about. Default 7 days. Looked at
    /// eight times a slot period.
    pub park_keep: Duration,
    /// For how long a message may be dead; then it is discarded. Default: for ever.
    pub park_dead_for: Option<Duration>,
    /// How long a drain (at shutdown or when a shard is handed over) waits for acknowledgements. Default 5 s.
    pub drain_deadline: Duration,
    /// Where `/livez`, `/readyz`, `/metrics` and `/api/status` are served. Default `127.0.0.1:9464`. Nowhere by a relay that
    /// ends once the outbox is empty.
    pub http_listen: Listen,
    /// A bug planted for the test suite's checkers. No configuration reaches it.
    #[cfg(feature = "plants")]
    pub plant: Option<crate::plant::Plant>,
    /// What a task may stand still for, beside lease and drain, before `/livez` says so. No configuration reaches it.
    #[cfg(feature = "plants")]
    pub still_slack: Option<Duration>,
    /// Where tests make it stand still. No configuration reaches it.
    #[cfg(feature = "plants")]
    pub hold: Option<crate::hold::Hold>,
}

const fn nz(n: usize) -> NonZeroUsize {
    match NonZeroUsize::new(n) {
        Some(n) => n,
        None => NonZeroUsize::MIN,
    }
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            database_url: String::new(),
            brokers: String::new(),
            kafka_properties: BTreeMap::new(),
            owner: default_owner(),
            source: None,
            content_type: "application/json".to_owned(),
            ce_time: false,
            lease_ttl: Duration::from_secs(10),
            lease_margin: Duration::from_secs(2),
            poll_floor: Duration::from_millis(1),
            poll_ceiling: Duration::from_millis(250),
            page_rows: nz(2_000),
            in_flight_rows: nz(20_000),
            in_flight_bytes: nz(16 << 20),
            in_flight_bytes_total: nz(48 << 20),
            park_attempts: NonZeroU32::new(10).unwrap_or(NonZeroU32::MIN),
            park_base: retry::Policy::default().base,
            park_cap: retry::Policy::default().cap,
            park_rows: nz(10_000),
            park_keep: Duration::from_secs(7 * 24 * 3600),
            park_dead_for: None,
            drain_deadline: Duration::from_secs(5),
            http_listen: Listen::default(),
            #[cfg(feature = "plants")]
            plant: None,
            #[cfg(feature = "plants")]
            still_slack: None,
            #[cfg(feature = "plants")]
            hold: None,
        }
    }
}

/// Shows everything but the secrets.
impl fmt::Debug for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Settings")
            .field("brokers", &self.brokers)
            .field("owner", &self.owner)
            .field("source", &self.source)
            .field("lease_ttl", &self.lease_ttl)
            .field("lease_margin", &self.lease_margin)
            .finish_non_exhaustive()
    }
}

fn default_owner() -> String {
    let host = std::env::var("HOSTNAME")
        .ok()
        .or_else(|| std::fs::read_to_string("/etc/hostname").ok())
        .map(|h| h.trim().to_owned())
        .filter(|h| !h.is_empty())
        .unwrap_or_else(|| "relay".to_owned());
    let random = uuid::Uuid::new_v4().simple().to_string();
    format!("{host}-{}-{}", std::process::id(), random.get(..6).unwrap_or(&random))
}

/// A setting that cannot be used. The process should exit with 2.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A librdkafka setting that would undo a guarantee.
    #[error("kafka.properties: {name} = {value} is refused: {reason}")]
    Property {
        /// The setting.
        name: String,
        /// What it was set to; only settings that are no secrets are ever refused.
        value: String,
        /// Why, and what to do.
        reason: &'static str,
    },
    /// A librdkafka setting that librdkafka itself refuses.
    #[error("kafka.properties: {message}")]
    Librdkafka {
        /// librdkafka's own words, which name the setting.
        message: String,
    },
    /// A value out of its range.
    #[error("{key}: {reason}")]
    Range {
        /// The configuration key.
        key: &'static str,
        /// The range, and why.
        reason: String,
    },
}

const TOPIC_REFRESH: &str = "topic.metadata.refresh.interval.ms";

/// What the relay sets itself, the only values it accepts for it from outside, and why.
const OWNED: &[(&str, &[&str], &str)] = &[
    (
        "message.timeout.ms",
        &["0"],
        "a message that expires while the broker is away is overtaken by its key's later ones; only 0 (never) keeps the order",
    ),
    (
        "delivery.timeout.ms",
        &["0"],
        "a message that expires while the broker is away is overtaken by its key's later ones; only 0 (never) keeps the order",
    ),
    ("enable.idempotence", &["true"], "without it a retried batch may overtake a later one"),
    ("enable.gapless.guarantee", &["true"], "without it later messages overtake one that the broker refused"),
    ("acks", &["all", "-1"], "a message counts as published only when all in-sync replicas have it"),
    (
        "request.required.acks",
        &["all", "-1"],
        "a message counts as published only when all in-sync replicas have it",
    ),
    ("partitioner", &["murmur2_random"], "other Kafka clients would look for the key on another partition"),
    ("transactional.id", &[], "the relay is in at-least-once mode and names its transactions itself"),
    (
        "max.in.flight.requests.per.connection",
        &["1", "2", "3", "4", "5"],
        "the idempotent producer keeps order with at most 5",
    ),
    ("max.in.flight", &["1", "2", "3", "4", "5"], "the idempotent producer keeps order with at most 5"),
    ("message.send.max.retries", &[], "a message is retried until it is acknowledged"),
    ("retries", &[], "a message is retried until it is acknowledged"),
    ("queue.buffering.max.messages", &[], "the relay bounds what is in flight: set publish.in_flight_rows"),
    ("queue.buffering.max.kbytes", &[], "the relay bounds what is in flight: set publish.in_flight_bytes"),
    ("bootstrap.servers", &[], "set kafka.brokers (or KAFKA_BROKERS)"),
    ("metadata.broker.list", &[], "set kafka.brokers (or KAFKA_BROKERS)"),
    ("test.mock.num.brokers", &["0"], "a mock broker acknowledges what no broker has"),
    ("plugin.library.paths", &[], "what a plugin does to records is out of the relay's sight"),
    ("delivery.report.only.error", &["false"], "progress follows delivery reports"),
];

impl Settings {
    /// Checks everything that can be checked without database and broker.
    ///
    /// # Errors
    /// Names the first setting that cannot be used, and why.
    pub fn validate(&self) -> Result<(), Error> {
        let range =
            |ok: bool, key, reason: String| if ok { Ok(()) } else { Err(Error::Range { key, reason }) };
        range(
            !self.owner.is_empty() && self.owner.len() <= 255,
            "relay.owner",
            "must have 1 to 255 bytes".into(),
        )?;
        Terms::new(self.lease_ttl, Some(self.lease_margin)).map_err(|e| {
            let key =
                if matches!(e, lease::Error::MarginTooLong { .. }) { "lease.margin" } else { "lease.ttl" };
            Error::Range { key, reason: e.to_string() }
        })?;
        range(
            self.lease_margin <= self.lease_ttl / 2,
            "lease.margin",
            format!(
                "must be at most half of lease.ttl ({:?}), or too little time is left to renew",
                self.lease_ttl
            ),
        )?;
        range(self.poll_floor >= Duration::from_micros(100), "poll.floor", "must be at least 100us".into())?;
        range(self.poll_floor <= self.poll_ceiling, "poll.ceiling", "must not be below poll.floor".into())?;
        range(self.poll_ceiling <= Duration::from_secs(60), "poll.ceiling", "must be at most 60s".into())?;
        range(
            self.page_rows <= self.in_flight_rows,
            "publish.page_rows",
            format!(
                "{} rows of a page are more than publish.in_flight_rows ({}) lets a shard have in flight; lower the one or raise \
                 the other",
                self.page_rows, self.in_flight_rows
            ),
        )?;
        range(
            self.in_flight_rows.get() <= 1_000_000,
            "publish.in_flight_rows",
            "must be at most 1,000,000".into(),
        )?;
        self.park_policy().validate().map_err(|error| {
            let key = if matches!(error, retry::Error::Base) { "park.base" } else { "park.cap" };
            Error::Range { key, reason: error.to_string() }
        })?;
        range(self.park_base <= self.park_cap, "park.cap", "must not be below park.base".into())?;
        range(!self.content_type.is_empty(), "relay.content_type", "must not be empty".into())?;
        range(
            self.source.as_deref().is_none_or(|s| (1..=512).contains(&s.len())),
            "relay.source",
            "must have 1 to 512 bytes: with the message's id it is an identity, which consumers bound".into(),
        )?;
        for (name, value) in &self.kafka_properties {
            if let Some((_, accepted, reason)) = OWNED.iter().find(|(owned, _, _)| owned == name)
                && !accepted.iter().any(|a| a.eq_ignore_ascii_case(value))
            {
                return Err(Error::Property { name: name.clone(), value: value.clone(), reason });
            }
        }
        self.producer_config()
            .create_native_config()
            .map(drop)
            .map_err(|e| Error::Librdkafka { message: librdkafka_words(&e) })
    }

    /// The lease's lengths. They agree once [`validate`](Self::validate) has passed, without which no relay starts.
    pub(crate) fn terms(&self) -> Terms {
        Terms::new(self.lease_ttl, Some(self.lease_margin)).unwrap_or_default()
    }

    /// The waits of a message that is set aside and tried again.
    pub(crate) fn park_policy(&self) -> retry::Policy {
        retry::Policy { base: self.park_base, factor: 2.0, cap: self.park_cap }
    }

    /// Whether librdkafka compresses: then what a message has on the wire is not known before.
    pub(crate) fn compresses(&self) -> bool {
        let set = ["compression.type", "compression.codec"].map(|name| self.kafka_properties.get(name));
        set.into_iter().flatten().any(|value| value.trim() != "none")
    }

    /// After how long the broker is asked again how many partitions a topic has: librdkafka's
    /// `topic.metadata.refresh.interval.ms`, by default 60 s; never when it is -1.
    pub(crate) fn topics_fresh(&self) -> Duration {
        self.client_config()
            .get(TOPIC_REFRESH)
            .and_then(|value| value.trim().parse::<i64>().ok())
            .map_or(Duration::from_secs(60), |ms| {
                u64::try_from(ms).map_or(Duration::MAX, Duration::from_millis)
            })
    }

    /// The configuration of a shard's producer: the user's settings under the relay's own. Public for benchmarks, which
    /// measure a bare producer set the same way.
    #[must_use]
    pub fn producer_config(&self) -> ClientConfig {
        let mut config = self.client_config();
        config
            .set("enable.idempotence", "true")
            .set("acks", "all")
            .set("enable.gapless.guarantee", "true")
            .set("partitioner", "murmur2_random")
            .set("message.timeout.ms", self.message_timeout_ms())
            // The window bounds what is in flight, in rows and bytes; these only must not be narrower.
            .set("queue.buffering.max.messages", (self.in_flight_rows.get() + 1_000).to_string())
            .set("queue.buffering.max.kbytes", "2097151");
        config
    }

    #[cfg(not(feature = "plants"))]
    #[expect(clippy::unused_self, reason = "the planted build reads the plant here")]
    fn message_timeout_ms(&self) -> &'static str {
        "0"
    }

    #[cfg(feature = "plants")]
    fn message_timeout_ms(&self) -> &'static str {
        if self.plant == Some(crate::plant::Plant::FiniteMessageTimeout) { "4000" } else { "0" }
    }

    /// The configuration of any client of this relay.
    pub(crate) fn client_config(&self) -> ClientConfig {
        let mut config = ClientConfig::new();
        config
            .set("client.id", format!("baton-{}", self.owner))
            // One message of the largest payload the table takes; a topic's own limit is the broker's to enforce.
            .set("message.max.bytes", "80000000")
            // A page arrives at once, so batches fill without waiting; a lone message should not wait either.
            .set("linger.ms", "1")
            .set("reconnect.backoff.max.ms", "2000")
            .set(TOPIC_REFRESH, "60000");
        for (name, value) in &self.kafka_properties {
            config.set(name, value);
        }
        config.set("bootstrap.servers", &self.brokers);
        config
    }
}

/// rdkafka wraps librdkafka's sentence; people need the sentence.
fn librdkafka_words(error: &rdkafka::error::KafkaError) -> String {
    match error {
        rdkafka::error::KafkaError::ClientConfig(_, description, name, _) => format!("{name}: {description}"),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(name: &str, value: &str) -> Result<(), Error> {
        let mut settings = Settings { brokers: "localhost:9092".into(), ..Settings::default() };
        settings.kafka_properties.insert(name.into(), value.into());
        settings.validate()
    }

    #[test]
    fn a_finite_message_timeout_is_refused_with_the_reason() {
        let error = with("message.timeout.ms", "30000").unwrap_err().to_string();
        assert!(error.contains("message.timeout.ms = 30000") && error.contains("overtaken"), "{error}");
        with("message.timeout.ms", "0").unwrap();
    }

    #[test]
    fn what_would_undo_order_or_durability_is_refused() {
        for (name, value) in [
            ("acks", "1"),
            ("enable.idempotence", "false"),
            ("partitioner", "consistent"),
            ("transactional.id", "x"),
        ] {
            assert!(matches!(with(name, value), Err(Error::Property { .. })), "{name}");
        }
        with("acks", "-1").unwrap();
        with("compression.type", "lz4").unwrap();
    }

    #[test]
    fn the_broker_is_asked_again_about_topics_as_often_as_librdkafka_is_told() {
        let mut settings = Settings::default();
        for (value, expected) in [
            (None, Duration::from_secs(60)),
            (Some("500"), Duration::from_millis(500)),
            (Some("-1"), Duration::MAX),
        ] {
            if let Some(value) = value {
                settings.kafka_properties.insert(TOPIC_REFRESH.into(), value.into());
            }
            assert_eq!(settings.topics_fresh(), expected);
        }
    }

    #[test]
    fn an_unknown_librdkafka_setting_is_named() {
        let error = with("no.such.setting", "1").unwrap_err().to_string();
        assert!(error.contains("no.such.setting"), "{error}");
    }

    #[test]
    fn a_lease_shorter_than_a_second_is_refused() {
        let settings = Settings { lease_ttl: Duration::from_millis(500), ..Settings::default() };
        assert!(settings.validate().unwrap_err().to_string().contains("at least 1s"));
    }

    #[test]
    fn secrets_do_not_show_in_debug() {
        let settings = Settings { database_url: "postgres://u:hunter2@h/d".into(), ..Settings::default() };
        assert!(!format!("{settings:?}").contains("hunter2"));
    }
}

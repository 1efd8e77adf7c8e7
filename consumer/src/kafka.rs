//! Where Kafka is, and which librdkafka settings may be given.
//!
//! Any librdkafka property passes through, to the consumer and to the producer of dead letters alike, but for those that
//! would break what this crate promises: they are refused with the reason when the consumer is built. Values are never
//! shown, neither by `Debug` nor by an error: one of them may be a password.

use std::collections::BTreeMap;
use std::fmt;

use rdkafka::ClientConfig;
use rdkafka::error::KafkaError;
use rdkafka::types::RDKafkaConfRes;

use crate::build;

/// The brokers and any librdkafka properties (TLS, SASL, fetch sizes, compression…).
///
/// Where nothing else is given `partition.assignment.strategy` is `cooperative-sticky` (all members of a group must agree),
/// `session.timeout.ms` is 10,000, `queued.min.messages` 1,000 and
/// `queued.max.messages.kbytes` 16,384; librdkafka's own defaults hold for the rest.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Kafka {
    /// `host:port`, several separated by commas.
    pub brokers: String,
    /// librdkafka properties by name, as in its `CONFIGURATION.md`.
    pub properties: BTreeMap<String, String>,
}

/// Who reads.
#[derive(Debug, Clone)]
pub(crate) struct Member {
    pub(crate) group: String,
    pub(crate) instance: Option<String>,
}

impl Member {
    fn of(group: &str) -> Self {
        Self { group: group.to_owned(), instance: None }
    }
}

impl Kafka {
    /// The brokers (`host:port`, several separated by commas), without further properties.
    #[must_use]
    pub fn new(brokers: impl Into<String>) -> Self {
        Self { brokers: brokers.into(), properties: BTreeMap::new() }
    }

    /// Sets one librdkafka property.
    #[must_use]
    pub fn property(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.properties.insert(name.into(), value.into());
        self
    }

    /// Refuses what would break a guarantee, and what librdkafka does not know.
    pub(crate) fn check(&self) -> Result<(), build::Error> {
        if self.brokers.trim().is_empty() {
            return Err(build::Error::NoBrokers);
        }
        for name in self.properties.keys() {
            if let Some((_, reason)) = REFUSED.iter().find(|(refused, _)| refused == name) {
                return Err(build::Error::PropertyRefused { name: name.clone(), reason });
            }
        }
        for config in [self.consumer(&Member::of("check")), self.producer("check")] {
            config.create_native_config().map_err(unknown_property)?;
        }
        Ok(())
    }

    /// The consumer's settings. What is set after the user's properties is not negotiable.
    pub(crate) fn consumer(&self, member: &Member) -> ClientConfig {
        let mut config = ClientConfig::new();
        config
            .set("client.id", format!("baton-consumer-{}", member.group))
            // How long the partitions of a process that was killed wait for another one.
            .set("session.timeout.ms", "10000")
            // A member that comes or goes takes only what moves away from the others.
            .set("partition.assignment.strategy", "cooperative-sticky")
            // A pause throws away what librdkafka has fetched ahead, so little of it is kept.
            .set("queued.min.messages", "1000")
            .set("queued.max.messages.kbytes", "16384");
        self.pass_through(&mut config);
        config
            .set("group.id", &member.group)
            .set("enable.auto.commit", "false")
            .set("enable.auto.offset.store", "false")
            .set("auto.offset.reset", "error")
            .set("allow.auto.create.topics", "false");
        if let Some(instance) = &member.instance {
            config.set("group.instance.id", instance);
        }
        config
    }

    /// The settings of the producer of dead letters.
    pub(crate) fn producer(&self, client_id: &str) -> ClientConfig {
        let mut config = ClientConfig::new();
        config
            .set("client.id", client_id)
            .set("partitioner", "murmur2_random")
            // The broker's limit decides, not the client's: a dead letter is larger than its record by its headers.
            .set("message.max.bytes", "1000000000")
            .set("topic.metadata.propagation.max.ms", "5000");
        self.pass_through(&mut config);
        config.set("acks", "all").set("enable.idempotence", "true").set("message.timeout.ms", "30000");
        config
    }

    /// Settings for looking and for creating topics, without a group.
    pub(crate) fn admin(&self) -> ClientConfig {
        let mut config = ClientConfig::new();
        self.pass_through(&mut config);
        config.set("allow.auto.create.topics", "false");
        config
    }

    fn pass_through(&self, config: &mut ClientConfig) {
        for (name, value) in &self.properties {
            config.set(name, value);
        }
        config.set("bootstrap.servers", &self.brokers);
    }
}

impl fmt::Debug for Kafka {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Kafka")
            .field("brokers", &self.brokers)
            .field("properties", &self.properties.keys().collect::<Vec<_>>())
            .finish()
    }
}

/// What a property would break. Aliases stand here too.
const REFUSED: [(&str, &str); 22] = [
    ("bootstrap.servers", "the brokers are given apart"),
    ("metadata.broker.list", "the brokers are given apart"),
    ("group.id", "the group is set on the builder"),
    ("group.instance.id", "the instance is set on the builder"),
    ("group.protocol", "only the classic protocol is supported; leave it out"),
    ("enable.auto.commit", "an offset is committed after its effect, never by a timer"),
    ("auto.commit.enable", "an offset is committed after its effect, never by a timer"),
    ("auto.commit.interval.ms", "an offset is committed after its effect, never by a timer"),
    ("enable.auto.offset.store", "an offset is committed after its effect, never when the record is read"),
    (
        "auto.offset.reset",
        "a new group starts at the earliest record, and an offset that is gone must stop its partition, not skip records",
    ),
    ("isolation.level", "records of aborted transactions must not be applied; read_committed is set already"),
    ("allow.auto.create.topics", "a misspelt topic must be an error, not a new topic"),
    ("enable.partition.eof", "the end of a partition means nothing here"),
    ("acks", "a dead letter counts only once every in-sync replica has it"),
    ("request.required.acks", "a dead letter counts only once every in-sync replica has it"),
    ("enable.idempotence", "a dead letter must not be lost or written twice by a retry"),
    ("transactional.id", "dead letters are not written in Kafka transactions"),
    ("message.timeout.ms", "a dead letter that cannot be written is tried again for as long as it takes"),
    ("delivery.timeout.ms", "a dead letter that cannot be written is tried again for as long as it takes"),
    ("queue.buffering.max.messages", "one dead letter at a time is written for each partition"),
    ("plugin.library.paths", "an interceptor could change what is read and committed"),
    ("test.mock.num.brokers", "it would replace the brokers by a mock"),
];

/// librdkafka's own message would quote the value.
fn unknown_property(error: KafkaError) -> build::Error {
    match error {
        KafkaError::ClientConfig(RDKafkaConfRes::RD_KAFKA_CONF_UNKNOWN, _, name, _) => {
            build::Error::PropertyUnknown { name }
        }
        KafkaError::ClientConfig(_, _, name, _) => build::Error::PropertyInvalid { name },
        source => build::Error::Client { source },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_property_that_breaks_a_guarantee_is_refused_with_its_reason() {
        for (name, reason) in REFUSED {
            let error = Kafka::new("localhost:9092").property(name, "1").check().unwrap_err();
            assert!(error.to_string().contains(name) && error.to_string().contains(reason), "{error}");
        }
    }

    #[test]
    fn a_misspelt_property_is_named_and_its_value_is_not() {
        let error = Kafka::new("localhost:9092").property("sasl.pasword", "hunter2").check().unwrap_err();
        assert!(error.to_string().contains("sasl.pasword"), "{error}");
        assert!(!format!("{error:?} {error}").contains("hunter2"), "{error:?}");
    }

    #[test]
    fn a_bad_value_is_named_by_its_property_only() {
        let error = Kafka::new("localhost:9092").property("fetch.min.bytes", "hunter2").check().unwrap_err();
        assert!(error.to_string().contains("fetch.min.bytes"), "{error}");
        assert!(!format!("{error:?} {error}").contains("hunter2"), "{error:?}");
    }

    #[test]
    fn other_properties_pass_through() {
        let kafka =
            Kafka::new("localhost:9092").property("fetch.wait.max.ms", "20").property("client.rack", "a");
        kafka.check().unwrap();
        assert_eq!(kafka.consumer(&Member::of("billing")).get("fetch.wait.max.ms"), Some("20"));
        assert_eq!(kafka.producer("billing").get("client.rack"), Some("a"));
    }

    #[test]
    fn what_debug_prints_holds_no_value() {
        let kafka = Kafka::new("localhost:9092").property("sasl.password", "hunter2");
        assert!(!format!("{kafka:?}").contains("hunter2"));
    }

    #[test]
    fn missing_brokers_are_refused() {
        assert!(matches!(Kafka::new(" ").check(), Err(build::Error::NoBrokers)));
    }
}

//! What a refusal by Kafka means: for which cause, as the lifecycle of a message calls it, and what an operator can do.
//!
//! Of a message that is too large it says how large, and what its topic allows, where the broker tells: the two numbers that
//! whoever is called at night compares.

use baton_protocol::lifecycle::message::Cause;
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::message::Headers;

use crate::links::Links;

/// The setting of a topic that bounds a message.
const LIMIT: &str = "max.message.bytes";

/// The cause that an error stands for. `None`: no single message is to blame.
pub(crate) fn cause(code: RDKafkaErrorCode) -> Option<Cause> {
    use RDKafkaErrorCode as E;
    match code {
        // The latter where a segment of the topic is smaller than what it takes.
        E::MessageSizeTooLarge | E::MessageBatchTooLarge => Some(Cause::TooLarge),
        E::UnknownTopic | E::UnknownTopicOrPartition => Some(Cause::UnknownTopic),
        E::InvalidTopic => Some(Cause::InvalidTopic),
        E::TopicAuthorizationFailed => Some(Cause::NotAuthorized),
        // A good record whose batch holds a bad one is told otherwise: InvalidDifferentRecord.
        E::InvalidRecord | E::InvalidTimestamp => Some(Cause::InvalidRecord),
        _ => None,
    }
}

/// What an operator can do about it.
pub(crate) fn advice(cause: Cause) -> &'static str {
    match cause {
        Cause::TooLarge => {
            "raise max.message.bytes of the topic, and segment.bytes where that is less, or have the service send less"
        }
        Cause::UnknownTopic => "create the topic",
        Cause::InvalidTopic => "the broker does not accept this topic name",
        Cause::NotAuthorized => "allow this relay's Kafka user to write to the topic",
        Cause::InvalidRecord => {
            "look at what the topic asks of a record: cleanup.policy=compact wants a key, message.timestamp.before.max.ms \
             and message.timestamp.after.max.ms bound its time; the broker's log may say more"
        }
        Cause::Paused => "resume the topic",
    }
}

/// What is told of a refusal: the client's words, and of a message that is too large how large it is.
pub(crate) fn words(error: &KafkaError, cause: Cause, bytes: impl FnOnce() -> usize) -> String {
    match cause {
        Cause::TooLarge => {
            format!("{error}: {}", of_size(bytes()))
        }
        _ => error.to_string(),
    }
}

/// How large a message is, in words.
pub(crate) fn of_size(bytes: usize) -> String {
    format!("the message has {bytes} bytes (key, payload and headers, before compression)")
}

/// What its topic takes, in words.
pub(crate) fn allows(limit: usize) -> String {
    format!("its topic takes batches of at most {limit} bytes ({LIMIT})")
}

/// How large a record is: its key, its payload, names and values of its headers.
pub(crate) fn bytes(key: Option<&[u8]>, payload: Option<&[u8]>, headers: Option<&impl Headers>) -> usize {
    let length = |part: Option<&[u8]>| part.map_or(0, <[u8]>::len);
    let headers: usize = headers
        .into_iter()
        .flat_map(Headers::iter)
        .map(|header| header.key.len() + length(header.value))
        .sum();
    length(key) + length(payload) + headers
}

/// A refusal in full. Of a message that is too large: what its topic takes.
pub(crate) async fn in_full(links: &Links, topic: &str, cause: Cause, error: String) -> String {
    if cause != Cause::TooLarge {
        return error;
    }
    let rules = links.topics.rules.ask(&links.settings, topic).await;
    match rules.and_then(|rules| rules.bytes) {
        Some(limit) => format!("{error}; {}", allows(limit)),
        None => format!("{error}; what its topic allows is unknown, the broker does not tell {LIMIT}"),
    }
}

#[cfg(test)]
mod tests {
    use rdkafka::message::{Header, OwnedHeaders};

    use super::*;

    #[test]
    fn a_record_is_as_large_as_its_key_its_payload_and_its_headers() {
        let headers = OwnedHeaders::new()
            .insert(Header { key: "ce_id", value: Some("12345") })
            .insert(Header { key: "none", value: None::<&str> });
        assert_eq!(bytes(Some(b"key"), Some(b"payload"), Some(&headers)), 3 + 7 + 10 + 4);
        assert_eq!(bytes(None, None, None::<&OwnedHeaders>), 0);
    }

    #[test]
    fn only_of_a_message_that_is_too_large_the_size_is_told() {
        let too_large = KafkaError::MessageProduction(RDKafkaErrorCode::MessageSizeTooLarge);
        assert!(words(&too_large, Cause::TooLarge, || 30_123).contains("the message has 30123 bytes"));
        let unknown = KafkaError::MessageProduction(RDKafkaErrorCode::UnknownTopic);
        assert_eq!(words(&unknown, Cause::UnknownTopic, || 1), unknown.to_string());
    }
}

//! What a record says that nobody could apply: where dead letters go, and the `dlt-*` headers they carry.
//!
//! A dead letter keeps the record's key, value, timestamp and headers exactly; the headers here are added to them, and
//! take the place of those of an earlier death ([`is_of_a_death`]), so that a record which fails again and again does not
//! grow. [`spring`] has the names and types of Spring Kafka instead, for whoever asks for that [`Format`]. Names and formats are public: numbers are decimal text, times RFC 3339 in UTC with milliseconds, and only
//! `dlt-original-timestamp` is in milliseconds since 1970, as Kafka gives it.

use std::fmt;
use std::str::FromStr;

use time::OffsetDateTime;

use crate::rfc3339;

pub mod spring;

/// Why the record was given up: one of [`Cause`].
pub const CAUSE: &str = "dlt-cause";
/// What the handler said, cut to [`ERROR_LIMIT`] bytes.
pub const ERROR: &str = "dlt-error";
/// How many attempts were made.
pub const ATTEMPTS: &str = "dlt-attempts";
/// The topic that the record came from, also where it came by way of a replay topic.
pub const ORIGINAL_TOPIC: &str = "dlt-original-topic";
/// The partition that it was read from.
pub const ORIGINAL_PARTITION: &str = "dlt-original-partition";
/// The offset that it was read at.
pub const ORIGINAL_OFFSET: &str = "dlt-original-offset";
/// Its timestamp, milliseconds since 1970; absent where it has none.
pub const ORIGINAL_TIMESTAMP: &str = "dlt-original-timestamp";
/// The consumer that gave it up.
pub const CONSUMER: &str = "dlt-consumer";
/// When it first failed.
pub const FIRST_FAILED_AT: &str = "dlt-first-failed-at";
/// When it was given up.
pub const FAILED_AT: &str = "dlt-failed-at";

/// The longest `dlt-error`, in bytes.
pub const ERROR_LIMIT: usize = 2048;

const OWN: [&str; 10] = [
    CAUSE,
    ERROR,
    ATTEMPTS,
    ORIGINAL_TOPIC,
    ORIGINAL_PARTITION,
    ORIGINAL_OFFSET,
    ORIGINAL_TIMESTAMP,
    CONSUMER,
    FIRST_FAILED_AT,
    FAILED_AT,
];

/// Where the dead letters of a consumer go: `<topic>.<consumer>.dlt`. `topic` is the original one.
#[must_use]
pub fn topic(topic: &str, consumer: &str) -> String {
    format!("{topic}.{consumer}.dlt")
}

/// Where they come back from: `<topic>.<consumer>.replay`. `topic` is the original one.
#[must_use]
pub fn replay_topic(topic: &str, consumer: &str) -> String {
    format!("{topic}.{consumer}.replay")
}

/// The consumer group that reads the replay topics of the consumer whose own group is `group`.
#[must_use]
pub fn replay_group(group: &str) -> String {
    format!("{group}.replay")
}

/// Whether a header is one of these.
#[must_use]
pub fn is_own(header: &str) -> bool {
    OWN.contains(&header)
}

/// Whether a header tells of a death, in either format, and so is replaced rather than kept when a record dies once more.
#[must_use]
pub fn is_of_a_death(header: &str) -> bool {
    is_own(header) || spring::is_own(header)
}

/// By which names and types a dead letter tells what happened, and where it goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Format {
    /// `dlt-…`, numbers as text, to `<topic>.<consumer>.dlt`. The default.
    #[default]
    Own,
    /// Spring Kafka's `kafka_dlt-…`, numbers big-endian, to `<topic>-dlt`, which all consumers of the topic share that write there.
    Spring,
}

impl Format {
    /// Where the dead letters of a consumer go. `topic` is the original one.
    #[must_use]
    pub fn topic(self, topic: &str, consumer: &str) -> String {
        match self {
            Self::Own => self::topic(topic, consumer),
            Self::Spring => spring::topic(topic),
        }
    }
}

/// What a record's timestamp is the time of, by Kafka's own names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum TimestampType {
    /// It has none.
    #[default]
    None,
    /// When its producer made it. Kafka's default, and what is said of a record that was set aside, of which it is not kept.
    Create,
    /// When the broker got it.
    LogAppend,
}

impl TimestampType {
    /// As Java's client writes it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::None => "NoTimestampType",
            Self::Create => "CreateTime",
            Self::LogAppend => "LogAppendTime",
        }
    }
}

/// Why a consumer gave a record up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Cause {
    /// The handler said that no attempt will succeed.
    Permanent,
    /// The attempt budget is spent.
    Exhausted,
    /// The same idempotency key was seen with another payload.
    Conflict,
    /// The record names no identity to deduplicate by.
    NoIdentity,
    /// The payload could not be decoded.
    Undecodable,
    /// No handler is registered for its type.
    UnknownType,
    /// It is older than the deduplication horizon and cannot be told from a duplicate.
    TooOld,
    /// The handler panicked.
    Panic,
}

impl Cause {
    /// Every cause.
    pub const ALL: [Self; 8] = [
        Self::Permanent,
        Self::Exhausted,
        Self::Conflict,
        Self::NoIdentity,
        Self::Undecodable,
        Self::UnknownType,
        Self::TooOld,
        Self::Panic,
    ];

    /// As headers, tables and commands write it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Permanent => "permanent",
            Self::Exhausted => "exhausted",
            Self::Conflict => "conflict",
            Self::NoIdentity => "no_identity",
            Self::Undecodable => "undecodable",
            Self::UnknownType => "unknown_type",
            Self::TooOld => "too_old",
            Self::Panic => "panic",
        }
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for Cause {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        Self::ALL
            .into_iter()
            .find(|cause| cause.as_str() == text)
            .ok_or_else(|| Error::UnknownCause { given: text.to_owned() })
    }
}

/// Why a dead letter cannot be described.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No cause has this name.
    #[error(
        "unknown cause {given:?}; expected permanent, exhausted, conflict, no_identity, undecodable, unknown_type, too_old or panic"
    )]
    UnknownCause {
        /// What was given.
        given: String,
    },
    /// A time lies outside the years 0 to 9999, which RFC 3339 cannot say.
    #[error("time of failure {at} lies outside the years 0 to 9999")]
    Time {
        /// The time.
        at: OffsetDateTime,
    },
}

/// One death of a record, as its headers tell it.
#[derive(Debug, Clone, Copy)]
pub struct Letter<'a> {
    /// Why it was given up.
    pub cause: Cause,
    /// What the handler said; cut to [`ERROR_LIMIT`] bytes.
    pub error: &'a str,
    /// How many attempts were made, the last one included.
    pub attempts: u32,
    /// The topic that it came from.
    pub original_topic: &'a str,
    /// The partition that it was read from.
    pub original_partition: i32,
    /// The offset that it was read at.
    pub original_offset: i64,
    /// Its timestamp, milliseconds since 1970.
    pub original_timestamp_ms: Option<i64>,
    /// What that is the time of; only Spring's format says it.
    pub original_timestamp_type: TimestampType,
    /// The consumer that gave it up.
    pub consumer: &'a str,
    /// Its consumer group; only Spring's format says it.
    pub group: &'a str,
    /// When it first failed, by the database's clock.
    pub first_failed_at: OffsetDateTime,
    /// When it was given up, by the database's clock.
    pub failed_at: OffsetDateTime,
}

impl Letter<'_> {
    /// Calls back once for each header of `format`, always in the same order.
    ///
    /// # Errors
    ///
    /// As [`write`](Self::write); Spring's format has no such time.
    pub fn write_as(&self, format: Format, header: &mut impl FnMut(&str, &[u8])) -> Result<(), Error> {
        match format {
            Format::Own => self.write(header),
            Format::Spring => {
                spring::write(self, header);
                Ok(())
            }
        }
    }

    /// Calls back once for each of our own headers, always in the same order.
    ///
    /// # Errors
    ///
    /// When a time cannot be written; nothing has been called back then.
    pub fn write(&self, header: &mut impl FnMut(&str, &[u8])) -> Result<(), Error> {
        let first_failed_at = time_text(self.first_failed_at)?;
        let failed_at = time_text(self.failed_at)?;
        header(CAUSE, self.cause.as_str().as_bytes());
        header(ERROR, cut(self.error, ERROR_LIMIT).as_bytes());
        header(ATTEMPTS, self.attempts.to_string().as_bytes());
        header(ORIGINAL_TOPIC, self.original_topic.as_bytes());
        header(ORIGINAL_PARTITION, self.original_partition.to_string().as_bytes());
        header(ORIGINAL_OFFSET, self.original_offset.to_string().as_bytes());
        if let Some(ms) = self.original_timestamp_ms {
            header(ORIGINAL_TIMESTAMP, ms.to_string().as_bytes());
        }
        header(CONSUMER, self.consumer.as_bytes());
        header(FIRST_FAILED_AT, first_failed_at.as_bytes());
        header(FAILED_AT, failed_at.as_bytes());
        Ok(())
    }
}

fn time_text(at: OffsetDateTime) -> Result<String, Error> {
    rfc3339::from_time(at).ok_or(Error::Time { at })
}

/// The longest beginning of `text` that has at most `limit` bytes and ends between two characters.
fn cut(text: &str, limit: usize) -> &str {
    &text[..text.floor_char_boundary(limit)]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn letter<'a>(error: &'a str, timestamp: Option<i64>) -> Letter<'a> {
        Letter {
            cause: Cause::Exhausted,
            error,
            attempts: 10,
            original_topic: "orders",
            original_partition: 3,
            original_offset: 9_007_199_254_740_993,
            original_timestamp_ms: timestamp,
            original_timestamp_type: TimestampType::LogAppend,
            consumer: "billing",
            group: "billing-eu",
            first_failed_at: OffsetDateTime::from_unix_timestamp(1_769_850_300).unwrap(),
            failed_at: OffsetDateTime::from_unix_timestamp_nanos(1_769_850_360_250_999_999).unwrap(),
        }
    }

    fn written(letter: &Letter<'_>) -> Vec<(String, String)> {
        let mut headers = Vec::new();
        let mut header = |name: &str, value: &[u8]| {
            headers.push((name.to_owned(), String::from_utf8(value.to_vec()).unwrap()));
        };
        letter.write(&mut header).unwrap();
        headers
    }

    #[test]
    fn the_headers_of_a_dead_letter_are_what_they_always_were() {
        let expected = [
            ("dlt-cause", "exhausted"),
            ("dlt-error", "card declined"),
            ("dlt-attempts", "10"),
            ("dlt-original-topic", "orders"),
            ("dlt-original-partition", "3"),
            ("dlt-original-offset", "9007199254740993"),
            ("dlt-original-timestamp", "1769850300250"),
            ("dlt-consumer", "billing"),
            ("dlt-first-failed-at", "2026-01-31T09:05:00.000Z"),
            ("dlt-failed-at", "2026-01-31T09:06:00.250Z"),
        ];
        let expected: Vec<_> = expected.map(|(n, v)| (n.to_owned(), v.to_owned())).into();
        assert_eq!(written(&letter("card declined", Some(1_769_850_300_250))), expected);
    }

    #[test]
    fn whatever_is_written_is_known_as_its_own_and_nothing_else_is() {
        assert!(written(&letter("", Some(0))).iter().all(|(name, _)| is_own(name)));
        for name in ["dlt-", "dlt-cause2", "DLT-CAUSE", "kafka_dlt-original-topic", "ce_id", ""] {
            assert!(!is_own(name), "{name}");
        }
    }

    #[test]
    fn springs_headers_are_springs_to_the_byte() {
        let mut headers = Vec::new();
        let mut letter = letter("card declined", Some(1_769_850_300_250));
        letter
            .write_as(Format::Spring, &mut |name, value| headers.push((name.to_owned(), value.to_vec())))
            .unwrap();
        let expected: [(&str, &[u8]); 10] = [
            ("kafka_dlt-original-topic", b"orders"),
            ("kafka_dlt-original-partition", &[0, 0, 0, 3]),
            ("kafka_dlt-original-offset", &[0, 0x20, 0, 0, 0, 0, 0, 1]),
            ("kafka_dlt-original-timestamp", &[0, 0, 0x01, 0x9c, 0x13, 0x4c, 0x67, 0x5a]),
            ("kafka_dlt-original-timestamp-type", b"LogAppendTime"),
            ("kafka_dlt-original-consumer-group", b"billing-eu"),
            ("kafka_dlt-exception-fqcn", b"baton.DeadLetter"),
            ("kafka_dlt-exception-cause-fqcn", b"baton.exhausted"),
            ("kafka_dlt-exception-message", b"card declined"),
            (
                "kafka_dlt-exception-stacktrace",
                b"baton.DeadLetter: exhausted after 10 attempts by consumer billing\nCaused by: baton.exhausted: card declined\n",
            ),
        ];
        let expected: Vec<_> =
            expected.iter().map(|(name, value)| ((*name).to_owned(), value.to_vec())).collect();
        assert_eq!(headers, expected);
        assert!(headers.iter().all(|(name, _)| is_of_a_death(name) && !is_own(name)));
        letter.original_timestamp_ms = None;
        letter.original_timestamp_type = TimestampType::None;
        spring::write(&letter, &mut |name, value| match name {
            spring::ORIGINAL_TIMESTAMP => assert_eq!(value, [0xff; 8]),
            spring::ORIGINAL_TIMESTAMP_TYPE => assert_eq!(value, b"NoTimestampType"),
            _ => {}
        });
    }

    #[test]
    fn an_error_of_any_length_is_bounded_in_both_formats() {
        let error = "é".repeat(1_000_000);
        for format in [Format::Own, Format::Spring] {
            let mut bytes = 0;
            letter(&error, None)
                .write_as(format, &mut |name, value| bytes += name.len() + value.len())
                .unwrap();
            assert!(bytes < 6_000, "{format:?}: {bytes}");
        }
    }

    #[test]
    fn a_record_without_a_timestamp_has_no_header_for_it() {
        assert!(written(&letter("", None)).iter().all(|(name, _)| name != ORIGINAL_TIMESTAMP));
    }

    #[test]
    fn a_long_error_is_cut_between_two_characters() {
        for (error, length) in [
            ("e".repeat(ERROR_LIMIT), ERROR_LIMIT),
            ("e".repeat(ERROR_LIMIT + 1), ERROR_LIMIT),
            ("é".repeat(ERROR_LIMIT), ERROR_LIMIT),
            (format!("e{}", "é".repeat(ERROR_LIMIT)), ERROR_LIMIT - 1),
            (format!("e{}", "🦀".repeat(ERROR_LIMIT)), ERROR_LIMIT - 3),
        ] {
            let headers = written(&letter(&error, None));
            let (_, kept) = headers.iter().find(|(name, _)| name == ERROR).unwrap();
            assert_eq!(kept.len(), length);
            assert!(error.starts_with(kept.as_str()));
        }
    }

    #[test]
    fn a_time_that_cannot_be_written_writes_nothing() {
        let at = OffsetDateTime::from_unix_timestamp(-62_167_219_201).unwrap();
        let broken = Letter { failed_at: at, ..letter("", None) };
        let mut header = |name: &str, _: &[u8]| panic!("{name} was written");
        assert_eq!(broken.write(&mut header), Err(Error::Time { at }));
    }

    #[test]
    fn topics_are_named_after_the_original_and_the_consumer() {
        assert_eq!(Format::Own.topic("orders", "billing"), "orders.billing.dlt");
        assert_eq!(Format::Spring.topic("orders", "billing"), "orders-dlt");
        assert_eq!(replay_topic("orders", "billing"), "orders.billing.replay");
        assert_eq!(replay_group("billing"), "billing.replay");
    }

    #[test]
    fn every_cause_is_read_as_it_is_written() {
        let names = Cause::ALL.map(Cause::as_str).join(" ");
        assert_eq!(names, "permanent exhausted conflict no_identity undecodable unknown_type too_old panic");
        for cause in Cause::ALL {
            assert_eq!(cause.to_string().parse(), Ok(cause));
        }
        for unknown in ["", "Permanent", "panicked"] {
            assert!(
                matches!(unknown.parse::<Cause>(), Err(Error::UnknownCause { given }) if given == unknown)
            );
        }
    }
}

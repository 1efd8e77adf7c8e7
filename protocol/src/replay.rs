//! What a replayed record carries, and what is read of a dead letter before it is replayed.
//!
//! ```text
//! dead letter ── read ──▶ Letter (cause, where it came from, round) ── next_round ──▶ None: the loop cap
//!                                                                          │
//!                                         replayed ◀── Stamp (plan, item, round) ┘
//! ```
//!
//! A replayed record keeps the letter's key, value and headers, but for those that tell of a death ([`dead_letter::is_own`],
//! `kafka_dlt-…`) and of an earlier replay: these are taken off, and the four of this page are put on. So a record that is
//! replayed and dies again and again carries each of them once, whatever the round. Numbers are decimal text.
//!
//! Letters written by Spring Kafka are read as well: its integers are big-endian bytes.

use sha2::{Digest, Sha256};
use time::OffsetDateTime;
use uuid::Uuid;

use crate::{dead_letter, rfc3339};

/// The plan that it was sent by: a uuid. It stands in the consumer's inbox database.
pub const PLAN: &str = "replay-plan";
/// Which item of the plan it is, counted from 1.
pub const ITEM: &str = "replay-item";
/// How often it has been replayed, this time included.
pub const ROUND: &str = "replay-round";
/// The timestamp of the record that died first, milliseconds since 1970; absent where it had none.
pub const ORIGINAL_TIMESTAMP: &str = "replay-original-timestamp";

/// How often a record is replayed at most, unless an operator says otherwise.
pub const DEFAULT_LOOP_CAP: u32 = 3;

const OWN: [&str; 4] = [PLAN, ITEM, ROUND, ORIGINAL_TIMESTAMP];

/// Spring Kafka's headers of a death begin so.
const SPRING: &str = "kafka_dlt-";
const SPRING_TOPIC: &str = "kafka_dlt-original-topic";
const SPRING_PARTITION: &str = "kafka_dlt-original-partition";
const SPRING_OFFSET: &str = "kafka_dlt-original-offset";
const SPRING_TIMESTAMP: &str = "kafka_dlt-original-timestamp";
const SPRING_GROUP: &str = "kafka_dlt-original-consumer-group";
const SPRING_EXCEPTION: &str = "kafka_dlt-exception-fqcn";
const SPRING_CAUSE: &str = "kafka_dlt-exception-cause-fqcn";

const IDEMPOTENCY_KEY: &str = "idempotency-key";

/// Whether a header is one of these four.
#[must_use]
pub fn is_own(header: &str) -> bool {
    OWN.contains(&header)
}

/// One item of one plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Item {
    /// The plan.
    pub plan: Uuid,
    /// Counted from 1 within it.
    pub number: i64,
}

/// The item that a record says it is. Only the database of the consumer knows whether that is so.
#[must_use]
pub fn item<'a>(headers: impl IntoIterator<Item = (&'a str, Option<&'a [u8]>)>) -> Option<Item> {
    let (mut plan, mut number) = (None, None);
    for (name, value) in headers {
        match name {
            PLAN => plan = plan.or(value),
            ITEM => number = number.or(value),
            _ => {}
        }
    }
    let plan = Uuid::try_parse_ascii(plan?).ok()?;
    let number = decimal(number?).filter(|number| *number >= 1)?;
    Some(Item { plan, number })
}

/// Of which topic a topic is this consumer's replay topic; none if it is not one.
#[must_use]
pub fn original_topic<'t>(topic: &'t str, consumer: &str) -> Option<&'t str> {
    let original = topic.strip_suffix(".replay")?.strip_suffix(consumer)?.strip_suffix('.')?;
    (!original.is_empty()).then_some(original)
}

/// The round of the next replay, or none where the record has been replayed as often as it may be.
#[must_use]
pub fn next_round(round: u32, cap: u32) -> Option<u32> {
    (round < cap).then(|| round.saturating_add(1))
}

/// What a dead letter tells of itself. What it does not say, or says in a way that cannot be read, is none.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Letter {
    /// Why it was given up: `dlt-cause`, or the class of the exception that Spring Kafka names (that of its cause where it has one).
    pub cause: Option<String>,
    /// Who gave it up.
    pub giver: Option<Giver>,
    /// The topic that the record was first read from.
    pub topic: Option<String>,
    /// Its partition there.
    pub partition: Option<i32>,
    /// Its offset there.
    pub offset: Option<i64>,
    /// Its timestamp there, milliseconds since 1970.
    pub timestamp_ms: Option<i64>,
    /// When it first failed.
    pub first_failed_at: Option<OffsetDateTime>,
    /// When it was given up.
    pub failed_at: Option<OffsetDateTime>,
    /// How often it had been replayed when it died; 0 where nothing says so.
    pub round: u32,
}

/// Who gave a record up, as its letter names it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Giver {
    /// A consumer of Baton, by its name.
    Consumer(String),
    /// A consumer group: what Spring Kafka names.
    Group(String),
}

impl Giver {
    /// The name.
    #[must_use]
    pub fn name(&self) -> &str {
        match self {
            Self::Consumer(name) | Self::Group(name) => name,
        }
    }
}

impl Letter {
    /// Reads a letter's headers; of a repeated one the first.
    #[must_use]
    pub fn read<'a>(headers: impl IntoIterator<Item = (&'a str, Option<&'a [u8]>)>) -> Self {
        let mut own = Self::default();
        let mut spring = Self::default();
        let (mut exception, mut round) = (None, None);
        for (name, value) in headers {
            let Some(value) = value else { continue };
            match name {
                dead_letter::CAUSE => first(&mut own.cause, text(value)),
                dead_letter::CONSUMER => first(&mut own.giver, text(value).map(Giver::Consumer)),
                dead_letter::ORIGINAL_TOPIC => first(&mut own.topic, text(value)),
                dead_letter::ORIGINAL_PARTITION => first(&mut own.partition, decimal(value)),
                dead_letter::ORIGINAL_OFFSET => first(&mut own.offset, decimal(value)),
                dead_letter::ORIGINAL_TIMESTAMP => first(&mut own.timestamp_ms, decimal(value)),
                dead_letter::FIRST_FAILED_AT => first(&mut own.first_failed_at, time(value)),
                dead_letter::FAILED_AT => first(&mut own.failed_at, time(value)),
                ROUND => first(&mut round, decimal(value)),
                SPRING_TOPIC => first(&mut spring.topic, text(value)),
                SPRING_PARTITION => {
                    first(&mut spring.partition, value.try_into().ok().map(i32::from_be_bytes));
                }
                SPRING_OFFSET => first(&mut spring.offset, value.try_into().ok().map(i64::from_be_bytes)),
                SPRING_TIMESTAMP => {
                    first(&mut spring.timestamp_ms, value.try_into().ok().map(i64::from_be_bytes));
                }
                SPRING_GROUP => first(&mut spring.giver, text(value).map(Giver::Group)),
                SPRING_EXCEPTION => first(&mut exception, text(value)),
                SPRING_CAUSE => first(&mut spring.cause, text(value)),
                _ => {}
            }
        }
        Self {
            cause: own.cause.or(spring.cause).or(exception),
            giver: own.giver.or(spring.giver),
            topic: own.topic.or(spring.topic),
            partition: own.partition.or(spring.partition),
            offset: own.offset.or(spring.offset),
            timestamp_ms: own.timestamp_ms.or(spring.timestamp_ms),
            first_failed_at: own.first_failed_at,
            failed_at: own.failed_at,
            round: round.unwrap_or_default(),
        }
    }

    /// Whether nothing in it tells of a death: it may be any record.
    #[must_use]
    pub fn is_silent(&self) -> bool {
        let Self {
            cause,
            giver,
            topic,
            partition,
            offset,
            timestamp_ms,
            first_failed_at,
            failed_at,
            round: _,
        } = self;
        cause.is_none()
            && giver.is_none()
            && topic.is_none()
            && partition.is_none()
            && offset.is_none()
            && timestamp_ms.is_none()
            && first_failed_at.is_none()
            && failed_at.is_none()
    }

    /// Names the record that died, the same for every letter about it: those that a crash wrote twice, and those of later rounds.
    /// `place` is where this letter stands (topic, partition, offset), which counts where it does not say where it came from.
    #[must_use]
    pub fn subject(&self, place: (&str, i32, i64)) -> [u8; 32] {
        let mut digest = Sha256::new();
        let (kind, (topic, partition, offset)) = match (&self.topic, self.partition, self.offset) {
            (Some(topic), Some(partition), Some(offset)) => (1_u8, (topic.as_str(), partition, offset)),
            _ => (2, place),
        };
        digest.update([kind]);
        digest.update(topic.as_bytes());
        // A topic holds no NUL.
        digest.update([0]);
        digest.update(partition.to_be_bytes());
        digest.update(offset.to_be_bytes());
        // A topic that was made anew gives the same offsets out again.
        if let Some(timestamp_ms) = self.timestamp_ms.filter(|_| kind == 1) {
            digest.update(timestamp_ms.to_be_bytes());
        }
        digest.finalize().into()
    }
}

/// What is put on a replayed record.
#[derive(Debug, Clone, Copy)]
pub struct Stamp<'a> {
    /// The item that it is sent for.
    pub item: Item,
    /// See [`ROUND`].
    pub round: u32,
    /// See [`ORIGINAL_TIMESTAMP`].
    pub original_timestamp_ms: Option<i64>,
    /// Makes it new work under this key; without one it is the same work again.
    pub new_key: Option<&'a str>,
}

impl Stamp<'_> {
    /// Calls back once for each header of the replayed record, in order; `None` is a null value.
    pub fn write<'h>(
        &self,
        letter: impl IntoIterator<Item = (&'h str, Option<&'h [u8]>)>,
        header: &mut impl FnMut(&str, Option<&[u8]>),
    ) {
        if let Some(key) = self.new_key {
            header(IDEMPOTENCY_KEY, Some(key.as_bytes()));
        }
        for (name, value) in letter {
            if tells_of_a_death(name) || is_own(name) || self.new_key.is_some() && name == IDEMPOTENCY_KEY {
                continue;
            }
            header(name, value);
        }
        header(PLAN, Some(self.item.plan.to_string().as_bytes()));
        header(ITEM, Some(self.item.number.to_string().as_bytes()));
        header(ROUND, Some(self.round.to_string().as_bytes()));
        if let Some(timestamp_ms) = self.original_timestamp_ms {
            header(ORIGINAL_TIMESTAMP, Some(timestamp_ms.to_string().as_bytes()));
        }
    }
}

fn tells_of_a_death(header: &str) -> bool {
    dead_letter::is_own(header) || header.starts_with(SPRING)
}

fn first<T>(place: &mut Option<T>, value: Option<T>) {
    if place.is_none() {
        *place = value;
    }
}

fn text(value: &[u8]) -> Option<String> {
    let text = std::str::from_utf8(value).ok()?;
    (!text.is_empty() && !text.contains('\0')).then(|| text.to_owned())
}

fn decimal<T: std::str::FromStr>(value: &[u8]) -> Option<T> {
    std::str::from_utf8(value).ok()?.parse().ok()
}

fn time(value: &[u8]) -> Option<OffsetDateTime> {
    rfc3339::to_time(std::str::from_utf8(value).ok()?)
}

#[cfg(test)]
mod tests;

//! Dead letters as Spring Kafka's `DeadLetterPublishingRecoverer` writes them, for tools that read those.
//!
//! Names and types are Spring's, to the byte: the partition is an int32 and offset and timestamp are int64, all big-endian; the
//! rest is text. A record without a timestamp says -1, as Java's client does. There is no Java exception to name, so the names of
//! classes are ours: [`EXCEPTION`], and below it the cause, `baton.permanent` for example.

use super::{ERROR_LIMIT, Letter, cut};

/// The topic that the record came from.
pub const ORIGINAL_TOPIC: &str = "kafka_dlt-original-topic";
/// The partition that it was read from, int32.
pub const ORIGINAL_PARTITION: &str = "kafka_dlt-original-partition";
/// The offset that it was read at, int64.
pub const ORIGINAL_OFFSET: &str = "kafka_dlt-original-offset";
/// Its timestamp, int64, milliseconds since 1970.
pub const ORIGINAL_TIMESTAMP: &str = "kafka_dlt-original-timestamp";
/// What that is the time of: one of [`TimestampType`](super::TimestampType).
pub const ORIGINAL_TIMESTAMP_TYPE: &str = "kafka_dlt-original-timestamp-type";
/// The consumer group that gave it up.
pub const ORIGINAL_CONSUMER_GROUP: &str = "kafka_dlt-original-consumer-group";
/// Always [`EXCEPTION`].
pub const EXCEPTION_FQCN: &str = "kafka_dlt-exception-fqcn";
/// `baton.` and why it was given up.
pub const EXCEPTION_CAUSE_FQCN: &str = "kafka_dlt-exception-cause-fqcn";
/// What the handler said, cut to [`ERROR_LIMIT`] bytes.
pub const EXCEPTION_MESSAGE: &str = "kafka_dlt-exception-message";
/// The same with cause, attempts and consumer, in the form of a stack trace.
pub const EXCEPTION_STACKTRACE: &str = "kafka_dlt-exception-stacktrace";

/// What stands for the class of the exception.
pub const EXCEPTION: &str = "baton.DeadLetter";

const NAMES: [&str; 10] = [
    ORIGINAL_TOPIC,
    ORIGINAL_PARTITION,
    ORIGINAL_OFFSET,
    ORIGINAL_TIMESTAMP,
    ORIGINAL_TIMESTAMP_TYPE,
    ORIGINAL_CONSUMER_GROUP,
    EXCEPTION_FQCN,
    EXCEPTION_CAUSE_FQCN,
    EXCEPTION_MESSAGE,
    EXCEPTION_STACKTRACE,
];

/// Where Spring's dead letters go by default: `<topic>-dlt`, whichever consumer writes them.
#[must_use]
pub fn topic(topic: &str) -> String {
    format!("{topic}-dlt")
}

/// Whether a header is one of these.
#[must_use]
pub fn is_own(header: &str) -> bool {
    NAMES.contains(&header)
}

/// Calls back once for each header, always in the same order.
pub fn write(letter: &Letter<'_>, header: &mut impl FnMut(&str, &[u8])) {
    let Letter { cause, attempts, consumer, .. } = letter;
    let error = cut(letter.error, ERROR_LIMIT);
    let class = format!("baton.{cause}");
    let times = if *attempts == 1 { "attempt" } else { "attempts" };
    let trace = format!(
        "{EXCEPTION}: {cause} after {attempts} {times} by consumer {consumer}\nCaused by: {class}: {error}\n"
    );
    header(ORIGINAL_TOPIC, letter.original_topic.as_bytes());
    header(ORIGINAL_PARTITION, &letter.original_partition.to_be_bytes());
    header(ORIGINAL_OFFSET, &letter.original_offset.to_be_bytes());
    header(ORIGINAL_TIMESTAMP, &letter.original_timestamp_ms.unwrap_or(-1).to_be_bytes());
    header(ORIGINAL_TIMESTAMP_TYPE, letter.original_timestamp_type.as_str().as_bytes());
    header(ORIGINAL_CONSUMER_GROUP, letter.group.as_bytes());
    header(EXCEPTION_FQCN, EXCEPTION.as_bytes());
    header(EXCEPTION_CAUSE_FQCN, class.as_bytes());
    header(EXCEPTION_MESSAGE, error.as_bytes());
    header(EXCEPTION_STACKTRACE, trace.as_bytes());
}

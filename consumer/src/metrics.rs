//! What a consumer counts, through the facade of the crate [metrics](https://docs.rs/metrics): every name, its labels and its words are here.
//!
//! Whoever installs a recorder (an exporter for Prometheus, say) before [`Consumer::run`](crate::Consumer::run) is told all of it; nobody
//! else pays for more than a look. Every series has the label `consumer`; what tells of
//! partitions, offsets and what is in flight has it once more for the replay topics, as `<consumer>.replay`. Base units; every label's words are there from the
//! start, at 0, so that a rate can be taken of the first event too.
//!
//! | name | other labels | |
//! |---|---|---|
//! | `baton_consumed_total` | `outcome` | records by how they ended: `fresh`, `duplicate`, `conflict`, `dead` (given up, now or before), each once for each time a record comes; and `in_progress`, each time one is met that somebody else has |
//! | `baton_handler_seconds` | | histogram: the handler alone, without claim and commit; once for each call, so once for a batch |
//! | `baton_retries_total` | `cause` | what failed for the time being and is tried again: `handler`, `outage`, `database`, `in_progress`, `fenced`, `dead_letter` |
//! | `baton_dead_letters_total` | `cause` | dead letters acknowledged, by `dlt-cause` |
//! | `baton_breaker_state` | | gauge: 1 from when everything fails until an attempt succeeds, else 0 |
//! | `baton_consumer_parked_total` | `state` | records set aside: `retrying`, `blocked` (behind those of its key), `dead` (and its key held up) |
//! | `baton_consumer_parked_retries_total` | `result` | tries of these: `done`, `dead`, `postponed` |
//! | `baton_consumer_fenced_total` | `operation` | writes that came too late and were refused, so no success: `complete` (the handler had ended its transaction), `complete_leased` (the lease was over), `parked` (so was a parked record's), `bury` (somebody had settled the work) |
//! | `baton_consumer_in_flight_records`, `baton_consumer_in_flight_bytes` | | gauges: read, and not settled yet |
//! | `baton_consumer_commits_total` | `result` | offsets asked to be committed, by partition: `sent`, `failed` |
//! | `baton_consumer_rebalances_total` | `event` | `assigned`, `revoked`, `lost` |
//! | `baton_consumer_assigned_partitions` | | gauge |
//! | `baton_consumer_stopped_partitions` | | gauge: not read, because the group's offset is no longer on the broker; **alert on it** |

use std::time::Duration;

use baton_protocol::dead_letter::Cause;
use metrics::{Label, SharedString, Unit, counter, gauge, histogram};

const CONSUMED: &str = "baton_consumed_total";
const HANDLER: &str = "baton_handler_seconds";
const RETRIES: &str = "baton_retries_total";
const DEAD_LETTERS: &str = "baton_dead_letters_total";
const BREAKER: &str = "baton_breaker_state";
const PARKED: &str = "baton_consumer_parked_total";
const PARKED_RETRIES: &str = "baton_consumer_parked_retries_total";
const FENCED: &str = "baton_consumer_fenced_total";
const IN_FLIGHT_RECORDS: &str = "baton_consumer_in_flight_records";
const IN_FLIGHT_BYTES: &str = "baton_consumer_in_flight_bytes";
const COMMITS: &str = "baton_consumer_commits_total";
const REBALANCES: &str = "baton_consumer_rebalances_total";
const ASSIGNED: &str = "baton_consumer_assigned_partitions";
const STOPPED: &str = "baton_consumer_stopped_partitions";

/// A label's words.
macro_rules! words {
    ($(#[$doc:meta])* $name:ident { $($variant:ident = $word:literal,)+ }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(crate) enum $name { $($variant,)+ }

        impl $name {
            const WORDS: &[&str] = &[$($word),+];

            fn word(self) -> &'static str {
                match self { $(Self::$variant => $word,)+ }
            }
        }
    };
}

words! {
    /// How a record ended, or was found.
    Consumed { Fresh = "fresh", Duplicate = "duplicate", Conflict = "conflict", InProgress = "in_progress", Dead = "dead", }
}
words! {
    /// What failed for the time being.
    Retry { Handler = "handler", Outage = "outage", Database = "database", InProgress = "in_progress", Fenced = "fenced", DeadLetter = "dead_letter", }
}
words! {
    /// As what a record was set aside.
    Aside { Retrying = "retrying", Blocked = "blocked", Dead = "dead", }
}
words! {
    /// How the try of a record that was set aside ended.
    AsideTry { Done = "done", Dead = "dead", Postponed = "postponed", }
}
words! {
    /// What was refused because it came too late.
    Fenced { Complete = "complete", CompleteLeased = "complete_leased", Parked = "parked", Bury = "bury", }
}
words! {
    /// Whether a commit could be asked for.
    Commit { Sent = "sent", Failed = "failed", }
}
words! {
    /// What the group did.
    Rebalance { Assigned = "assigned", Revoked = "revoked", Lost = "lost", }
}

impl From<bool> for Commit {
    fn from(is_sent: bool) -> Self {
        if is_sent { Self::Sent } else { Self::Failed }
    }
}

/// Describes everything and puts every series of this consumer at 0. Once, when it starts.
pub(crate) fn describe(consumer: &str) {
    metrics::describe_counter!(CONSUMED, Unit::Count, "Records by how they ended, and found in progress");
    metrics::describe_histogram!(HANDLER, Unit::Seconds, "Time in the handler, without claim and commit");
    metrics::describe_counter!(RETRIES, Unit::Count, "What failed for the time being and is tried again");
    metrics::describe_counter!(DEAD_LETTERS, Unit::Count, "Dead letters acknowledged");
    metrics::describe_gauge!(BREAKER, Unit::Count, "1 while everything fails and reading pauses");
    metrics::describe_counter!(PARKED, Unit::Count, "Records set aside with their key");
    metrics::describe_counter!(PARKED_RETRIES, Unit::Count, "Tries of records that were set aside");
    metrics::describe_counter!(FENCED, Unit::Count, "Writes that came too late and were refused");
    metrics::describe_gauge!(IN_FLIGHT_RECORDS, Unit::Count, "Records read and not settled yet");
    metrics::describe_gauge!(IN_FLIGHT_BYTES, Unit::Bytes, "Bytes of the records read and not settled yet");
    metrics::describe_counter!(COMMITS, Unit::Count, "Offsets asked to be committed, by partition");
    metrics::describe_counter!(REBALANCES, Unit::Count, "Changes of the assignment");
    metrics::describe_gauge!(ASSIGNED, Unit::Count, "Partitions that this process has");
    metrics::describe_gauge!(STOPPED, Unit::Count, "Partitions not read: their offset is not on the broker");

    let causes: Vec<&str> = Cause::ALL.iter().map(|cause| cause.as_str()).collect();
    let families: [(&'static str, &'static str, &[&'static str]); 7] = [
        (CONSUMED, "outcome", Consumed::WORDS),
        (RETRIES, "cause", Retry::WORDS),
        (DEAD_LETTERS, "cause", &causes),
        (PARKED, "state", Aside::WORDS),
        (PARKED_RETRIES, "result", AsideTry::WORDS),
        (FENCED, "operation", Fenced::WORDS),
        (COMMITS, "result", Commit::WORDS),
    ];
    let rebalances = (REBALANCES, "event", Rebalance::WORDS);
    for (name, label, words) in families.into_iter().chain([rebalances]) {
        for word in words {
            count(name, consumer, label, word, 0);
        }
    }
    for name in [BREAKER, IN_FLIGHT_RECORDS, IN_FLIGHT_BYTES, ASSIGNED, STOPPED] {
        set(name, consumer, 0);
    }
}

/// A record has ended, or was found in progress.
pub(crate) fn consumed(consumer: &str, outcome: Consumed) {
    count(CONSUMED, consumer, "outcome", outcome.word(), 1);
}

/// A handler was at work for so long.
pub(crate) fn handled(consumer: &str, took: Duration) {
    histogram!(HANDLER, vec![of(consumer)]).record(took);
}

/// Something failed for the time being.
pub(crate) fn retried(consumer: &str, cause: Retry) {
    count(RETRIES, consumer, "cause", cause.word(), 1);
}

/// A dead letter was acknowledged.
pub(crate) fn dead_letter(consumer: &str, cause: Cause) {
    count(DEAD_LETTERS, consumer, "cause", cause.as_str(), 1);
}

/// The breaker opened, or closed.
pub(crate) fn breaker(consumer: &str, is_open: bool) {
    set(BREAKER, consumer, usize::from(is_open));
}

/// A record was set aside.
pub(crate) fn parked(consumer: &str, state: Aside) {
    count(PARKED, consumer, "state", state.word(), 1);
}

/// A record that was set aside was tried.
pub(crate) fn parked_retried(consumer: &str, result: AsideTry) {
    count(PARKED_RETRIES, consumer, "result", result.word(), 1);
}

/// A write was refused, because it came too late.
pub(crate) fn fenced(consumer: &str, operation: Fenced) {
    count(FENCED, consumer, "operation", operation.word(), 1);
}

/// What is read and not settled.
pub(crate) fn in_flight(consumer: &str, records: usize, bytes: usize) {
    set(IN_FLIGHT_RECORDS, consumer, records);
    set(IN_FLIGHT_BYTES, consumer, bytes);
}

/// Kafka was asked to commit the offsets of so many partitions.
pub(crate) fn committed(consumer: &str, result: Commit, partitions: usize) {
    count(COMMITS, consumer, "result", result.word(), partitions as u64);
}

/// The assignment changed.
pub(crate) fn rebalanced(consumer: &str, event: Rebalance) {
    count(REBALANCES, consumer, "event", event.word(), 1);
}

/// The partitions of this process, and those of them that are not read.
pub(crate) fn partitions(consumer: &str, assigned: usize, stopped: usize) {
    set(ASSIGNED, consumer, assigned);
    set(STOPPED, consumer, stopped);
}

fn count(name: &'static str, consumer: &str, label: &'static str, word: &'static str, by: u64) {
    counter!(name, vec![of(consumer), Label::from_static_parts(label, word)]).increment(by);
}

#[expect(
    clippy::cast_precision_loss,
    reason = "a gauge is a float; what is counted here stays far below 2^53"
)]
fn set(name: &'static str, consumer: &str, to: usize) {
    gauge!(name, vec![of(consumer)]).set(to as f64);
}

fn of(consumer: &str) -> Label {
    Label::new("consumer", SharedString::from(consumer.to_owned()))
}

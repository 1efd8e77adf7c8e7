//! What this relay counts, as Prometheus reads it.
//!
//! One answer has two parts. What the process did since it started, and what it holds now, is counted where it happens, by
//! atomics, and is always there. What only the database knows (what waits, who holds leases, what is parked) comes from one
//! [`Status`]; while there is none, these gauges are left out, not repeated, and `baton_database_up` is 0.
//!
//! Base units (seconds, bytes); every label value is there from the start, at 0, so that a rate can be taken of the first
//! event too.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use baton_protocol::lifecycle::Word as _;
use baton_protocol::lifecycle::message::Cause;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric as _, prometheus_text};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::{ConstCounter, Counter};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use tokio::time::Instant;

use crate::fenced::{Fences, Operation};
use crate::retention::Skipped;
use crate::status::Status;

pub(crate) use prometheus_text::CONTENT_TYPE;

/// Upper bounds in seconds: a message takes milliseconds, a takeover a lease, an outage minutes.
const ENQUEUE_TO_ACK: [f64; 16] =
    [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0, 600.0];

/// The cause of a failure that no single message is to blame for: the producer is replaced, the same rows go again.
const BROKEN: &str = "producer_broken";

type Label = [(&'static str, &'static str); 1];
type Seconds = Gauge<f64, AtomicU64>;

/// Counted since the relay started, and held now. One for the whole process.
pub(crate) struct Metrics {
    registry: Registry,
    published: Counter,
    failures: Family<Label, Counter>,
    takeovers: Counter,
    leaves_truncated: Counter,
    truncations_skipped: Family<Label, Counter>,
    enqueue_to_ack: Histogram,
    in_flight_messages: Gauge,
    in_flight_bytes: Gauge,
}

impl fmt::Debug for Metrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Metrics").field("published", &self.published.get()).finish_non_exhaustive()
    }
}

impl Metrics {
    pub(crate) fn new(fences: Arc<Fences>) -> Self {
        let mut metrics = Self {
            registry: Registry::default(),
            published: Counter::default(),
            failures: Family::default(),
            takeovers: Counter::default(),
            leaves_truncated: Counter::default(),
            truncations_skipped: Family::default(),
            enqueue_to_ack: Histogram::new(ENQUEUE_TO_ACK),
            in_flight_messages: Gauge::default(),
            in_flight_bytes: Gauge::default(),
        };
        for cause in Cause::refusals().map(Cause::as_str).chain([BROKEN]) {
            drop(metrics.failures.get_or_create(&[("cause", cause)]));
        }

        for why in Skipped::WORDS {
            drop(metrics.truncations_skipped.get_or_create(&[("why", why)]));
        }
        let registry = &mut metrics.registry;
        registry.register(
            "baton_published",
            "Messages that Kafka has acknowledged to this relay, repeated ones included",
            metrics.published.clone(),
        );
        registry.register(
            "baton_publish_failures",
            "Attempts at a message that Kafka, or a check before it, refused for the message's own sake, by cause; and times a \
             shard's producer failed for no message's sake and was replaced (producer_broken)",
            metrics.failures.clone(),
        );
        registry.register_collector(Box::new(FencesCollector(fences)));
        registry.register(
            "baton_lease_takeovers",
            "Shards that this relay took after their lease had run out without a release",
            metrics.takeovers.clone(),
        );
        registry.register(
            "baton_leaves_truncated",
            "Leaves of the outbox that this relay truncated",
            metrics.leaves_truncated.clone(),
        );
        registry.register(
            "baton_leaf_truncations_skipped",
            "Times this relay left the leaf in turn as it was: a shard had not consumed it (unconsumed), it was consumed less than \
             a slot period ago (kept), somebody had it locked (locked), or the attempt failed (failed)",
            metrics.truncations_skipped.clone(),
        );
        registry.register(
            "baton_enqueue_to_ack_seconds",
            "From a row's created_at until Kafka has acknowledged its whole page, by the database's clock, for the first row \
             of each page: no message of a page took longer than what is observed for it",
            metrics.enqueue_to_ack.clone(),
        );
        registry.register(
            "baton_in_flight_messages",
            "Messages read from the outbox and not yet acknowledged by Kafka",
            metrics.in_flight_messages.clone(),
        );
        registry.register(
            "baton_in_flight_bytes",
            "Bytes of the pages that hold messages not yet acknowledged by Kafka",
            metrics.in_flight_bytes.clone(),
        );
        metrics
    }

    pub(crate) fn published(&self, messages: u64) {
        self.published.inc_by(messages);
    }

    pub(crate) fn published_total(&self) -> u64 {
        self.published.get()
    }

    /// A producer had to be replaced, for no message's sake.
    pub(crate) fn producer_broke(&self) {
        self.failures.get_or_create(&[("cause", BROKEN)]).inc();
    }

    /// A message was refused for its own sake.
    pub(crate) fn message_refused(&self, cause: Cause) {
        self.failures.get_or_create(&[("cause", cause.as_str())]).inc();
    }

    /// A shard was taken whose lease had run out.
    pub(crate) fn took_over(&self) {
        self.takeovers.inc();
    }

    /// A leaf is empty again.
    pub(crate) fn leaf_truncated(&self) {
        self.leaves_truncated.inc();
    }

    /// A leaf in turn stays as it is for now.
    pub(crate) fn leaf_skipped(&self, why: Skipped) {
        self.truncations_skipped.get_or_create(&[("why", why.word())]).inc();
    }

    /// A page is acknowledged whose first row is so old.
    pub(crate) fn acknowledged(&self, age: Duration) {
        self.enqueue_to_ack.observe(age.as_secs_f64());
    }

    /// What one producer's life holds; nothing yet.
    pub(crate) fn in_flight(&self) -> InFlight {
        InFlight {
            messages: Part { total: self.in_flight_messages.clone(), held: 0 },
            bytes: Part { total: self.in_flight_bytes.clone(), held: 0 },
        }
    }

    /// Everything, in Prometheus' text format 0.0.4, with the database's part where it is known.
    ///
    /// # Errors
    /// Never in practice: a string takes what is written to it.
    pub(crate) fn text(&self, status: Option<&Status>) -> Result<String, fmt::Error> {
        let mut text = String::new();
        prometheus_text::encode(&mut text, &self.registry)?;
        prometheus_text::encode(&mut text, &of_now(status))?;
        Ok(text)
    }
}

/// What a producer's life holds, as its part of the process's totals. Dropped, it holds nothing.
pub(crate) struct InFlight {
    messages: Part,
    bytes: Part,
}

impl InFlight {
    pub(crate) fn set(&mut self, messages: usize, bytes: usize) {
        self.messages.set(messages);
        self.bytes.set(bytes);
    }
}

struct Part {
    total: Gauge,
    held: i64,
}

impl Part {
    fn set(&mut self, held: usize) {
        let held = i64::try_from(held).unwrap_or(i64::MAX);
        self.total.inc_by(held - self.held);
        self.held = held;
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        self.total.dec_by(self.held);
    }
}

/// The refusals are counted where they are named; this only shows them.
#[derive(Debug)]
struct FencesCollector(Arc<Fences>);

impl Collector for FencesCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let mut metric = encoder.encode_descriptor(
            "baton_fenced",
            "Statements of this relay that were refused, because its lease had run out or was another's.",
            None,
            MetricType::Counter,
        )?;
        for operation in Operation::ALL {
            let label: Label = [("operation", operation.as_str())];
            ConstCounter::new(self.0.count(operation)).encode(metric.encode_family(&label)?)?;
        }
        Ok(())
    }
}

/// What the database and the system say now.
fn of_now(status: Option<&Status>) -> Registry {
    let mut registry = Registry::default();
    gauge(
        &mut registry,
        "baton_database_up",
        "1: the gauges of the outbox were read less than two seconds ago; 0: the database did not answer in time, and they are \
         left out",
        i64::from(status.is_some()),
    );
    if let Some(bytes) = resident_bytes() {
        gauge(&mut registry, "process_resident_memory_bytes", "Resident memory of this process", bytes);
    }
    if let Some(status) = status {
        of_status(&mut registry, status);
    }
    registry
}

fn of_status(registry: &mut Registry, status: &Status) {
    gauge(
        registry,
        "baton_outbox_pending_messages",
        "Committed messages that no cursor covers yet; exact up to 10,000 a shard, estimated beyond",
        status.pending.count,
    );
    let age = Seconds::default();
    age.set(status.oldest_pending_age_seconds.unwrap_or(0.0));
    registry.register(
        "baton_outbox_oldest_pending_age_seconds",
        "Age of the oldest message that waits to be published; 0 when none waits",
        age,
    );
    gauge(
        registry,
        "baton_guard_violations",
        "What was done to the outbox on which no relay works: none publishes while this is not 0; `baton status` says what mends it",
        i64::try_from(status.guards.len()).unwrap_or(i64::MAX),
    );
    let left = |wanted: fn(Option<f64>) -> bool| {
        status.shards.iter().filter(|shard| wanted(shard.lease_left_seconds)).count()
    };
    let leases = [
        ("held", left(|left| left.is_some_and(|left| left > 0.0))),
        ("expired", left(|left| left.is_some_and(|left| left <= 0.0))),
        ("free", left(|left| left.is_none())),
    ];
    family(
        registry,
        "baton_leases",
        "Leases of the outbox's shards, whoever holds them; expired: run out without a release and not taken over yet",
        "state",
        leases.map(|(state, count)| (state.to_owned(), i64::try_from(count).unwrap_or(i64::MAX))),
    );
    let stopped_for = |cause: Cause| {
        let stopped = status.shards.iter().filter_map(|shard| shard.stopped.as_ref());
        stopped.filter(|stopped| stopped.cause == cause.as_str()).count()
    };
    family(
        registry,
        "baton_stopped_shards",
        "Shards that stand still behind a message that Kafka refuses, whoever holds them",
        "cause",
        Cause::refusals()
            .map(|cause| (cause.as_str().to_owned(), i64::try_from(stopped_for(cause)).unwrap_or(i64::MAX))),
    );
    let parked = &status.parked;
    let states = [
        ("retrying", parked.retrying),
        ("blocked", parked.blocked),
        ("dead", parked.dead),
        ("paused", parked.paused),
    ];
    family(
        registry,
        "baton_parked_messages",
        "Messages set aside",
        "state",
        states.map(|(state, count)| (state.to_owned(), count)),
    );
    family(
        registry,
        "baton_cursor_lag_messages",
        "Committed messages that the shard's durable cursor does not cover; exact up to 10,000, estimated beyond",
        "shard",
        status.shards.iter().map(|shard| (shard.shard.to_string(), shard.lag_messages)),
    );
    family(
        registry,
        "baton_outbox_leaf_bytes",
        "Size of a leaf of the outbox with its indexes and TOAST; leaves are truncated in turn, slot after slot",
        "slot",
        status.leaves.iter().map(|leaf| (leaf.slot.to_string(), leaf.bytes)),
    );
}

fn gauge(registry: &mut Registry, name: &str, help: &str, value: i64) {
    let gauge = Gauge::<i64>::default();
    gauge.set(value);
    registry.register(name, help, gauge);
}

fn family(
    registry: &mut Registry,
    name: &str,
    help: &str,
    label: &'static str,
    values: impl IntoIterator<Item = (String, i64)>,
) {
    let family = Family::<[(&'static str, String); 1], Gauge>::default();
    for (value, count) in values {
        family.get_or_create(&[(label, value)]).set(count);
    }
    registry.register(name, help, family);
}

/// Where the system tells.
fn resident_bytes() -> Option<i64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kib: i64 = line.split_whitespace().next()?.parse().ok()?;
    Some(kib * 1024)
}

/// What the database's clock showed, and a moment of ours not after it. So a row's age is known later without any other
/// wall clock than the one that stamped it: never too small, and too large by at most what passed between the two.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DatabaseClock {
    /// Milliseconds since the epoch.
    pub shown_ms: i64,
    /// Before the statement was sent that read it.
    pub asked: Instant,
}

impl DatabaseClock {
    /// How old what was created then is now. `None` where the stamp is none: a row of `-infinity` counts as the first
    /// millisecond.
    pub(crate) fn age(&self, created_ms: i64, now: Instant) -> Option<Duration> {
        if created_ms <= 1 {
            return None;
        }
        // The database's clock may have been set back since, and a producer commits before it is read: never below zero.
        let before = u64::try_from(self.shown_ms.saturating_sub(created_ms)).unwrap_or(0);
        Some(Duration::from_millis(before) + now.saturating_duration_since(self.asked))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(text: &str, start: &str) -> String {
        text.lines().find(|line| line.starts_with(start)).unwrap_or_default().to_owned()
    }

    #[test]
    fn every_label_value_is_there_before_its_first_event() {
        let metrics = Metrics::new(Arc::default());
        let text = metrics.text(None).unwrap();
        for cause in
            ["too_large", "unknown_topic", "invalid_topic", "not_authorized", "invalid_record", BROKEN]
        {
            assert!(
                text.contains(&format!("baton_publish_failures_total{{cause=\"{cause}\"}} 0\n")),
                "{text}"
            );
        }
        for operation in ["claim", "renew", "advance", "release"] {
            assert!(text.contains(&format!("baton_fenced_total{{operation=\"{operation}\"}} 0\n")), "{text}");
        }
    }

    #[test]
    fn without_the_database_its_gauges_are_left_out_and_the_process_still_speaks() {
        let metrics = Metrics::new(Arc::default());
        metrics.published(3);
        let text = metrics.text(None).unwrap();
        assert_eq!(line(&text, "baton_database_up"), "baton_database_up 0");
        assert_eq!(line(&text, "baton_published_total"), "baton_published_total 3");
        assert!(!text.contains("baton_outbox_") && !text.contains("baton_leases"), "{text}");
    }

    #[test]
    fn what_a_producers_life_holds_is_given_back_however_it_ends() {
        let metrics = Metrics::new(Arc::default());
        let (mut one, mut other) = (metrics.in_flight(), metrics.in_flight());
        one.set(5, 500);
        other.set(2, 20);
        one.set(3, 500);
        let held = || (metrics.in_flight_messages.get(), metrics.in_flight_bytes.get());
        assert_eq!(held(), (5, 520));
        drop(one);
        assert_eq!(held(), (2, 20));
        drop(other);
        assert_eq!(held(), (0, 0));
    }

    #[test]
    fn a_rows_age_goes_by_the_databases_clock_and_is_never_negative() {
        let asked = Instant::now();
        let clock = DatabaseClock { shown_ms: 10_000, asked };
        let later = asked + Duration::from_millis(250);
        assert_eq!(clock.age(9_000, later), Some(Duration::from_millis(1_250)));
        assert_eq!(
            clock.age(11_000, later),
            Some(Duration::from_millis(250)),
            "committed after it was stamped"
        );
        assert_eq!(clock.age(1, later), None, "-infinity");
    }
}

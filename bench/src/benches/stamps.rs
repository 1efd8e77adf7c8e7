//! When each message of a paced run was sent, committed, appended and acknowledged.
//!
//! Written by writers and a producer's callbacks at once, so they are atomics: nanoseconds since the run's start, 0 as long as
//! it has not happened. The first mark counts: a repeated record changes nothing. All but the appends are by one monotonic
//! clock; those are the broker's, of this machine and in whole milliseconds, and are set beside it by the start's two clocks.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use baton_relay::Settings;
use rdkafka::ClientContext;
use rdkafka::config::FromClientConfigAndContext as _;
use rdkafka::message::{DeliveryResult, OwnedHeaders};
use rdkafka::producer::{BaseRecord, ProducerContext, ThreadedProducer};
use tokio::time::Instant;

use crate::lab::Result;

pub(crate) struct Marks {
    at: Vec<AtomicU64>,
    start: Arc<OnceLock<Start>>,
}

/// The same moment by two clocks.
#[derive(Debug, Clone, Copy)]
struct Start {
    monotonic: Instant,
    wall: Duration,
}

impl Start {
    #[expect(clippy::disallowed_methods, reason = "set beside the broker's clock, and stored nowhere")]
    fn now() -> Self {
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self { monotonic: Instant::now(), wall }
    }
}

impl Marks {
    fn new(messages: usize, start: &Arc<OnceLock<Start>>) -> Self {
        Self { at: (0..messages).map(|_| AtomicU64::new(0)).collect(), start: Arc::clone(start) }
    }

    pub(crate) fn mark(&self, n: usize) {
        self.set(n, self.start.get_or_init(Start::now).monotonic.elapsed());
    }

    /// It happened then by the wall clock, in milliseconds since 1970; before the start counts as at the start.
    pub(crate) fn mark_at(&self, n: usize, at_ms: i64) {
        let at = Duration::from_millis(u64::try_from(at_ms).unwrap_or_default());
        self.set(n, at.saturating_sub(self.start.get_or_init(Start::now).wall));
    }

    fn set(&self, n: usize, since: Duration) {
        let nanoseconds = u64::try_from(since.as_nanos()).unwrap_or(u64::MAX).max(1);
        if let Some(at) = self.at.get(n) {
            // A later mark loses, whoever makes it.
            let _ = at.compare_exchange(0, nanoseconds, Ordering::Relaxed, Ordering::Relaxed);
        }
    }

    /// An error that says how many are missing.
    pub(crate) fn complete(&self, what: &str) -> Result<()> {
        match self.at.iter().filter(|at| at.load(Ordering::Relaxed) == 0).count() {
            0 => Ok(()),
            missing => Err(format!("{missing} of {} messages were not {what}", self.at.len()).into()),
        }
    }
}

pub(crate) struct Stamps {
    start: Arc<OnceLock<Start>>,
    pub(crate) sent: Marks,
    pub(crate) committed: Marks,
    pub(crate) appended: Marks,
    pub(crate) acked: Marks,
}

impl Stamps {
    pub(crate) fn new(messages: usize) -> Self {
        let start = Arc::new(OnceLock::new());
        let marks = || Marks::new(messages, &start);
        Self {
            sent: marks(),
            committed: marks(),
            appended: marks(),
            acked: marks(),
            start: Arc::clone(&start),
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.sent.at.len()
    }

    /// From now on messages are due.
    pub(crate) fn start(&self) {
        self.start.get_or_init(Start::now);
    }

    /// When a message is to be sent, at so many a second.
    pub(crate) fn due(&self, n: usize, rate: u32) -> Instant {
        let start = self.start.get_or_init(Start::now).monotonic;
        start + Duration::from_secs(1) * u32::try_from(n).unwrap_or(u32::MAX) / rate
    }

    /// Milliseconds from sent to that mark, in order of the messages.
    pub(crate) fn since_sent(&self, to: &Marks) -> Result<Vec<f64>> {
        self.sent.complete("sent")?;
        to.complete("followed to the end")?;
        let both = self.sent.at.iter().zip(&to.at);
        Ok(both.map(|(from, to)| milliseconds(from, to)).collect())
    }
}

fn milliseconds(from: &AtomicU64, to: &AtomicU64) -> f64 {
    let between = to.load(Ordering::Relaxed).saturating_sub(from.load(Ordering::Relaxed));
    Duration::from_nanos(between).as_secs_f64() * 1000.0
}

/// The callbacks of a bare producer.
pub(crate) struct Acks(Arc<Stamps>);

impl Acks {
    /// A producer with the relay's settings.
    pub(crate) fn producer(settings: &Settings, stamps: &Arc<Stamps>) -> Result<ThreadedProducer<Self>> {
        Ok(ThreadedProducer::from_config_and_context(&settings.producer_config(), Self(Arc::clone(stamps)))?)
    }

    /// Hands over message `n`. At this rate the queue is never full: that it is, is an error.
    pub(crate) fn send(
        producer: &ThreadedProducer<Self>,
        topic: &str,
        n: usize,
        key: &str,
        payload: &[u8],
        headers: OwnedHeaders,
    ) -> Result<()> {
        let record = BaseRecord::with_opaque_to(topic, n).key(key).payload(payload).headers(headers);
        producer.send(record).map_err(|(error, _)| error.into())
    }
}

impl ClientContext for Acks {}

impl ProducerContext for Acks {
    type DeliveryOpaque = usize;

    fn delivery(&self, result: &DeliveryResult<'_>, n: usize) {
        if result.is_ok() {
            self.0.acked.mark(n);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_mark_counts_and_a_missing_one_is_told() {
        let stamps = Stamps::new(2);
        stamps.sent.mark(0);
        let first = stamps.sent.at[0].load(Ordering::Relaxed);
        stamps.sent.mark(0);
        assert_eq!(stamps.sent.at[0].load(Ordering::Relaxed), first);
        assert!(stamps.sent.complete("sent").unwrap_err().to_string().starts_with("1 of 2"));
        stamps.sent.mark(1);
        stamps.sent.complete("sent").unwrap();
        assert!(stamps.since_sent(&stamps.appended).is_err());
    }

    #[test]
    fn an_append_is_set_beside_the_other_marks() {
        let stamps = Stamps::new(1);
        stamps.start();
        stamps.sent.mark(0);
        let in_a_second = stamps.start.get().unwrap().wall.as_millis() + 1_000;
        stamps.appended.mark_at(0, i64::try_from(in_a_second).unwrap());
        let after = stamps.since_sent(&stamps.appended).unwrap()[0];
        assert!((900.0..=1_001.0).contains(&after), "{after}");
    }

    #[test]
    fn messages_are_due_at_the_rate() {
        let stamps = Stamps::new(1);
        assert_eq!(stamps.due(2_000, 2_000) - stamps.due(0, 2_000), Duration::from_secs(1));
    }
}

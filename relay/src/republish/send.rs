//! The producer of a republishing: a page goes in, group by group, and each group is acknowledged before the next.
//!
//! ```text
//!   group handed over ──all acknowledged──▶ next group
//!        ├─ refused: a topic's limit is on batches, so half as many at once, down to one; refused alone, it is the message
//!        ├─ broken: a new producer from the first unacknowledged one, three times without any progress
//!        └─ nothing acknowledged for half a minute: the end
//! ```
//!
//! It is the relay's producer with the relay's settings, and [`route`](crate::route) chooses the partitions: a group that is refused
//! is not overtaken within its key by what was handed over behind it. Sent again are those from the first unacknowledged one on.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use baton_protocol::envelope::Envelope;
use baton_protocol::lifecycle::message::Cause;
use rdkafka::error::KafkaError;
use tokio::task::spawn_blocking;
use tokio::time::{Instant, sleep_until};

use super::{Error, PATIENCE, ROWS, Stop};
use crate::publish::{Failure, HandOver, Publisher};
use crate::read::Row;
use crate::route::{Route, Routes};
use crate::settings::Settings;
use crate::topics::Seen;
use crate::window::Window;

/// How long Kafka may acknowledge nothing.
const SILENCE: Duration = Duration::from_secs(30);

/// How many producers in a row may break before one message more is acknowledged.
const BREAKS: u32 = 3;

/// A report that did not wake us is noticed so soon.
const LOOK: Duration = Duration::from_millis(250);

/// What became of a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Sent {
    All,
    /// Of what was handed over as much as was acknowledged in time.
    Stopped,
}

/// Why a group was not acknowledged as a whole.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Trouble {
    /// The row at this place of the group, by the broker or, `is_surely_it`, before it was handed over.
    Refused {
        at: usize,
        cause: Cause,
        error: String,
        is_surely_it: bool,
    },
    Broken {
        error: String,
    },
    Silent,
    Stopped,
}

/// What to do about it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Next {
    /// Go on from the first unacknowledged one, this many at once.
    Again(usize),
    Ends,
}

/// The rule. `group` is how many were sent at once, `breaks` how many producers were lost without progress, this one included.
fn next(trouble: &Trouble, group: usize, breaks: u32) -> Next {
    match trouble {
        Trouble::Refused { is_surely_it: true, .. } => Next::Ends,
        Trouble::Refused { cause: Cause::TooLarge | Cause::InvalidRecord, .. } if group > 1 => {
            Next::Again(group / 2)
        }
        Trouble::Broken { .. } if breaks < BREAKS => Next::Again(group),
        Trouble::Refused { .. } | Trouble::Broken { .. } | Trouble::Silent | Trouble::Stopped => Next::Ends,
    }
}

/// One producer after the other, for one topic.
pub(super) struct Sender {
    settings: Arc<Settings>,
    envelope: Arc<Envelope>,
    topic: String,
    producing: Option<Producing>,
    /// How many go at once.
    at_once: usize,
    sent: u64,
}

/// A producer and what it has opened.
struct Producing {
    publisher: Arc<Publisher>,
    partitions: NonZeroU32,
    routes: Routes,
}

impl Sender {
    pub(super) fn new(settings: Arc<Settings>, envelope: Arc<Envelope>, topic: &str) -> Self {
        Self { settings, envelope, topic: topic.to_owned(), producing: None, at_once: ROWS, sent: 0 }
    }

    /// How many are acknowledged.
    pub(super) fn sent(&self) -> u64 {
        self.sent
    }

    /// Sends rows in order until all are acknowledged. `of` is how many the range has.
    pub(super) async fn send(&mut self, page: &[Row], stop: &mut Stop<'_>, of: u64) -> Result<Sent, Error> {
        let mut rest = page;
        let mut breaks = 0;
        while !rest.is_empty() {
            if stop.is_told {
                return Ok(Sent::Stopped);
            }
            let group = rest.get(..self.at_once).unwrap_or(rest);
            let (first, trouble) = self.group(group, stop).await?;
            if trouble.is_some() {
                // What the purge waits for may have been acknowledged.
                self.purge().await;
            }
            let acked = self.acked_since(first).min(group.len());
            let handed_over = self.handed_over_since(first).min(group.len());
            self.sent += acked as u64;
            rest = rest.get(acked..).unwrap_or_default();
            breaks = if acked > 0 { 0 } else { breaks };
            let Some(trouble) = trouble else { continue };
            self.end().await;
            breaks += 1;
            match (next(&trouble, group.len(), breaks), trouble) {
                (Next::Again(at_once), trouble) => {
                    match trouble {
                        Trouble::Refused { error, .. } => tracing::warn!(
                            topic = self.topic,
                            at_once,
                            "kafka refused a batch, its messages go again in smaller ones: {error}"
                        ),
                        trouble => tracing::warn!(
                            topic = self.topic,
                            "a producer broke, another goes on: {trouble:?}"
                        ),
                    }
                    self.at_once = at_once;
                }
                (Next::Ends, Trouble::Stopped) => return Ok(Sent::Stopped),
                (Next::Ends, Trouble::Refused { at, cause, error, .. }) => {
                    let id = group.get(at).map(|row| row.id).unwrap_or_default();
                    return Err(Error::Refused {
                        id,
                        topic: self.topic.clone(),
                        cause,
                        error,
                        sent: self.sent,
                        of,
                    });
                }
                (Next::Ends, trouble @ (Trouble::Silent | Trouble::Broken { .. })) => {
                    let error = match trouble {
                        Trouble::Broken { error } => error,
                        _ => format!("nothing for {SILENCE:?}"),
                    };
                    let unknown = handed_over - acked;
                    let topic = self.topic.clone();
                    return Err(Error::Unacknowledged { topic, error, sent: self.sent, of, unknown });
                }
            }
        }
        Ok(Sent::All)
    }

    /// Hands a group over and waits for its acknowledgements. The number of its first row, if there is a producer.
    async fn group(
        &mut self,
        group: &[Row],
        stop: &mut Stop<'_>,
    ) -> Result<(Option<u64>, Option<Trouble>), Error> {
        let Producing { publisher, partitions, mut routes } = match self.producer().await? {
            Ok(producing) => producing,
            Err(trouble) => return Ok((None, Some(trouble))),
        };
        let first = publisher.reports().window().prefix();
        let wait = Wait { publisher: &publisher, first, drain: self.settings.drain_deadline };
        let mut trouble = None;
        for (at, row) in group.iter().enumerate() {
            match hand_over(row, &self.topic, partitions, &mut routes, &wait, stop).await? {
                None => {}
                Some(Trouble::Refused { cause, error, is_surely_it: true, .. }) => {
                    // Those before it are on their way.
                    let before = wait.until(stop, |window| window.prefix() >= first + at as u64).await;
                    let refused = Trouble::Refused { at, cause, error, is_surely_it: true };
                    trouble = Some(before.unwrap_or(refused));
                    break;
                }
                Some(other) => {
                    trouble = Some(other);
                    break;
                }
            }
        }
        if trouble.is_none() {
            let last = first + group.len() as u64;
            trouble = wait.until(stop, |window| window.prefix() >= last).await;
        }
        self.producing = Some(Producing { publisher, partitions, routes });
        Ok((Some(first), trouble))
    }

    /// The producer, made and introduced to the topic where there is none.
    async fn producer(&mut self) -> Result<Result<Producing, Trouble>, Error> {
        if let Some(producing) = self.producing.take() {
            return Ok(Ok(producing));
        }
        let publisher =
            Publisher::new(&self.settings, Arc::clone(&self.envelope)).map_err(Error::Producer)?;
        let publisher = Arc::new(publisher);
        let (asked, topic) = (Arc::clone(&publisher), self.topic.clone());
        let seen = spawn_blocking(move || asked.topic(&topic, PATIENCE)).await;
        let trouble = match seen.unwrap_or(Err(KafkaError::Canceled)) {
            Ok(Seen::Partitions(partitions)) => {
                let mut routes = Routes::default();
                routes.meet(&self.topic, partitions);
                return Ok(Ok(Producing { publisher, partitions, routes }));
            }
            Ok(Seen::Refused(cause)) => {
                let error = "the broker says so of the topic".to_owned();
                Trouble::Refused { at: 0, cause, error, is_surely_it: true }
            }
            Err(error) => Trouble::Broken { error: error.to_string() },
        };
        destroy(publisher).await;
        Ok(Err(trouble))
    }

    fn acked_since(&self, first: Option<u64>) -> usize {
        let prefix = self.producing.as_ref().map(|p| p.publisher.reports().window().prefix());
        prefix
            .zip(first)
            .map_or(0, |(prefix, first)| usize::try_from(prefix.saturating_sub(first)).unwrap_or(0))
    }

    fn handed_over_since(&self, first: Option<u64>) -> usize {
        let in_flight = self.producing.as_ref().map_or(0, |p| p.publisher.reports().window().in_flight());
        self.acked_since(first) + in_flight
    }

    async fn purge(&self) {
        if let Some(producing) = &self.producing {
            producing.publisher.purge(self.settings.drain_deadline).await;
        }
    }

    /// Ends the producer; what it has not acknowledged is thrown away.
    pub(super) async fn end(&mut self) {
        self.purge().await;
        if let Some(Producing { publisher, .. }) = self.producing.take() {
            destroy(publisher).await;
        }
    }
}

/// Waits for a producer's reports.
struct Wait<'p> {
    publisher: &'p Arc<Publisher>,
    /// The number of the group's first row.
    first: u64,
    /// How long is waited once somebody says stop.
    drain: Duration,
}

impl Wait<'_> {
    /// Until this is so; or why it does not come about.
    async fn until(&self, stop: &mut Stop<'_>, is_so: impl Fn(&Window<Failure>) -> bool) -> Option<Trouble> {
        let reports = Arc::clone(self.publisher.reports());
        let mut until = Instant::now() + SILENCE;
        let mut seen = 0;
        let mut drains = false;
        loop {
            {
                let window = reports.window();
                if is_so(&window) {
                    return None;
                }
                if let Some((number, failure)) = window.failure() {
                    return Some(self.trouble(*number, failure));
                }
                if window.prefix() > seen {
                    seen = window.prefix();
                    until = if drains { until } else { Instant::now() + SILENCE };
                }
            }
            if let Some(error) = reports.fatal() {
                // What it was raised for is reported behind it.
                self.publisher.purge(self.drain).await;
                let window = reports.window();
                let failure = window.failure().map(|(number, failure)| self.trouble(*number, failure));
                return Some(failure.unwrap_or(Trouble::Broken { error }));
            }
            if stop.is_told && !drains {
                drains = true;
                until = until.min(Instant::now() + self.drain);
            }
            if Instant::now() >= until {
                return Some(if drains { Trouble::Stopped } else { Trouble::Silent });
            }
            tokio::select! {
                biased;
                () = stop.told(), if !stop.is_told => {}
                () = reports.changed.notified() => {}
                () = sleep_until(until.min(Instant::now() + LOOK)) => {}
            }
        }
    }

    fn trouble(&self, number: u64, failure: &Failure) -> Trouble {
        match failure.clone() {
            Failure::Refused { cause, error, .. } => {
                let at = usize::try_from(number.saturating_sub(self.first)).unwrap_or(0);
                Trouble::Refused { at, cause, error, is_surely_it: false }
            }
            Failure::Broken { error } => Trouble::Broken { error },
        }
    }
}

/// Hands one row over, as soon as its partition and the producer have room for it.
async fn hand_over(
    row: &Row,
    topic: &str,
    partitions: NonZeroU32,
    routes: &mut Routes,
    wait: &Wait<'_>,
    stop: &mut Stop<'_>,
) -> Result<Option<Trouble>, Error> {
    let publisher = wait.publisher;
    let key = row.key()?;
    let partition = loop {
        let acked = |number| publisher.reports().window().is_acked(number);
        match routes.route(topic, partitions, key, Instant::now(), acked) {
            Route::To(partition) => break Some(partition),
            Route::Any => break None,
            Route::After(number) => {
                publisher.reports().window().wait_for(number);
                if let Some(trouble) = wait.until(stop, |window| window.is_acked(number)).await {
                    return Ok(Some(trouble));
                }
            }
            // A producer is introduced to its one topic once.
            Route::Unmet | Route::Resized { .. } => {
                let error = "the producer does not know the topic".to_owned();
                return Ok(Some(Trouble::Broken { error }));
            }
        }
    };
    let mut headers = publisher.headers_of(row)?;
    loop {
        match publisher.hand_over(row, &mut headers, topic, key, partition)? {
            HandOver::Taken(number) => {
                if let Some(partition) = partition {
                    routes.gone(topic, partition, number, Instant::now());
                }
                return Ok(None);
            }
            HandOver::Full => {
                let before = publisher.reports().window().unreported();
                if let Some(trouble) = wait.until(stop, |window| window.unreported() < before).await {
                    return Ok(Some(trouble));
                }
            }
            HandOver::Failed(Failure::Refused { cause, error, .. }) => {
                return Ok(Some(Trouble::Refused { at: 0, cause, error, is_surely_it: true }));
            }
            HandOver::Failed(Failure::Broken { error }) => return Ok(Some(Trouble::Broken { error })),
        }
    }
}

/// Its thread may be waited for, so off the runtime's.
async fn destroy(publisher: Arc<Publisher>) {
    drop(spawn_blocking(move || drop(publisher)).await);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(cause: Cause, is_surely_it: bool) -> Trouble {
        Trouble::Refused { at: 0, cause, error: String::new(), is_surely_it }
    }

    #[test]
    fn a_batch_that_is_too_large_goes_in_halves_until_one_message_alone_is() {
        let too_large = refused(Cause::TooLarge, false);
        let mut group = ROWS;
        let mut tries = 0;
        while let Next::Again(fewer) = next(&too_large, group, tries) {
            assert!(fewer < group && fewer > 0);
            (group, tries) = (fewer, tries + 1);
        }
        assert_eq!((group, tries), (1, 8));
    }

    #[test]
    fn what_is_surely_one_message_or_the_whole_topic_ends_it_at_once() {
        assert_eq!(next(&refused(Cause::TooLarge, true), ROWS, 1), Next::Ends);
        for cause in [Cause::NotAuthorized, Cause::UnknownTopic, Cause::InvalidTopic] {
            assert_eq!(next(&refused(cause, false), ROWS, 1), Next::Ends);
        }
    }

    #[test]
    fn a_broken_producer_is_replaced_as_long_as_that_helps_and_silence_is_not_waited_for_twice() {
        let broken = Trouble::Broken { error: String::new() };
        assert_eq!(next(&broken, 7, 1), Next::Again(7));
        assert_eq!(next(&broken, 7, BREAKS), Next::Ends);
        assert_eq!(next(&Trouble::Silent, 7, 1), Next::Ends);
        assert_eq!(next(&Trouble::Stopped, 7, 1), Next::Ends);
    }
}

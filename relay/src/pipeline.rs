//! The life of one producer of one shard: read ahead, hand over, follow the reports, advance.
//!
//! ```text
//!  reader ──page──▶ in hand ──rows──▶ producer ──reports──▶ window ──prefix──▶ cursor, at most 4 times a second
//!                      │ ▲ trust, queue, limits                └ the first failure ends this life
//!                      └─ refused, or behind what waits ──▶ slated ──▶ outbox.parked, by the advance that passes it
//! ```
//!
//! Reading, publishing and advancing overlap. Nothing is handed over after the trust in the lease has ended. Whatever
//! ends this life, what is not acknowledged is purged, and what Kafka acknowledged without a gap until then is still
//! written to the cursor where the lease allows. A crash at any point repeats at most what was handed over since the
//! last durable cursor, and that is at most `publish.in_flight_rows` of a shard: no page is asked for that could exceed it.

mod feed;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use baton_protocol::lifecycle::message::Cause;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use uuid::Uuid;

use crate::advance::Outcome;
use crate::aside::Slated;
use crate::care::{Care, Sure};
use crate::cursor::Cursor;
use crate::database;
use crate::fenced::Operation;
use crate::flight::Flight;
use crate::links::{Ended, Links, Order};
use crate::metrics::InFlight;
use crate::publish::{Failure, Prepared, Publisher};
use crate::read::{self, Page};
use crate::route::Routes;
use crate::topics::{self, Checked};

/// At most four cursor writes a second and shard, or one for each half of `publish.in_flight_rows` where that is more.
const ADVANCE_EVERY: Duration = Duration::from_millis(250);

/// The first pause between two, doubled each time: where connections are cut all the time, the same rows would go for ever.
const ADVANCE_FIRST: Duration = Duration::from_millis(8);

/// Rows between two looks at the clock. The rows of a page go without a pause between them, or librdkafka sends them in many
/// small batches, and its threads spin while one is on its way and more rows of the partition lie there.
const FEED_CHUNK: usize = 64;

/// Which message it was, for an operator.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Which {
    pub id: Uuid,
    pub position: i64,
}

/// Why a producer's life ended.
#[derive(Debug)]
pub(crate) enum Stop {
    /// The shard is let go.
    Ended(Ended),
    /// The producer must be replaced.
    Failed(Failed),
    /// A message would have to be set aside, and the shard has as many as it may.
    Full(Full),
}

/// Why a producer must be replaced.
#[derive(Debug)]
pub(crate) struct Failed {
    pub failure: Failure,
    /// The first message without an acknowledgement, where there is one.
    pub which: Option<Which>,
    /// Those that Kafka refused, this one included.
    pub refused: Vec<Which>,
    /// How sure it is that each of them is meant.
    pub sure: Sure,
}

/// A message for which there is no room aside.
#[derive(Debug)]
pub(crate) struct Full {
    pub which: Which,
    pub topic: String,
    pub cause: Cause,
}

/// What the next row in hand waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Hold {
    Nothing,
    /// The producer's queue was full; it is offered the row again after the next report.
    Full,
    /// The broker is asked about its topic.
    Unknown,
    /// The acknowledgement of the row of this number.
    After(u64),
    /// The acknowledgement of everything in flight.
    All,
}

pub(crate) struct Pipeline<'a> {
    links: &'a Links,
    publisher: Arc<Publisher>,
    /// Who is suspected, and who is to be set aside.
    care: &'a mut Care,
    /// How many suspects are in flight, with nothing else.
    group: Option<usize>,
    /// The durable cursor, and how many of this producer's rows that covers.
    durable: (u64, Cursor),
    /// The cursor after the last page that is acknowledged whole.
    settled: Cursor,
    /// Where the next page is read from.
    ahead: Cursor,
    flights: VecDeque<Flight>,
    /// Read and not yet handed over, in order; they belong to the last flight.
    in_hand: VecDeque<Prepared>,
    bytes: usize,
    /// What of all that the metrics know.
    in_flight: InFlight,
    /// Rows that the metrics know as published.
    counted: u64,
    reading: Option<oneshot::Receiver<Page>>,
    advancing: Option<oneshot::Receiver<Outcome>>,
    advance_to: (u64, Cursor),
    advance_due: Instant,
    pace: Duration,
    look: Duration,
    /// Topics that the broker is asked about.
    checking: Option<JoinHandle<Vec<Checked>>>,
    routes: Routes,
    /// Rows that go aside and that the durable cursor does not cover, with their numbers.
    slated: VecDeque<(u64, Slated)>,
    /// The numbers of those that the metrics do not know of.
    aside_numbers: VecDeque<u64>,
    failed: Option<(Failure, Which)>,
    full: Option<Full>,
    hold: Hold,
    drain_until: Option<Instant>,
}

impl<'a> Pipeline<'a> {
    pub(crate) fn new(links: &'a Links, publisher: Publisher, durable: Cursor, care: &'a mut Care) -> Self {
        links.aside.start_anew();
        Self {
            links,
            publisher: Arc::new(publisher),
            care,
            group: None,
            durable: (0, durable.clone()),
            settled: durable.clone(),
            ahead: durable.clone(),
            flights: VecDeque::new(),
            in_hand: VecDeque::new(),
            bytes: 0,
            in_flight: links.metrics.in_flight(),
            counted: 0,
            reading: None,
            advancing: None,
            advance_to: (0, durable),
            advance_due: Instant::now(),
            pace: ADVANCE_FIRST,
            look: ADVANCE_FIRST,
            checking: None,
            routes: Routes::default(),
            slated: VecDeque::new(),
            aside_numbers: VecDeque::new(),
            failed: None,
            full: None,
            hold: Hold::Nothing,
            drain_until: None,
        }
    }

    /// Runs until something ends it; then purges and writes what was acknowledged. Also returned: the durable cursor.
    pub(crate) async fn run(mut self) -> Result<(Stop, Cursor), database::Error> {
        let stop = self.follow().await?;
        self.in_hand.clear();
        self.reading = None;
        let reports = Arc::clone(self.publisher.reports());
        let patience = self.links.settings.drain_deadline;
        self.publisher.purge(patience).await;
        let prefix = reports.window().prefix();
        self.settle(prefix);
        let mut stop = self.named(stop);
        if !matches!(stop, Stop::Ended(Ended::Fenced | Ended::Abandoned))
            && let Some(ended) = self.finish(prefix).await
        {
            stop = Stop::Ended(ended);
        }
        let (publisher, durable) = (self.publisher, self.durable.1);
        self.links.destroying.destroy(publisher, matches!(stop, Stop::Failed(_))).await;
        Ok((stop, durable))
    }

    /// What is known of a failure once all reports are in: whom Kafka refused, also where that was reported behind the error
    /// that ended this life.
    fn named(&self, stop: Stop) -> Stop {
        let Stop::Failed(mut failed) = stop else { return stop };
        let (first, all, is_told_apart) = {
            let window = self.publisher.reports().window();
            (window.failure().cloned(), window.failed().to_vec(), window.is_told_apart())
        };
        if let Some((number, failure @ Failure::Refused { .. })) = first {
            (failed.which, failed.failure) = (self.which(number), failure);
        }
        let Failure::Refused { cause, .. } = failed.failure else { return Stop::Failed(failed) };
        let is_same =
            |failure: &Failure| matches!(failure, Failure::Refused { cause: other, .. } if *other == cause);
        failed.refused = all
            .iter()
            .filter(|(_, failure)| is_same(failure))
            .filter_map(|(number, _)| self.which(*number))
            .collect();
        // A batch of one, or one whose others were told otherwise.
        if failed.refused.len() == 1 || is_told_apart && cause == Cause::InvalidRecord {
            failed.sure = Sure::Exactly;
        }
        Stop::Failed(failed)
    }

    async fn follow(&mut self) -> Result<Stop, database::Error> {
        let (mut order, mut trust) = (self.links.order.clone(), self.links.trust.clone());
        let reports = Arc::clone(self.publisher.reports());
        loop {
            let (now, trusted_until) = (Instant::now(), *trust.borrow_and_update());
            let (prefix, unacked, failure) = {
                let window = reports.window();
                (window.prefix(), window.in_flight(), self.links.failure(&window))
            };
            self.links.beat.at(now);
            self.settle(prefix);
            self.in_flight.set(unacked + self.in_hand.len(), self.bytes);
            match *order.borrow_and_update() {
                Order::Run => {}
                Order::Drain => _ = self.drain_until.get_or_insert(now + self.links.settings.drain_deadline),
                Order::Let(ended) => return Ok(Stop::Ended(ended)),
            }
            if now >= trusted_until {
                return Ok(Stop::Ended(Ended::Distrusted));
            }
            if let Some((number, failure)) = failure {
                return Ok(self.fails(failure, self.which(number)));
            }
            if let Some(error) = reports.fatal() {
                return Ok(self.fails(Failure::Broken { error }, self.which(prefix)));
            }
            if unacked == 0 {
                if let Some((failure, which)) = self.failed.take() {
                    return Ok(self.fails(failure, Some(which)));
                }
                if let Some(full) = self.full.take() {
                    return Ok(Stop::Full(full));
                }
            }
            match self.drain_until {
                Some(until) if unacked == 0 || now >= until => return Ok(Stop::Ended(Ended::Drained)),
                Some(_) => {}
                None => {
                    #[cfg(feature = "plants")]
                    self.links.hold_in(self.in_page(), unacked).await;
                    self.feed(now, trusted_until)?;
                    self.ask_for_more().await;
                }
            }
            // What was slated is settled without a report.
            let prefix = reports.window().prefix();
            #[cfg(feature = "plants")]
            if unacked == 0 && self.in_hand.is_empty() && prefix > self.durable.0 && self.room().is_none() {
                self.links.hold(crate::hold::Point::P4).await;
            }
            let mut advance_at = self.write_cursor(prefix, now).await;
            if unacked > 0 && advance_at.is_none() {
                // Not every report wakes: look at the prefix about as often as it may be written, less while it stands.
                advance_at = Some(now + self.look);
                self.look = (self.look * 2).min(ADVANCE_EVERY);
            }
            let again_at = (!self.in_hand.is_empty() && self.can_feed()).then_some(now);

            tokio::select! {
                page = reply(&mut self.reading) => match page {
                    Some(page) => self.take(page)?,
                    None => return Ok(Stop::Ended(Ended::Abandoned)),
                },
                outcome = reply(&mut self.advancing) => match outcome {
                    Some(Outcome::Advanced) => {
                        self.advanced();
                        #[cfg(feature = "plants")]
                        self.links.hold(crate::hold::Point::P6).await;
                        #[cfg(feature = "plants")]
                        if self.links.aside.is_occupied() {
                            self.links.hold(crate::hold::Point::K2).await;
                        }
                    }
                    Some(Outcome::Fenced) => return Ok(Stop::Ended(self.links.fenced(Operation::Advance))),
                    None => return Ok(Stop::Ended(Ended::Abandoned)),
                },
                checked = topics::checked(&mut self.checking) => self.topics_checked(checked),
                () = reports.changed.notified() => self.reported(),
                () = until(advance_at) => {}
                () = until(again_at) => {}
                () = until(Some(trusted_until)) => {}
                () = until(self.drain_until) => {}
                changed = order.changed() => if changed.is_err() { return Ok(Stop::Ended(Ended::Abandoned)) },
                changed = trust.changed() => if changed.is_err() { return Ok(Stop::Ended(Ended::Abandoned)) },
            }
        }
    }

    fn fails(&self, failure: Failure, which: Option<Which>) -> Stop {
        Stop::Failed(Failed { failure, which, refused: Vec::new(), sure: Sure::Among })
    }

    /// Takes a page in hand. The next one may be read meanwhile.
    fn take(&mut self, page: Page) -> Result<(), database::Error> {
        let Some(last) = page.rows.last() else { return Ok(()) };
        self.ahead = page.from.after(&page.read, last.position);
        self.bytes += page.bytes.bytes();
        let first = {
            let w = self.publisher.reports().window();
            w.prefix() + w.in_flight() as u64
        };
        let created_ms = page.rows.first().map_or(1, |row| row.created_ms);
        self.flights.push_back(Flight {
            created_ms,
            clock: page.clock,
            from: page.from,
            read: page.read,
            first,
            rows: Vec::new(),
            is_sent: false,
            bytes: page.bytes,
        });
        self.in_hand =
            page.rows.into_iter().map(|row| self.publisher.prepare(row)).collect::<Result<_, _>>()?;
        Ok(())
    }

    #[cfg(feature = "plants")]
    fn in_page(&self) -> crate::hold::InPage {
        let handed_over = self.flights.back().map_or(0, |flight| flight.rows.len());
        crate::hold::InPage { handed_over, in_hand: self.in_hand.len() }
    }

    /// Rows handed over that the durable cursor does not cover: what a crash now would repeat.
    fn exposed(&self) -> usize {
        let handed_over = {
            let window = self.publisher.reports().window();
            window.prefix() + window.in_flight() as u64
        };
        usize::try_from(handed_over - self.durable.0).unwrap_or(usize::MAX)
    }

    /// How many rows the next page may have; `None` unless that is a good part of one.
    ///
    /// All rows of a page that is asked for are handed over, so this is where what a crash repeats is bounded.
    fn room(&self) -> Option<usize> {
        let settings = &self.links.settings;
        let (most, limit) = (settings.page_rows.get(), settings.in_flight_rows.get());
        let rows = limit.saturating_sub(self.exposed()).min(most);
        (rows >= most.min(limit / 2).max(1)).then_some(rows)
    }

    /// Asks for the next page once there is room for a good part of one.
    async fn ask_for_more(&mut self) {
        let settings = &self.links.settings;
        if self.reading.is_some() || !self.in_hand.is_empty() || self.failed.is_some() || self.full.is_some()
        {
            return;
        }
        let Some(rows) = self.room() else { return };
        let bytes = settings.in_flight_bytes.get().saturating_sub(self.bytes);
        if bytes < settings.in_flight_bytes.get() / 4 {
            return;
        }
        #[cfg(feature = "plants")]
        self.links.hold(crate::hold::Point::P1).await;
        let (sender, receiver) = oneshot::channel();
        let cursor = self.ahead.clone();
        #[cfg(feature = "plants")]
        let cursor = self.links.planted_from(cursor);
        let request = read::Request { shard: self.links.shard, cursor, rows, bytes, reply: sender };
        // A reader that is gone drops the reply, which ends this life as abandoned.
        drop(self.links.reads.send(request).await);
        self.reading = Some(receiver);
    }

    /// Lets go of pages that are acknowledged whole.
    fn settle(&mut self, prefix: u64) {
        let mut aside = 0;
        while self.aside_numbers.front().is_some_and(|number| *number < prefix) {
            self.aside_numbers.pop_front();
            aside += 1;
        }
        self.links.metrics.published(prefix.saturating_sub(self.counted).saturating_sub(aside));
        self.counted = prefix;
        while let Some(flight) = self.flights.front() {
            let complete = self.flights.len() > 1 || self.in_hand.is_empty();
            let rows = usize::try_from(prefix.saturating_sub(flight.first)).unwrap_or(usize::MAX);
            if !complete || rows < flight.rows.len() {
                return;
            }
            if let Some(cursor) = flight.cursor_after(flight.rows.len()) {
                self.settled = cursor;
            }
            self.bytes = self.bytes.saturating_sub(flight.bytes.bytes());
            let age = flight.clock.age(flight.created_ms, Instant::now());
            if let Some(age) = age.filter(|_| flight.is_sent) {
                self.links.metrics.acknowledged(age);
            }
            if !self.care.is_idle() {
                flight.rows.iter().for_each(|which| self.care.settled(which.position));
            }
            self.flights.pop_front();
        }
    }

    /// The cursor after the acknowledged prefix.
    fn acked(&self, prefix: u64) -> Cursor {
        self.flights
            .front()
            .and_then(|f| {
                f.cursor_after(usize::try_from(prefix.saturating_sub(f.first)).unwrap_or(usize::MAX))
            })
            .unwrap_or_else(|| self.settled.clone())
    }

    fn which(&self, number: u64) -> Option<Which> {
        let flight = self.flights.iter().rev().find(|f| f.first <= number)?;
        flight.rows.get(usize::try_from(number - flight.first).ok()?).copied()
    }

    /// Writes the cursor if it is due; else says when it will be.
    async fn write_cursor(&mut self, prefix: u64, now: Instant) -> Option<Instant> {
        #[cfg(feature = "plants")]
        let prefix = self.links.planted_progress(prefix, &self.publisher.reports().window());
        if prefix <= self.durable.0 || self.advancing.is_some() {
            return None;
        }
        #[cfg(feature = "plants")]
        if self.links.holds_cursor() {
            return None;
        }
        // A shard that is so fast is not slowed down by the pace of its cursor: it writes one for each half of its limit.
        let acked = usize::try_from(prefix - self.durable.0).unwrap_or(usize::MAX);
        let is_short_of_room = acked >= (self.links.settings.in_flight_rows.get() / 2).max(1);
        let due = if is_short_of_room { now } else { self.advance_due };
        self.look = self.pace;
        if now < due {
            return Some(due);
        }
        self.advance_due = now + self.pace;
        self.pace = (self.pace * 2).min(ADVANCE_EVERY);
        self.advancing = Some(self.advance(prefix).await);
        None
    }

    /// Asks for the cursor of this prefix, and for what it passes over to be set aside with it.
    async fn advance(&mut self, prefix: u64) -> oneshot::Receiver<Outcome> {
        self.advance_to = (prefix, self.acked(prefix));
        let slated: Vec<Slated> = self
            .slated
            .iter()
            .take_while(|(number, _)| *number < prefix)
            .map(|(_, slated)| slated.clone())
            .collect();
        #[cfg(feature = "plants")]
        if !slated.is_empty() {
            self.links.hold(crate::hold::Point::K1).await;
        }
        self.links.advance(self.advance_to.1.clone(), slated).await
    }

    /// The durable cursor is what was asked for.
    fn advanced(&mut self) {
        self.durable = self.advance_to.clone();
        let written = self.slated.iter().take_while(|(number, _)| *number < self.durable.0).count();
        let written: Vec<_> = self.slated.drain(..written).map(|(_, slated)| slated).collect();
        self.links.aside.written(written.iter());
        #[cfg(feature = "plants")]
        self.links.remember(&self.durable.1);
        self.links.confirmed.advanced(self.links.shard, self.durable.1.position);
        self.links.flows(&self.durable.1);
    }

    /// Writes what is left to write. `Some` when the shard is not ours any more.
    async fn finish(&mut self, prefix: u64) -> Option<Ended> {
        for _ in 0..2 {
            if let Some(asked) = self.advancing.take() {
                match asked.await {
                    Ok(Outcome::Advanced) => self.advanced(),
                    Ok(Outcome::Fenced) => return Some(self.links.fenced(Operation::Advance)),
                    Err(_) => return Some(Ended::Abandoned),
                }
            }
            if prefix > self.durable.0 {
                self.advancing = Some(self.advance(prefix).await);
            }
        }
        None
    }
}

/// The answer to what was asked, or never when nothing was. `None`: whoever should answer is gone.
async fn reply<T>(asked: &mut Option<oneshot::Receiver<T>>) -> Option<T> {
    let Some(receiver) = asked else { return std::future::pending().await };
    let answer = receiver.await.ok();
    *asked = None;
    answer
}

async fn until(instant: Option<Instant>) {
    match instant {
        Some(instant) => tokio::time::sleep_until(instant).await,
        None => std::future::pending().await,
    }
}

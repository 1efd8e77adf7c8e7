//! The life of one producer of one shard: read ahead, hand over, follow the reports, advance.
//!
//! ```text
//!  reader ──page──▶ in hand ──rows──▶ producer ──reports──▶ window ──prefix──▶ cursor, at most 4 times a second
//!                      ▲ trust, queue, limits                  └ the first failure ends this life
//! ```
//!
//! Reading, publishing and advancing overlap. Nothing is handed over after the trust in the lease has ended. Whatever
//! ends this life, what is not acknowledged is purged, and what Kafka acknowledged without a gap until then is still
//! written to the cursor where the lease allows. A crash at any point repeats at most what was handed over since the
//! last durable cursor, and that is at most `publish.in_flight_rows` of a shard: no page is asked for that could exceed it.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use baton_protocol::lifecycle::message::Cause;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use uuid::Uuid;

use crate::advance::Outcome;
use crate::cursor::Cursor;
use crate::database;
use crate::fenced::Operation;
use crate::flight::Flight;
use crate::links::{Ended, Links, Order};
use crate::metrics::InFlight;
use crate::publish::{Failure, HandOver, Prepared, Publisher};
use crate::read::{self, Page};
use crate::route::{Route, Routes};
use crate::topics::{self, Checked, Seen, Topic};

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
    Failed {
        failure: Failure,
        /// The first message without an acknowledgement, where there is one.
        which: Option<Which>,
        /// Rows handed over and not acknowledged, this message included.
        unacked: usize,
    },
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
    /// Rows to hand over one at a time, after a refusal that may have been meant for their batch.
    careful: usize,
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
    /// A topic that the broker is asked about.
    checking: Option<JoinHandle<Checked>>,
    routes: Routes,
    refused: Option<(Failure, Which)>,
    hold: Hold,
    drain_until: Option<Instant>,
}

impl<'a> Pipeline<'a> {
    pub(crate) fn new(links: &'a Links, publisher: Publisher, durable: Cursor, careful: usize) -> Self {
        Self {
            links,
            publisher: Arc::new(publisher),
            careful,
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
            refused: None,
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
        let publisher = Arc::clone(&self.publisher);
        let purged = tokio::task::spawn_blocking(move || publisher.purge(patience)).await;
        if purged.is_err() {
            tracing::error!(shard = self.links.shard, "purging a producer panicked; it is dropped as it is");
        }
        let prefix = reports.window().prefix();
        self.settle(prefix);
        let mut stop = self.named(stop);
        if !matches!(stop, Stop::Ended(Ended::Fenced | Ended::Abandoned))
            && let Some(ended) = self.finish(prefix).await
        {
            stop = Stop::Ended(ended);
        }
        let (publisher, durable) = (self.publisher, self.durable.1);
        self.links.destroying.destroy(publisher, matches!(stop, Stop::Failed { .. })).await;
        Ok((stop, durable))
    }

    /// A refusal that was reported behind the error that ended this life, once all reports are in: it names the message.
    fn named(&self, stop: Stop) -> Stop {
        let refused = self.publisher.reports().window().failure().cloned();
        match (stop, refused) {
            (Stop::Failed { failure: Failure::Broken { .. }, unacked, .. }, Some((number, failure)))
                if matches!(failure, Failure::Refused { .. }) =>
            {
                Stop::Failed { failure, which: self.which(number), unacked }
            }
            (stop, _) => stop,
        }
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
                return Ok(Stop::Failed { failure, which: self.which(number), unacked });
            }
            if let Some(error) = reports.fatal() {
                return Ok(Stop::Failed {
                    failure: Failure::Broken { error },
                    which: self.which(prefix),
                    unacked,
                });
            }
            if unacked == 0
                && let Some((failure, which)) = self.refused.take()
            {
                return Ok(Stop::Failed { failure, which: Some(which), unacked: 1 });
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
                    }
                    Some(Outcome::Fenced) => return Ok(Stop::Ended(self.links.fenced(Operation::Advance))),
                    None => return Ok(Stop::Ended(Ended::Abandoned)),
                },
                checked = topics::checked(&mut self.checking) => self.topic_checked(checked)?,
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

    fn can_feed(&self) -> bool {
        #[cfg(feature = "plants")]
        if self.links.holds_rest_of(self.in_page()) {
            return false;
        }
        self.refused.is_none()
            && match self.hold {
                Hold::Nothing => true,
                Hold::Full | Hold::Unknown => false,
                Hold::After(number) => self.publisher.reports().window().is_acked(number),
                Hold::All => self.publisher.reports().window().in_flight() == 0,
            }
    }

    /// A report came in, so the producer has room.
    fn reported(&mut self) {
        if self.hold == Hold::Full {
            self.hold = Hold::Nothing;
        }
    }

    /// Hands over what is in hand, as far as it may go and the producer takes it.
    fn feed(&mut self, now: Instant, trusted_until: Instant) -> Result<(), database::Error> {
        if self.in_hand.is_empty() || !self.can_feed() {
            return Ok(());
        }
        self.hold = Hold::Nothing;
        // Of the row before: most often this one's too.
        let mut known: Option<(String, Topic)> = None;
        for number in 0.. {
            if number % FEED_CHUNK == 0 && Instant::now() >= trusted_until {
                break;
            }
            #[cfg(feature = "plants")]
            if self.links.holds_rest_of(self.in_page()) {
                break;
            }
            let Some(Prepared { row, headers }) = self.in_hand.front_mut() else { break };
            let topic = row.topic()?;
            if known.as_ref().is_none_or(|(name, _)| name != topic) {
                let found = self.links.topics.get(topic, now);
                if found.is_none_or(|found| found.stale) && self.checking.is_none() {
                    self.checking = Some(topics::check(&self.publisher, topic));
                }
                known = found.map(|found| (topic.to_owned(), found));
            }
            let Some((topic, Topic { partitions, .. })) = &known else {
                self.hold = Hold::Unknown;
                break;
            };
            let (which, key) = (Which { id: row.id, position: row.position }, row.key()?);
            let acked = |number| self.publisher.reports().window().is_acked(number);
            let partition = match self.routes.route(topic, *partitions, key, now, acked) {
                Route::To(partition) => Some(partition),
                Route::Any => None,
                // librdkafka, handed rows of a topic that it has not met, may take a second until it asks for itself.
                Route::Unmet => {
                    if self.checking.is_none() {
                        self.checking = Some(topics::check(&self.publisher, topic));
                    }
                    self.hold = Hold::Unknown;
                    break;
                }
                Route::After(number) => {
                    self.publisher.reports().window().wait_for(number);
                    self.hold = Hold::After(number);
                    break;
                }
                Route::Resized { .. } if self.publisher.reports().window().in_flight() > 0 => {
                    self.hold = Hold::All;
                    break;
                }
                Route::Resized { from, to } => {
                    tracing::warn!(
                        shard = self.links.shard,
                        topic,
                        "the topic had {from} partitions and has {to}: keys move to other partitions, where readers \
                         may take later messages before earlier ones; all earlier ones are acknowledged"
                    );
                    self.routes.resize(topic, to);
                    continue;
                }
            };
            match self.publisher.hand_over(row, headers, topic, key, partition)? {
                HandOver::Taken(number) => {
                    if let Some(partition) = partition {
                        self.routes.gone(topic, partition, number, now);
                    }
                    self.in_hand.pop_front();
                    if let Some(flight) = self.flights.back_mut() {
                        flight.rows.push(which);
                    }
                    if self.careful > 0 {
                        self.careful -= 1;
                        self.hold = Hold::All;
                        break;
                    }
                }
                HandOver::Full => {
                    self.hold = Hold::Full;
                    break;
                }
                HandOver::Failed(failure) => {
                    self.refused = Some((failure, which));
                    break;
                }
            }
        }
        Ok(())
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
        if self.reading.is_some() || !self.in_hand.is_empty() || self.refused.is_some() {
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
        self.links.metrics.published(prefix.saturating_sub(self.counted));
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
            if let Some(age) = age.filter(|_| !flight.rows.is_empty()) {
                self.links.metrics.acknowledged(age);
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
        self.advance_to = (prefix, self.acked(prefix));
        self.advancing = Some(self.links.advance(self.advance_to.1.clone()).await);
        None
    }

    /// The durable cursor is what was asked for.
    fn advanced(&mut self) {
        self.durable = self.advance_to.clone();
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
                self.advance_to = (prefix, self.acked(prefix));
                self.advancing = Some(self.links.advance(self.advance_to.1.clone()).await);
            }
        }
        None
    }

    fn topic_checked(&mut self, Checked { topic, seen }: Checked) -> Result<(), database::Error> {
        if self.hold == Hold::Unknown {
            self.hold = Hold::Nothing;
        }
        match seen {
            Ok(Seen::Partitions(partitions)) => {
                self.links.topics.learn(&topic, partitions);
                self.routes.meet(&topic, partitions);
            }
            Ok(Seen::Refused(cause)) => {
                self.links.topics.forget(&topic);
                // Found while rows of other topics were in hand: the next row of it asks again.
                let Some(Prepared { row, .. }) = self.in_hand.front() else { return Ok(()) };
                if row.topic()? == topic {
                    let which = Which { id: row.id, position: row.position };
                    let error = match cause {
                        Cause::UnknownTopic => format!("topic {topic} does not exist"),
                        _ => format!("the broker does not show topic {topic} to this relay"),
                    };
                    self.refused = Some((Failure::Refused { topic, cause, error }, which));
                }
            }
            Err(error) => {
                tracing::warn!(
                    shard = self.links.shard,
                    topic,
                    "kafka does not say whether the topic exists, asking again: {error}"
                );
            }
        }
        Ok(())
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

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
//! last durable cursor.

use std::collections::VecDeque;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use rdkafka::error::KafkaError;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use uuid::Uuid;

use crate::advance::{self, Outcome};
use crate::budget::Held;
use crate::cursor::{Cursor, ReadAt};
use crate::database;
use crate::links::{Ended, Links, Order, Topic};
use crate::publish::{Cause, Failure, HandOver, Publisher};
use crate::read::{self, Page};
use crate::route::{Route, Routes};

/// At most four cursor writes a second and shard: a hot row grows under a held vacuum horizon.
const ADVANCE_EVERY: Duration = Duration::from_millis(250);

/// Rows between two looks at the clock.
const FEED_CHUNK: usize = 64;

/// How long the broker may take to say whether a topic exists.
const METADATA_PATIENCE: Duration = Duration::from_secs(5);

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

/// The rows of one page that are with the producer.
struct Flight {
    from: Cursor,
    read: ReadAt,
    /// Number of the first row in this producer's window.
    first: u64,
    rows: Vec<Which>,
    bytes: Held,
}

impl Flight {
    /// The cursor once the first `rows` of this page are acknowledged.
    fn cursor_after(&self, rows: usize) -> Option<Cursor> {
        let last = self.rows.get(rows.checked_sub(1)?)?;
        Some(self.from.after(&self.read, last.position))
    }
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
    /// What the cursor row holds, and how many of this producer's rows that covers.
    durable: (u64, Cursor),
    /// The cursor after the last page that is acknowledged whole.
    settled: Cursor,
    /// Where the next page is read from.
    ahead: Cursor,
    flights: VecDeque<Flight>,
    /// Read and not yet handed over, in order; they belong to the last flight.
    in_hand: VecDeque<read::Row>,
    bytes: usize,
    reading: Option<oneshot::Receiver<Page>>,
    advancing: Option<oneshot::Receiver<Outcome>>,
    advance_to: (u64, Cursor),
    advanced_at: Option<Instant>,
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
            reading: None,
            advancing: None,
            advance_to: (0, durable),
            advanced_at: None,
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
        let mut stop = stop;
        if !matches!(stop, Stop::Ended(Ended::Fenced | Ended::Abandoned))
            && let Some(ended) = self.finish(prefix).await
        {
            stop = Stop::Ended(ended);
        }
        // Destroying a producer blocks for up to half a second.
        let (publisher, durable) = (self.publisher, self.durable.1);
        drop(tokio::task::spawn_blocking(move || drop(publisher)).await);
        Ok((stop, durable))
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
            self.settle(prefix);
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
                    self.feed(now, trusted_until)?;
                    self.ask_for_more().await;
                }
            }
            let mut advance_at = self.write_cursor(prefix, now).await;
            if unacked > 0 {
                // Not every report wakes; look at the prefix as often as it may be written.
                advance_at = advance_at.or(Some(now + ADVANCE_EVERY));
            }
            let again_at = (!self.in_hand.is_empty() && self.can_feed()).then_some(now);

            tokio::select! {
                page = reply(&mut self.reading) => match page {
                    Some(page) => self.take(page),
                    None => return Ok(Stop::Ended(Ended::Abandoned)),
                },
                outcome = reply(&mut self.advancing) => match outcome {
                    Some(Outcome::Advanced) => self.durable = self.advance_to.clone(),
                    Some(Outcome::Fenced) => return Ok(Stop::Ended(Ended::Fenced)),
                    None => return Ok(Stop::Ended(Ended::Abandoned)),
                },
                checked = joined(&mut self.checking) => self.topic_checked(checked)?,
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
    fn take(&mut self, page: Page) {
        let Some(Ok(last)) = page.rows.last().map(read::Row::position) else { return };
        self.ahead = page.from.after(&page.read, last);
        self.bytes += page.bytes.bytes();
        let first = {
            let w = self.publisher.reports().window();
            w.prefix() + w.in_flight() as u64
        };
        self.flights.push_back(Flight {
            from: page.from,
            read: page.read,
            first,
            rows: Vec::new(),
            bytes: page.bytes,
        });
        self.in_hand = page.rows.into();
    }

    fn can_feed(&self) -> bool {
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

    /// Hands over a chunk of what is in hand, as far as it may go and the producer takes it.
    fn feed(&mut self, now: Instant, trusted_until: Instant) -> Result<(), database::Error> {
        if self.in_hand.is_empty() || !self.can_feed() || Instant::now() >= trusted_until {
            return Ok(());
        }
        self.hold = Hold::Nothing;
        for _ in 0..FEED_CHUNK {
            let Some(row) = self.in_hand.front() else { break };
            let topic = row.topic()?;
            let known = self.links.topics.get(topic, now);
            if known.is_none_or(|known| known.stale) && self.checking.is_none() {
                self.checking = Some(self.links.check(&self.publisher, topic));
            }
            let Some(Topic { partitions, .. }) = known else {
                self.hold = Hold::Unknown;
                break;
            };
            let which = Which { id: row.id()?, position: row.position()? };
            let acked = |number| self.publisher.reports().window().is_acked(number);
            let partition = match self.routes.route(
                topic,
                partitions,
                row.key()?.map(str::as_bytes),
                now,
                acked,
            ) {
                Route::To(partition) => Some(partition),
                Route::Any => None,
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
            match self.publisher.hand_over(row, partition)? {
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

    /// Asks for the next page once there is room for a good part of one.
    async fn ask_for_more(&mut self) {
        let settings = &self.links.settings;
        if self.reading.is_some() || !self.in_hand.is_empty() || self.refused.is_some() {
            return;
        }
        let (most, limit) = (settings.page_rows.get(), settings.in_flight_rows.get());
        let rows = limit.saturating_sub(self.publisher.reports().window().in_flight());
        let bytes = settings.in_flight_bytes.get().saturating_sub(self.bytes);
        if rows < most.min(limit / 2).max(1) || bytes < settings.in_flight_bytes.get() / 4 {
            return;
        }
        let (sender, receiver) = oneshot::channel();
        let request = read::Request {
            shard: self.links.shard,
            cursor: self.ahead.clone(),
            rows: rows.min(most),
            bytes,
            reply: sender,
        };
        // A reader that is gone drops the reply, which ends this life as abandoned.
        drop(self.links.reads.send(request).await);
        self.reading = Some(receiver);
    }

    /// Lets go of pages that are acknowledged whole.
    fn settle(&mut self, prefix: u64) {
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
            self.links.published.count(flight.rows.len());
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
        if prefix <= self.durable.0 || self.advancing.is_some() {
            return None;
        }
        let due = self.advanced_at.map_or(now, |at| at + ADVANCE_EVERY);
        if now < due {
            return Some(due);
        }
        self.advanced_at = Some(now);
        self.advance_to = (prefix, self.acked(prefix));
        self.advancing = Some(self.links.advance(self.advance_to.1.clone()).await);
        None
    }

    /// Writes what is left to write. `Some` when the shard is not ours any more.
    async fn finish(&mut self, prefix: u64) -> Option<Ended> {
        for _ in 0..2 {
            if let Some(asked) = self.advancing.take() {
                match asked.await {
                    Ok(Outcome::Advanced) => self.durable = self.advance_to.clone(),
                    Ok(Outcome::Fenced) => return Some(Ended::Fenced),
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

    fn topic_checked(&mut self, Checked { topic, partitions }: Checked) -> Result<(), database::Error> {
        if self.hold == Hold::Unknown {
            self.hold = Hold::Nothing;
        }
        match partitions {
            Ok(Some(partitions)) => self.links.topics.learn(&topic, partitions),
            Ok(None) => {
                self.links.topics.forget(&topic);
                // Found missing while rows of other topics were in hand: the next row of it asks again.
                let Some(row) = self.in_hand.front() else { return Ok(()) };
                if row.topic()? == topic {
                    let which = Which { id: row.id()?, position: row.position()? };
                    let error = format!("topic {topic} does not exist");
                    self.refused =
                        Some((Failure::Refused { topic, cause: Cause::UnknownTopic, error }, which));
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

async fn joined(task: &mut Option<JoinHandle<Checked>>) -> Checked {
    let Some(handle) = task else { return std::future::pending().await };
    let checked = handle.await;
    *task = None;
    // Only a panic ends the task early; then nothing is known.
    checked.unwrap_or(Checked { topic: String::new(), partitions: Err(KafkaError::Canceled) })
}

async fn until(instant: Option<Instant>) {
    match instant {
        Some(instant) => tokio::time::sleep_until(instant).await,
        None => std::future::pending().await,
    }
}

/// What the broker says of a topic.
struct Checked {
    topic: String,
    /// How many partitions it has; `None` when it does not exist.
    partitions: Result<Option<NonZeroU32>, KafkaError>,
}

impl Links {
    /// Asks the broker about a topic, on a thread that may block.
    fn check(&self, publisher: &Arc<Publisher>, topic: &str) -> JoinHandle<Checked> {
        let (publisher, topic) = (Arc::clone(publisher), topic.to_owned());
        tokio::spawn(async move {
            let asked = topic.clone();
            let asked = tokio::task::spawn_blocking(move || publisher.partitions(&asked, METADATA_PATIENCE));
            let partitions = asked.await.unwrap_or(Err(KafkaError::Canceled));
            if partitions.is_err() {
                // The broker is away: that is an outage, not a missing topic.
                tokio::time::sleep(Duration::from_millis(500)).await;
            }
            Checked { topic, partitions }
        })
    }

    /// Asks for the cursor to be written.
    async fn advance(&self, cursor: Cursor) -> oneshot::Receiver<Outcome> {
        let (reply, receiver) = oneshot::channel();
        let request = advance::Request {
            shard: self.shard,
            generation: self.generation,
            token: self.token,
            cursor,
            reply,
        };
        // An advancer that is gone drops the reply.
        drop(self.advances.send(request).await);
        receiver
    }
}

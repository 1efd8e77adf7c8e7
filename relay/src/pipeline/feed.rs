//! Which row in hand goes next, and where: to Kafka, aside, or nowhere yet.
//!
//! What can be known to fail is not handed over: a topic that is missing or denied, a message that breaks its topic's rules (as far
//! as the broker tells, see `rules`), headers that cannot be written, a message that was refused alone. A row that goes aside counts as
//! acknowledged; the advance that passes it writes it down.

use baton_protocol::lifecycle::message::Cause;
use tokio::time::Instant;

use super::{FEED_CHUNK, Full, Hold, Pipeline, Which};
use crate::aside::{KeyHash, Reason, Slated};
use crate::database;
use crate::links::Links;
use crate::publish::{Failure, HandOver, Prepared};
use crate::refusal;
use crate::route::Route;
use crate::rules::{Facts, Rules};
use crate::topics::{self, Checked, Standing};

/// Of the topic of the row before: most often this one's too.
struct Known {
    topic: String,
    standing: Standing,
    is_paused: bool,
}

/// What becomes of a row.
enum Fate {
    Goes(Option<u32>),
    Aside(Reason),
    /// Nothing, until what the pipeline holds for has come.
    Waits,
    /// Look again.
    Again,
}

impl Pipeline<'_> {
    pub(super) fn can_feed(&self) -> bool {
        #[cfg(feature = "plants")]
        if self.links.holds_rest_of(self.in_page()) {
            return false;
        }
        self.failed.is_none()
            && self.full.is_none()
            && match self.hold {
                Hold::Nothing => true,
                Hold::Full | Hold::Unknown => false,
                Hold::After(number) => self.publisher.reports().window().is_acked(number),
                Hold::All => self.publisher.reports().window().in_flight() == 0,
            }
    }

    /// A report came in, so the producer has room.
    pub(super) fn reported(&mut self) {
        if self.hold == Hold::Full {
            self.hold = Hold::Nothing;
        }
    }

    /// Hands over what is in hand, as far as it may go and the producer takes it.
    pub(super) fn feed(&mut self, now: Instant, trusted_until: Instant) -> Result<(), database::Error> {
        if self.in_hand.is_empty() || !self.can_feed() {
            return Ok(());
        }
        self.hold = Hold::Nothing;
        let mut known: Option<Known> = None;
        for number in 0.. {
            if number % FEED_CHUNK == 0 && Instant::now() >= trusted_until {
                break;
            }
            #[cfg(feature = "plants")]
            if self.links.holds_rest_of(self.in_page()) {
                break;
            }
            let Some(mut prepared) = self.in_hand.pop_front() else { break };
            match self.feed_one(&mut prepared, &mut known, now)? {
                Fed::Gone => {}
                Fed::Kept => {
                    self.in_hand.push_front(prepared);
                    break;
                }
                Fed::Again => self.in_hand.push_front(prepared),
            }
        }
        Ok(())
    }

    fn feed_one(
        &mut self,
        prepared: &mut Prepared,
        known: &mut Option<Known>,
        now: Instant,
    ) -> Result<Fed, database::Error> {
        let topic = prepared.row.topic()?;
        if known.as_ref().is_none_or(|known| known.topic != topic) {
            *known = Some(Known {
                topic: topic.to_owned(),
                standing: self.links.topics.standing(topic, now),
                is_paused: self.links.is_paused(topic),
            });
        }
        let Some(of_topic) = known.as_ref() else { return Ok(Fed::Kept) };
        let which = Which { id: prepared.row.id, position: prepared.row.position };
        let key = prepared.row.key()?;
        let hash = key
            .filter(|_| of_topic.is_paused || !self.links.aside.is_empty())
            .map(|key| self.links.aside.hash(topic, key));
        let partition = match self.fate(prepared, of_topic, which, hash, now)? {
            Fate::Goes(partition) => partition,
            Fate::Waits => return Ok(Fed::Kept),
            Fate::Again => return Ok(Fed::Again),
            Fate::Aside(reason) => {
                let hash = key.map(|key| self.links.aside.hash(topic, key));
                return self.slate(which, topic, hash, reason, of_topic.is_paused);
            }
        };
        let headers = &mut prepared.headers;
        match self.publisher.hand_over(&prepared.row, headers, topic, key, partition)? {
            HandOver::Taken(number) => {
                if let Some(partition) = partition {
                    self.routes.gone(topic, partition, number, now);
                }
                if let Some(flight) = self.flights.back_mut() {
                    flight.rows.push(which);
                    flight.is_sent = true;
                }
                Ok(Fed::Gone)
            }
            HandOver::Full => {
                self.hold = Hold::Full;
                Ok(Fed::Kept)
            }
            // librdkafka has heard that it is gone; the broker is asked whether that is so.
            HandOver::Failed(Failure::Refused { topic, cause: Cause::UnknownTopic, .. }) => {
                self.links.topics.forget(&topic);
                *known = None;
                Ok(Fed::Again)
            }
            HandOver::Failed(Failure::Refused { topic, cause, error }) => {
                let hash = key.map(|key| self.links.aside.hash(&topic, key));
                self.slate(which, &topic, hash, Reason::Refused { cause, error }, false)
            }
            HandOver::Failed(failure) => {
                self.failed = Some((failure, which));
                Ok(Fed::Kept)
            }
        }
    }

    /// What becomes of the row in hand.
    fn fate(
        &mut self,
        prepared: &Prepared,
        known: &Known,
        which: Which,
        hash: Option<KeyHash>,
        now: Instant,
    ) -> Result<Fate, database::Error> {
        let topic = known.topic.as_str();
        if hash.and_then(|hash| self.links.aside.waits(hash)).is_some() {
            return Ok(Fate::Aside(Reason::Behind));
        }
        if known.is_paused {
            return Ok(Fate::Aside(Reason::Paused));
        }
        if let Some((cause, error)) = self.care.condemned(which.position) {
            return Ok(Fate::Aside(Reason::Refused { cause: *cause, error: error.clone() }));
        }
        if let Err(error) = &prepared.headers {
            let (cause, error) = (Cause::InvalidRecord, error.clone());
            return Ok(Fate::Aside(Reason::Refused { cause, error }));
        }
        let (partitions, rules) = match &known.standing {
            Standing::Flows { partitions, stale, rules } => {
                if *stale {
                    self.ask_about(topic);
                }
                (*partitions, *rules)
            }
            Standing::Refused { cause, error } => {
                return Ok(Fate::Aside(Reason::Refused { cause: *cause, error: error.clone() }));
            }
            Standing::Unknown => {
                self.ask_about(topic);
                self.hold = Hold::Unknown;
                return Ok(Fate::Waits);
            }
        };
        let key = prepared.row.key()?;
        if let Some((rules, is_believed)) = rules
            && let Some((cause, error)) = rules.refuse(self.facts(prepared, &rules, now)?)
        {
            if is_believed {
                return Ok(Fate::Aside(Reason::Refused { cause, error }));
            }
            // It may have been altered.
            self.ask_about(topic);
            self.hold = Hold::Unknown;
            return Ok(Fate::Waits);
        }
        if !self.joins(which.position) {
            self.hold = Hold::All;
            return Ok(Fate::Waits);
        }
        let acked = |number| self.publisher.reports().window().is_acked(number);
        Ok(match self.routes.route(topic, partitions, key, now, acked) {
            Route::To(partition) => Fate::Goes(Some(partition)),
            Route::Any => Fate::Goes(None),
            // librdkafka, handed rows of a topic that it has not met, may take a second until it asks for itself.
            Route::Unmet => {
                self.ask_about(topic);
                self.hold = Hold::Unknown;
                Fate::Waits
            }
            Route::After(number) => {
                self.publisher.reports().window().wait_for(number);
                self.hold = Hold::After(number);
                Fate::Waits
            }
            Route::Resized { .. } if self.publisher.reports().window().in_flight() > 0 => {
                self.hold = Hold::All;
                Fate::Waits
            }
            Route::Resized { from, to } => {
                tracing::warn!(
                    shard = self.links.shard,
                    topic,
                    "the topic had {from} partitions and has {to}: keys move to other partitions, where readers \
                     may take later messages before earlier ones; all earlier ones are acknowledged"
                );
                self.routes.resize(topic, to);
                Fate::Again
            }
        })
    }

    /// Whether the row may join those in flight: suspects go in groups of their own.
    fn joins(&mut self, position: i64) -> bool {
        let group = self.care.group(position);
        let is_joining = match (self.group, group) {
            (None, None) => return true,
            (Some(sent), Some(most)) => sent < most,
            _ => false,
        };
        if is_joining {
            self.group = self.group.map(|sent| sent + 1);
            return true;
        }
        if self.publisher.reports().window().in_flight() > 0 {
            return false;
        }
        self.group = group.map(|_| 1);
        true
    }

    /// What a topic's rules are about.
    fn facts(&self, prepared: &Prepared, rules: &Rules, now: Instant) -> Result<Facts, database::Error> {
        let Prepared { row, headers } = prepared;
        let key = row.key()?;
        // Hardly any message is large; and compressed, one that is may pass.
        let may_be_too_large = rules.bytes.is_some_and(|limit| row.size > limit);
        let bytes = if may_be_too_large && !self.links.settings.compresses() {
            let headers = headers.as_ref().ok().and_then(Option::as_ref);
            Some(refusal::bytes(key, row.payload()?, headers))
        } else {
            None
        };
        let age = self.flights.back().and_then(|flight| flight.clock.age(row.created_ms, now));
        Ok(Facts { bytes, age, has_key: key.is_some() })
    }

    /// Asks the broker about a topic, and with it about those that come next and that this producer has not met.
    fn ask_about(&mut self, topic: &str) {
        /// A row of each would wait for its own answer otherwise.
        const TOGETHER: usize = 16;
        if self.checking.is_some() {
            return;
        }
        let mut asked = vec![topic.to_owned()];
        for prepared in &self.in_hand {
            let Ok(next) = prepared.row.topic() else { continue };
            if !self.routes.has_met(next) && asked.iter().all(|topic| topic != next) {
                asked.push(next.to_owned());
            }
            if asked.len() == TOGETHER {
                break;
            }
        }
        let Links { topics, settings, .. } = self.links;
        self.checking = Some(topics::check(topics, settings, &self.publisher, asked));
    }

    /// The row goes aside, once the cursor passes it.
    fn slate(
        &mut self,
        which: Which,
        topic: &str,
        key: Option<KeyHash>,
        reason: Reason,
        topic_is_paused: bool,
    ) -> Result<Fed, database::Error> {
        let settings = &self.links.settings;
        let cause = match &reason {
            Reason::Refused { cause, error } => {
                self.links.refused(which, topic, *cause, error);
                *cause
            }
            Reason::Behind | Reason::Paused => {
                key.and_then(|key| self.links.aside.waits(key)).unwrap_or(Cause::UnknownTopic)
            }
        };
        let attempts = settings.park_attempts.get();
        let slated = Slated::new(which.id, which.position, key, reason, topic_is_paused, attempts)
            .map_err(|illegal| database::Error::Answer { operation: "parking", what: illegal.to_string() })?;
        if slated.counts() && self.links.aside.counted() >= settings.park_rows.get() {
            self.full = Some(Full { which, topic: topic.to_owned(), cause });
            return Ok(Fed::Kept);
        }
        let number = {
            let mut window = self.publisher.reports().window();
            let number = window.hand_over();
            window.ack(number);
            number
        };
        if let Some(flight) = self.flights.back_mut() {
            flight.rows.push(which);
        }
        self.links.aside.slate(&slated);
        self.aside_numbers.push_back(number);
        self.slated.push_back((number, slated));
        Ok(Fed::Gone)
    }

    pub(super) fn topics_checked(&mut self, checked: Vec<Checked>) {
        if self.hold == Hold::Unknown {
            self.hold = Hold::Nothing;
        }
        for checked in checked {
            self.topic_checked(checked);
        }
    }

    fn topic_checked(&mut self, Checked { topic, seen }: Checked) {
        match seen {
            Ok(Some(topics::Seen::Partitions(partitions))) => self.routes.meet(&topic, partitions),
            // What is set aside for it says so.
            Ok(Some(topics::Seen::Refused(_))) => {}
            Ok(None) => {
                tracing::warn!(
                    shard = self.links.shard,
                    topic,
                    "kafka says that a topic is gone that was there; if it still says so in {:?}, its messages are set aside",
                    topics::DOUBTED_FOR
                );
            }
            Err(error) => {
                tracing::warn!(
                    shard = self.links.shard,
                    topic,
                    "kafka does not say whether the topic exists, asking again: {error}"
                );
            }
        }
    }
}

/// What became of the row in hand.
enum Fed {
    /// It is the producer's, or slated.
    Gone,
    /// It stays in hand, and so does what is behind it.
    Kept,
    /// It is looked at once more.
    Again,
}

//! What a shard has set aside is tried again: in order per key, by a producer of its own, beside the one that publishes.
//!
//! ```text
//!  look ─▶ due ─▶ the first of a key, alone ──acked──▶ those behind it, together ──▶ settle ─▶ look …
//!    ▲                       ├─ refused: an attempt spent, later or dead
//!    └── rest, a second ◀────┴─ outage: nothing spent, later
//! ```
//!
//! Only the owner of the shard tries, as long as it trusts its lease. What was acknowledged and not settled when the process dies is
//! tried once more by the next owner, in order: at most [`SETTLE_AT`] messages and those behind the last of them, [`BEHIND`]. A key's
//! next message is handed over only when the one before it is acknowledged, or together with it by a producer that opened its
//! partition with the first one alone; so a refusal lets nothing overtake (`route` says why).
//!
//! *An outage spends nothing.* No answer about a topic, no acknowledgement for [`PATIENCE`], and every error that is not one of
//! the refusals: the topic is left alone for a while, and its messages keep their attempts.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use baton_protocol::lifecycle::Word as _;
use baton_protocol::lifecycle::message::{Cause, Event, State};
use baton_protocol::retry;
use rdkafka::error::KafkaError;
use tokio::sync::{oneshot, watch};
use tokio::time::Instant;

use crate::aside::{KeyHash, after_refusal};
use crate::database::Error;
use crate::fenced::Operation;
use crate::links::{Links, Order};
use crate::parked::{Answer, Behind, Grip, Left, Request, Settled, Tidy, Tried};
use crate::pipeline::Which;
use crate::publish::{Failure, HandOver, Prepared, Publisher};
use crate::read::Row;
use crate::refusal;
use crate::topics::{self, Seen, Standing};

/// Between two looks at what is set aside, as long as something is: so soon an operator's command is noticed.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// How soon what an operator has locked is settled once more.
const LOCKED_AGAIN: Duration = Duration::from_millis(250);

/// Most first ones of a key in a round.
const ROUND: usize = 100;

/// Most messages that follow one of them at once.
const BEHIND: usize = 200;

/// Most bytes of either; one larger message still comes, alone.
const BYTES: usize = 1 << 20;

/// A round is settled when so many are acknowledged, so that a crash repeats few.
const SETTLE_AT: usize = 200;

/// How long Kafka may take to acknowledge; then it counts as an outage.
const PATIENCE: Duration = Duration::from_secs(10);

/// What became of a message that was handed over.
enum Sent {
    Acked,
    Refused {
        cause: Cause,
        error: String,
    },
    Outage {
        error: String,
    },
    /// The shard is let go.
    Ended,
}

/// Tries what a shard has set aside until it is let go, or `over` says that nothing else of it goes on.
pub(crate) async fn run(links: &Links, over: watch::Receiver<bool>) -> Result<(), Error> {
    let outages =
        retry::Policy { base: Duration::from_millis(500), factor: 2.0, cap: Duration::from_secs(10) };
    let mut retrier = Retrier {
        links,
        over,
        publisher: None,
        met: HashSet::new(),
        sick: HashMap::new(),
        outages: outages.delays(),
        tidied: None,
    };
    let ended = retrier.follow().await;
    retrier.drop_publisher().await;
    ended
}

struct Retrier<'a> {
    links: &'a Links,
    over: watch::Receiver<bool>,
    publisher: Option<Arc<Publisher>>,
    /// The topics that this producer has asked about.
    met: HashSet<String>,
    /// Topics that are left alone until then.
    sick: HashMap<String, Instant>,
    outages: retry::Delays,
    tidied: Option<Instant>,
}

/// A round: what it has found out, and not settled.
#[derive(Default)]
struct Round {
    settled: Vec<Settled>,
    /// Of those that were published.
    keys: HashMap<i64, KeyHash>,
    published: usize,
    dead: Vec<Which>,
    /// Topics of which a message was refused for the topic's sake.
    refused: HashMap<String, (Cause, String)>,
}

impl Retrier<'_> {
    async fn follow(&mut self) -> Result<(), Error> {
        while !self.is_over() {
            if !self.links.aside.is_occupied() {
                self.drop_publisher().await;
                self.rest(None).await;
                continue;
            }
            let asked = self.links.aside.moment();
            let grip = self.grip();
            let tidy = self.tidies();
            let Some(answer) = self.ask(|reply| Request::Look { grip, tidy, reply }).await else {
                return Ok(());
            };
            let look = match answer {
                Answer::Done(look) => look,
                Answer::Fenced => return self.fenced(),
                Answer::Locked => {
                    self.rest(Some(LOOK_EVERY)).await;
                    continue;
                }
            };
            self.links.aside.looked(look.is_occupied, look.counted, asked);
            match look.due_in {
                Some(Duration::ZERO) => {
                    if self.round().await?.is_none() {
                        return Ok(());
                    }
                }
                due_in => {
                    if due_in.is_none_or(|due_in| due_in > LOOK_EVERY) {
                        self.drop_publisher().await;
                    }
                    self.rest(Some(due_in.map_or(LOOK_EVERY, |due_in| due_in.min(LOOK_EVERY)))).await;
                }
            }
        }
        Ok(())
    }

    /// Tidying looks at every key that waits, so it is not done for each round.
    fn tidies(&mut self) -> Tidy {
        let now = Instant::now();
        if self.tidied.is_some_and(|at| now.saturating_duration_since(at) < LOOK_EVERY) {
            return Tidy::NotNow;
        }
        self.tidied = Some(now);
        Tidy::First
    }

    /// Tries what is due. `None`: the shard is let go.
    async fn round(&mut self) -> Result<Option<()>, Error> {
        let shard = self.links.shard;
        let now = Instant::now();
        self.sick.retain(|_, until| now < *until);
        let without: Vec<String> = self.sick.keys().cloned().collect();
        let due = self.ask(|reply| Request::Due { shard, rows: ROUND, bytes: BYTES, without, reply }).await;
        let Some(due) = due else { return Ok(None) };
        let mut round = Round::default();
        let mut was_idle = true;
        for tried in due {
            if self.is_over() {
                break;
            }
            let topic = tried.row.topic()?.to_owned();
            if self.sick.contains_key(&topic) {
                continue;
            }
            was_idle = false;
            let Tried { row, place, attempts, budget_from } = tried;
            let which = Which { id: row.id, position: row.position };
            let key = row.key()?.map(<[u8]>::to_vec);
            let sent = match round.refused.get(&topic) {
                Some((cause, error)) => Sent::Refused { cause: *cause, error: error.clone() },
                None => self.send_alone(row, &topic).await?,
            };
            match sent {
                Sent::Acked => {
                    self.links.topics.takes(&topic);
                    self.outages.reset();
                    let key = key.and_then(|key| String::from_utf8(key).ok());
                    let hash = key.as_ref().map(|key| self.links.aside.hash(&topic, key.as_bytes()));
                    round.published(which.position, hash)?;
                    if let (Some(key), Some(hash)) = (key, hash) {
                        let behind = Behind { topic: topic.clone(), key, place };
                        for position in self.send_those_behind(behind).await? {
                            round.published(position, Some(hash))?;
                        }
                    }
                }
                Sent::Refused { cause, error } => {
                    self.links.refused(which, &topic, cause, &error);
                    if cause.may_pass() || cause == Cause::InvalidTopic {
                        round.refused.insert(topic, (cause, error.clone()));
                    }
                    self.spend(&mut round, which, (attempts, budget_from), cause, error)?;
                }
                Sent::Outage { error } => {
                    let delay = self.outages.next_delay();
                    tracing::warn!(
                        shard,
                        topic,
                        ?delay,
                        "a parked message could not be tried, it loses no attempt: {error}"
                    );
                    self.sick.insert(topic, Instant::now() + delay);
                }
                Sent::Ended => break,
            }
            if round.published >= SETTLE_AT {
                let refused = std::mem::take(&mut round.refused);
                let full = std::mem::replace(&mut round, Round { refused, ..Round::default() });
                if self.settle(full).await?.is_none() {
                    return Ok(None);
                }
            }
        }
        if self.settle(round).await?.is_none() {
            return Ok(None);
        }
        if was_idle {
            // All that is due is of topics that are left alone.
            self.rest(Some(LOOK_EVERY)).await;
        }
        Ok(Some(()))
    }

    /// An attempt was spent.
    fn spend(
        &self,
        round: &mut Round,
        which: Which,
        seen: (i32, i32),
        cause: Cause,
        error: String,
    ) -> Result<(), Error> {
        let settings = &self.links.settings;
        let (attempts, budget_from) = seen;
        let spent = u32::try_from(attempts.saturating_sub(budget_from)).unwrap_or(0).saturating_add(1);
        let state = after_refusal(State::Retrying, cause, spent, settings.park_attempts.get())
            .map_err(|illegal| illegal_here(&illegal))?;
        let delay = (state == State::Retrying).then(|| settings.park_policy().delay(spent - 1));
        if state == State::Dead {
            round.dead.push(which);
        }
        let refusal = Some((cause, error));
        round.settled.push(Settled { position: which.position, state, refusal, delay, seen: Some(seen) });
        Ok(())
    }

    /// Writes down what a round has found out. `None`: the shard is let go.
    async fn settle(&mut self, round: Round) -> Result<Option<()>, Error> {
        let Round { settled, keys, published, dead, .. } = round;
        if settled.is_empty() {
            return Ok(Some(()));
        }
        #[cfg(feature = "plants")]
        if published > 0 {
            self.links.hold(crate::hold::Point::K3).await;
        }
        let aside = &self.links.aside;
        let asked = aside.moment();
        let slated: HashSet<KeyHash> = keys.values().copied().filter(|key| aside.is_slated(*key)).collect();
        let grip = self.grip();
        let left = loop {
            let again = settled.clone();
            match self.ask(|reply| Request::Settle { grip, settled: again, reply }).await {
                Some(Answer::Done(left)) => break left,
                Some(Answer::Fenced) => return self.fenced().map(|()| None),
                // An operator changes some of it just now. What is not written down is tried once more by the next owner.
                Some(Answer::Locked) if !self.is_over() => self.rest(Some(LOCKED_AGAIN)).await,
                Some(Answer::Locked) | None => return Ok(None),
            }
        };
        self.links.metrics.published(published as u64);
        self.links.aside.settled(published);
        for Left { position, is_left } in left {
            if let Some(key) = keys.get(&position).filter(|_| !is_left) {
                self.links.aside.none_left(*key, asked, slated.contains(key));
            }
        }
        if let Some(first) = dead.first() {
            tracing::error!(
                shard = self.links.shard,
                id = %first.id,
                messages = dead.len(),
                "parked messages are dead, this one first: no further attempt is made, and what follows of their keys waits; look \
                 at `baton parked list --state dead`, then requeue or discard them"
            );
        }
        #[cfg(feature = "plants")]
        if published > 0 {
            self.links.hold(crate::hold::Point::K4).await;
        }
        Ok(Some(()))
    }

    /// Sends one message with nothing else in flight.
    async fn send_alone(&mut self, row: Row, topic: &str) -> Result<Sent, Error> {
        let publisher = match self.publisher() {
            Ok(publisher) => publisher,
            Err(sent) => return Ok(sent),
        };
        if !self.met.contains(topic) {
            let Links { topics, settings, .. } = self.links;
            let mut asked = Some(topics::check(topics, settings, &publisher, vec![topic.to_owned()]));
            let checked = tokio::select! {
                checked = topics::checked(&mut asked) => checked,
                () = self.ended(|order| order != Order::Run) => return Ok(Sent::Ended),
            };
            let checked = checked.into_iter().next();
            match checked.map_or(Err(KafkaError::Canceled), |checked| checked.seen) {
                Ok(Some(Seen::Partitions(_))) => _ = self.met.insert(topic.to_owned()),
                Ok(Some(Seen::Refused(cause))) => {
                    let error = match self.links.topics.standing(topic, Instant::now()) {
                        Standing::Refused { error, .. } => error,
                        _ => cause.as_str().to_owned(),
                    };
                    return Ok(Sent::Refused { cause, error });
                }
                Ok(None) => {
                    let error = "kafka says that a topic is gone that was there".to_owned();
                    return Ok(Sent::Outage { error });
                }
                Err(error) => return Ok(Sent::Outage { error: error.to_string() }),
            }
        }
        let sent = match self.hand_over(&publisher, row).await? {
            Ok(number) => self.acknowledged(&publisher, number + 1).await,
            Err(sent) => sent,
        };
        match sent {
            Sent::Acked => Ok(Sent::Acked),
            Sent::Refused { cause, error } => {
                self.drop_publisher().await;
                Ok(self.worded(topic, cause, error).await)
            }
            other => {
                self.drop_publisher().await;
                Ok(other)
            }
        }
    }

    /// A refusal in the words in which it is kept, and what it says of its topic.
    async fn worded(&self, topic: &str, cause: Cause, error: String) -> Sent {
        let error = refusal::in_full(self.links, topic, cause, error).await;
        match cause {
            // That librdkafka thinks so is no answer of the broker's: it is asked the next time.
            Cause::UnknownTopic => {
                self.links.topics.forget(topic);
                Sent::Outage { error }
            }
            Cause::NotAuthorized | Cause::InvalidTopic => {
                self.links.topics.denied(topic, cause, error.clone());
                Sent::Refused { cause, error }
            }
            _ => Sent::Refused { cause, error },
        }
    }

    /// Sends what waits behind a message that is acknowledged, together. Returned: the positions of those that are as well, in order.
    async fn send_those_behind(&mut self, behind: Behind) -> Result<Vec<i64>, Error> {
        let shard = self.links.shard;
        let rows =
            self.ask(|reply| Request::Behind { shard, behind, rows: BEHIND, bytes: BYTES, reply }).await;
        let (Some(rows), Some(publisher)) = (rows, self.publisher.clone()) else { return Ok(Vec::new()) };
        let mut sent: Vec<(u64, i64)> = Vec::new();
        let mut is_broken = false;
        for row in rows {
            let position = row.position;
            match self.hand_over(&publisher, row).await? {
                Ok(number) => sent.push((number, position)),
                Err(_) => {
                    is_broken = true;
                    break;
                }
            }
        }
        if let Some((last, _)) = sent.last() {
            is_broken |= !matches!(self.acknowledged(&publisher, last + 1).await, Sent::Acked);
        }
        let acked = publisher.reports().window().prefix();
        if is_broken {
            // The one that was refused is tried alone when it is the first.
            self.drop_publisher().await;
        }
        Ok(sent.into_iter().take_while(|(number, _)| *number < acked).map(|(_, position)| position).collect())
    }

    /// Hands a row over, whenever there is room for it; its number.
    async fn hand_over(&self, publisher: &Publisher, row: Row) -> Result<Result<u64, Sent>, Error> {
        let Prepared { row, mut headers } = publisher.prepare(row)?;
        let (topic, key) = (row.topic()?, row.key()?);
        let partition = key
            .zip(self.links.topics.partitions(topic))
            .map(|(key, partitions)| baton_protocol::partition::of_key(key, partitions));
        if key.is_some() && partition.is_none() {
            let error = "how many partitions its topic has is not known".to_owned();
            return Ok(Err(Sent::Outage { error }));
        }
        let until = Instant::now() + PATIENCE;
        loop {
            if self.is_over() {
                return Ok(Err(Sent::Ended));
            }
            match publisher.hand_over(&row, &mut headers, topic, key, partition)? {
                HandOver::Taken(number) => return Ok(Ok(number)),
                HandOver::Failed(failure) => return Ok(Err(failure.into())),
                HandOver::Full if Instant::now() >= until => {
                    return Ok(Err(Sent::Outage { error: "the producer's queue stays full".to_owned() }));
                }
                HandOver::Full => tokio::time::sleep(Duration::from_millis(5)).await,
            }
        }
    }

    /// Waits until Kafka has acknowledged the first `many` rows of this producer, or refuses one of them, or takes too long.
    async fn acknowledged(&self, publisher: &Arc<Publisher>, many: u64) -> Sent {
        let reports = Arc::clone(publisher.reports());
        let mut trust = self.links.trust.clone();
        let mut until = Instant::now() + PATIENCE;
        loop {
            let failure = {
                let window = reports.window();
                if window.prefix() >= many {
                    return Sent::Acked;
                }
                window.failure().map(|(_, failure)| failure.clone())
            };
            if let Some(failure) = failure {
                return failure.into();
            }
            if let Some(error) = reports.fatal() {
                // What it was raised for is reported behind it.
                publisher.purge(self.links.settings.drain_deadline).await;
                let failure = reports.window().failure().map(|(_, failure)| failure.clone());
                return failure.map_or(Sent::Outage { error }, Sent::from);
            }
            let now = Instant::now();
            match *self.links.order.borrow() {
                Order::Run if !*self.over.borrow() => {}
                Order::Let(_) => return Sent::Ended,
                _ => until = until.min(now + self.links.settings.drain_deadline.min(PATIENCE / 10)),
            }
            if now >= until {
                let error = format!("kafka has not acknowledged it within {PATIENCE:?}");
                return Sent::Outage { error };
            }
            let trusted_until = *trust.borrow_and_update();
            if now >= trusted_until {
                return Sent::Ended;
            }
            tokio::select! {
                () = reports.changed.notified() => {}
                () = tokio::time::sleep_until(until.min(trusted_until).min(now + Duration::from_millis(250))) => {}
            }
        }
    }

    /// The producer, made when it is needed.
    fn publisher(&mut self) -> Result<Arc<Publisher>, Sent> {
        if let Some(publisher) = &self.publisher {
            return Ok(Arc::clone(publisher));
        }
        match Publisher::new(&self.links.settings, Arc::clone(&self.links.envelope)) {
            Ok(publisher) => {
                let publisher = Arc::new(publisher);
                self.publisher = Some(Arc::clone(&publisher));
                Ok(publisher)
            }
            Err(error) => Err(Sent::Outage { error: format!("cannot make a kafka producer: {error}") }),
        }
    }

    /// What it has not acknowledged is thrown away, and all reports are in.
    async fn drop_publisher(&mut self) {
        self.met.clear();
        if let Some(publisher) = self.publisher.take() {
            publisher.purge(self.links.settings.drain_deadline).await;
            self.links.destroying.destroy(publisher, false).await;
        }
    }

    fn grip(&self) -> Grip {
        let Links { shard, generation, token, .. } = *self.links;
        Grip { shard, generation, token }
    }

    /// Asks the connection for what is set aside. `None`: it is gone, and the session with it.
    async fn ask<T>(&self, request: impl FnOnce(oneshot::Sender<T>) -> Request) -> Option<T> {
        let (reply, answer) = oneshot::channel();
        tokio::select! {
            biased;
            answer = async {
                self.links.parked.send(request(reply)).await.ok()?;
                answer.await.ok()
            } => answer,
            // A drain waits for the answer; who has lost the shard or the session does not.
            () = self.ended(|order| matches!(order, Order::Let(_))) => None,
        }
    }

    /// Waits until the trust in the lease has ended, or the shard has such an order.
    async fn ended(&self, is_end: fn(Order) -> bool) {
        let (mut order, mut trust) = (self.links.order.clone(), self.links.trust.clone());
        loop {
            let trusted_until = *trust.borrow_and_update();
            if is_end(*order.borrow_and_update()) || Instant::now() >= trusted_until {
                return;
            }
            tokio::select! {
                changed = order.changed() => if changed.is_err() { return },
                changed = trust.changed() => if changed.is_err() { return },
                () = tokio::time::sleep_until(trusted_until) => {}
            }
        }
    }

    fn fenced(&self) -> Result<(), Error> {
        self.links.fenced(Operation::Settle);
        Ok(())
    }

    /// Whether nothing more is to be handed over.
    fn is_over(&self) -> bool {
        *self.over.borrow()
            || *self.links.order.borrow() != Order::Run
            || Instant::now() >= *self.links.trust.borrow()
    }

    /// Waits until something joins the table, or the shard is let go, or for so long.
    async fn rest(&mut self, period: Option<Duration>) {
        let (mut order, mut trust) = (self.links.order.clone(), self.links.trust.clone());
        order.mark_unchanged();
        let trusted_until = *trust.borrow_and_update();
        if self.is_over() {
            return;
        }
        tokio::select! {
            () = self.links.aside.changed.notified() => {}
            () = sleep(period) => {}
            _ = self.over.changed() => {}
            _ = order.changed() => {}
            _ = trust.changed() => {}
            () = tokio::time::sleep_until(trusted_until) => {}
        }
    }
}

impl Round {
    fn published(&mut self, position: i64, key: Option<KeyHash>) -> Result<(), Error> {
        let state = State::Retrying.next(Event::Acknowledged).map_err(|illegal| illegal_here(&illegal))?;
        self.published += 1;
        self.keys.extend(key.map(|key| (position, key)));
        self.settled.push(Settled { position, state, refusal: None, delay: None, seen: None });
        Ok(())
    }
}

impl From<Failure> for Sent {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Refused { cause, error, .. } => Self::Refused { cause, error },
            Failure::Broken { error } => Self::Outage { error },
        }
    }
}

fn illegal_here(illegal: &baton_protocol::lifecycle::IllegalTransition) -> Error {
    Error::Answer { operation: "settling what was tried", what: illegal.to_string() }
}

async fn sleep(period: Option<Duration>) {
    match period {
        Some(period) => tokio::time::sleep(period).await,
        None => std::future::pending().await,
    }
}

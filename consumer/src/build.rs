//! Puts a consumer together and refuses what cannot work, before anything is connected.

use std::fmt;
use std::num::{NonZeroU32, NonZeroUsize};
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;

use baton_protocol::dead_letter;
use baton_protocol::retry::{self, Policy};
use futures_util::future::{BoxFuture, join};
use rdkafka::error::KafkaError;
use sqlx::PgPool;
use tokio::sync::Notify;

use crate::apply::{Apply, ByLease, InBatches, InTransaction};
use crate::dead_letter::DeadLetters;
use crate::inbox::horizon;
use crate::kafka::Member;
use crate::runtime::breaker::Breaker;
use crate::runtime::budget::Limits;
use crate::runtime::lane::{Inlet, Spawn, Stop};
use crate::runtime::worker::{Terms, Worker};
use crate::{
    AfterDeadLetter, BatchHandler, Consumer, DeadLetterFormat, DeadLetterTopics, Fingerprints, Handler,
    Health, Inbox, Kafka, LeasedHandler, Scope, inbox,
};

/// What cannot be built, and what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The consumer's name becomes part of topic names.
    #[error(
        "consumer name {name:?} must be 1 or more letters, digits, dots, underscores or dashes: it is part of topic names"
    )]
    Name {
        /// What was given.
        name: String,
    },
    /// Nothing to read.
    #[error("no topics were given; name at least one with Builder::topics")]
    NoTopics,
    /// A topic that Kafka would not have, or whose own topics it would not.
    #[error(
        "topic {topic:?} must be letters, digits, dots, underscores or dashes, and {longest:?} at most 249 characters"
    )]
    Topic {
        /// What was given.
        topic: String,
        /// The longest topic name made of it.
        longest: String,
    },
    /// No brokers.
    #[error("no Kafka brokers were given; give host:port, several separated by commas")]
    NoBrokers,
    /// A librdkafka property that would break a guarantee.
    #[error("Kafka property {name} is refused: {reason}")]
    PropertyRefused {
        /// The property.
        name: String,
        /// What it would break.
        reason: &'static str,
    },
    /// librdkafka has no such property.
    #[error("librdkafka knows no property {name}; see its CONFIGURATION.md")]
    PropertyUnknown {
        /// The property.
        name: String,
    },
    /// librdkafka does not take the value. It is not shown, because it may be a secret.
    #[error("librdkafka refuses the value of property {name}; see its CONFIGURATION.md")]
    PropertyInvalid {
        /// The property.
        name: String,
    },
    /// librdkafka refuses the settings as a whole.
    #[error("librdkafka refuses the settings")]
    Client {
        /// Its words.
        #[source]
        source: KafkaError,
    },
    /// The retry policy makes no sense.
    #[error("the retry policy is refused")]
    Retry(#[source] retry::Error),
    /// Draining would outlast the time in which a member must poll.
    #[error(
        "drain deadline {deadline:?} must be below max.poll.interval.ms ({interval:?}), or the group gives the partitions away meanwhile"
    )]
    DrainDeadline {
        /// What was given.
        deadline: Duration,
        /// The interval in force.
        interval: Duration,
    },
    /// The inbox does not take the name.
    #[error("the inbox refuses the consumer's name")]
    Inbox(#[source] inbox::Error),
    /// The inbox does not take the scope.
    #[error("fixed scope of {bytes} bytes does not fit the inbox; it takes up to 1280 bytes without NUL")]
    Scope {
        /// Its length.
        bytes: usize,
    },
    /// A header that a dead letter replaces is no part of what a message means.
    #[error(
        "header {header:?} cannot be part of the fingerprint: a dead letter carries another value, and would be a conflict when it is replayed"
    )]
    Fingerprint {
        /// The header's name.
        header: String,
    },
}

/// Makes what does the work, once the producer of dead letters is there.
pub(crate) type Factory = Box<dyn FnOnce(Inbox, Arc<DeadLetters>) -> Tasks + Send>;

/// What tries records that were set aside, until it is asked to stop.
pub(crate) type Retrier = Box<dyn FnOnce(Stop) -> BoxFuture<'static, ()> + Send>;

/// The tasks of a consumer.
pub(crate) struct Tasks {
    pub(crate) lanes: Spawn,
    pub(crate) retrier: Retrier,
}

/// A consumer in the making; from [`Consumer::builder`].
pub struct Builder {
    name: String,
    pool: PgPool,
    kafka: Kafka,
    topics: Vec<String>,
    group: Option<String>,
    retry: Policy,
    scope: Scope,
    fingerprints: Fingerprints,
    own_topics: DeadLetterTopics,
    format: DeadLetterFormat,
    drain_deadline: Duration,
    stall: Duration,
    limits: Limits,
    terms: Terms,
    outage_after: NonZeroUsize,
    lease_ttl: Duration,
    instance: Option<String>,
    dedupe_horizon: Duration,
    #[cfg(feature = "plants")]
    plant: Option<crate::plant::Plant>,
}

impl Builder {
    pub(crate) fn new(name: String, pool: PgPool, kafka: Kafka) -> Self {
        Self {
            name,
            pool,
            kafka,
            topics: Vec::new(),
            group: None,
            retry: Policy::default(),
            scope: Scope::default(),
            fingerprints: Fingerprints::default(),
            own_topics: DeadLetterTopics::default(),
            format: DeadLetterFormat::default(),
            drain_deadline: Duration::from_secs(20),
            stall: Inbox::DEFAULT_STALL,
            // A partition that was paused takes librdkafka up to a second to read again: until then the lane lives on the half that it
            // still has when it is resumed, so 256 rows were 256 messages a second.
            limits: Limits { lane_rows: 8192, lane_bytes: 4 << 20, total_bytes: 48 << 20 },
            terms: Terms {
                concurrency: 1,
                attempts: Inbox::DEFAULT_ATTEMPTS,
                park_after: Duration::from_secs(2),
                after_dead_letter: AfterDeadLetter::default(),
            },
            outage_after: NonZeroUsize::MIN.saturating_add(4),
            lease_ttl: Inbox::DEFAULT_LEASE_TTL,
            instance: None,
            dedupe_horizon: Inbox::DEFAULT_HORIZON,
            #[cfg(feature = "plants")]
            plant: None,
        }
    }

    /// A bug planted for the test suite's checkers.
    #[cfg(feature = "plants")]
    #[must_use]
    pub fn plant(mut self, plant: crate::plant::Plant) -> Self {
        self.plant = Some(plant);
        self
    }

    /// The topics to read. They must exist. Required; adds to what was given before, and one given twice counts once.
    #[must_use]
    pub fn topics<T: Into<String>>(mut self, topics: impl IntoIterator<Item = T>) -> Self {
        self.topics.extend(topics.into_iter().map(Into::into));
        self
    }

    /// The consumer group. Default: the consumer's name. The replay topics are read by a group of their own, this name and `.replay`.
    #[must_use]
    pub fn group(mut self, group: impl Into<String>) -> Self {
        self.group = Some(group.into());
        self
    }

    /// This member's name for life (`group.instance.id`), for static membership: a process that comes back under it within
    /// the session time-out has its partitions back without a rebalance. Two at once must not have the same. Default: none.
    #[must_use]
    pub fn instance(mut self, name: impl Into<String>) -> Self {
        self.instance = Some(name.into());
        self
    }

    /// How many records of one partition are handled at once, each of another key; records of one key follow each other. Each
    /// uses a connection of the pool while it is handled. Default: 1, which keeps the order of the partition where nothing fails.
    #[must_use]
    pub fn concurrency(mut self, records: NonZeroUsize) -> Self {
        self.terms.concurrency = records.get();
        self
    }

    /// How many attempts a record gets in all before it is dead-lettered as `exhausted`, those of an outage not
    /// counted. Those of a leased handler, and all once the record is set aside, are counted in the database, whichever processes make
    /// them. Default: 10.
    #[must_use]
    pub fn attempts(mut self, attempts: NonZeroU32) -> Self {
        self.terms.attempts = attempts.get();
        self
    }

    /// How long a record that fails for the time being waits in memory, its offset with it, before it is set aside in
    /// `inbox.parked` with its key, so that offsets move on. Attempts before that are lost when the process dies. Default: 2 s.
    #[must_use]
    pub fn park_after(mut self, patience: Duration) -> Self {
        self.terms.park_after = patience;
        self
    }

    /// Whether a dead letter holds up later messages of its key. Default: they go on, and so overtake it.
    #[must_use]
    pub fn after_dead_letter(mut self, after: AfterDeadLetter) -> Self {
        self.terms.after_dead_letter = after;
        self
    }

    /// How many different keys fail one after another for the time being, with no success between, before that counts as an
    /// outage: reading pauses until an attempt succeeds, and no attempt is spent. Default: 5.
    #[must_use]
    pub fn outage_after(mut self, keys: NonZeroUsize) -> Self {
        self.outage_after = keys;
        self
    }

    /// How long a leased message, or a record that was set aside, stays with a process that says nothing: the longest step of a
    /// leased handler between two reports of progress, and how long a takeover takes. At least 100 ms. Default: 30 s.
    #[must_use]
    pub fn lease_ttl(mut self, ttl: Duration) -> Self {
        self.lease_ttl = ttl;
        self
    }

    /// How long what is finished is remembered, 1 s to 100 years: a repeat of a record after that is a dead letter, `too_old`, and
    /// never applied. At least as long as the topics are kept. The consumer purges by itself, now and then; see
    /// [`Inbox::purge`]. Default: 30 days.
    #[must_use]
    pub fn dedupe_horizon(mut self, horizon: Duration) -> Self {
        self.dedupe_horizon = horizon;
        self
    }

    /// The waits between attempts after a transient failure. Default: 500 ms, doubled up to 5 min, with full jitter. An outage
    /// has its own waits, up to 5 s.
    #[must_use]
    pub fn retry(mut self, policy: Policy) -> Self {
        self.retry = policy;
        self
    }

    /// Which keys are compared with each other. Default: those of one original topic and one type.
    #[must_use]
    pub fn scope(mut self, scope: Scope) -> Self {
        self.scope = scope;
        self
    }

    /// What of a record is compared when its idempotency key is met again. Default: the exact bytes of its payload.
    ///
    /// ```no_run
    /// # use baton_consumer::{Builder, Compare, Fingerprints};
    /// # fn example(builder: Builder) -> Builder {
    /// builder.fingerprint(Compare::CanonicalJson)
    /// # }
    /// # fn other(builder: Builder) -> Builder {
    /// # builder
    ///     .fingerprint(Fingerprints::of(Compare::ExactBytes).with_headers(["tenant"]))
    /// # }
    /// ```
    #[must_use]
    pub fn fingerprint(mut self, fingerprints: impl Into<Fingerprints>) -> Self {
        self.fingerprints = fingerprints.into();
        self
    }

    /// Whether the topics of dead letters and replays are created at start. Default: where that is allowed.
    #[must_use]
    pub fn dead_letter_topics(mut self, own: DeadLetterTopics) -> Self {
        self.own_topics = own;
        self
    }

    /// By which names and types a dead letter tells what happened, and its topic: ours, `<topic>.<consumer>.dlt`, or those of
    /// Spring Kafka, `<topic>-dlt`. A dead letter replaces what an earlier death has said, in either. Default: ours.
    #[must_use]
    pub fn dead_letter_format(mut self, format: DeadLetterFormat) -> Self {
        self.format = format;
        self
    }

    /// How long the records in hand may take when partitions are revoked or the consumer shuts down. At a revocation the
    /// rebalance waits for it. Below `max.poll.interval.ms`. Default: 20 s.
    #[must_use]
    pub fn drain_deadline(mut self, deadline: Duration) -> Self {
        self.drain_deadline = deadline;
        self
    }

    /// How long one statement of a handler may take, and how long a handler may leave its transaction idle, before the
    /// server ends it. COMMIT is not counted: the server ends none that waits for a deferred trigger or a standby. Default: 60 s.
    #[must_use]
    pub fn stall_timeout(mut self, stall: Duration) -> Self {
        self.stall = stall;
        self
    }

    /// How many records may wait in one partition's lane before the partition is paused. It is resumed at half of it, and librdkafka then takes up to a
    /// second to read on: half of this is about how many messages a second a partition can be handled at. Default: 8,192.
    #[must_use]
    pub fn lane_rows(mut self, rows: NonZeroUsize) -> Self {
        self.limits.lane_rows = rows.get();
        self
    }

    /// How many bytes may wait in one partition's lane before the partition is paused. Default: 4 MiB.
    #[must_use]
    pub fn lane_bytes(mut self, bytes: NonZeroUsize) -> Self {
        self.limits.lane_bytes = bytes.get();
        self
    }

    /// How many bytes may wait in all lanes together, and a quarter of that in those of the replay topics. Default: 48 MiB. What librdkafka fetches ahead comes on top: set
    /// `queued.max.messages.kbytes` (16 MiB here) for that.
    #[must_use]
    pub fn in_flight_bytes(mut self, bytes: NonZeroUsize) -> Self {
        self.limits.total_bytes = bytes.get();
        self
    }

    /// Effects in the database of the inbox: claim, effects and mark in one transaction.
    #[must_use]
    pub fn transactional<H: Handler>(self, handler: H) -> WithHandler {
        self.with(InTransaction(handler))
    }

    /// Effects elsewhere: a lease on each message while it is handled, and a look-up before it is handled again.
    #[must_use]
    pub fn leased<H: LeasedHandler>(self, handler: H) -> WithHandler {
        self.with(ByLease(handler))
    }

    /// Effects in the database of the inbox, of up to `most` messages of a partition in one transaction: as many as have come
    /// by the time the last one is committed. Raises [`lane_rows`](Self::lane_rows) to twice that, so that they can.
    #[must_use]
    pub fn batched<H: BatchHandler>(mut self, most: NonZeroUsize, handler: H) -> WithHandler {
        let most = most.get();
        self.limits.lane_rows = self.limits.lane_rows.max(most.saturating_mul(2));
        self.with(InBatches { handler, most })
    }

    fn with<A: Apply>(self, apply: A) -> WithHandler {
        let (consumer, scope, retry, terms) = (self.name.clone(), self.scope.clone(), self.retry, self.terms);
        let (fingerprints, outage_after) = (self.fingerprints.clone(), self.outage_after.get());
        let dedupe_horizon = self.dedupe_horizon;
        let replays = self.topics.iter().map(|topic| dead_letter::replay_topic(topic, &self.name));
        let mut topics: Vec<String> = self.topics.iter().cloned().chain(replays).collect();
        topics.sort();
        topics.dedup();
        let factory = Box::new(move |inbox, letters| {
            let breaker = Arc::new(Breaker::new(&consumer, outage_after));
            let set_aside = Notify::new();
            let worker = Arc::new(Worker {
                consumer,
                apply,
                inbox,
                scope,
                fingerprints,
                retry,
                terms,
                letters,
                breaker,
                set_aside,
                owed: AtomicUsize::new(0),
            });
            let retrying = Arc::clone(&worker);
            let retrier: Retrier = Box::new(move |stop: Stop| {
                let (inbox, mut ending) = (retrying.inbox.clone(), stop.clone());
                Box::pin(async move {
                    let purging = horizon::keep(inbox, dedupe_horizon, async { ending.requested().await });
                    join(retrying.retry_parked(topics, stop), purging).await;
                })
            });
            let lanes: Spawn = Arc::new(move |inlet: Inlet| {
                let worker = Arc::clone(&worker);
                Box::pin(async move { worker.run(inlet).await })
            });
            Tasks { lanes, retrier }
        });
        WithHandler { builder: self, factory }
    }
}

/// A builder that knows what to do with a record.
pub struct WithHandler {
    builder: Builder,
    factory: Factory,
}

impl WithHandler {
    /// Checks everything that can be checked without a connection.
    ///
    /// # Errors
    ///
    /// [`enum@Error`], which says what to change.
    pub fn build(self) -> Result<Consumer, Error> {
        let Self { builder, factory } = self;
        let Builder {
            name,
            pool,
            kafka,
            mut topics,
            group,
            retry,
            scope,
            fingerprints,
            own_topics,
            format,
            drain_deadline,
            stall,
            limits,
            terms,
            lease_ttl,
            instance,
            #[cfg(feature = "plants")]
            plant,
            ..
        } = builder;
        if !is_topic_text(&name) {
            return Err(Error::Name { name });
        }
        if topics.is_empty() {
            return Err(Error::NoTopics);
        }
        topics.sort();
        topics.dedup();
        for topic in &topics {
            let longest = dead_letter::replay_topic(topic, &name);
            if !is_topic_text(topic) || longest.len() > 249 {
                return Err(Error::Topic { topic: topic.clone(), longest });
            }
        }
        kafka.check()?;
        retry.validate().map_err(Error::Retry)?;
        if let Scope::Fixed(text) = &scope
            && (text.len() > inbox::SCOPE_LIMIT || text.contains('\0'))
        {
            return Err(Error::Scope { bytes: text.len() });
        }
        if let Some(header) = fingerprints.unsteady_header() {
            return Err(Error::Fingerprint { header: header.to_owned() });
        }
        let interval = poll_interval(&kafka);
        if drain_deadline >= interval {
            return Err(Error::DrainDeadline { deadline: drain_deadline, interval });
        }
        let inbox = Inbox::new(&name, pool.clone()).map_err(Error::Inbox)?.stall_timeout(stall);
        let inbox = inbox.lease_ttl(lease_ttl).attempts(terms.attempts);
        #[cfg(feature = "plants")]
        let inbox = inbox.plant(plant);
        let group = group.unwrap_or_else(|| name.clone());
        let member = Member { group, instance };
        let health = Health::new(pool.clone(), drain_deadline);
        Ok(Consumer {
            name,
            pool,
            health,
            kafka,
            topics,
            member,
            own_topics,
            format,
            drain_deadline,
            limits,
            inbox,
            factory,
        })
    }
}

fn is_topic_text(text: &str) -> bool {
    !text.is_empty()
        && !matches!(text, "." | "..")
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-'))
}

/// librdkafka's default is 5 min.
fn poll_interval(kafka: &Kafka) -> Duration {
    let given = kafka.properties.get("max.poll.interval.ms").and_then(|text| text.trim().parse().ok());
    Duration::from_millis(given.unwrap_or(300_000))
}

impl fmt::Debug for Builder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Builder")
            .field("name", &self.name)
            .field("topics", &self.topics)
            .field("kafka", &self.kafka)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for WithHandler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("WithHandler").field(&self.builder).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Raw, Verdict, handler_fn};

    fn build(change: impl FnOnce(Builder) -> Builder) -> Result<Consumer, Error> {
        named("billing", change)
    }

    fn named(name: &str, change: impl FnOnce(Builder) -> Builder) -> Result<Consumer, Error> {
        let pool = PgPool::connect_lazy("postgres://127.0.0.1:1/none").unwrap();
        let builder = Consumer::builder(name, pool, Kafka::new("127.0.0.1:1")).topics(["orders"]);
        change(builder)
            .transactional(handler_fn::<Raw, _>(|_, _| Box::pin(async { Verdict::done() })))
            .build()
    }

    #[tokio::test]
    async fn what_cannot_work_is_refused_before_anything_is_connected() {
        assert!(build(|builder| builder).is_ok());
        assert!(matches!(named("bill/ing", |builder| builder), Err(Error::Name { .. })));
        assert!(matches!(named("", |builder| builder), Err(Error::Name { .. })));
        assert!(matches!(build(|builder| builder.topics(["a b"])), Err(Error::Topic { .. })));
        assert!(matches!(build(|builder| builder.topics(["t".repeat(240)])), Err(Error::Topic { .. })));
        assert!(matches!(
            build(|builder| builder.drain_deadline(Duration::from_secs(300))),
            Err(Error::DrainDeadline { .. })
        ));
        assert!(matches!(
            build(|builder| builder.retry(Policy { factor: 0.5, ..Policy::default() })),
            Err(Error::Retry(_))
        ));
        assert!(matches!(
            build(|builder| builder.scope(Scope::Fixed("s".repeat(1281)))),
            Err(Error::Scope { bytes: 1281 })
        ));
        assert!(matches!(
            build(|builder| builder.fingerprint(Fingerprints::default().with_headers(["dlt-cause"]))),
            Err(Error::Fingerprint { header }) if header == "dlt-cause"
        ));
        assert!(matches!(
            build(|mut builder| {
                builder.topics.clear();
                builder
            }),
            Err(Error::NoTopics)
        ));
    }
}

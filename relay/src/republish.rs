//! A range of published messages goes to Kafka once more: the same ids, keys, payloads, headers and times, each key in order of position.
//!
//! *What is sent again* is what a shard's durable cursor covers and Kafka has taken. What still waits, and what is parked, is the
//! relay's business; what was discarded was never published. All of it is judged by one snapshot of one transaction, which holds
//! ACCESS SHARE on every leaf until it ends: relays publish, producers enqueue, and only the ring does not turn meanwhile.
//!
//! ```text
//!   count, and since when rows are kept ──▶ look at the topic ──▶ audit: begun ──▶ page ▶ send ▶ acknowledged ▶ page … ──▶ audit: the end
//!   └────────────────────── one transaction, read only ──────────────────────────────────────────────────────┘
//! ```
//!
//! Nothing of the outbox changes: no cursor, no lease, no row but those two of the audit table. What is true if the process dies:
//!
//! | died | then |
//! |---|---|
//! | before *begun* is written | nothing happened, and nobody has to know |
//! | *begun* written, nothing handed over | the audit table has a *begun* without an end of the same `run`; nothing is on the topic |
//! | while rows are handed over | the same, and some of the range is on the topic once more, of each key a beginning |
//! | all acknowledged, the end not written | the same, and all of it is |
//!
//! Whoever reads `baton audit` sees that a run has no end, and runs it again: it begins anew, and what the first one sent is there twice more,
//! with the same ids. The transaction ends with its connection, so the ring turns on.

mod kept;
mod send;

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use baton_protocol::envelope::Envelope;
use baton_protocol::lifecycle::Word as _;
use baton_protocol::lifecycle::message::Cause;
use rdkafka::error::KafkaError;
use sqlx::AssertSqlSafe;
use sqlx::postgres::{PgConnection, PgRow};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
use uuid::Uuid;

use crate::database::{self, Cluster, answer};
use crate::doctor;
use crate::guards::{self, Violations};
use crate::reach;
use crate::read::Row;
use crate::refusal;
use crate::settings::Settings;
use send::{Sender, Sent};

/// How long a short statement may take, and each question to the broker.
const PATIENCE: Duration = Duration::from_secs(10);

/// How long the whole table may take to be counted.
const COUNTING: Duration = Duration::from_secs(30 * 60);

/// How long a page may take: of a range that is rare in a large outbox it is a walk over much of a shard.
const PAGING: Duration = Duration::from_secs(300);

/// Most rows of a page. So many are on their way at once, and a run that is killed has sent no more that nobody had acknowledged.
const ROWS: usize = 500;

/// Most bytes of a page; one larger message still comes, alone.
const BYTES: i64 = 4 << 20;

const CONSUMED: &str = include_str!("../queries/republish_consumed.sql");

/// Which messages.
#[derive(Debug, Clone)]
pub struct Range {
    /// Of this topic.
    pub topic: String,
    /// Of this key only.
    pub key: Option<String>,
    /// Enqueued at this time or later.
    pub from: OffsetDateTime,
    /// Enqueued before this time.
    pub to: OffsetDateTime,
}

/// What there is of a range.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Found {
    /// Published and kept: these go again.
    pub published: u64,
    /// Still to be published by a relay.
    pub waiting: u64,
    /// Parked: the relay's and the operator's to settle.
    pub parked: u64,
    /// Given up by an operator, so never published. Known for as long as `park.keep` says.
    pub discarded: u64,
    /// The range begins before this, from which on it is whole: of what was written earlier nothing is left but what is counted
    /// here, or nothing was written. `None`: all of the range is there.
    pub kept_from: Option<OffsetDateTime>,
}

/// What a topic does with old records.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Cleanup {
    /// It keeps the last record of a key: an old one that goes again becomes that.
    Compacts,
    /// It keeps all of them for a time.
    Deletes,
    /// The broker does not say, and why.
    Unknown(String),
}

/// How a run ended that was not ended by an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// All of the range is on the topic once more.
    Finished,
    /// It was told to stop.
    Stopped,
}

/// Why a range was not republished, or not to its end. Nothing is lost by any of it.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The database, or the outbox in it, is not as it has to be.
    #[error(transparent)]
    Database(#[from] database::Error),
    /// The role may not.
    #[error(
        "this role may not republish ({operation}): it needs baton_operator, so GRANT baton_operator TO it"
    )]
    Denied {
        /// What was asked.
        operation: &'static str,
        /// What the server said.
        #[source]
        source: sqlx::Error,
    },
    /// Somebody has the table to himself.
    #[error(
        "outbox.message is locked by somebody for longer than {PATIENCE:?}, a migration perhaps; try again once that is done"
    )]
    Locked(#[source] sqlx::Error),
    /// No broker answers.
    #[error(
        "kafka at {brokers} does not answer ({why}); nothing has been published; check KAFKA_BROKERS or kafka.brokers, and that it runs"
    )]
    Unreachable {
        /// Who was asked.
        brokers: String,
        /// What is wrong with each address.
        why: String,
        /// What librdkafka said.
        #[source]
        source: KafkaError,
    },
    /// Kafka does not know the topic, or does not show it to this user.
    #[error(
        "there is no topic {topic}, or this kafka user may not see it; nothing has been published; check --topic, or create it"
    )]
    UnknownTopic {
        /// The topic.
        topic: String,
    },
    /// There is no producer.
    #[error("cannot make a kafka producer of the settings under kafka.properties")]
    Producer(#[source] KafkaError),
    /// Kafka refused a message for its own sake, or all of the topic.
    #[error(
        "kafka does not take message {id} for {topic} ({word}: {error}); {}; {sent} of {of} messages were published again; once that \
         is mended run it again, it begins anew", refusal::advice(*.cause), word = .cause.as_str()
    )]
    Refused {
        /// The message.
        id: Uuid,
        /// The topic.
        topic: String,
        /// Why.
        cause: Cause,
        /// In Kafka's words.
        error: String,
        /// Acknowledged before it.
        sent: u64,
        /// Of so many.
        of: u64,
    },
    /// The broker went away, or does not acknowledge.
    #[error(
        "kafka does not acknowledge what is sent for {topic} ({error}); {sent} of {of} messages were published again, up to {unknown} \
         more may be; nothing is lost; run it again once kafka is well, it begins anew"
    )]
    Unacknowledged {
        /// The topic.
        topic: String,
        /// What is known of it.
        error: String,
        /// Acknowledged.
        sent: u64,
        /// Of so many.
        of: u64,
        /// Handed over and not acknowledged.
        unknown: usize,
    },
    /// It was done, or a part of it, and the audit table does not say how many.
    #[error("{sent} messages were published again, but how it ended is not in the audit table")]
    Unaudited {
        /// How many.
        sent: u64,
        /// Why not.
        #[source]
        source: Box<Error>,
    },
}

/// Told to end, as long as somebody looks. Asked again after that it answers at once.
struct Stop<'f> {
    told: Pin<&'f mut (dyn Future<Output = ()> + Send)>,
    is_told: bool,
}

impl Stop<'_> {
    /// # Cancel safety
    /// Safe.
    async fn told(&mut self) {
        if !self.is_told {
            self.told.as_mut().await;
            self.is_told = true;
        }
    }
}

/// A range, counted; the transaction in which it is read is open. Dropped, nothing has happened.
#[derive(Debug)]
pub struct Run {
    connection: PgConnection,
    settings: Arc<Settings>,
    envelope: Arc<Envelope>,
    range: Range,
    shards: i16,
    found: Found,
}

impl Run {
    /// Opens the transaction and counts. The connection needs a session of its own and the privileges of `baton_readonly`; it is
    /// closed by dropping. `settings` are the relay's: what it calls itself (`source`) is in every record.
    ///
    /// # Errors
    /// When the database fails, the outbox is not migrated, a guard stands or the role may not read. Nothing has happened then.
    ///
    /// # Cancel safety
    /// Reads only; the connection is closed if the future is dropped.
    pub async fn begin(
        mut connection: PgConnection,
        settings: Settings,
        range: Range,
    ) -> Result<Self, Error> {
        let open = sqlx::raw_sql(include_str!("../queries/republish_open.sql")).execute(&mut connection);
        answer("opening the outbox for reading", PATIENCE * 2, open).await.map_err(told_apart)?;
        let (outbox, cluster) = database::identify(&mut connection, PATIENCE).await.map_err(told_apart)?;
        // A cursor that does not mean what it says would call published what never was.
        let elsewhere = match cluster {
            Cluster::Stored(stored) => {
                guards::judge_cluster(stored, guards::cluster(&mut connection, PATIENCE).await?)
            }
            Cluster::NotToBeAsked => None,
        };
        let facts = guards::facts(&mut connection, PATIENCE).await.map_err(told_apart)?;
        let found: Vec<_> = elsewhere.into_iter().chain(guards::judge(&facts)).collect();
        if !found.is_empty() {
            return Err(database::Error::Guards(Violations(found)).into());
        }
        let source = settings.source.clone().unwrap_or_else(|| format!("/{}", outbox.database));
        let envelope = Arc::new(Envelope::cloud_events(&source, &settings.content_type, settings.ce_time));
        let mut run = Self {
            connection,
            settings: Arc::new(settings),
            envelope,
            range,
            shards: outbox.shards,
            found: Found::default(),
        };
        run.found = run.count().await.map_err(told_apart)?;
        Ok(run)
    }

    /// What there is of the range.
    #[must_use]
    pub fn found(&self) -> &Found {
        &self.found
    }

    async fn count(&mut self) -> Result<Found, database::Error> {
        type Leaf = (i16, Option<i64>, i64, i64, i64, i64);
        let sql = include_str!("../queries/republish_count.sql").replace("{consumed}", CONSUMED);
        let asked = sqlx::query_as(AssertSqlSafe(sql))
            .bind(&self.range.topic)
            .bind(&self.range.key)
            .bind(self.range.from)
            .bind(self.range.to)
            .fetch_all(&mut self.connection);
        let leaves: Vec<Leaf> = answer("counting the range", COUNTING, asked).await?;
        let asked = sqlx::query_as(include_str!("../queries/republish_ring.sql"));
        let asked = asked.fetch_one(&mut self.connection);
        let (now, period, made): (i64, i64, Option<i64>) =
            answer("asking since when rows are kept", PATIENCE, asked).await?;
        let mut found = Found::default();
        let mut oldest = [None; 4];
        for (slot, of_leaf, published, waiting, parked, discarded) in leaves {
            found.published += published.unsigned_abs();
            found.waiting += waiting.unsigned_abs();
            found.parked += parked.unsigned_abs();
            found.discarded += discarded.unsigned_abs();
            if let Some(leaf) = usize::try_from(slot).ok().and_then(|slot| oldest.get_mut(slot)) {
                *leaf = of_leaf;
            }
        }
        let kept = kept::kept_from(now, micros(self.range.to), period, oldest);
        // Before the outbox was made there was nothing to lose.
        let from = micros(self.range.from).max(made.unwrap_or(i64::MIN));
        if from < kept {
            found.kept_from = OffsetDateTime::from_unix_timestamp_nanos(i128::from(kept) * 1_000).ok();
        }
        Ok(found)
    }

    /// Asks Kafka whether the topic is there and what it does with old records. Sends nothing.
    ///
    /// # Errors
    /// When no broker answers within 10 s, or there is no such topic.
    ///
    /// # Cancel safety
    /// Safe; a question that is under way goes on, on a thread of its own, for 10 s at most.
    pub async fn look(&self) -> Result<Cleanup, Error> {
        let unreachable =
            |why: String, source| Error::Unreachable { brokers: self.settings.brokers.clone(), why, source };
        reach::reach(&self.settings, PATIENCE).await.map_err(|u| unreachable(u.why, u.source))?;
        let topics = doctor::kafka::topics(&self.settings).await;
        let topics =
            topics.map_err(|source| unreachable("it does not list its topics".to_owned(), source))?;
        let topic = self.range.topic.as_str();
        let Some(replicas) = topics.get(topic) else {
            return Err(Error::UnknownTopic { topic: topic.to_owned() });
        };
        Ok(match doctor::kafka::topic(&self.settings, topic, *replicas).await {
            Ok(Some(topic)) if topic.says("cleanup.policy", "compact") => Cleanup::Compacts,
            Ok(Some(_)) => Cleanup::Deletes,
            Ok(None) => Cleanup::Unknown("the broker does not tell its settings".to_owned()),
            Err(error) => Cleanup::Unknown(error.to_string()),
        })
    }

    /// Publishes the range once more, after writing to the audit table, by `auditor`'s role, that it begins, and before writing
    /// there how it ended. `progress` is told how many are acknowledged, page by page. When `stop` is done, what was handed over
    /// is waited for, for `relay.drain_deadline` at most, and nothing more is sent.
    ///
    /// # Errors
    /// When the database fails, the role may not write to the audit table (then nothing is sent), Kafka refuses a message, or
    /// acknowledges nothing for half a minute. How many were sent is said by the error.
    ///
    /// # Cancel safety
    /// None: dropped half-way, some of the range is on the topic, and the audit table has no end of it.
    pub async fn publish(
        mut self,
        auditor: &mut PgConnection,
        stop: impl Future<Output = ()> + Send,
        mut progress: impl FnMut(u64),
    ) -> Result<(u64, End), Error> {
        let id = Uuid::new_v4();
        let mut stop = std::pin::pin!(stop);
        let mut stop = Stop { told: stop.as_mut(), is_told: false };
        self.audit(auditor, id, "begun", 0).await?;
        let mut sender =
            Sender::new(Arc::clone(&self.settings), Arc::clone(&self.envelope), &self.range.topic);
        let ended = self.send_all(&mut sender, &mut stop, &mut progress).await;
        let sent = sender.sent();
        sender.end().await;
        let event = match ended {
            Ok(End::Finished) => "finished",
            Ok(End::Stopped) => "stopped",
            Err(_) => "failed",
        };
        let audited = self.audit(auditor, id, event, sent).await;
        let end = ended?;
        audited.map_err(|source| Error::Unaudited { sent, source: Box::new(source) })?;
        Ok((sent, end))
    }

    /// Shard by shard: a key is of one.
    async fn send_all(
        &mut self,
        sender: &mut Sender,
        stop: &mut Stop<'_>,
        progress: &mut impl FnMut(u64),
    ) -> Result<End, Error> {
        if self.found.published == 0 {
            return Ok(End::Finished);
        }
        // So that pages are read along the index, whatever the planner thinks of the range.
        let set = sqlx::raw_sql(AssertSqlSafe(database::session_settings(PAGING)));
        answer("setting the session up", PATIENCE, set.execute(&mut self.connection)).await?;
        for shard in 0..self.shards {
            let mut after = -1;
            loop {
                let page = tokio::select! {
                    biased;
                    () = stop.told() => return Ok(End::Stopped),
                    page = self.page(shard, after) => page.map_err(told_apart)?,
                };
                let Some(last) = page.last() else { break };
                after = last.position;
                let sent = sender.send(&page, stop, self.found.published).await?;
                progress(sender.sent());
                if sent == Sent::Stopped && sender.sent() < self.found.published {
                    return Ok(End::Stopped);
                }
            }
        }
        Ok(End::Finished)
    }

    async fn page(&mut self, shard: i16, after: i64) -> Result<Vec<Row>, database::Error> {
        let sql = include_str!("../queries/republish_page.sql").replace("{consumed}", CONSUMED);
        let rows = ROWS.min(self.settings.in_flight_rows.get());
        let asked = sqlx::query(AssertSqlSafe(sql))
            .bind(shard)
            .bind(after)
            .bind(&self.range.topic)
            .bind(&self.range.key)
            .bind(self.range.from)
            .bind(self.range.to)
            .bind(i64::try_from(rows).unwrap_or(i64::MAX))
            .bind(BYTES)
            .fetch_one(&mut self.connection);
        let page: PgRow = answer("reading a page of the range", PAGING, asked).await?;
        Row::whole(page)
    }

    async fn audit(&self, auditor: &mut PgConnection, id: Uuid, event: &str, sent: u64) -> Result<(), Error> {
        let Range { topic, key, from, to } = &self.range;
        let mut arguments = serde_json::json!({
            "run": id, "event": event, "topic": topic, "key": key, "from": rfc3339(*from), "to": rfc3339(*to),
            "messages": self.found.published,
        });
        if let Some(arguments) = arguments.as_object_mut() {
            arguments.retain(|_, value| !value.is_null());
        }
        let write = sqlx::query(include_str!("../queries/republish_audit.sql"))
            .bind(arguments.to_string())
            .bind(i64::try_from(sent).unwrap_or(i64::MAX))
            .execute(auditor);
        answer("writing to the audit table", PATIENCE, write).await.map(drop).map_err(told_apart)
    }
}

/// A time as commands print it.
fn rfc3339(at: OffsetDateTime) -> String {
    at.to_offset(time::UtcOffset::UTC).format(&Rfc3339).unwrap_or_else(|_| at.to_string())
}

fn micros(at: OffsetDateTime) -> i64 {
    i64::try_from(at.unix_timestamp_nanos().div_euclid(1_000)).unwrap_or(i64::MAX)
}

/// What somebody else can mend is told as what it is.
fn told_apart(error: database::Error) -> Error {
    let database::Error::Statement { operation, source } = error else { return error.into() };
    match source.as_database_error().and_then(|e| e.code()).as_deref() {
        Some("42501") => Error::Denied { operation, source },
        Some("55P03") => Error::Locked(source),
        _ => database::Error::Statement { operation, source }.into(),
    }
}

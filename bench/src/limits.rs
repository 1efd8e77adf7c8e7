//! The limits of a drain, each a process of its own: what the machine gives when nothing is promised.
//!
//! * *pipe*: the same rows by one binary `COPY` straight into one base producer with the relay's settings and headers.
//! * *read* (R): that `COPY` alone.
//! * *produce* (P): that producer alone, on records of the same shape made in memory.
//!
//! The producer is polled by the thread that feeds it: nothing that waits for a full queue turns in a circle meanwhile.

use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use baton_protocol::envelope::{Envelope, Outgoing};
use baton_relay::Settings;
use clap::{Args, Subcommand};
use futures_util::TryStreamExt as _;
use rdkafka::ClientContext;
use rdkafka::config::FromClientConfigAndContext as _;
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::message::{DeliveryResult, Header, OwnedHeaders};
use rdkafka::producer::{BaseProducer, BaseRecord, Producer as _, ProducerContext};
use sqlx::postgres::PgConnection;
use sqlx::{Connection as _, Executor as _};
use tokio::time::Instant;
use uuid::Uuid;

use crate::lab::Result;
use crate::process::Told;

/// In the order in which they lie there, which is that of position: one transaction wrote them all.
const COPY: &str =
    "COPY (SELECT id, topic, key, type, payload, (extract(epoch FROM created_at) * 1000)::bigint
                          FROM outbox.message) TO STDOUT (FORMAT binary)";

/// How often the producer is asked for reports, in records.
const POLL_EVERY: u64 = 64;

#[derive(Debug, Subcommand)]
pub(crate) enum Limit {
    /// The rows of an outbox by one COPY into one producer
    #[command(name = "limit-pipe", hide = true)]
    Pipe(To),
    /// The COPY alone
    #[command(name = "limit-read", hide = true)]
    Read(To),
    /// The producer alone
    #[command(name = "limit-produce", hide = true)]
    Produce(To),
}

#[derive(Debug, Args)]
pub(crate) struct To {
    #[arg(long)]
    topic: String,
    #[arg(long, default_value_t = 0)]
    messages: u64,
    #[arg(long, default_value_t = 1)]
    keys: u64,
}

/// Runs it on what the environment names, and prints what it took.
pub(crate) async fn run(limit: Limit) -> Result<()> {
    let database_url = std::env::var("DATABASE_URL")?;
    let settings = Settings { brokers: std::env::var("KAFKA_BROKERS")?, ..Settings::default() };
    let seconds = match limit {
        Limit::Pipe(_) => pipe(&database_url, &settings).await?,
        Limit::Read(_) => read(&database_url).await?,
        Limit::Produce(to) => produce(&settings, &to)?,
    };
    Told::print(seconds)
}

async fn pipe(database_url: &str, settings: &Settings) -> Result<f64> {
    let mut sink = Sink::open(settings, database_url.rsplit('/').next().unwrap_or_default())?;
    let started = rows(database_url, |row| sink.send(row)).await?;
    sink.close()?;
    Ok(started.elapsed().as_secs_f64())
}

async fn read(database_url: &str) -> Result<f64> {
    Ok(rows(database_url, |_| Ok(())).await?.elapsed().as_secs_f64())
}

fn produce(settings: &Settings, to: &To) -> Result<f64> {
    let mut sink = Sink::open(settings, &to.topic)?;
    let pad = "x".repeat(180);
    let (mut key, mut payload) = (String::new(), String::new());
    let started = Instant::now();
    for n in 1..=to.messages {
        key.clear();
        payload.clear();
        write!(key, "key-{}", n % to.keys)?;
        write!(payload, "{{\"n\":{n},\"pad\":\"{pad}\"}}")?;
        sink.send(&Row {
            id: Uuid::from_u128(u128::from(n) << 64),
            topic: &to.topic,
            key: Some(key.as_bytes()),
            r#type: Some("bench"),
            payload: Some(payload.as_bytes()),
            created_ms: 1_700_000_000_000,
        })?;
    }
    sink.close()?;
    Ok(started.elapsed().as_secs_f64())
}

/// What a record is made of.
struct Row<'a> {
    id: Uuid,
    topic: &'a str,
    key: Option<&'a [u8]>,
    r#type: Option<&'a str>,
    payload: Option<&'a [u8]>,
    created_ms: i64,
}

#[derive(Default)]
struct Reports {
    acked: AtomicU64,
    failed: AtomicU64,
}

impl ClientContext for Reports {}

impl ProducerContext for Reports {
    type DeliveryOpaque = usize;

    fn delivery(&self, result: &DeliveryResult<'_>, _: usize) {
        let count = if result.is_ok() { &self.acked } else { &self.failed };
        count.fetch_add(1, Ordering::Relaxed);
    }
}

struct Sink {
    producer: BaseProducer<Reports>,
    envelope: Envelope,
    sent: u64,
}

impl Sink {
    fn open(settings: &Settings, database: &str) -> Result<Self> {
        let producer =
            BaseProducer::from_config_and_context(&settings.producer_config(), Reports::default())?;
        let envelope = Envelope::cloud_events(&format!("/{database}"), "application/json", false);
        Ok(Self { producer, envelope, sent: 0 })
    }

    fn send(&mut self, row: &Row<'_>) -> Result<()> {
        let outgoing = Outgoing {
            id: row.id,
            idempotency_key: None,
            topic: row.topic,
            r#type: row.r#type,
            has_payload: row.payload.is_some(),
            created_ms: row.created_ms,
            headers: None,
        };
        let mut headers = Some(OwnedHeaders::new_with_capacity(6));
        self.envelope.write(&outgoing, &mut |key: &str, value: Option<&[u8]>| {
            headers = headers.take().map(|h| h.insert(Header { key, value }));
        })?;
        let mut record: BaseRecord<'_, [u8], [u8], usize> =
            BaseRecord::with_opaque_to(row.topic, usize::try_from(self.sent)?).timestamp(row.created_ms);
        record.headers = headers;
        record.key = row.key;
        record.payload = row.payload;
        while let Err((error, back)) = self.producer.send(record) {
            if error != KafkaError::MessageProduction(RDKafkaErrorCode::QueueFull) {
                return Err(error.into());
            }
            record = back;
            self.producer.poll(Duration::from_millis(100));
        }
        self.sent += 1;
        if self.sent.is_multiple_of(POLL_EVERY) {
            self.producer.poll(Duration::ZERO);
        }
        Ok(())
    }

    /// Waits until all are acknowledged.
    fn close(self) -> Result<()> {
        self.producer.flush(Duration::from_secs(120))?;
        let reports = self.producer.context();
        let (acked, failed) = (reports.acked.load(Ordering::Relaxed), reports.failed.load(Ordering::Relaxed));
        if acked == self.sent {
            return Ok(());
        }
        Err(format!("of {} records {acked} were acknowledged and {failed} refused", self.sent).into())
    }
}

/// Calls back for every row and tells when the first one came.
async fn rows(database_url: &str, mut each: impl FnMut(&Row<'_>) -> Result<()>) -> Result<Instant> {
    let mut connection = PgConnection::connect(database_url).await?;
    // One backend: the limit of one COPY, and rows as they lie there.
    connection.execute("SET max_parallel_workers_per_gather = 0").await?;
    let mut copy = connection.copy_out_raw(COPY).await?;
    let mut started = None;
    while let Some(chunk) = copy.try_next().await? {
        let Some(fields) = fields(&chunk) else { continue };
        let [Some(id), Some(topic), key, r#type, payload, Some(created)] = fields else {
            return Err("a row is not as expected".into());
        };
        started.get_or_insert_with(Instant::now);
        each(&Row {
            id: Uuid::from_slice(id)?,
            topic: std::str::from_utf8(topic)?,
            key,
            r#type: r#type.map(std::str::from_utf8).transpose()?,
            payload,
            created_ms: i64::from_be_bytes(created.try_into()?),
        })?;
    }
    started.ok_or_else(|| "there are no rows".into())
}

/// The six fields of a row of a binary `COPY`; none for its header and trailer.
fn fields(chunk: &[u8]) -> Option<[Option<&[u8]>; 6]> {
    // The first chunk begins with the 19 bytes of the header, and may hold the first row too.
    let mut rest =
        chunk.strip_prefix(b"PGCOPY\n\xff\r\n\0").map_or(chunk, |rest| rest.get(8..).unwrap_or_default());
    let (count, after) = rest.split_first_chunk::<2>()?;
    if i16::from_be_bytes(*count) != 6 {
        return None;
    }
    rest = after;
    let mut fields = [None; 6];
    for field in &mut fields {
        let (length, after) = rest.split_first_chunk::<4>()?;
        rest = after;
        if let Ok(length) = usize::try_from(i32::from_be_bytes(*length)) {
            let (value, after) = rest.split_at_checked(length)?;
            *field = Some(value);
            rest = after;
        }
    }
    Some(fields)
}

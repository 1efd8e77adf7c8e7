//! One key of a thousand that fails for the time being, while a backlog is consumed as fast as it goes.
//!
//! The limit is the same backlog without a sick key. Two members consume it; when a third of it is done one of them is stopped
//! and another one started, so that partitions move twice while the key is sick. What is measured is the rate of all other keys,
//! from the start to the last of their effects. Then it is looked at what must hold: the offsets have moved to the end although
//! the key is still sick; once it is well, its messages take effect, in order, once each.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use baton_consumer::{Consumer, Delivery, Handler, Kafka, Raw, Verdict, run};
use rdkafka::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::message::{Header, OwnedHeaders};
use rdkafka::producer::{BaseRecord, Producer as _, ThreadedProducer};
use sqlx::postgres::PgPoolOptions;
use sqlx::{Postgres, Transaction};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};

use crate::arena::Arena;
use crate::lab::{Lab, Result};
use crate::measure::ratios;
use crate::report::{Bar, Report};

const KEYS: u32 = 1_000;
const SICK: &str = "key-7";
const PATIENCE: Duration = Duration::from_secs(300);
const EFFECT: &str = "CREATE TABLE effect (n bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, key text NOT NULL, seq bigint NOT NULL)";
const EMPTY: &str = "TRUNCATE effect, inbox.message, inbox.parked";

/// Writes one row a message; fails for the sick key while it is sick.
struct Effects {
    is_sick: Arc<AtomicBool>,
    others: Arc<AtomicU64>,
    failures: Arc<AtomicU64>,
}

impl Handler for Effects {
    type Payload = Raw;

    async fn handle(&self, delivery: &Delivery<Raw>, tx: &mut Transaction<'_, Postgres>) -> Verdict {
        let key = String::from_utf8_lossy(delivery.key().unwrap_or_default());
        let seq: i64 = delivery
            .raw()
            .and_then(|raw| std::str::from_utf8(raw).ok())
            .and_then(|text| text.parse().ok())
            .unwrap_or(-1);
        let is_sick_one = key == SICK;
        if is_sick_one && self.is_sick.load(Ordering::Relaxed) {
            self.failures.fetch_add(1, Ordering::Relaxed);
            return Verdict::transient("this key is not well");
        }
        let effect = sqlx::query("INSERT INTO effect (key, seq) VALUES ($1, $2)").bind(&*key).bind(seq);
        match effect.execute(&mut **tx).await {
            Ok(_) => {
                if !is_sick_one {
                    self.others.fetch_add(1, Ordering::Relaxed);
                }
                Verdict::done()
            }
            Err(error) => error.into(),
        }
    }
}

struct Member {
    stop: oneshot::Sender<()>,
    task: JoinHandle<std::result::Result<(), run::Error>>,
}

impl Member {
    async fn stop(self) -> Result<()> {
        let _ = self.stop.send(());
        Ok(self.task.await??)
    }
}

pub(crate) async fn run(lab: &Lab) -> Result<Report> {
    let (pairs, messages) = lab.tier.choose((5, 30_000_u32), (3, 6_000));
    let arena = lab.arena().await?;
    baton_migrations::migrate_inbox(&mut arena.connect().await?).await?;
    arena.sql(&[EFFECT]).await?;
    produce(&arena, messages)?;
    let mut report = Report::new("sick_key");
    let (mut with, mut without, mut failures) = (Vec::new(), Vec::new(), Vec::new());
    for pair in 0..pairs {
        for is_sick in if pair % 2 == 0 { [false, true] } else { [true, false] } {
            arena.sql(&[EMPTY, "CHECKPOINT"]).await?;
            let (rate, failed) = consumed(&arena, messages, is_sick).await?;
            if is_sick {
                with.push(rate);
                failures.push(failed);
            } else {
                without.push(rate);
            }
        }
    }
    report.figure("other keys, no key sick", "messages/s", without.clone());
    report.figure("other keys, one key sick", "messages/s", with.clone());
    report.figure("attempts on the sick key that failed", "attempts", failures);
    report.note("each run: offsets at the end while the key was sick; then its messages once each, in order");
    report.verdict(
        ratios(&with, &without),
        "other keys' rate, one of 1,000 keys sick / none sick",
        Bar::AtLeast(0.85),
    );
    arena.close().await?;
    Ok(report)
}

async fn consumed(arena: &Arena, messages: u32, is_sick: bool) -> Result<(f64, f64)> {
    let group = format!("sick-{}", uuid::Uuid::new_v4().simple());
    let sick = Arc::new(AtomicBool::new(is_sick));
    let (others, failures) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let start = || member(arena, &group, &sick, &others, &failures);
    let per_key = u64::from(messages / KEYS);
    let all_others = per_key * u64::from(KEYS - 1);
    let (first, second) = (start()?, start()?);
    // What was rolled back is counted too; the table decides at the end.
    until("a third is done", || Ok(others.load(Ordering::Relaxed) >= all_others / 3)).await?;
    first.stop().await?;
    let third = start()?;
    until("other keys are done", || Ok(others.load(Ordering::Relaxed) >= all_others)).await?;
    let (done, last): (i64, Option<f64>) = counted(arena, all_others).await?;
    let rate = f64::from(u32::try_from(done)?) / last.ok_or("no effect has a time")?;
    until("offsets are at the end", || at_the_end(arena, &group)).await?;
    sick.store(false, Ordering::Relaxed);
    let deadline = Instant::now() + PATIENCE;
    loop {
        let seqs: Vec<i64> = sqlx::query_scalar("SELECT seq FROM effect WHERE key = $1 ORDER BY n")
            .bind(SICK)
            .fetch_all(&mut arena.connect().await?)
            .await?;
        if seqs.len() == usize::try_from(per_key)? {
            if !seqs.is_sorted_by(|a, b| a < b) {
                return Err(format!("the sick key's messages took effect out of order: {seqs:?}").into());
            }
            break;
        }
        if Instant::now() > deadline {
            return Err(format!("{} of {per_key} messages of the sick key took effect", seqs.len()).into());
        }
        sleep(Duration::from_millis(200)).await;
    }
    second.stop().await?;
    third.stop().await?;
    Ok((rate, f64::from(u32::try_from(failures.load(Ordering::Relaxed))?)))
}

/// How many effects other keys have, each once, and the seconds from the first to the last claim of them.
async fn counted(arena: &Arena, expected: u64) -> Result<(i64, Option<f64>)> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let (effects, different): (i64, i64) =
            sqlx::query_as("SELECT count(*), count(DISTINCT (key, seq)) FROM effect WHERE key <> $1")
                .bind(SICK)
                .fetch_one(&mut arena.connect().await?)
                .await?;
        if effects != different {
            return Err(format!("{effects} effects of {different} messages").into());
        }
        if u64::try_from(effects)? == expected {
            let span = sqlx::query_scalar(
                "SELECT extract(epoch FROM max(finished_at) - min(created_at))::float8
                 FROM inbox.message m WHERE state = 'done' AND key NOT LIKE $1",
            )
            .bind(format!("{SICK}:%"))
            .fetch_one(&mut arena.connect().await?)
            .await?;
            return Ok((effects, span));
        }
        if Instant::now() > deadline {
            return Err(format!("{effects} of {expected} effects").into());
        }
        sleep(Duration::from_millis(50)).await;
    }
}

fn member(
    arena: &Arena,
    group: &str,
    is_sick: &Arc<AtomicBool>,
    others: &Arc<AtomicU64>,
    failures: &Arc<AtomicU64>,
) -> Result<Member> {
    let pool = PgPoolOptions::new().max_connections(8).connect_lazy(&arena.settings.database_url)?;
    let kafka = Kafka::new(&arena.settings.brokers).property("fetch.wait.max.ms", "50");
    let handler =
        Effects { is_sick: Arc::clone(is_sick), others: Arc::clone(others), failures: Arc::clone(failures) };
    let consumer = Consumer::builder("sick", pool, kafka)
        .group(group)
        .topics([&arena.topic])
        .concurrency(NonZeroUsize::MIN.saturating_add(3))
        .transactional(handler)
        .build()?;
    let (stop, stopped) = oneshot::channel::<()>();
    let task = tokio::spawn(consumer.run(async { drop(stopped.await) }));
    Ok(Member { stop, task })
}

/// The backlog: of each key as many, in rounds, so that the sick one's are spread over all of it.
fn produce(arena: &Arena, messages: u32) -> Result<()> {
    let producer: ThreadedProducer<_> = ClientConfig::new()
        .set("bootstrap.servers", &arena.settings.brokers)
        .set("enable.idempotence", "true")
        .set("queue.buffering.max.messages", "1000000")
        .create()?;
    for n in 0..messages {
        let (key, seq) = (format!("key-{}", n % KEYS), n / KEYS);
        let id = format!("{key}:{seq}");
        let headers = OwnedHeaders::new().insert(Header { key: "idempotency-key", value: Some(&id) });
        let payload = seq.to_string();
        let record = BaseRecord::to(&arena.topic).key(&key).payload(&payload).headers(headers);
        producer.send(record).map_err(|(error, _)| error)?;
    }
    Ok(producer.flush(PATIENCE)?)
}

/// Whether the group has committed everything.
fn at_the_end(arena: &Arena, group: &str) -> Result<bool> {
    let ends = arena.broker.ends(&arena.topic)?;
    let asker: BaseConsumer = ClientConfig::new()
        .set("bootstrap.servers", &arena.settings.brokers)
        .set("group.id", group)
        .set("enable.auto.commit", "false")
        .create()?;
    let mut list = rdkafka::TopicPartitionList::new();
    for partition in 0..i32::try_from(ends.len())? {
        list.add_partition(&arena.topic, partition);
    }
    let committed = asker.committed_offsets(list, Duration::from_secs(10))?;
    let has = |(partition, end): (usize, &i64)| {
        let found = committed.elements().get(partition).and_then(|element| element.offset().to_raw());
        *end == 0 || found == Some(*end)
    };
    Ok(ends.iter().enumerate().all(has))
}

async fn until(what: &str, mut reached: impl FnMut() -> Result<bool>) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    while !reached()? {
        if Instant::now() > deadline {
            return Err(format!("waited in vain until {what}").into());
        }
        sleep(Duration::from_millis(20)).await;
    }
    Ok(())
}

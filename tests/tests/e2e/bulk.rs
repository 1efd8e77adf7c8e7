//! One transaction enqueues very many messages of one key and commits last, while the keys of other shards flow.
//!
//! ```text
//! bulk    BEGIN ══ insert N ══╗                ╔ COMMIT ═══ N late messages, page by page ═══╗
//! its key                     ║ quick          ║              (once: SIGKILL, next relay)    ║
//! others  · · · · · · · · · · ╨ · · measured · ╨ · · · · · · · · measured again · · · · · · ·╨
//! ```
//!
//! What it costs the others is told by the broker's clock: their topic has LogAppendTime, and each message carries when it was
//! enqueued. `BATON_TIER=full` enqueues a million.

use std::time::Duration;

use baton_tests::{Harness, Load, Outcome, Process, Record, Site, eventually, fail, figure, lasts, test};
use sqlx::{Connection, Executor, PgConnection};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{MissedTickBehavior, interval};

use crate::memory::{MIB, full, peak};

/// The relay's default for messages in flight of a shard: what a crash may repeat.
const IN_FLIGHT_ROWS: usize = 20_000;

fn bulk_size() -> i64 {
    if full() { 1_000_000 } else { 100_000 }
}

#[test]
fn a_million_late_messages_of_one_shard_hold_up_no_other_and_cost_no_memory() {
    let many = bulk_size();
    test(Duration::from_secs(if full() { 600 } else { 120 }), Load::Alone, async |harness: &mut Harness| {
        let mut scene = Scene::begin(harness, many).await?;
        let flow = Flow::start(&scene).await?;
        lasts("the others' messages before", Duration::from_secs(3)).await;
        let memory_before = peak(&scene.relay)?;
        let committed_at = flow.now().await?;
        scene.bulk.execute("COMMIT").await?;
        scene.arrives(many, Duration::from_secs(300)).await?;
        let done_at = flow.now().await?;
        let delays = flow.stop(&scene).await?;
        let before = median(delays.iter().filter(|d| d.enqueued < committed_at))?;
        let during = median(delays.iter().filter(|d| (committed_at..done_at).contains(&d.enqueued)))?;
        let memory = peak(&scene.relay)?;
        let records = scene.site.kafka().records(&scene.topic).await?;
        assert_eq!(repeated_in_order(&records, many)?, 0, "no relay died");
        figure(&format!(
            "must show 6: {many} late messages of one shard published in {} ms; messages of the other seven took {before} ms before and \
             {during} ms during it (medians); at most {} MiB resident, {} MiB before",
            done_at - committed_at,
            memory / MIB,
            memory_before / MIB
        ));
        // Small, it shows that they do not wait until it is over, beside whatever else the machine does; how little they wait is
        // shown by the million.
        let most = if full() { 3 * before.max(2) } else { before + (done_at - committed_at) / 8 };
        assert!(
            during <= most,
            "others' messages took {before} ms before and {during} ms during it, at most {most} are right"
        );
        assert!(memory < memory_before + 96 * MIB, "{memory_before} bytes before, {memory} after");
        Ok(())
    });
}

#[test]
fn a_relay_killed_amid_a_million_late_messages_repeats_at_most_what_was_in_flight_and_in_order() {
    let many = bulk_size();
    test(Duration::from_secs(if full() { 600 } else { 120 }), Load::Alone, async |harness: &mut Harness| {
        let mut scene = Scene::begin(harness, many).await?;
        scene.bulk.execute("COMMIT").await?;
        scene.arrives(many / 3, Duration::from_secs(200)).await?;
        scene.relay.kill().await?;
        let before = scene.site.kafka().count(&scene.topic).await?;
        assert!(before < many, "it was done before it was killed");
        scene.relay = scene.site.relay("second")?.start()?;
        scene.site.emptied().await?;
        let records = scene.site.kafka().records(&scene.topic).await?;
        let repeated = repeated_in_order(&records, many)?;
        figure(&format!(
            "must show 6: a SIGKILL after {before} of {many} late messages repeats {repeated} of them, {IN_FLIGHT_ROWS} is the bound"
        ));
        assert!(repeated <= IN_FLIGHT_ROWS, "{repeated} messages came twice");
        Ok(())
    });
}

struct Scene {
    site: Site,
    relay: Process,
    topic: String,
    /// A key of each shard; the first one's is the bulk's.
    keys: Vec<String>,
    /// The connection whose transaction holds the bulk.
    bulk: PgConnection,
}

impl Scene {
    /// A relay at work, the bulk enqueued and not committed, and a later message of its key published: so the bulk is late.
    async fn begin(harness: &mut Harness, many: i64) -> Outcome<Self> {
        let site = harness.site().await?;
        let topic = site.topic("bulk", 1).await?;
        let keys = site.key_of_each_shard().await?;
        let relay = site.relay("relay")?.start()?;
        let mut bulk = site.connect().await?;
        bulk.execute("BEGIN").await?;
        sqlx::query(
            "INSERT INTO outbox.message (topic, key, payload)
             SELECT $1, $2, convert_to(i::text, 'UTF8') FROM generate_series(1, $3::bigint) i",
        )
        .bind(&topic)
        .bind(&keys[0])
        .bind(many)
        .execute(&mut bulk)
        .await?;
        let scene = Self { site, relay, topic, keys, bulk };
        sqlx::query("INSERT INTO outbox.message (topic, key, payload) VALUES ($1, $2, 'quick')")
            .bind(&scene.topic)
            .bind(&scene.keys[0])
            .execute(scene.site.pool())
            .await?;
        scene.arrives(1, Duration::from_secs(20)).await?;
        Ok(scene)
    }

    async fn arrives(&self, many: i64, patience: Duration) -> Outcome {
        eventually(format!("{many} records"), patience, async || {
            let count = self.site.kafka().count(&self.topic).await?;
            if count >= many { Ok(()) } else { fail!("{count} records") }
        })
        .await
    }
}

/// How many records came more than once. Fails unless all of 1 to `many` are there after `quick`, and in order: each either follows
/// the one before it, or begins the repetition of some that were there already.
fn repeated_in_order(records: &[Record], many: i64) -> Outcome<usize> {
    let mut seen = records.iter().map(|record| record.payload_text().unwrap_or("null"));
    if seen.next() != Some("quick") {
        fail!("the message that committed first is not the first");
    }
    let (mut last, mut most, mut repeated) = (0, 0, 0);
    for text in seen {
        let number: i64 = text.parse()?;
        let follows = number == last + 1;
        if !follows && number > most {
            fail!("{number} came after {last}, and {most} was the highest before");
        }
        repeated += usize::from(number <= most);
        (last, most) = (number, most.max(number));
    }
    if (last, most) != (many, many) {
        fail!("it ends with {last}, {most} is the highest of {many}")
    }
    Ok(repeated)
}

/// Messages of the other shards' keys, one every ten milliseconds.
struct Flow {
    topic: String,
    stop: watch::Sender<bool>,
    task: JoinHandle<Outcome>,
    clock: tokio::sync::Mutex<PgConnection>,
}

/// What one of them took, in milliseconds since 1970 and in milliseconds.
struct Delay {
    enqueued: i64,
    took: i64,
}

impl Flow {
    async fn start(scene: &Scene) -> Outcome<Self> {
        let topic = scene.site.topic_with("flow", 1, &[("message.timestamp.type", "LogAppendTime")]).await?;
        let mut connection = scene.site.connect().await?;
        let clock = tokio::sync::Mutex::new(scene.site.connect().await?);
        let (keys, named) = (scene.keys[1..].to_vec(), topic.clone());
        let (stop, stopped) = watch::channel(false);
        let task = tokio::spawn(async move {
            let mut tick = interval(Duration::from_millis(10));
            tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
            for key in keys.iter().cycle() {
                tick.tick().await;
                if *stopped.borrow() {
                    break;
                }
                sqlx::query(
                    "INSERT INTO outbox.message (topic, key, payload)
                     VALUES ($1, $2, convert_to((extract(epoch FROM clock_timestamp()) * 1000)::bigint::text, 'UTF8'))",
                )
                .bind(&named)
                .bind(key)
                .execute(&mut connection)
                .await?;
            }
            connection.close().await?;
            Ok(())
        });
        Ok(Self { topic, stop, task, clock })
    }

    /// By the clock that the messages carry.
    async fn now(&self) -> Outcome<i64> {
        let mut clock = self.clock.lock().await;
        Ok(sqlx::query_scalar("SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint")
            .fetch_one(&mut *clock)
            .await?)
    }

    async fn stop(self, scene: &Scene) -> Outcome<Vec<Delay>> {
        self.stop.send_replace(true);
        self.task.await??;
        scene.site.emptied().await?;
        let records = scene.site.kafka().records(&self.topic).await?;
        let delay = |record: &Record| {
            let enqueued: i64 = record.payload_text()?.parse().ok()?;
            Some(Delay { enqueued, took: record.timestamp_ms? - enqueued })
        };
        Ok(records.iter().filter_map(delay).collect())
    }
}

fn median<'d>(delays: impl Iterator<Item = &'d Delay>) -> Outcome<i64> {
    let mut took: Vec<i64> = delays.map(|delay| delay.took).collect();
    took.sort_unstable();
    if took.len() < 20 {
        fail!("only {} messages of the others", took.len());
    }
    Ok(took[took.len() / 2])
}

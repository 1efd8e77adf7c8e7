//! Writers as real services are, in the ways that break a reader of an outbox.
//!
//! Each of them runs short transactions over a few keys. A transaction takes the row lock of each of its aggregates, in
//! one order so that they never deadlock, counts the aggregate's `seq` up and enqueues a message that carries it. On top:
//! a write elsewhere first (an early transaction id), pauses before and after the locks, savepoints kept and rolled back,
//! bulk transactions larger than a relay's page, rollbacks, and commits up to 0.4 s late. Within a key, `seq` is the order
//! of commits; across keys positions are anything but.
//!
//! What is committed is read from the table when all is quiet ([`truth`]), never remembered by the writers: a commit
//! whose answer was lost, or that a crash took back, would be remembered wrongly.

use std::time::Duration;

use fastrand::Rng;
use sqlx::postgres::PgConnection;
use sqlx::{Connection, Executor};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::sleep;

use crate::failure::Outcome;
use crate::harness::Site;
use crate::ledger::{self, Committed, Findings, Seen};
use crate::record::Record;

/// How long a writer waits before it connects again.
const RECONNECT: Duration = Duration::from_millis(100);

/// What the writers do.
#[derive(Debug, Clone)]
pub struct Workload {
    /// Makes a run that can be had again, but for the servers' and the scheduler's share in it.
    pub seed: u64,
    /// How many write at once.
    pub writers: u64,
    /// Over how many keys; few enough that they meet.
    pub keys: i32,
    /// Where the messages go.
    pub topic: String,
    /// Whether they run `synchronous_commit = off`.
    pub asynchronous: bool,
    /// What share of the transactions is rolled back.
    pub rollbacks: f64,
    /// How likely a message is followed by one of its key that a savepoint takes back.
    pub undone: f64,
}

impl Workload {
    /// Twelve writers over forty keys, committing durably.
    #[must_use]
    pub fn new(seed: u64, topic: &str) -> Self {
        Self {
            seed,
            writers: 12,
            keys: 40,
            topic: topic.to_owned(),
            asynchronous: false,
            rollbacks: 0.1,
            undone: 0.1,
        }
    }

    /// Makes the aggregates and starts writing.
    ///
    /// # Errors
    ///
    /// When the database refuses the tables.
    pub async fn start(self, site: &Site) -> Outcome<Writers> {
        let mut connection = site.connect().await?;
        connection
            .execute(
                "CREATE TABLE aggregate (key int PRIMARY KEY, seq bigint NOT NULL DEFAULT 0);
                 CREATE TABLE elsewhere (i int)",
            )
            .await?;
        sqlx::query("INSERT INTO aggregate SELECT generate_series(0, $1 - 1)")
            .bind(self.keys)
            .execute(&mut connection)
            .await?;
        connection.close().await?;

        let (stop, stopped) = watch::channel(false);
        let mut tasks = JoinSet::new();
        for number in 0..self.writers {
            let writer = Writer {
                random: Rng::with_seed(self.seed.wrapping_mul(1000).wrapping_add(number)),
                workload: self.clone(),
                site: site.clone(),
            };
            tasks.spawn(writer.run(stopped.clone()));
        }
        Ok(Writers { stop, tasks })
    }
}

/// Writers at work. Dropping them stops them in mid transaction.
#[derive(Debug)]
pub struct Writers {
    stop: watch::Sender<bool>,
    tasks: JoinSet<Done>,
}

impl Writers {
    /// Lets each finish its transaction.
    ///
    /// # Errors
    ///
    /// When one has panicked.
    pub async fn stop(&mut self) -> Outcome<Done> {
        self.stop.send_replace(true);
        let mut all = Done::default();
        while let Some(done) = self.tasks.join_next().await {
            let done = done?;
            all.commits += done.commits;
            all.messages += done.messages;
            all.rollbacks += done.rollbacks;
            all.broken += done.broken;
        }
        Ok(all)
    }
}

/// What the writers remember, for the figures only.
#[derive(Debug, Clone, Copy, Default)]
pub struct Done {
    /// Commits that were confirmed.
    pub commits: u64,
    /// Messages in them. More than the table holds in the end: a crash has taken commits back.
    pub messages: i64,
    /// Transactions rolled back on purpose.
    pub rollbacks: u64,
    /// Transactions that an error ended.
    pub broken: u64,
}

struct Writer {
    random: Rng,
    workload: Workload,
    site: Site,
}

impl Writer {
    async fn run(mut self, stopped: watch::Receiver<bool>) -> Done {
        let mut done = Done::default();
        while !*stopped.borrow() {
            // Away servers and lost connections are part of the story.
            if self.session(&stopped, &mut done).await.is_err() {
                done.broken += 1;
                sleep(RECONNECT).await;
            }
        }
        done
    }

    async fn session(&mut self, stopped: &watch::Receiver<bool>, done: &mut Done) -> Outcome {
        let mut connection = self.site.connect().await?;
        if self.workload.asynchronous {
            connection.execute("SET synchronous_commit = off").await?;
        }
        while !*stopped.borrow() {
            connection.execute("BEGIN").await?;
            let messages = self.transaction(&mut connection).await?;
            if self.chance(self.workload.rollbacks) {
                connection.execute("ROLLBACK").await?;
                done.rollbacks += 1;
            } else {
                connection.execute("COMMIT").await?;
                done.commits += 1;
                done.messages += messages;
            }
        }
        connection.close().await?;
        Ok(())
    }

    /// Everything between BEGIN and the decision; gives how many messages are to be committed.
    async fn transaction(&mut self, connection: &mut PgConnection) -> Outcome<i64> {
        let mut enqueued = 0;
        if self.chance(0.4) {
            // The transaction id is older than the aggregate's lock.
            connection.execute("INSERT INTO elsewhere VALUES (1)").await?;
        }
        if self.chance(0.3) {
            self.pause(20).await;
        }
        let count = if self.chance(0.3) { 1 } else { self.random.usize(2..=4) };
        let mut keys = self.random.choose_multiple(0..self.workload.keys, count);
        keys.sort_unstable();
        for key in keys {
            if self.chance(0.3) {
                connection.execute("SAVEPOINT kept").await?;
            }
            let messages = match self.random.f64() {
                share if share < 0.0003 => 2_500,
                share if share < 0.03 => 60,
                _ => 1,
            };
            self.enqueue(connection, key, messages).await?;
            enqueued += messages;
            if self.chance(self.workload.undone) {
                connection.execute("SAVEPOINT undone").await?;
                self.enqueue(connection, key, 1).await?;
                connection.execute("ROLLBACK TO SAVEPOINT undone").await?;
            }
        }
        if self.chance(0.3) {
            self.pause(50).await;
        }
        if self.chance(0.03) {
            self.pause(400).await;
        }
        Ok(enqueued)
    }

    /// Locks the aggregate, counts it up and enqueues one message for each number.
    async fn enqueue(&self, connection: &mut PgConnection, key: i32, messages: i64) -> Outcome {
        let last: i64 =
            sqlx::query_scalar("UPDATE aggregate SET seq = seq + $2 WHERE key = $1 RETURNING seq")
                .bind(key)
                .bind(messages)
                .fetch_one(&mut *connection)
                .await?;
        sqlx::query(
            r#"INSERT INTO outbox.message (topic, key, payload)
               SELECT $1, 'key-' || $2, convert_to(format('{"key":%s,"seq":%s}', $2, seq), 'UTF8')
               FROM generate_series($3::bigint, $4) AS seq"#,
        )
        .bind(&self.workload.topic)
        .bind(key)
        .bind(last - messages + 1)
        .bind(last)
        .execute(connection)
        .await?;
        Ok(())
    }

    fn chance(&mut self, share: f64) -> bool {
        self.random.f64() < share
    }

    async fn pause(&mut self, milliseconds: u64) {
        sleep(Duration::from_millis(self.random.u64(0..=milliseconds))).await;
    }
}

/// One row of the table, with what the ledger needs of it.
#[derive(Debug, Clone)]
pub struct Row {
    /// What the ledger compares.
    pub message: Committed,
    /// Its shard.
    pub shard: i16,
    /// Its place in the table.
    pub position: i64,
}

/// What is committed, by the only witness that counts.
///
/// # Errors
///
/// When the database does not answer, or a payload of the topic is not the workload's.
pub async fn truth(site: &Site, topic: &str) -> Outcome<Vec<Row>> {
    let mut connection = site.connect().await?;
    let rows: Vec<(String, String, i64, Vec<u8>, i16, i64)> = sqlx::query_as(
        r#"SELECT id::text, key, (convert_from(payload, 'UTF8')::json ->> 'seq')::bigint, payload, shard, "position"
           FROM outbox.message WHERE topic = $1 ORDER BY "position""#,
    )
    .bind(topic)
    .fetch_all(&mut connection)
    .await?;
    connection.close().await?;
    Ok(rows
        .into_iter()
        .map(|(id, key, rank, content, shard, position)| Row {
            message: Committed { id, key: Some(key), rank, content },
            shard,
            position,
        })
        .collect())
}

/// What a topic shows against the table, and how many of its records were published late.
#[must_use]
pub fn judge(truth: &[Row], records: &[Record]) -> (Findings, usize) {
    let committed: Vec<Committed> = truth.iter().map(|row| row.message.clone()).collect();
    let seen: Vec<Seen> = records
        .iter()
        .map(|record| Seen {
            id: record.header("ce_id").unwrap_or("no ce_id").to_owned(),
            lane: record.partition.to_string(),
            content: record.payload.clone().unwrap_or_default(),
        })
        .collect();
    let rows: std::collections::HashMap<&str, &Row> =
        truth.iter().map(|row| (row.message.id.as_str(), row)).collect();
    let late = ledger::late(seen.iter().filter_map(|sight| {
        let row = rows.get(sight.id.as_str())?;
        Some(((row.shard, sight.lane.as_str()), row.position))
    }));
    (ledger::judge(&committed, &seen), late)
}

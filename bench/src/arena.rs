//! Where a benchmark runs: a database and a topic of its own, and the broker's clock.

use std::future::Future;
use std::time::Duration;

use baton_relay::{Settings, Until};
use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::client::DefaultClientContext;
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::{ClientConfig, Message as _, Offset, TopicPartitionList};
use sqlx::{AssertSqlSafe, Connection as _, Executor as _, PgConnection};

pub(crate) type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

const PARTITIONS: i32 = 4;
const PATIENCE: Duration = Duration::from_secs(30);

/// A database and a topic that nobody else uses.
pub(crate) struct Arena {
    admin_url: String,
    pub(crate) database: String,
    pub(crate) settings: Settings,
    pub(crate) topic: String,
}

/// What a run took.
pub(crate) struct Timed {
    /// Records a second, between the first and the last append.
    pub(crate) rate: f64,
    /// Seconds of CPU of this process.
    pub(crate) cpu: f64,
}

impl Arena {
    pub(crate) async fn open() -> Result<Self> {
        let admin_url = std::env::var("DATABASE_URL")
            .map_err(|_| "DATABASE_URL is not set: eval \"$(cargo xtask env)\"")?;
        let brokers = std::env::var("KAFKA_BROKERS")
            .map_err(|_| "KAFKA_BROKERS is not set: eval \"$(cargo xtask env)\"")?;
        let database = format!("baton_bench_{}", uuid::Uuid::new_v4().simple());
        let mut admin = PgConnection::connect(&admin_url).await?;
        admin.execute(AssertSqlSafe(format!("CREATE DATABASE {database}"))).await?;
        let (server, _) = admin_url.rsplit_once('/').ok_or("DATABASE_URL names no database")?;
        let settings =
            Settings { database_url: format!("{server}/{database}"), brokers, ..Settings::default() };
        let mut connection = PgConnection::connect(&settings.database_url).await?;
        baton_migrations::migrate_outbox(&mut connection, None, None).await?;
        let arena = Self { admin_url, topic: database.clone(), database, settings };
        arena.make_topic().await?;
        Ok(arena)
    }

    async fn make_topic(&self) -> Result<()> {
        let topic = NewTopic::new(&self.topic, PARTITIONS, TopicReplication::Fixed(1))
            .set("message.timestamp.type", "LogAppendTime");
        for made in self.admin()?.create_topics([&topic], &AdminOptions::new()).await? {
            made.map_err(|(topic, code)| format!("cannot create topic {topic}: {code}"))?;
        }
        Ok(())
    }

    fn admin(&self) -> Result<AdminClient<DefaultClientContext>> {
        Ok(ClientConfig::new().set("bootstrap.servers", &self.settings.brokers).create()?)
    }

    pub(crate) async fn connect(&self) -> Result<PgConnection> {
        Ok(PgConnection::connect(&self.settings.database_url).await?)
    }

    /// Commits a backlog, 100 rows a transaction's worth of keys apart, and keeps the cursors it is drained from.
    pub(crate) async fn fill(&self, messages: i64, keys: i64) -> Result<()> {
        let mut connection = self.connect().await?;
        connection.execute("CREATE TABLE start AS SELECT * FROM outbox.cursor").await?;
        sqlx::query(
            "INSERT INTO outbox.message (topic, key, type, payload)
             SELECT $1, 'key-' || i % $2, 'bench', convert_to(format('{\"n\":%s,\"pad\":\"%s\"}', i, repeat('x', 180)), 'UTF8')
             FROM generate_series(1, $3) i",
        )
        .bind(&self.topic)
        .bind(keys)
        .bind(messages)
        .execute(&mut connection)
        .await?;
        connection.execute("VACUUM ANALYZE outbox.message").await?;
        connection.execute("CHECKPOINT").await?;
        Ok(())
    }

    /// Puts the cursors back to where they were before the backlog.
    pub(crate) async fn rewind(&self) -> Result<()> {
        self.connect()
            .await?
            .execute(
                "INSERT INTO outbox.advance (shard, number, generation, position, snapshot, ceiling)
                 SELECT s.shard, c.number + 1, c.generation, s.position, s.snapshot, s.ceiling
                 FROM start s JOIN outbox.cursor c USING (shard)",
            )
            .await?;
        Ok(())
    }

    /// The relay, from start to empty.
    pub(crate) async fn relay(&self) -> Result<()> {
        baton_relay::run(self.settings.clone(), Until::Empty, std::future::pending()).await?;
        Ok(())
    }

    /// Runs something that publishes `messages` records and asks the broker how long that took.
    pub(crate) async fn timed(&self, messages: i64, run: impl Future<Output = Result<()>>) -> Result<Timed> {
        let (before, cpu) = (self.ends()?, cpu_seconds()?);
        run.await?;
        let (after, cpu) = (self.ends()?, cpu_seconds()? - cpu);
        let published: i64 = after.iter().zip(&before).map(|(a, b)| a - b).sum();
        if published < messages {
            return Err(format!("{published} records arrived instead of {messages}").into());
        }
        let mut first = i64::MAX;
        let mut last = i64::MIN;
        for (partition, (from, to)) in
            before.iter().zip(&after).enumerate().filter(|(_, (from, to))| from < to)
        {
            first = first.min(self.appended_at(partition, *from)?);
            last = last.max(self.appended_at(partition, to - 1)?);
        }
        #[expect(clippy::cast_precision_loss, reason = "counts and milliseconds of a benchmark")]
        let rate = published as f64 * 1000.0 / (last - first).max(1) as f64;
        Ok(Timed { rate, cpu })
    }

    fn consumer(&self) -> Result<BaseConsumer> {
        Ok(ClientConfig::new()
            .set("bootstrap.servers", &self.settings.brokers)
            .set("group.id", "bench")
            .create()?)
    }

    fn ends(&self) -> Result<Vec<i64>> {
        let consumer = self.consumer()?;
        (0..PARTITIONS).map(|p| Ok(consumer.fetch_watermarks(&self.topic, p, PATIENCE)?.1)).collect()
    }

    fn appended_at(&self, partition: usize, offset: i64) -> Result<i64> {
        let consumer = self.consumer()?;
        let mut assignment = TopicPartitionList::new();
        assignment.add_partition_offset(&self.topic, i32::try_from(partition)?, Offset::Offset(offset))?;
        consumer.assign(&assignment)?;
        let message = consumer.poll(PATIENCE).ok_or("no record came back")??;
        message.timestamp().to_millis().ok_or_else(|| "a record without a timestamp".into())
    }

    pub(crate) async fn close(self) -> Result<()> {
        self.admin()?.delete_topics(&[&self.topic], &AdminOptions::new()).await?;
        let mut admin = PgConnection::connect(&self.admin_url).await?;
        admin.execute(AssertSqlSafe(format!("DROP DATABASE {} WITH (FORCE)", self.database))).await?;
        Ok(())
    }
}

/// User and system seconds of this process so far.
fn cpu_seconds() -> Result<f64> {
    let stat = std::fs::read_to_string("/proc/self/stat")?;
    let fields: Vec<&str> =
        stat.rsplit_once(')').ok_or("/proc/self/stat is not as expected")?.1.split_whitespace().collect();
    let ticks = |n: usize| fields.get(n).and_then(|f| f.parse::<f64>().ok()).unwrap_or(0.0);
    // utime and stime, in ticks of 10 ms on every Linux that matters here.
    Ok((ticks(11) + ticks(12)) / 100.0)
}

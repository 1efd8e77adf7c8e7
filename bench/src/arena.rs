//! Where a benchmark runs: a database and a topic of its own, which are taken down again.
//!
//! A connection whose application name is the database's stays open as long as the arena: what a killed benchmark left
//! behind is a database without one, and the next arena drops it.

use std::sync::Arc;

use baton_relay::Settings;
use sqlx::postgres::PgConnectOptions;
use sqlx::{AssertSqlSafe, ConnectOptions as _, Connection as _, Executor as _, PgConnection};

use crate::broker::Broker;
use crate::lab::{Lab, Result};

const PREFIX: &str = "baton_bench_";

/// What a backlog is made of.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Backlog {
    pub(crate) messages: i64,
    pub(crate) keys: i64,
}

pub(crate) struct Arena {
    admin_url: String,
    pub(crate) database: String,
    pub(crate) settings: Settings,
    /// Also the database's name.
    pub(crate) topic: String,
    pub(crate) broker: Arc<Broker>,
    keeper: PgConnection,
}

impl Arena {
    pub(crate) async fn open(lab: &Lab) -> Result<Self> {
        let broker = Arc::new(Broker::new(&lab.brokers)?);
        let database = format!("{PREFIX}{}", uuid::Uuid::new_v4().simple());
        let options: PgConnectOptions = lab.admin_url.parse()?;
        let mut keeper = options.application_name(&database).connect().await?;
        drop_left_behind(&mut keeper, &broker).await?;
        keeper.execute(AssertSqlSafe(format!("CREATE DATABASE {database}"))).await?;
        let (server, _) = lab.admin_url.rsplit_once('/').ok_or("DATABASE_URL names no database")?;
        let settings = Settings {
            database_url: format!("{server}/{database}"),
            brokers: lab.brokers.clone(),
            ..Settings::default()
        };
        let mut connection = PgConnection::connect(&settings.database_url).await?;
        baton_migrations::migrate_outbox(&mut connection, None, None).await?;
        broker.make_topic(&database).await?;
        let admin_url = lab.admin_url.clone();
        Ok(Self { admin_url, topic: database.clone(), database, settings, broker, keeper })
    }

    pub(crate) async fn connect(&self) -> Result<PgConnection> {
        Ok(PgConnection::connect(&self.settings.database_url).await?)
    }

    /// Runs statements, one after the other.
    pub(crate) async fn sql(&self, statements: &[&'static str]) -> Result<()> {
        let mut connection = self.connect().await?;
        for statement in statements {
            connection.execute(*statement).await?;
        }
        connection.close().await?;
        Ok(())
    }

    /// Commits messages of about 200 bytes, and leaves the table as vacuum does.
    pub(crate) async fn fill(&self, backlog: Backlog) -> Result<()> {
        self.write(backlog).await?;
        self.sql(&["VACUUM ANALYZE outbox.message"]).await
    }

    /// Commits messages of about 200 bytes in one transaction.
    pub(crate) async fn write(&self, backlog: Backlog) -> Result<()> {
        sqlx::query(
            "INSERT INTO outbox.message (topic, key, type, payload)
             SELECT $1, 'key-' || i % $2, 'bench', convert_to(format('{\"n\":%s,\"pad\":\"%s\"}', i, repeat('x', 180)), 'UTF8')
             FROM generate_series(1, $3) i",
        )
        .bind(&self.topic)
        .bind(backlog.keys)
        .bind(backlog.messages)
        .execute(&mut self.connect().await?)
        .await?;
        Ok(())
    }

    /// Commits messages whose payloads of that size cannot be compressed.
    pub(crate) async fn fill_with(&self, payload: i32, messages: i64, keys: i64) -> Result<()> {
        // Twice a payload's length of noise, of which each message has another part.
        sqlx::query(
            "WITH noise AS MATERIALIZED (
                 SELECT string_agg(uuid_send(gen_random_uuid()), NULL) AS bytes FROM generate_series(1, $2 / 8 + 1)
             )
             INSERT INTO outbox.message (topic, key, type, payload)
             SELECT $1, 'key-' || i % $4, 'bench', substr(bytes, 1 + (i * 37 % $2)::integer, $2)
             FROM noise, generate_series(1, $3) i",
        )
        .bind(&self.topic)
        .bind(payload)
        .bind(messages)
        .bind(keys)
        .execute(&mut self.connect().await?)
        .await?;
        self.sql(&["VACUUM ANALYZE outbox.message"]).await
    }

    /// Empties the outbox. No relay may run.
    pub(crate) async fn empty(&self) -> Result<()> {
        self.sql(&["TRUNCATE outbox.message"]).await
    }

    /// Makes everything up to a position published, and everything above it not. No relay may run.
    pub(crate) async fn place(&self, position: i64) -> Result<()> {
        sqlx::query(
            "INSERT INTO outbox.advance (shard, number, generation, position, snapshot, ceiling)
             SELECT shard, number + 1, generation, $1, pg_current_snapshot(), pg_current_xact_id() FROM outbox.cursor",
        )
        .bind(position)
        .execute(&mut self.connect().await?)
        .await?;
        Ok(())
    }

    pub(crate) async fn last_position(&self) -> Result<i64> {
        Ok(sqlx::query_scalar("SELECT coalesce(max(position), 0) FROM outbox.message")
            .fetch_one(&mut self.connect().await?)
            .await?)
    }

    /// Everything is on disk and has been read, so that the first run finds what the last one does.
    pub(crate) async fn settle(&self) -> Result<()> {
        self.sql(&["CHECKPOINT", "SELECT count(payload) FROM outbox.message"]).await
    }

    pub(crate) async fn close(self) -> Result<()> {
        self.broker.drop_topic(&self.topic).await?;
        let mut admin = PgConnection::connect(&self.admin_url).await?;
        admin.execute(AssertSqlSafe(format!("DROP DATABASE {} WITH (FORCE)", self.database))).await?;
        self.keeper.close().await?;
        Ok(())
    }
}

async fn drop_left_behind(admin: &mut PgConnection, broker: &Broker) -> Result<()> {
    let left: Vec<String> = sqlx::query_scalar(
        "SELECT datname FROM pg_database
         WHERE starts_with(datname, $1) AND datname NOT IN (SELECT application_name FROM pg_stat_activity)",
    )
    .bind(PREFIX)
    .fetch_all(&mut *admin)
    .await?;
    for database in left {
        admin.execute(AssertSqlSafe(format!("DROP DATABASE IF EXISTS {database} WITH (FORCE)"))).await?;
        broker.drop_topic(&database).await?;
    }
    Ok(())
}

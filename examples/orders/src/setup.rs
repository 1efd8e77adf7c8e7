//! `orders setup`: both migration lines, the example's tables, the topic. Each may be there already.
//!
//! `--fresh` forgets an earlier run first. Database and topic belong together: orders of another database on the topic
//! would be billed, and are phantoms to the check.

use std::time::Duration;

use baton_migrations::{migrate_inbox, migrate_outbox};
use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::client::DefaultClientContext;
use rdkafka::config::ClientConfig;
use rdkafka::error::{KafkaError, RDKafkaErrorCode};

use crate::{CONSUMER, DEAD_LETTERS, REPLAYS, TOPIC, database};

/// Enough for a few consumers to share the work.
const PARTITIONS: i32 = 6;

/// How long the brokers may take.
const PATIENCE: Duration = Duration::from_secs(20);

/// What could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No connection, or the tables cannot be made.
    #[error(transparent)]
    Database(#[from] database::Error),
    /// A migration failed.
    #[error("cannot migrate the database")]
    Migrate(#[from] baton_migrations::Error),
    /// The brokers cannot be used.
    #[error(
        "cannot reach Kafka at {brokers} (from KAFKA_BROKERS); does it run there, and are host and port right"
    )]
    Kafka {
        /// Where it was looked for.
        brokers: String,
        /// What librdkafka said.
        source: KafkaError,
    },
    /// The brokers do not make the topic, or do not let it go.
    #[error("Kafka refuses to create or delete topic {TOPIC}: {code}")]
    Topic {
        /// The reason.
        code: RDKafkaErrorCode,
    },
}

/// Whether the topic had to be made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Topic {
    /// It was made, with six partitions.
    Made,
    /// It was there.
    WasThere,
}

/// Sets everything up.
///
/// # Errors
/// When the database or the brokers cannot be used. What was done until then stays; run it again.
pub async fn run(database_url: &str, brokers: &str) -> Result<Topic, Error> {
    let mut connection = database::connect(&database::options(database_url)?).await?;
    migrate_outbox(&mut connection, None, None).await?;
    migrate_inbox(&mut connection).await?;
    sqlx::raw_sql(include_str!("../queries/tables_create.sql")).execute(&mut connection).await.map_err(
        |source| database::Error::Statement { operation: "create the tables of the example", source },
    )?;
    create_topic(brokers).await
}

/// Drops everything an earlier run has left in this database and on these brokers.
///
/// # Errors
/// When the database or the brokers cannot be used, or the brokers keep a topic.
pub async fn forget(database_url: &str, brokers: &str) -> Result<(), Error> {
    let mut connection = database::connect(&database::options(database_url)?).await?;
    sqlx::raw_sql(include_str!("../queries/schemas_drop.sql")).execute(&mut connection).await.map_err(
        |source| database::Error::Statement { operation: "drop what an earlier run left", source },
    )?;
    let failed = |source| Error::Kafka { brokers: brokers.to_owned(), source };
    let admin = admin(brokers).map_err(failed)?;
    let gone = admin.delete_topics(&[TOPIC, DEAD_LETTERS, REPLAYS], &options()).await.map_err(failed)?;
    for answer in gone {
        match answer {
            Ok(_) | Err((_, RDKafkaErrorCode::UnknownTopicOrPartition)) => {}
            Err((_, code)) => return Err(Error::Topic { code }),
        }
    }
    // A group that never was, or that somebody still is a member of, keeps no offset that matters: its topic is gone.
    drop(admin.delete_groups(&[CONSUMER], &options()).await);
    Ok(())
}

fn admin(brokers: &str) -> Result<AdminClient<DefaultClientContext>, KafkaError> {
    ClientConfig::new().set("bootstrap.servers", brokers).create()
}

fn options() -> AdminOptions {
    AdminOptions::new().request_timeout(Some(PATIENCE)).operation_timeout(Some(PATIENCE))
}

async fn create_topic(brokers: &str) -> Result<Topic, Error> {
    let failed = |source| Error::Kafka { brokers: brokers.to_owned(), source };
    let admin = admin(brokers).map_err(failed)?;
    // Minus one: as many replicas as the brokers make by default.
    let topic = NewTopic::new(TOPIC, PARTITIONS, TopicReplication::Fixed(-1));
    let answers = admin.create_topics([&topic], &options()).await.map_err(failed)?;
    match answers.into_iter().next() {
        None | Some(Ok(_)) => Ok(Topic::Made),
        Some(Err((_, RDKafkaErrorCode::TopicAlreadyExists))) => Ok(Topic::WasThere),
        Some(Err((_, code))) => Err(Error::Topic { code }),
    }
}

//! `baton replay`: dead letters sent again, chosen first and counted, and what became of each.
//!
//! ```text
//! plan: dead-letter topic, up to its end now ──▶ choose ──▶ inbox.replay_plan, inbox.replay_item (one transaction; nothing is sent)
//! run:  claim a few items (lease of 30 s) ▶ read their letters ▶ send, acknowledged ▶ mark as sent ▶ …
//! consumer: runs the work once for each item and writes what became of it in the transaction that settles the work
//! status: reads that
//! ```
//!
//! The items' rows are authoritative. *On failure:* what dies between claim and acknowledgement leaves a claim that lapses; what dies between
//! acknowledgement and mark sends the item again, with the same key and the same item, and the inbox lets it take effect once. Several
//! runs share the items of a plan, each by claims of its own. Nothing is sent while a rate is waited for, so no claim outlasts a wait.

mod args;
mod choose;
mod groups;
mod letters;
mod pace;
mod plan;
mod run;
mod send;
mod show;
mod store;

use rdkafka::error::KafkaError;
use uuid::Uuid;

pub(crate) use args::Command;

use crate::config::{self, Effective, Side};
use crate::database;
use crate::failure::Failure;
use crate::migrate;
use baton_migrations::Line;
use sqlx::PgConnection;

/// Why a replay did not do what it was asked to.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("no replay plan {0} in this database; `baton replay list` shows those that there are")]
    NoPlan(Uuid),
    #[error("cannot read or write the replay plans in the inbox")]
    Database(#[source] sqlx::Error),
    #[error("cannot make a Kafka client of the settings under [kafka.properties]")]
    Client(#[source] KafkaError),
    #[error(
        "there is no topic {topic}; check --consumer and --topic, or name the dead-letter topic by --dlt"
    )]
    NoTopic { topic: String },
    #[error(
        "there is no topic {topic} to send to; start the consumer once, which makes it, or create it with as many partitions as the original"
    )]
    NoTarget { topic: String },
    #[error("cannot reach Kafka; check that the brokers are up and that KAFKA_BROKERS names them")]
    Brokers(#[source] KafkaError),
    #[error("cannot read topic {topic}; check that this principal may read it")]
    Read {
        topic: String,
        #[source]
        source: KafkaError,
    },
    #[error("topic {topic} gave nothing for {seconds} s; check that its brokers are up, and try again")]
    Silent { topic: String, seconds: u64 },
    #[error("{topic} does not take item {item}; {what_to_do}, then run the plan again")]
    Refused {
        topic: String,
        item: i64,
        what_to_do: &'static str,
        #[source]
        source: Box<KafkaError>,
    },
    #[error(
        "{items} items were not acknowledged by {topic}: they may be on it or not, and are sent again, with the same key, by a run in 30 s or later"
    )]
    Unacknowledged {
        topic: String,
        items: usize,
        #[source]
        source: Box<KafkaError>,
    },
    #[error(
        "{items} items cannot be sent, because their dead letters are no longer on {topic} (deleted, or its retention is over); the others are sent"
    )]
    Gone { topic: String, items: usize },
    #[error("the operating system lets no signal be caught")]
    Signals(#[source] std::io::Error),
    #[error("a task of this command ended by itself, which is a defect; run it again")]
    Task,
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::failed(error)
    }
}

/// Runs one of the four.
pub(crate) async fn run(config: &Effective, command: &Command) -> Result<(), Failure> {
    match command {
        Command::Plan(wish) => plan::run(config, wish).await,
        Command::Run { plan, rate, limit } => run::run(config, *plan, *rate, *limit).await,
        Command::Status { plan, json } => show::status(config, *plan, *json).await,
        Command::List { json } => show::list(config, *json).await,
    }
}

/// The consumer's database, if it is as this binary needs it.
async fn connect(config: &Effective) -> Result<PgConnection, Failure> {
    let mut connection = database::connect_alone(&config.database_url(Side::Inbox)?).await?;
    migrate::require_current(&mut connection, Line::Inbox).await?;
    Ok(connection)
}

/// Where Kafka is, with the settings that pass through.
fn kafka(config: &Effective) -> Result<letters::Cluster, Failure> {
    config.check_ranges()?;
    let brokers = config.config.kafka.brokers.clone().filter(|brokers| !brokers.is_empty()).ok_or(
        config::Error::Missing {
            what: "the Kafka cluster",
            how: "KAFKA_BROKERS, or brokers under [kafka] in baton.toml, to host:port[,host:port…]",
        },
    )?;
    Ok(letters::Cluster { brokers, properties: config.settings_without_addresses().kafka_properties })
}

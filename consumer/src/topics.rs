//! What must be there before a consumer starts: its topics, and beside each one the topic of its dead letters and the
//! topic of its replays.
//!
//! A topic to consume that does not exist is an error: it is a misspelling more often than a topic to come. The two
//! topics of one's own are created where that is allowed, with as many partitions as the original; where it is not, the
//! consumer starts all the same and says what is missing, because most records need neither. The replay topics that are there are
//! read, in a group of their own; one that is made later is read after the next start.

use std::sync::Arc;
use std::time::Duration;

use baton_protocol::dead_letter::{self, Format};
use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, ResourceSpecifier, TopicReplication};
use rdkafka::client::DefaultClientContext;
use rdkafka::config::FromClientConfig;
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::types::RDKafkaRespErr;
use tokio::time::Instant;

use crate::{Kafka, run};

/// How long a broker may take to answer before the start fails.
const PATIENCE: Duration = Duration::from_secs(10);

/// How often is looked whether a topic that was made is told of.
const TOLD_EVERY: Duration = Duration::from_millis(50);

/// Whether a consumer makes the topics of its dead letters and replays.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum DeadLetterTopics {
    /// Create at start what is missing; where that is not allowed, say so and start. The default.
    #[default]
    Create,
    /// They are made by somebody else; a missing one is only met when it is needed, and then holds up its partition.
    Expect,
}

type Admin = AdminClient<DefaultClientContext>;

/// Checks and creates. The replay topics that are there.
pub(crate) async fn prepare(
    kafka: &Kafka,
    consumer: &str,
    topics: &[String],
    own: DeadLetterTopics,
    format: Format,
) -> Result<Vec<String>, run::Error> {
    let admin = Arc::new(AdminClient::from_config(&kafka.admin()).map_err(run::Error::Client)?);
    let prepared = look_and_create(&admin, kafka, consumer, topics, own, format).await;
    // It waits for its thread when it is dropped.
    drop(tokio::task::spawn_blocking(move || drop(admin)).await);
    prepared
}

async fn look_and_create(
    admin: &Arc<Admin>,
    kafka: &Kafka,
    consumer: &str,
    topics: &[String],
    own: DeadLetterTopics,
    format: Format,
) -> Result<Vec<String>, run::Error> {
    let brokers = || kafka.brokers.clone();
    let mut counts = Vec::with_capacity(topics.len());
    let mut missing = Vec::new();
    for topic in topics {
        match partitions(admin, topic)
            .await
            .map_err(|source| run::Error::Brokers { brokers: brokers(), source })?
        {
            Found::Partitions(count) => counts.push((topic.as_str(), count)),
            Found::Missing => missing.push(topic.clone()),
            Found::Refused(source) => return Err(run::Error::Topic { topic: topic.clone(), source }),
        }
    }
    if !missing.is_empty() {
        return Err(run::Error::MissingTopics { topics: missing });
    }
    let mut replays = Vec::new();
    for (topic, count) in counts {
        let letters = format.topic(topic, consumer);
        if own == DeadLetterTopics::Create
            && let Err(error) = ensure(admin, topic, &letters, count, Keep::ForEver).await
        {
            tracing::warn!(
                topic = %letters,
                %error,
                "cannot create this topic; create it with {count} partitions, or its first record holds up a partition"
            );
        }
        let replay = dead_letter::replay_topic(topic, consumer);
        let there = match own {
            DeadLetterTopics::Create => ensure(admin, topic, &replay, count, Keep::AsTheBrokerDoes).await,
            DeadLetterTopics::Expect => match partitions(admin, &replay).await {
                Ok(Found::Partitions(_)) => Ok(()),
                Ok(Found::Missing) => Err(KafkaError::AdminOp(RDKafkaErrorCode::UnknownTopicOrPartition)),
                Ok(Found::Refused(error)) | Err(error) => Err(error),
            },
        };
        match there {
            Ok(()) => replays.push(replay),
            Err(error) => tracing::warn!(
                topic = %replay,
                %error,
                "this topic cannot be read; create it with {count} partitions and start again, or nothing that is replayed is applied"
            ),
        }
    }
    Ok(replays)
}

/// Creates a topic where it is not there, and waits, for a while, until the brokers tell of it.
async fn ensure(
    admin: &Arc<Admin>,
    original: &str,
    topic: &str,
    count: i32,
    keep: Keep,
) -> Result<(), KafkaError> {
    if let Ok(Found::Partitions(_)) = partitions(admin, topic).await {
        return Ok(());
    }
    create(admin, original, topic, count, keep).await?;
    tracing::info!(%topic, partitions = count, "created");
    let deadline = Instant::now() + PATIENCE;
    while Instant::now() < deadline {
        if let Ok(Found::Partitions(_)) = partitions(admin, topic).await {
            break;
        }
        tokio::time::sleep(TOLD_EVERY).await;
    }
    Ok(())
}

enum Found {
    Partitions(i32),
    Missing,
    Refused(KafkaError),
}

/// Asks the brokers, off the runtime's threads.
async fn partitions(admin: &Arc<Admin>, topic: &str) -> Result<Found, KafkaError> {
    let (admin, topic) = (Arc::clone(admin), topic.to_owned());
    let answer = tokio::task::spawn_blocking(move || {
        let metadata = admin.inner().fetch_metadata(Some(&topic), PATIENCE)?;
        let Some(found) = metadata.topics().iter().find(|found| found.name() == topic) else {
            return Ok(Found::Missing);
        };
        Ok(match found.error() {
            None => Found::Partitions(i32::try_from(found.partitions().len()).unwrap_or(i32::MAX)),
            Some(
                RDKafkaRespErr::RD_KAFKA_RESP_ERR_UNKNOWN_TOPIC_OR_PART
                | RDKafkaRespErr::RD_KAFKA_RESP_ERR__UNKNOWN_TOPIC,
            ) => Found::Missing,
            Some(error) => Found::Refused(KafkaError::MetadataFetch(error.into())),
        })
    });
    answer.await.unwrap_or(Err(KafkaError::Canceled))
}

#[derive(Debug, Clone, Copy)]
enum Keep {
    ForEver,
    AsTheBrokerDoes,
}

/// A dead letter is kept until somebody deletes it, and may be as large and as old as its record plus the headers.
async fn create(
    admin: &Admin,
    original: &str,
    topic: &str,
    partitions: i32,
    keep: Keep,
) -> Result<(), KafkaError> {
    let plain = NewTopic::new(topic, partitions, TopicReplication::Fixed(-1));
    let max_bytes = max_message_bytes(admin, original).await;
    let mut wanted = NewTopic::new(topic, partitions, TopicReplication::Fixed(-1))
        .set("message.timestamp.before.max.ms", "9223372036854775807")
        .set("message.timestamp.after.max.ms", "9223372036854775807");
    if let Some(max_bytes) = &max_bytes {
        wanted = wanted.set("max.message.bytes", max_bytes);
    }
    if matches!(keep, Keep::ForEver) {
        wanted =
            wanted.set("retention.ms", "-1").set("retention.bytes", "-1").set("cleanup.policy", "delete");
    }
    match submit(admin, &wanted).await {
        // Brokers before 3.6 do not know the limits on timestamps, and a policy may allow no settings at all.
        Err(KafkaError::AdminOp(RDKafkaErrorCode::InvalidConfig | RDKafkaErrorCode::PolicyViolation)) => {
            tracing::warn!(%topic, "the brokers refuse this topic's settings; look at its retention.ms and max.message.bytes");
            submit(admin, &plain).await
        }
        answer => answer,
    }
}

async fn submit(admin: &Admin, topic: &NewTopic<'_>) -> Result<(), KafkaError> {
    let answers = admin.create_topics([topic], &options()).await?;
    for answer in answers {
        match answer {
            Ok(_) | Err((_, RDKafkaErrorCode::TopicAlreadyExists)) => {}
            Err((_, code)) => return Err(KafkaError::AdminOp(code)),
        }
    }
    Ok(())
}

/// The original's limit and room for the headers; none where it may not be read.
async fn max_message_bytes(admin: &Admin, topic: &str) -> Option<String> {
    const HEADERS: i64 = 64 * 1024;
    let answers = admin.describe_configs([&ResourceSpecifier::Topic(topic)], &options()).await.ok()?;
    let resource = answers.into_iter().next()?.ok()?;
    let limit: i64 = resource.get("max.message.bytes")?.value.as_deref()?.parse().ok()?;
    Some(limit.saturating_add(HEADERS).min(i32::MAX.into()).to_string())
}

fn options() -> AdminOptions {
    AdminOptions::new().request_timeout(Some(PATIENCE)).operation_timeout(Some(PATIENCE))
}

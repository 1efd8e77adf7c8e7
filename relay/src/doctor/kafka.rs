//! The part of the doctor that asks Kafka: whether it answers, and whether the topics in use take what we send.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use rdkafka::admin::{AdminClient, AdminOptions, OwnedResourceSpecifier, ResourceSpecifier};
use rdkafka::client::DefaultClientContext;
use rdkafka::error::KafkaError;

use super::{Finding, Level, Used};
use crate::reach;
use crate::settings::Settings;

/// How long the broker may take for each answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// Of how many topics the settings are asked for.
const TOPICS: usize = 200;

/// librdkafka's own, where nothing else is set.
const BATCH_SIZE: i64 = 1_000_000;

/// What the broker says of a topic.
#[derive(Debug, Clone)]
pub(crate) struct Topic {
    name: String,
    replicas: usize,
    settings: HashMap<String, String>,
}

impl Topic {
    fn number(&self, name: &str) -> Option<i64> {
        self.settings.get(name)?.parse().ok()
    }

    /// Whether this setting is the word, or a list with it.
    pub(crate) fn says(&self, name: &str, word: &str) -> bool {
        self.settings.get(name).is_some_and(|value| value.split(',').any(|part| part.trim() == word))
    }
}

/// Which topics there are, each with the number of its replicas; for who asks about one without making it.
pub(crate) async fn topics(settings: &Arc<Settings>) -> Result<HashMap<String, usize>, KafkaError> {
    let asked = Arc::clone(settings);
    let seen = tokio::task::spawn_blocking(move || look(&asked)).await;
    seen.unwrap_or(Err(KafkaError::Canceled)).map(|(_, there)| there)
}

/// The settings of one topic. `None`: the broker tells none.
pub(crate) async fn topic(
    settings: &Settings,
    name: &str,
    replicas: usize,
) -> Result<Option<Topic>, KafkaError> {
    Ok(describe(settings, &[(name, replicas)]).await?.into_iter().next())
}

/// Examines the broker and the topics in use.
pub(super) async fn examine(settings: &Settings, topics: Option<&[Used]>, findings: &mut Vec<Finding>) {
    let settings = Arc::new(settings.clone());
    if let Err(unreachable) = reach::reach(&settings, PATIENCE).await {
        let found = format!("Kafka at {} does not answer: {}", settings.brokers, unreachable.why);
        let advice = "check kafka.brokers or KAFKA_BROKERS, kafka.properties, and that the broker runs";
        findings.push(Finding::new("kafka", Level::Error, found, advice));
        return;
    }
    let asked = Arc::clone(&settings);
    let seen = tokio::task::spawn_blocking(move || look(&asked)).await;
    let (brokers, there) = match seen.unwrap_or(Err(KafkaError::Canceled)) {
        Ok(seen) => seen,
        Err(error) => {
            let advice = "see the broker's log; this user needs to describe topics";
            findings.push(Finding::new("kafka", Level::Error, error.to_string(), advice));
            return;
        }
    };
    let (_, librdkafka) = rdkafka::util::get_rdkafka_version();
    let found = format!("{brokers} brokers answer at {} (librdkafka {librdkafka})", settings.brokers);
    findings.push(Finding::ok("kafka", found));

    // Without the outbox nothing is known of them.
    let Some(topics) = topics else { return };
    let before = findings.len();
    let missing = topics.iter().filter(|used| used.waiting > 0 && !there.contains_key(&used.topic));
    findings.extend(missing.map(|Used { topic, waiting }| {
        Finding::new(
            "topics",
            Level::Error,
            format!("the topic {topic} is not there, or this user may not see it; {waiting} or more messages wait for it"),
            format!("create {topic}, or allow this relay's Kafka user to describe and write it"),
        )
    }));
    let used: Vec<(&str, usize)> = topics
        .iter()
        .filter_map(|used| Some((used.topic.as_str(), *there.get(&used.topic)?)))
        .take(TOPICS)
        .collect();
    let batch = settings.client_config().get("batch.size").and_then(|value| value.trim().parse().ok());
    match describe(&settings, &used).await {
        Ok(described) => {
            for topic in &described {
                findings.extend(judge(topic, batch.unwrap_or(BATCH_SIZE)));
            }
        }
        Err(error) => {
            let found = format!("the settings of topics cannot be read: {error}");
            let advice = "allow this relay's Kafka user DescribeConfigs on its topics, to have them compared with ours";
            findings.push(Finding::new("topics", Level::Note, found, advice));
        }
    }
    if findings.len() == before {
        findings.push(Finding::ok("topics", format!("{} in use, all there", topics.len())));
    }
}

/// How many brokers there are, and how many replicas the partitions of each topic have. Of all topics, because a question
/// about one that is missing may create it. Blocks.
fn look(settings: &Settings) -> Result<(usize, HashMap<String, usize>), KafkaError> {
    let client: AdminClient<DefaultClientContext> = settings.client_config().create()?;
    let metadata = client.inner().fetch_metadata(None, PATIENCE)?;
    let topics = metadata.topics().iter().filter(|topic| topic.error().is_none());
    let replicas = topics.map(|topic| {
        let fewest = topic.partitions().iter().map(|partition| partition.replicas().len()).min();
        (topic.name().to_owned(), fewest.unwrap_or(0))
    });
    Ok((metadata.brokers().len(), replicas.collect()))
}

async fn describe(settings: &Settings, topics: &[(&str, usize)]) -> Result<Vec<Topic>, KafkaError> {
    if topics.is_empty() {
        return Ok(Vec::new());
    }
    let client: AdminClient<DefaultClientContext> = settings.client_config().create()?;
    let asked: Vec<_> = topics.iter().map(|(topic, _)| ResourceSpecifier::Topic(topic)).collect();
    let options = AdminOptions::new().request_timeout(Some(PATIENCE));
    let answers = client.describe_configs(&asked, &options).await?;
    let mut described = Vec::new();
    for answer in answers {
        let answer = answer.map_err(KafkaError::AdminOp)?;
        let OwnedResourceSpecifier::Topic(name) = answer.specifier else { continue };
        let replicas = topics.iter().find(|(topic, _)| *topic == name).map_or(0, |(_, replicas)| *replicas);
        let settings = answer.entries.into_iter().filter_map(|entry| Some((entry.name, entry.value?)));
        described.push(Topic { name, replicas, settings: settings.collect() });
    }
    Ok(described)
}

/// What a topic's settings mean to those who publish to it in batches of `batch` bytes.
fn judge(topic: &Topic, batch: i64) -> Vec<Finding> {
    let mut findings = Vec::new();
    let name = &topic.name;
    let mut say = |level, found: String, advice: String| {
        findings.push(Finding::new("topics", level, found, advice));
    };
    if let Some(limit) = topic.number("max.message.bytes").filter(|limit| *limit < batch) {
        say(
            Level::Warning,
            format!(
                "the topic {name} takes batches of at most {limit} bytes (max.message.bytes), and ours have up to {batch} \
                 (batch.size): a batch that is refused is tried again message by message, which is slow"
            ),
            format!(
                "set batch.size under [kafka.properties] to at most {limit}, or raise max.message.bytes of {name}"
            ),
        );
    }
    let replicas = i64::try_from(topic.replicas).unwrap_or(i64::MAX);
    if let Some(least) = topic.number("min.insync.replicas") {
        if least > replicas {
            say(
                Level::Error,
                format!(
                    "the topic {name} wants {least} replicas in sync and has {replicas}: nothing can be written to it"
                ),
                format!("lower min.insync.replicas of {name}, or give it more replicas"),
            );
        } else if least == 1 && replicas >= 2 {
            say(
                Level::Note,
                format!(
                    "the topic {name} acknowledges what one of its {replicas} replicas has (min.insync.replicas)"
                ),
                format!(
                    "set min.insync.replicas of {name} to 2, or one broker's loss may lose published messages"
                ),
            );
        }
    }
    if replicas == 1 {
        say(
            Level::Note,
            format!("the topic {name} has one replica: what was published is lost with its broker"),
            format!("give {name} three replicas, where there are as many brokers"),
        );
    }
    if topic.says("unclean.leader.election.enable", "true") {
        say(
            Level::Warning,
            format!(
                "the topic {name} may elect a leader that lacks what was acknowledged (unclean.leader.election.enable)"
            ),
            format!(
                "set unclean.leader.election.enable of {name} to false, or published messages may be lost"
            ),
        );
    }
    if topic.says("message.timestamp.type", "LogAppendTime") {
        say(
            Level::Note,
            format!(
                "the topic {name} replaces the time of a record by that of its arrival (message.timestamp.type)"
            ),
            "set relay.ce_time if consumers need the time at which a message was enqueued".to_owned(),
        );
    }
    if topic.says("cleanup.policy", "compact") {
        say(
            Level::Note,
            format!(
                "the topic {name} is compacted: it refuses messages without a key, and republishing puts an old state last"
            ),
            "give every message of this topic a key".to_owned(),
        );
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    fn topic(replicas: usize, settings: &[(&str, &str)]) -> Topic {
        let of_brokers =
            [("max.message.bytes", "1048588"), ("min.insync.replicas", "2"), ("cleanup.policy", "delete")];
        let settings =
            of_brokers.iter().chain(settings).map(|(name, value)| ((*name).into(), (*value).into()));
        Topic { name: "orders".into(), replicas, settings: settings.collect() }
    }

    #[test]
    fn a_replicated_topic_with_the_brokers_own_limits_is_well() {
        assert_eq!(judge(&topic(3, &[]), BATCH_SIZE), []);
    }

    #[test]
    fn each_setting_that_costs_or_risks_something_is_named_with_what_to_do() {
        for (topic, level, words, to_do) in [
            (
                topic(3, &[("max.message.bytes", "10000")]),
                Level::Warning,
                "message by message",
                "at most 10000",
            ),
            (
                topic(3, &[("min.insync.replicas", "4")]),
                Level::Error,
                "nothing can be written",
                "lower min.insync",
            ),
            (topic(3, &[("min.insync.replicas", "1")]), Level::Note, "one of its 3 replicas", "to 2"),
            (topic(1, &[("min.insync.replicas", "1")]), Level::Note, "has one replica", "three replicas"),
            (
                topic(3, &[("unclean.leader.election.enable", "true")]),
                Level::Warning,
                "lacks what was acknowledged",
                "to false",
            ),
            (
                topic(3, &[("message.timestamp.type", "LogAppendTime")]),
                Level::Note,
                "that of its arrival",
                "relay.ce_time",
            ),
            (topic(3, &[("cleanup.policy", "compact,delete")]), Level::Note, "is compacted", "a key"),
        ] {
            let findings = judge(&topic, BATCH_SIZE);
            let [Finding { level: seen, found, advice: Some(advice), .. }] = findings.as_slice() else {
                panic!("{words}: {findings:?}")
            };
            assert!(*seen == level && found.contains(words) && advice.contains(to_do), "{findings:?}");
        }
    }
}

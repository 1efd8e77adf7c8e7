//! What the broker is known to say of topics, shared by all shards: nothing is handed over for a topic before the broker has
//! said that it is there and how many partitions it has.
//!
//! ```text
//!   unknown ──asked──▶ flows ──after a while──▶ stale (still used, asked again)
//!      ▲  │              └── refused, or a producer broke: forgotten ──┘
//!      │  └──▶ refused: it does not exist, may not be written ──a second, or five──┐
//!      └───────────────────────────────────────────────────────────────────────────┘
//! ```
//!
//! **An outage or a refusal?** No answer is an outage, and so is every answer that is not one of the refusals
//! of [`refusal::cause`](crate::refusal::cause): a partition without a leader, too few replicas, a broker that says that it is
//! not the leader, whatever librdkafka reports of the network. Shards wait then, and nothing is set aside. A topic that is missing
//! is a refusal, unless this process has seen it before: brokers that have just come back may deny for seconds what they have. So of
//! such a topic it has to be said for [`DOUBTED_FOR`] without a break; until then its shards wait.

use std::collections::HashMap;
use std::num::NonZeroU32;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use baton_protocol::lifecycle::Word as _;
use baton_protocol::lifecycle::message::Cause;
use futures_util::future::join_all;
use rdkafka::error::KafkaError;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::publish::Publisher;
use crate::rules::{RuleBook, Rules};
use crate::settings::Settings;

/// How long the broker may take to say whether a topic exists.
const PATIENCE: Duration = Duration::from_secs(5);

/// For how long a broker must say that a topic is gone that was there.
pub(crate) const DOUBTED_FOR: Duration = Duration::from_secs(15);

/// Between two questions about a topic that is doubted, or about which there was no answer.
const ASK_AGAIN: Duration = Duration::from_millis(500);

/// For how long a topic counts as missing that is: asking is cheap.
const MISSING_FOR: Duration = Duration::from_secs(1);

/// For how long a topic counts as not to be written: to find that out anew costs a producer.
const DENIED_FOR: Duration = Duration::from_secs(5);

/// What is known of a topic.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Standing {
    Flows {
        partitions: NonZeroU32,
        /// Long ago: ask again. The answer may be used until the next one is there.
        stale: bool,
        /// What it asks of a record, and whether that was asked so lately that it may stand against one.
        rules: Option<(Rules, bool)>,
    },
    Refused {
        cause: Cause,
        error: String,
    },
    Unknown,
}

#[derive(Debug, Default)]
struct Topic {
    /// Since when, and how many partitions.
    known: Option<(NonZeroU32, Instant)>,
    refused: Option<(Cause, String, Instant)>,
    /// It was there once.
    was_there: bool,
    missing_since: Option<Instant>,
    /// Refusals of its messages, to say them aloud at each doubling.
    said: u32,
}

/// What the broker is known to say of topics.
#[derive(Debug)]
pub(crate) struct Topics {
    topics: Mutex<HashMap<String, Topic>>,
    /// How long an answer of the broker is taken for fresh: so soon is a raised number of partitions used.
    fresh: Duration,
    pub rules: RuleBook,
}

impl Topics {
    pub(crate) fn new(fresh: Duration) -> Self {
        Self { topics: Mutex::default(), fresh, rules: RuleBook::default() }
    }

    pub(crate) fn standing(&self, topic: &str, now: Instant) -> Standing {
        let topics = self.lock();
        let Some(found) = topics.get(topic) else { return Standing::Unknown };
        let since = |then: Instant| now.saturating_duration_since(then);
        if let Some((cause, error, until)) = &found.refused
            && now < *until
        {
            return Standing::Refused { cause: *cause, error: error.clone() };
        }
        let Some((partitions, asked)) = found.known else { return Standing::Unknown };
        Standing::Flows { partitions, stale: since(asked) > self.fresh, rules: self.rules.known(topic, now) }
    }

    /// How many partitions the topic has, however long ago that was.
    pub(crate) fn partitions(&self, topic: &str) -> Option<NonZeroU32> {
        self.lock().get(topic)?.known.map(|(partitions, _)| partitions)
    }

    /// Its messages are taken.
    pub(crate) fn takes(&self, topic: &str) {
        if let Some(found) = self.lock().get_mut(topic) {
            (found.refused, found.said) = (None, 0);
        }
    }

    /// The broker does not take messages of this topic, whatever they are.
    pub(crate) fn denied(&self, topic: &str, cause: Cause, error: String) {
        let lasts = if cause == Cause::UnknownTopic { MISSING_FOR } else { DENIED_FOR };
        let mut topics = self.lock();
        topics.entry(topic.to_owned()).or_default().refused = Some((cause, error, Instant::now() + lasts));
    }

    /// Whether one more refusal of the topic's messages is to be said aloud: the first, and at each doubling.
    pub(crate) fn is_news(&self, topic: &str) -> bool {
        let mut topics = self.lock();
        let said = &mut topics.entry(topic.to_owned()).or_default().said;
        *said = said.saturating_add(1);
        said.is_power_of_two()
    }

    /// The broker is to be asked anew.
    pub(crate) fn forget(&self, topic: &str) {
        if let Some(found) = self.lock().get_mut(topic) {
            found.known = None;
        }
    }

    /// The broker is to be asked anew about every topic.
    pub(crate) fn forget_all(&self) {
        for found in self.lock().values_mut() {
            found.known = None;
        }
    }

    /// The broker did not answer: whatever it denied before, it has not gone on denying it since.
    fn unanswered(&self, topic: &str) {
        if let Some(found) = self.lock().get_mut(topic) {
            found.missing_since = None;
        }
    }

    /// What an answer of the broker means. `None`: nothing is to be believed yet.
    fn learn(&self, topic: &str, seen: Seen, now: Instant) -> Option<Seen> {
        let mut topics = self.lock();
        let found = topics.entry(topic.to_owned()).or_default();
        match seen {
            Seen::Partitions(partitions) => {
                found.known = Some((partitions, now));
                (found.was_there, found.missing_since) = (true, None);
                if found.refused.as_ref().is_some_and(|(cause, ..)| *cause == Cause::UnknownTopic) {
                    found.refused = None;
                }
            }
            Seen::Refused(cause) => {
                if cause == Cause::UnknownTopic && found.was_there {
                    let since = *found.missing_since.get_or_insert(now);
                    if now.saturating_duration_since(since) < DOUBTED_FOR {
                        return None;
                    }
                }
                found.known = None;
                let error = match cause {
                    Cause::UnknownTopic => format!("topic {topic} does not exist"),
                    Cause::InvalidTopic => {
                        format!("the broker does not take {topic} for the name of a topic")
                    }
                    _ => format!("the broker does not show topic {topic} to this relay"),
                };
                let lasts = if cause == Cause::UnknownTopic { MISSING_FOR } else { DENIED_FOR };
                found.refused = Some((cause, error, now + lasts));
            }
        }
        Some(seen)
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Topic>> {
        self.topics.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What the broker says of a topic when it is asked.
#[derive(Debug)]
pub(crate) struct Checked {
    pub topic: String,
    /// `Ok(None)`: it denies a topic that was there, and is not believed yet.
    pub seen: Result<Option<Seen>, KafkaError>,
}

/// An answer of the broker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Seen {
    Partitions(NonZeroU32),
    Refused(Cause),
}

/// Asks the broker about topics, whether each is there and what it asks of a record, and remembers the answers. The first one is asked
/// about alone: a producer that has just been made then has a connection for the others.
pub(crate) fn check(
    topics: &Arc<Topics>,
    settings: &Arc<Settings>,
    publisher: &Arc<Publisher>,
    asked: Vec<String>,
) -> JoinHandle<Vec<Checked>> {
    let (topics, settings, publisher) = (Arc::clone(topics), Arc::clone(settings), Arc::clone(publisher));
    tokio::spawn(async move {
        let one = async |topic| check_one(&topics, &settings, &publisher, topic).await;
        let mut asked = asked.into_iter();
        let mut checked = Vec::with_capacity(asked.len());
        if let Some(first) = asked.next() {
            checked.push(one(first).await);
        }
        checked.extend(join_all(asked.map(one)).await);
        checked
    })
}

async fn check_one(
    topics: &Topics,
    settings: &Settings,
    publisher: &Arc<Publisher>,
    topic: String,
) -> Checked {
    let (publisher, asked) = (Arc::clone(publisher), topic.clone());
    let asked = tokio::task::spawn_blocking(move || publisher.topic(&asked, PATIENCE));
    let (seen, _rules) = tokio::join!(asked, topics.rules.ask(settings, &topic));
    // The slower of the two answers must not make the other one old.
    topics.rules.stands(&topic);
    let seen = seen.unwrap_or(Err(KafkaError::Canceled));
    let seen = seen.map(|seen| topics.learn(&topic, seen, Instant::now()));
    if seen.is_err() {
        topics.unanswered(&topic);
    }
    if let Ok(None) = seen {
        tracing::debug!(topic, cause = Cause::UnknownTopic.as_str(), "a topic that was there is denied");
    }
    if !matches!(seen, Ok(Some(_))) {
        tokio::time::sleep(ASK_AGAIN).await;
    }
    Checked { topic, seen }
}

/// The answers, or never when nothing was asked.
pub(crate) async fn checked(asked: &mut Option<JoinHandle<Vec<Checked>>>) -> Vec<Checked> {
    let Some(handle) = asked else { return std::future::pending().await };
    let checked = handle.await;
    *asked = None;
    // Only a panic ends the task early; then nothing is known.
    checked.unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    const FOUR: NonZeroU32 = NonZeroU32::new(4).unwrap();

    fn refusal(topics: &Topics, now: Instant) -> Option<Cause> {
        match topics.standing("t", now) {
            Standing::Refused { cause, .. } => Some(cause),
            _ => None,
        }
    }

    #[test]
    fn a_topic_that_was_never_there_is_missing_at_once_and_one_that_was_only_when_that_lasts() {
        let (topics, now) = (Topics::new(Duration::from_secs(60)), Instant::now());
        let missing = Seen::Refused(Cause::UnknownTopic);
        assert_eq!(topics.learn("t", missing, now), Some(missing));
        assert_eq!(refusal(&topics, now), Some(Cause::UnknownTopic));
        assert_eq!(topics.learn("t", Seen::Partitions(FOUR), now), Some(Seen::Partitions(FOUR)));
        assert_eq!(refusal(&topics, now), None);

        assert_eq!(topics.learn("t", missing, now), None);
        let almost = now + DOUBTED_FOR - Duration::from_millis(1);
        assert_eq!(topics.learn("t", missing, almost), None);
        assert_eq!(refusal(&topics, almost), None);
        // That it is there once begins it anew.
        topics.learn("t", Seen::Partitions(FOUR), almost);
        assert_eq!(topics.learn("t", missing, now + DOUBTED_FOR), None);
        assert_eq!(topics.learn("t", missing, now + DOUBTED_FOR * 2), Some(missing));
        assert_eq!(refusal(&topics, now + DOUBTED_FOR * 2), Some(Cause::UnknownTopic));

        // And so does an outage: one denial before it and one after it are no fifteen seconds without a break.
        topics.learn("t", Seen::Partitions(FOUR), now);
        assert_eq!(topics.learn("t", missing, now), None);
        topics.unanswered("t");
        assert_eq!(topics.learn("t", missing, now + DOUBTED_FOR), None);
    }

    #[test]
    fn a_refusal_is_believed_for_a_while_and_ends_when_a_message_is_taken() {
        let (topics, now) = (Topics::new(Duration::from_secs(60)), Instant::now());
        topics.learn("t", Seen::Partitions(FOUR), now);
        topics.denied("t", Cause::NotAuthorized, "no".to_owned());
        assert_eq!(refusal(&topics, now), Some(Cause::NotAuthorized));
        // That it is there says nothing of whether it may be written.
        topics.learn("t", Seen::Partitions(FOUR), now);
        assert_eq!(refusal(&topics, now), Some(Cause::NotAuthorized));
        let later = Instant::now() + DENIED_FOR;
        assert_eq!(
            topics.standing("t", later),
            Standing::Flows { partitions: FOUR, stale: false, rules: None }
        );
        topics.takes("t");
        assert_eq!(
            topics.standing("t", now),
            Standing::Flows { partitions: FOUR, stale: false, rules: None }
        );
    }

    #[test]
    fn refusals_of_a_topic_are_news_at_each_doubling() {
        let topics = Topics::new(Duration::ZERO);
        let news: Vec<u32> = (1..=20).filter(|_| topics.is_news("t")).collect();
        assert_eq!(news, [1, 2, 4, 8, 16]);
    }
}

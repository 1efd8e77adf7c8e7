//! What a topic asks of a record, as its broker tells: a record that is surely refused is not handed over, because a refusal costs
//! the producer of the whole shard.
//!
//! Where the broker does not tell, or an old answer stands against a record, nothing is known; the broker judges then.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use baton_protocol::lifecycle::message::Cause;
use rdkafka::admin::{AdminClient, AdminOptions, ConfigResource, ResourceSpecifier};
use rdkafka::error::KafkaResult;
use tokio::time::{Instant, timeout};

use crate::reach::Quiet;
use crate::refusal;
use crate::settings::Settings;

/// How long the broker may take to say what a topic asks. Shards wait for it.
const PATIENCE: Duration = Duration::from_secs(2);

/// For how long nobody is asked after the broker did not answer: shards would wait for that topic by topic.
const SILENT_FOR: Duration = Duration::from_secs(30);

/// For how long an answer may stand against a record: the topic may have been altered since.
pub(crate) const BELIEVED_FOR: Duration = Duration::from_secs(1);

/// By how much more than its topic allows a record must be late to be refused unasked: the broker's clock is not the database's.
const CLOCKS: Duration = Duration::from_secs(600);

const LIMIT: &str = "max.message.bytes";
const BEFORE: &str = "message.timestamp.before.max.ms";
const POLICY: &str = "cleanup.policy";

/// What a topic asks of a record. What is not known asks nothing.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Rules {
    /// The most bytes of a batch, as it is sent.
    pub bytes: Option<usize>,
    /// How old a record may be.
    before: Option<Duration>,
    /// It is compacted.
    wants_key: bool,
}

/// What of a record they are about.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Facts {
    /// Its bytes, at least; none where compressing may make it smaller.
    pub bytes: Option<usize>,
    pub age: Option<Duration>,
    pub has_key: bool,
}

impl Rules {
    fn of(topic: &ConfigResource) -> Self {
        let value = |name| topic.get(name)?.value.as_deref();
        let is_by_producer = value("message.timestamp.type").is_some_and(|kind| kind == "CreateTime");
        Self {
            bytes: value(LIMIT).and_then(|limit| limit.parse().ok()),
            before: value(BEFORE)
                .filter(|_| is_by_producer)
                .and_then(|ms| ms.parse().ok())
                .map(Duration::from_millis),
            wants_key: value(POLICY).is_some_and(|policy| policy.split(',').any(|one| one == "compact")),
        }
    }

    /// Why a record is surely refused, if it is.
    pub(crate) fn refuse(&self, facts: Facts) -> Option<(Cause, String)> {
        let Facts { bytes, age, has_key } = facts;
        if let Some((bytes, limit)) = bytes.zip(self.bytes).filter(|(bytes, limit)| bytes > limit) {
            return Some((
                Cause::TooLarge,
                format!("{}; {}", refusal::of_size(bytes), refusal::allows(limit)),
            ));
        }
        let is_late = |age: &Duration, before: &Duration| *age > before.saturating_add(CLOCKS);
        if let Some((age, before)) = age.zip(self.before).filter(|(age, before)| is_late(age, before)) {
            let (age, before) = (age.as_secs(), before.as_secs());
            let error = format!(
                "the message is {age} s old; its topic takes what is at most {before} s old ({BEFORE})"
            );
            return Some((Cause::InvalidRecord, error));
        }
        let error = || format!("the message has no key; its topic wants one ({POLICY}=compact)");
        (self.wants_key && !has_key).then(|| (Cause::InvalidRecord, error()))
    }
}

/// What is known of all topics' rules, shared by all shards.
#[derive(Default)]
pub(crate) struct RuleBook {
    known: Mutex<HashMap<String, (Option<Rules>, Instant)>>,
    /// Who asks has it: so a topic is asked about once, however many shards want to know.
    asking: tokio::sync::Mutex<Asking>,
}

#[derive(Default)]
struct Asking {
    client: Option<AdminClient<Quiet>>,
    silent_until: Option<Instant>,
}

impl std::fmt::Debug for RuleBook {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RuleBook").field("known", &self.known).finish_non_exhaustive()
    }
}

impl RuleBook {
    /// What is known of a topic, and whether that may stand against a record.
    pub(crate) fn known(&self, topic: &str, now: Instant) -> Option<(Rules, bool)> {
        let (rules, at) = *self.lock().get(topic)?;
        Some((rules?, now.saturating_duration_since(at) < BELIEVED_FOR))
    }

    /// What a topic asks now: from the broker, unless that has just been asked. `None`: it does not tell.
    pub(crate) async fn ask(&self, settings: &Settings, topic: &str) -> Option<Rules> {
        let asked = Instant::now();
        let mut asking = timeout(PATIENCE, self.asking.lock()).await.ok()?;
        // While this one waited another may have asked.
        if let Some((rules, at)) = self.lock().get(topic).copied()
            && (at >= asked || asked.saturating_duration_since(at) < BELIEVED_FOR)
        {
            return rules;
        }
        let rules = asking.describe(settings, topic).await;
        self.lock().insert(topic.to_owned(), (rules, Instant::now()));
        rules
    }

    /// The last answer about a topic counts as given now.
    pub(crate) fn stands(&self, topic: &str) {
        if let Some((_, at)) = self.lock().get_mut(topic) {
            *at = Instant::now();
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, (Option<Rules>, Instant)>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for RuleBook {
    fn drop(&mut self) {
        // Destroying a client blocks for up to half a second.
        if let Some(client) = self.asking.get_mut().client.take() {
            std::thread::spawn(move || drop(client));
        }
    }
}

impl Asking {
    async fn describe(&mut self, settings: &Settings, topic: &str) -> Option<Rules> {
        if self.silent_until.is_some_and(|until| Instant::now() < until) {
            return None;
        }
        let client = match &mut self.client {
            Some(client) => client,
            none => {
                let made: KafkaResult<AdminClient<Quiet>> =
                    settings.client_config().create_with_context(Quiet);
                none.insert(made.ok()?)
            }
        };
        let options = AdminOptions::new().request_timeout(Some(PATIENCE));
        let topics = [ResourceSpecifier::Topic(topic)];
        let answer = timeout(PATIENCE, client.describe_configs(&topics, &options)).await;
        let Ok(Ok(described)) = answer else {
            self.silent_until = Some(Instant::now() + SILENT_FOR);
            return None;
        };
        // What a topic's own answer refuses (it is missing, or must not be looked at) is told at once.
        Some(Rules::of(&described.into_iter().next()?.ok()?))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const DAY: Duration = Duration::from_secs(86_400);

    fn facts(bytes: usize, age: Duration, has_key: bool) -> Facts {
        Facts { bytes: Some(bytes), age: Some(age), has_key }
    }

    #[test]
    fn what_is_surely_refused_is_told_with_the_two_numbers_that_an_operator_compares() {
        let rules = Rules { bytes: Some(1_000), before: Some(DAY), wants_key: true };
        let (cause, error) = rules.refuse(facts(1_001, DAY, true)).unwrap();
        assert!(cause == Cause::TooLarge && error.contains("1001 bytes") && error.contains("1000 bytes"));
        let (cause, error) = rules.refuse(facts(1_000, DAY + CLOCKS + Duration::from_secs(1), true)).unwrap();
        assert!(cause == Cause::InvalidRecord && error.contains("87001 s") && error.contains("86400 s"));
        let (cause, error) = rules.refuse(facts(1_000, DAY, false)).unwrap();
        assert!(cause == Cause::InvalidRecord && error.contains("cleanup.policy=compact"));
        assert_eq!(rules.refuse(facts(1_000, DAY + CLOCKS, true)), None);
    }

    proptest! {
        #[test]
        fn what_is_not_known_refuses_nothing(bytes: Option<usize>, age: Option<u64>, has_key: bool) {
            let age = age.map(Duration::from_millis);
            prop_assert_eq!(Rules::default().refuse(Facts { bytes, age, has_key }), None);
            let rules = Rules { bytes: Some(0), before: Some(Duration::ZERO), wants_key: false };
            prop_assert_eq!(rules.refuse(Facts { bytes: None, age: None, has_key }), None);
        }
    }
}

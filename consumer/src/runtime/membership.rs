//! Membership in the group: what librdkafka's callbacks do. They run on the poll thread, inside `poll`.
//!
//! *Where reading starts.* At the group's committed offset; at the beginning where it has none. librdkafka is told never
//! to reset an offset: one that the broker no longer has stops its partition with an error, because whoever owns the
//! records must decide. If the committed offsets cannot be read, the assignment is given back and asked for anew.
//!
//! *Revocation.* The lanes concerned are stopped and waited for, what they settled is committed unless the assignment was
//! lost, and only then are the partitions given up.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rdkafka::config::RDKafkaLogLevel;
use rdkafka::consumer::{BaseConsumer, CommitMode, Consumer, ConsumerContext, RebalanceProtocol};
use rdkafka::error::{KafkaError, KafkaResult, RDKafkaErrorCode};
use rdkafka::types::RDKafkaRespErr;
use rdkafka::{ClientContext, Offset, TopicPartitionList};
use tokio::time::Instant;

use super::assignment::{Assignment, Commit, Partition};
use crate::Health;
use crate::metrics::{self, Rebalance};

/// How long the coordinator may take to tell what the group has committed.
pub(super) const LOOK_UP_PATIENCE: Duration = Duration::from_secs(5);
/// The same complaint of librdkafka is a warning once in this time.
const REPEAT_AFTER: Duration = Duration::from_secs(30);

/// What librdkafka's callbacks work on. They run on the poll thread, inside `poll`.
pub(super) struct Context {
    consumer: String,
    label: String,
    health: Health,
    state: Mutex<State>,
    drain_deadline: Duration,
}

pub(super) struct State {
    pub(super) assignment: Assignment,
    pub(super) membership: Membership,
    /// What librdkafka complained of, and when it was last said aloud.
    complaints: HashMap<String, Instant>,
    /// Partitions that librdkafka has stopped reading, and that were reported.
    pub(super) stopped: Vec<Partition>,
    /// When the shutdown's patience ends; a revocation in between does not add to it.
    pub(super) end: Option<Instant>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Membership {
    Member,
    /// The assignment was given back: leave the group and join it anew.
    JoinAgain,
}

impl Context {
    pub(super) fn new(
        consumer: String,
        label: String,
        health: Health,
        assignment: Assignment,
        drain_deadline: Duration,
    ) -> Self {
        let state = State {
            assignment,
            membership: Membership::Member,
            complaints: HashMap::new(),
            stopped: Vec::new(),
            end: None,
        };
        Self { consumer, label, health, state: Mutex::new(state), drain_deadline }
    }

    pub(super) fn consumer(&self) -> &str {
        &self.consumer
    }

    /// What its own series are labelled with.
    pub(super) fn label(&self) -> &str {
        &self.label
    }

    pub(super) fn health(&self) -> &Health {
        &self.health
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn assigned(&self, consumer: &BaseConsumer<Self>, given: &TopicPartitionList) {
        let list = match starts(consumer, given) {
            Ok(list) => list,
            Err(error) => {
                tracing::warn!(%error, "cannot read the group's committed offsets; the assignment is given back and asked for anew");
                self.state().membership = Membership::JoinAgain;
                TopicPartitionList::new()
            }
        };
        {
            let mut state = self.state();
            for element in list.elements() {
                let partition =
                    Partition { topic: state.assignment.topic(element.topic()), number: element.partition() };
                let started = match element.offset() {
                    Offset::Offset(offset) => Some(offset),
                    _ => None,
                };
                state.stopped.retain(|stopped| *stopped != partition);
                state.assignment.open(partition, started);
            }
        }
        let assigned = match consumer.rebalance_protocol() {
            RebalanceProtocol::Cooperative => consumer.incremental_assign(&list),
            RebalanceProtocol::Eager | RebalanceProtocol::None => consumer.assign(&list),
        };
        if let Err(error) = assigned {
            tracing::warn!(%error, "cannot take the assignment; it is given back and asked for anew");
            let partitions = self.partitions(&list);
            let mut state = self.state();
            state.assignment.close(&partitions);
            state.membership = Membership::JoinAgain;
            return;
        }
        // A pause outlives a rebalance, and the lanes are new.
        if let Err(error) = consumer.resume(&list) {
            tracing::warn!(%error, "cannot resume what was assigned");
        }
        // What was given back is asked for anew.
        if self.state().membership == Membership::Member {
            self.health.joined();
        }
        metrics::rebalanced(&self.label, Rebalance::Assigned);
        tracing::info!(partitions = %names(&list), "assigned");
    }

    fn revoked(&self, consumer: &BaseConsumer<Self>, taken: &TopicPartitionList) {
        let lost = consumer.assignment_lost();
        tracing::debug!(partitions = %names(taken), lost, "revoking");
        let partitions = self.partitions(taken);
        let patience = if lost { Duration::ZERO } else { self.drain_deadline };
        let settled = {
            let mut state = self.state();
            let deadline = state.end.unwrap_or_else(|| Instant::now() + patience);
            state.assignment.stop(&partitions, deadline);
            state.assignment.close(&partitions)
        };
        if !lost && !settled.is_empty() {
            // Sent before we leave: both go to the coordinator one after the other.
            let sent = list(&settled).and_then(|list| consumer.commit(&list, CommitMode::Async));
            metrics::committed(&self.label, sent.is_ok().into(), settled.len());
            if let Err(error) = sent {
                tracing::warn!(%error, "cannot commit on revocation; the next owner reads some records again");
            }
        }
        let unassigned = match consumer.rebalance_protocol() {
            RebalanceProtocol::Cooperative => consumer.incremental_unassign(taken),
            RebalanceProtocol::Eager | RebalanceProtocol::None => consumer.unassign(),
        };
        if let Err(error) = unassigned {
            tracing::warn!(%error, "cannot give the partitions up");
        }
        if lost {
            self.health.lost();
        }
        metrics::rebalanced(&self.label, if lost { Rebalance::Lost } else { Rebalance::Revoked });
        tracing::info!(partitions = %names(taken), lost, "revoked");
    }

    fn partitions(&self, list: &TopicPartitionList) -> Vec<Partition> {
        let mut state = self.state();
        list.elements()
            .iter()
            .map(|element| Partition {
                topic: state.assignment.topic(element.topic()),
                number: element.partition(),
            })
            .collect()
    }
}

impl ClientContext for Context {
    fn log(&self, level: RDKafkaLogLevel, facility: &str, message: &str) {
        super::librdkafka_log(level, facility, message);
    }

    fn stats_raw(&self, _: &[u8]) {}

    fn error(&self, error: KafkaError, reason: &str) {
        // This one is looked into by the poll loop, which knows the partitions.
        if is_reset(&error) {
            return;
        }
        let text = format!("{error}: {reason}");
        let mut state = self.state();
        if state.complaints.get(&error.to_string()).is_some_and(|said| said.elapsed() < REPEAT_AFTER) {
            tracing::debug!(error = text, "Kafka");
            return;
        }
        state.complaints.insert(error.to_string(), Instant::now());
        if needs_somebody(&error) {
            tracing::error!(
                error = text,
                "Kafka refuses; see that the topic exists and that this consumer's principal may read it"
            );
        } else {
            tracing::warn!(error = text, "Kafka does not answer as it should; the consumer goes on trying");
        }
    }
}

impl ConsumerContext for Context {
    fn rebalance(&self, consumer: &BaseConsumer<Self>, event: RDKafkaRespErr, list: &mut TopicPartitionList) {
        match event {
            RDKafkaRespErr::RD_KAFKA_RESP_ERR__ASSIGN_PARTITIONS => self.assigned(consumer, list),
            _ => self.revoked(consumer, list),
        }
    }
}

/// Where each partition starts: at the group's offset, or at the beginning where it has none.
fn starts(consumer: &BaseConsumer<Context>, given: &TopicPartitionList) -> KafkaResult<TopicPartitionList> {
    let mut asked = TopicPartitionList::new();
    for element in given.elements() {
        asked.add_partition(element.topic(), element.partition());
    }
    if asked.count() == 0 {
        return Ok(asked);
    }
    let committed = consumer.committed_offsets(asked, LOOK_UP_PATIENCE)?;
    let mut list = TopicPartitionList::new();
    for element in committed.elements() {
        element.error()?;
        let offset = match element.offset() {
            Offset::Offset(offset) => Offset::Offset(offset),
            _ => Offset::Beginning,
        };
        list.add_partition_offset(element.topic(), element.partition(), offset)?;
    }
    Ok(list)
}

pub(super) fn list(commits: &[Commit]) -> KafkaResult<TopicPartitionList> {
    let mut list = TopicPartitionList::new();
    for (partition, offset) in commits {
        list.add_partition_offset(&partition.topic, partition.number, Offset::Offset(*offset))?;
    }
    Ok(list)
}

pub(super) fn names(list: &TopicPartitionList) -> String {
    let names: Vec<String> = list
        .elements()
        .iter()
        .map(|element| format!("{}[{}]", element.topic(), element.partition()))
        .collect();
    names.join(" ")
}

pub(super) fn is_reset(error: &KafkaError) -> bool {
    matches!(
        error.rdkafka_error_code(),
        Some(
            RDKafkaErrorCode::AutoOffsetReset
                | RDKafkaErrorCode::OffsetOutOfRange
                | RDKafkaErrorCode::LogTruncation
        )
    )
}

fn needs_somebody(error: &KafkaError) -> bool {
    matches!(
        error.rdkafka_error_code(),
        Some(
            RDKafkaErrorCode::UnknownTopicOrPartition
                | RDKafkaErrorCode::UnknownTopic
                | RDKafkaErrorCode::TopicAuthorizationFailed
                | RDKafkaErrorCode::GroupAuthorizationFailed
                | RDKafkaErrorCode::Authentication
                | RDKafkaErrorCode::SaslAuthenticationFailed
        )
    )
}

//! The poll thread: the only one that touches the consumer.
//!
//! *Offsets.* Committed explicitly, asynchronously, at most every 200 ms, and once more on revocation and at the end. A
//! synchronous commit can wait for ever, and of an asynchronous one nobody is told how it went. So from time to time, and
//! at the end, the group is asked what it has, and what is not there is committed again. What is lost all the same is
//! read again and found done.
//!
//! *Where reading starts.* At the group's committed offset; at the beginning where it has none. librdkafka is told never
//! to reset an offset: one that the broker no longer has stops its partition with an error, because whoever owns the
//! records must decide. If the committed offsets cannot be read, the assignment is given back and asked for anew.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rdkafka::config::RDKafkaLogLevel;
use rdkafka::consumer::{BaseConsumer, CommitMode, Consumer, ConsumerContext, RebalanceProtocol};
use rdkafka::error::{KafkaError, KafkaResult, RDKafkaErrorCode};
use rdkafka::message::BorrowedMessage;
use rdkafka::types::RDKafkaRespErr;
use rdkafka::{ClientContext, Message, Offset, TopicPartitionList};
use tokio::time::Instant;

use super::Drained;
use super::assignment::{Assignment, Commit, Died, Handed, Partition};
use crate::Record;
use crate::run::Error;

/// How long one poll waits: what bounds the delay of resuming, committing and stopping.
const POLL: Duration = Duration::from_millis(20);
const COMMIT_EVERY: Duration = Duration::from_millis(200);
const CONFIRM_EVERY: Duration = Duration::from_secs(5);
/// How long the last commit may take, after the lanes have ended.
const LAST_COMMIT_PATIENCE: Duration = Duration::from_secs(5);
const LOOK_UP_PATIENCE: Duration = Duration::from_secs(5);
/// The same complaint of librdkafka is a warning once in this time.
const REPEAT_AFTER: Duration = Duration::from_secs(30);

/// What librdkafka's callbacks work on. They run on the poll thread, inside `poll`.
pub(super) struct Context {
    state: Mutex<State>,
    drain_deadline: Duration,
}

struct State {
    assignment: Assignment,
    membership: Membership,
    complaint: Option<(String, Instant)>,
    /// Partitions that librdkafka has stopped reading, and that were reported.
    stopped: Vec<Partition>,
    /// When the shutdown's patience ends; a revocation in between does not add to it.
    end: Option<Instant>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Membership {
    Member,
    /// The assignment was given back: leave the group and join it anew.
    JoinAgain,
}

impl Context {
    pub(super) fn new(assignment: Assignment, drain_deadline: Duration) -> Self {
        let state = State {
            assignment,
            membership: Membership::Member,
            complaint: None,
            stopped: Vec::new(),
            end: None,
        };
        Self { state: Mutex::new(state), drain_deadline }
    }

    fn state(&self) -> MutexGuard<'_, State> {
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
        tracing::info!(partitions = %names(&list), "assigned");
    }

    fn revoked(&self, consumer: &BaseConsumer<Self>, taken: &TopicPartitionList) {
        let lost = consumer.assignment_lost();
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
            if let Err(error) = list(&settled).and_then(|list| consumer.commit(&list, CommitMode::Async)) {
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
        let repeated = state
            .complaint
            .as_ref()
            .is_some_and(|(said, at)| *said == error.to_string() && at.elapsed() < REPEAT_AFTER);
        if repeated {
            tracing::debug!(error = text, "Kafka");
            return;
        }
        state.complaint = Some((error.to_string(), Instant::now()));
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

/// The loop around the consumer.
pub(super) struct Poller {
    consumer: BaseConsumer<Context>,
    topics: Vec<String>,
    drain_deadline: Duration,
    stop: Arc<AtomicBool>,
    commit_due: Instant,
    confirm_due: Instant,
}

impl Poller {
    pub(super) fn new(
        consumer: BaseConsumer<Context>,
        topics: Vec<String>,
        drain_deadline: Duration,
        stop: Arc<AtomicBool>,
    ) -> Self {
        let now = Instant::now();
        Self { consumer, topics, drain_deadline, stop, commit_due: now, confirm_due: now + CONFIRM_EVERY }
    }

    /// Polls until it is asked to stop or cannot go on, then drains. The consumer is given back to be dropped: that
    /// leaves the group, and may take its time.
    pub(super) fn run(mut self) -> (BaseConsumer<Context>, Drained) {
        let result = self.poll_until_stopped();
        let stragglers = self.drain();
        (self.consumer, Drained { result, stragglers })
    }

    fn poll_until_stopped(&mut self) -> Result<(), Error> {
        self.subscribe()?;
        while !self.stop.load(Ordering::Relaxed) {
            match self.consumer.poll(POLL) {
                None => {}
                Some(Ok(message)) => self.take(&message),
                Some(Err(error)) => self.note(error)?,
            }
            self.tend()?;
        }
        Ok(())
    }

    fn subscribe(&self) -> Result<(), Error> {
        let topics: Vec<&str> = self.topics.iter().map(String::as_str).collect();
        self.consumer.subscribe(&topics).map_err(Error::Subscribe)
    }

    fn take(&self, message: &BorrowedMessage<'_>) {
        let mut state = self.consumer.context().state();
        let partition =
            Partition { topic: state.assignment.topic(message.topic()), number: message.partition() };
        let record = Record::copy(message, Arc::clone(&partition.topic));
        let handed = state.assignment.hand(record, &partition);
        drop(state);
        if handed == Handed::Pause {
            self.switch(&[partition], Consumer::pause);
        }
    }

    /// Everything that is not reading.
    fn tend(&mut self) -> Result<(), Error> {
        let mut state = self.consumer.context().state();
        state.assignment.collect().map_err(|Died(partition)| Error::Lane {
            topic: partition.topic.to_string(),
            partition: partition.number,
        })?;
        let flowing = state.assignment.resume();
        let membership = std::mem::replace(&mut state.membership, Membership::Member);
        drop(state);
        if !flowing.is_empty() {
            self.switch(&flowing, Consumer::resume);
        }
        if membership == Membership::JoinAgain {
            self.consumer.unsubscribe();
            self.subscribe()?;
        }
        if Instant::now() >= self.commit_due {
            self.commit_due = Instant::now() + COMMIT_EVERY;
            self.commit();
        }
        if Instant::now() >= self.confirm_due {
            self.confirm();
            self.confirm_due = Instant::now() + CONFIRM_EVERY;
        }
        Ok(())
    }

    fn switch(
        &self,
        partitions: &[Partition],
        switch: fn(&BaseConsumer<Context>, &TopicPartitionList) -> KafkaResult<()>,
    ) {
        let mut list = TopicPartitionList::new();
        for partition in partitions {
            list.add_partition(&partition.topic, partition.number);
        }
        if let Err(error) = switch(&self.consumer, &list) {
            tracing::warn!(%error, partitions = %names(&list), "cannot pause or resume");
        }
    }

    /// Asks Kafka to commit what is settled.
    fn commit(&self) {
        let due = self.consumer.context().state().assignment.due();
        if due.is_empty() {
            return;
        }
        if let Err(error) = list(&due).and_then(|list| self.consumer.commit(&list, CommitMode::Async)) {
            tracing::warn!(%error, "cannot commit; it is repeated");
            self.consumer.context().state().assignment.commit_failed();
        }
    }

    /// Looks whether the last commits took place. The question follows them to the coordinator.
    fn confirm(&self) {
        let unconfirmed = self.consumer.context().state().assignment.unconfirmed();
        if unconfirmed.is_empty() {
            return;
        }
        let mut asked = TopicPartitionList::new();
        for partition in &unconfirmed {
            asked.add_partition(&partition.topic, partition.number);
        }
        let answer = match self.consumer.committed_offsets(asked, LOOK_UP_PATIENCE) {
            Ok(answer) => answer,
            Err(error) => {
                tracing::debug!(%error, "cannot read the group's committed offsets; it is tried again");
                return;
            }
        };
        let mut state = self.consumer.context().state();
        for element in answer.elements() {
            let partition =
                Partition { topic: state.assignment.topic(element.topic()), number: element.partition() };
            match (element.error(), element.offset()) {
                (Ok(()), Offset::Offset(offset)) => state.assignment.confirm(&partition, Some(offset)),
                (Ok(()), _) => state.assignment.confirm(&partition, None),
                (Err(_), _) => {}
            }
        }
    }

    fn note(&self, error: KafkaError) -> Result<(), Error> {
        match error {
            KafkaError::MessageConsumptionFatal(_) => Err(Error::Fatal(error)),
            error if is_reset(&error) => {
                self.report_gone_offsets();
                Ok(())
            }
            // librdkafka goes on by itself, and the context has said it.
            _ => Ok(()),
        }
    }

    /// librdkafka has stopped a partition and does not say which: the one whose next offset the broker does not have.
    fn report_gone_offsets(&self) {
        let open: Vec<(Partition, Option<i64>)> = {
            let state = self.consumer.context().state();
            let open =
                state.assignment.all().into_iter().filter(|partition| !state.stopped.contains(partition));
            open.map(|partition| (partition.clone(), state.assignment.read_to(&partition))).collect()
        };
        let mut found = 0;
        for (partition, next) in open {
            let Ok((low, high)) =
                self.consumer.fetch_watermarks(&partition.topic, partition.number, LOOK_UP_PATIENCE)
            else {
                continue;
            };
            let Some(next) = next.filter(|next| !(low..=high).contains(next)) else { continue };
            tracing::error!(
                topic = %partition.topic,
                partition = partition.number,
                offset = next,
                low,
                high,
                "the group's offset is no longer on the broker: this partition is not read, and nothing is skipped; \
                 decide where to go on, set the group's offset there (kafka-consumer-groups --reset-offsets), and restart"
            );
            self.consumer.context().state().stopped.push(partition);
            found += 1;
        }
        if found == 0 {
            tracing::error!(
                "Kafka has stopped reading a partition, because an offset is no longer on the broker; restart the consumer"
            );
        }
    }

    /// Lets the lanes finish what they have in hand, commits, and forgets everything. Bounded.
    fn drain(&mut self) -> Vec<tokio::task::JoinHandle<()>> {
        {
            let mut state = self.consumer.context().state();
            let all = state.assignment.all();
            let deadline = Instant::now() + self.drain_deadline;
            state.end = Some(deadline);
            state.assignment.stop(&all, deadline);
        }
        let deadline = Instant::now() + LAST_COMMIT_PATIENCE;
        loop {
            self.commit();
            self.confirm();
            if self.consumer.context().state().assignment.all_confirmed() || Instant::now() >= deadline {
                break;
            }
            // What is read now is not handed to a lane: it is read again by the next owner.
            drop(self.consumer.poll(POLL));
        }
        let mut state = self.consumer.context().state();
        let all = state.assignment.all();
        let uncommitted = state.assignment.close(&all);
        if !uncommitted.is_empty() {
            tracing::warn!(
                partitions = uncommitted.len(),
                "the last offsets were not committed; some records are read again and found done"
            );
        }
        state.assignment.take_stragglers()
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

fn list(commits: &[Commit]) -> KafkaResult<TopicPartitionList> {
    let mut list = TopicPartitionList::new();
    for (partition, offset) in commits {
        list.add_partition_offset(&partition.topic, partition.number, Offset::Offset(*offset))?;
    }
    Ok(list)
}

fn names(list: &TopicPartitionList) -> String {
    let names: Vec<String> = list
        .elements()
        .iter()
        .map(|element| format!("{}[{}]", element.topic(), element.partition()))
        .collect();
    names.join(" ")
}

fn is_reset(error: &KafkaError) -> bool {
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

//! The poll thread: the only one that touches the consumer.
//!
//! *Offsets.* Committed explicitly, asynchronously, at most every 200 ms, and once more on revocation and at the end. A
//! synchronous commit can wait for ever, and of an asynchronous one nobody is told how it went. So from time to time, and
//! at the end, the group is asked what it has, and what is not there is committed again. What is lost all the same is
//! read again and found done.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rdkafka::consumer::{BaseConsumer, CommitMode, Consumer};
use rdkafka::error::{KafkaError, KafkaResult};
use rdkafka::message::BorrowedMessage;
use rdkafka::{Message, Offset, TopicPartitionList};
use tokio::time::Instant;

use super::Drained;
use super::assignment::{Died, Handed, Partition};
use super::membership::{Context, LOOK_UP_PATIENCE, Membership, is_reset, list, names};
use crate::Record;
use crate::metrics;
use crate::run::Error;

/// How long one poll waits: what bounds the delay of resuming, committing and stopping.
const POLL: Duration = Duration::from_millis(20);
const COMMIT_EVERY: Duration = Duration::from_millis(200);
const CONFIRM_EVERY: Duration = Duration::from_secs(5);
/// How long the last commit may take, after the lanes have ended.
const LAST_COMMIT_PATIENCE: Duration = Duration::from_secs(5);

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
        self.consumer.context().health().polls();
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
        let record =
            Record::copy(message, Arc::clone(&partition.topic)).read_by(self.consumer.context().consumer());
        let handed = state.assignment.hand(record, &partition);
        drop(state);
        if handed == Handed::Pause {
            self.switch(&[partition], Consumer::pause);
        }
    }

    /// Everything that is not reading.
    fn tend(&mut self) -> Result<(), Error> {
        self.consumer.context().health().beat();
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
            self.gauge();
        }
        if Instant::now() >= self.confirm_due {
            self.confirm();
            self.confirm_due = Instant::now() + CONFIRM_EVERY;
        }
        Ok(())
    }

    /// Says what is held. As often as is committed: a gauge that lags a little costs the poll thread nothing.
    fn gauge(&self) {
        let state = self.consumer.context().state();
        let (records, bytes) = state.assignment.held();
        let assigned = state.assignment.all();
        let stopped = state.stopped.iter().filter(|partition| assigned.contains(partition)).count();
        drop(state);
        let consumer = self.consumer.context().label();
        metrics::in_flight(consumer, records, bytes);
        metrics::partitions(consumer, assigned.len(), stopped);
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
        let sent = list(&due).and_then(|list| self.consumer.commit(&list, CommitMode::Async));
        metrics::committed(self.consumer.context().label(), sent.is_ok().into(), due.len());
        if let Err(error) = sent {
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
            // Each may take its time.
            self.consumer.context().health().beat();
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
        let stragglers = state.assignment.take_stragglers();
        drop(state);
        self.gauge();
        stragglers
    }
}

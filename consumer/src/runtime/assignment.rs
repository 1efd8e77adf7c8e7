//! The partitions that this consumer has, and a lane for each. Owned by the poll thread; knows nothing of librdkafka.
//!
//! A lane is authoritative for what it has settled until its partition is closed here; what it says afterwards is not
//! heard, because its number is no longer known.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use tokio::runtime::Handle;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::LaneId;
use super::budget::{Budget, Limits, Pressure};
use super::lane::{Inlet, Report, Reporter, Spawn, Stop};
use super::offsets::Offsets;
use crate::Record;

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Partition {
    pub(crate) topic: Arc<str>,
    pub(crate) number: i32,
}

/// An offset to commit for a partition: that of the next record to read.
pub(crate) type Commit = (Partition, i64);

/// A lane ended without being asked to: its partition would stand still unseen.
#[derive(Debug)]
pub(crate) struct Died(pub(crate) Partition);

/// What became of a record that librdkafka handed out.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Handed {
    Flows,
    /// Pause its partition.
    Pause,
    /// Its partition is not ours (any more); it is dropped, and its owner reads it.
    NotOurs,
}

struct Lane {
    id: LaneId,
    records: mpsc::UnboundedSender<Record>,
    stop: watch::Sender<bool>,
    task: JoinHandle<()>,
    life: Life,
    offsets: Offsets,
    /// The group's committed offset when the partition came; none was committed.
    started: Option<i64>,
    /// The offset last given to Kafka to commit.
    requested: Option<i64>,
    /// The offset that the group was seen to have committed.
    confirmed: Option<i64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Life {
    Runs,
    Stopping,
    Ended,
}

pub(crate) struct Assignment {
    handle: Handle,
    spawn: Spawn,
    reports: Receiver<Report>,
    reporter: Sender<Report>,
    lanes: BTreeMap<Partition, Lane>,
    partitions: HashMap<LaneId, Partition>,
    topics: HashMap<String, Arc<str>>,
    budget: Budget,
    opened: u64,
    stragglers: Vec<JoinHandle<()>>,
}

impl Assignment {
    pub(crate) fn new(handle: Handle, spawn: Spawn, limits: Limits) -> Self {
        let (reporter, reports) = channel();
        Self {
            handle,
            spawn,
            reports,
            reporter,
            lanes: BTreeMap::new(),
            partitions: HashMap::new(),
            topics: HashMap::new(),
            budget: Budget::new(limits),
            opened: 0,
            stragglers: Vec::new(),
        }
    }

    /// One shared name for each topic.
    pub(crate) fn topic(&mut self, topic: &str) -> Arc<str> {
        if let Some(shared) = self.topics.get(topic) {
            return Arc::clone(shared);
        }
        let shared: Arc<str> = topic.into();
        self.topics.insert(topic.to_owned(), Arc::clone(&shared));
        shared
    }

    /// A partition was assigned, with what the group has committed for it.
    pub(crate) fn open(&mut self, partition: Partition, started: Option<i64>) {
        self.opened += 1;
        let id = LaneId(self.opened);
        let (records, from_poll) = mpsc::unbounded_channel();
        let (stop, stop_seen) = watch::channel(false);
        let inlet = Inlet {
            topic: Arc::clone(&partition.topic),
            records: from_poll,
            stop: Stop(stop_seen),
            reporter: Reporter { lane: id, reports: self.reporter.clone() },
        };
        let task = self.handle.spawn((self.spawn)(inlet));
        let offsets = Offsets::default();
        let lane = Lane {
            id,
            records,
            stop,
            task,
            life: Life::Runs,
            offsets,
            started,
            requested: None,
            confirmed: None,
        };
        self.partitions.insert(id, partition.clone());
        self.lanes.insert(partition, lane);
    }

    /// A record goes to its lane.
    pub(crate) fn hand(&mut self, record: Record, partition: &Partition) -> Handed {
        let Some(lane) = self.lanes.get_mut(partition).filter(|lane| lane.life == Life::Runs) else {
            return Handed::NotOurs;
        };
        let (offset, bytes) = (record.offset(), record.size());
        // A lane that has ended by itself is found when its report is read.
        if lane.records.send(record).is_err() {
            return Handed::NotOurs;
        }
        lane.offsets.handed(offset);
        match self.budget.handed(lane.id, bytes) {
            Pressure::Flows => Handed::Flows,
            Pressure::Pause => Handed::Pause,
        }
    }

    /// Reads what the lanes have reported.
    pub(crate) fn collect(&mut self) -> Result<(), Died> {
        // Never disconnected: we hold a sender ourselves.
        while let Ok(report) = self.reports.try_recv() {
            self.hear(report)?;
        }
        self.stragglers.retain(|straggler| !straggler.is_finished());
        Ok(())
    }

    fn hear(&mut self, report: Report) -> Result<(), Died> {
        match report {
            Report::Settled { lane: id, offset, bytes } => {
                self.budget.settled(id, bytes);
                if let Some(lane) =
                    self.partitions.get(&id).and_then(|partition| self.lanes.get_mut(partition))
                {
                    lane.offsets.settled(offset);
                }
            }
            Report::Ended { lane: id } => {
                let Some(partition) = self.partitions.get(&id) else { return Ok(()) };
                if let Some(lane) = self.lanes.get_mut(partition) {
                    let before = std::mem::replace(&mut lane.life, Life::Ended);
                    if before == Life::Runs {
                        return Err(Died(partition.clone()));
                    }
                }
            }
        }
        Ok(())
    }

    /// Takes the paused partitions that may flow again.
    pub(crate) fn resume(&mut self) -> Vec<Partition> {
        self.budget.resume().into_iter().filter_map(|id| self.partitions.get(&id).cloned()).collect()
    }

    /// What should be committed and was not asked for yet; it counts as asked for from here on.
    pub(crate) fn due(&mut self) -> Vec<Commit> {
        let mut due = Vec::new();
        for (partition, lane) in &mut self.lanes {
            if let Some(offset) = lane.offsets.to_commit().filter(|offset| lane.requested != Some(*offset)) {
                lane.requested = Some(offset);
                due.push((partition.clone(), offset));
            }
        }
        due
    }

    /// Partitions whose last commit is not known to have taken place.
    pub(crate) fn unconfirmed(&self) -> Vec<Partition> {
        let unconfirmed = self.lanes.iter().filter(|(_, lane)| lane.requested != lane.confirmed);
        unconfirmed.map(|(partition, _)| partition.clone()).collect()
    }

    /// What the group has committed. Where that is not what was asked for, it is due again.
    pub(crate) fn confirm(&mut self, partition: &Partition, committed: Option<i64>) {
        if let Some(lane) = self.lanes.get_mut(partition) {
            lane.confirmed = committed.filter(|committed| lane.requested == Some(*committed));
            lane.requested = lane.confirmed;
        }
    }

    /// A commit could not even be asked for: everything that is not confirmed is due again.
    pub(crate) fn commit_failed(&mut self) {
        for lane in self.lanes.values_mut() {
            lane.requested = lane.confirmed;
        }
    }

    /// Whether everything that is settled is known to be committed.
    pub(crate) fn all_confirmed(&self) -> bool {
        self.lanes.values().all(|lane| lane.offsets.to_commit() == lane.confirmed)
    }

    /// Records and bytes that the lanes have in hand.
    pub(crate) fn held(&self) -> (usize, usize) {
        self.budget.held()
    }

    /// Every partition that is open.
    pub(crate) fn all(&self) -> Vec<Partition> {
        self.lanes.keys().cloned().collect()
    }

    /// Where reading of a partition goes on; none if nothing was committed and nothing read.
    pub(crate) fn read_to(&self, partition: &Partition) -> Option<i64> {
        let lane = self.lanes.get(partition)?;
        lane.offsets.read_to().or(lane.started)
    }

    /// Asks lanes to finish the record in hand and to end. Waits for them until the deadline.
    pub(crate) fn stop(&mut self, partitions: &[Partition], deadline: Instant) {
        for partition in partitions {
            if let Some(lane) = self.lanes.get_mut(partition).filter(|lane| lane.life == Life::Runs) {
                lane.life = Life::Stopping;
                lane.stop.send_replace(true);
            }
        }
        while self.any_running(partitions) {
            let left = deadline.saturating_duration_since(Instant::now());
            let Ok(report) = self.reports.recv_timeout(left) else { return };
            if let Err(Died(partition)) = self.hear(report) {
                // It is being closed with everything else, or found again by the next look.
                tracing::error!(topic = %partition.topic, partition = partition.number, "a lane ended by itself");
            }
        }
    }

    fn any_running(&self, partitions: &[Partition]) -> bool {
        partitions
            .iter()
            .filter_map(|partition| self.lanes.get(partition))
            .any(|lane| lane.life != Life::Ended)
    }

    /// Forgets partitions. Gives what is settled and not known to be committed, and keeps the tasks that still run.
    pub(crate) fn close(&mut self, partitions: &[Partition]) -> Vec<Commit> {
        let mut settled = Vec::new();
        for partition in partitions {
            let Some(lane) = self.lanes.remove(partition) else { continue };
            self.partitions.remove(&lane.id);
            self.budget.closed(lane.id);
            if let Some(offset) = lane.offsets.to_commit().filter(|offset| lane.confirmed != Some(*offset)) {
                settled.push((partition.clone(), offset));
            }
            if lane.life != Life::Ended {
                lane.stop.send_replace(true);
                self.stragglers.push(lane.task);
            }
        }
        settled
    }

    /// The tasks of closed partitions that have not ended.
    pub(crate) fn take_stragglers(&mut self) -> Vec<JoinHandle<()>> {
        std::mem::take(&mut self.stragglers)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const LIMITS: Limits = Limits { lane_rows: 100, lane_bytes: 1 << 20, total_bytes: 1 << 20 };

    /// Lanes that settle whatever they are given, or that hold on to it for ever.
    fn assignment(settle: fn(i64) -> bool) -> Assignment {
        let spawn: Spawn = Arc::new(move |mut inlet: Inlet| {
            Box::pin(async move {
                while let Some(record) = inlet.records.recv().await {
                    if !settle(record.offset()) {
                        std::future::pending::<()>().await;
                    }
                    inlet.reporter.settled(record.offset(), record.size());
                }
            })
        });
        Assignment::new(Handle::current(), spawn, LIMITS)
    }

    fn partition() -> Partition {
        Partition { topic: "orders".into(), number: 0 }
    }

    fn hand(assignment: &mut Assignment, offset: i64) {
        assert_eq!(assignment.hand(Record::bare("orders", 0, offset), &partition()), Handed::Flows);
    }

    async fn until(assignment: &mut Assignment, mut reached: impl FnMut(&mut Assignment) -> bool) {
        let waited = async {
            loop {
                assignment.collect().unwrap();
                if reached(assignment) {
                    return;
                }
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(Duration::from_secs(10), waited).await.expect("waited in vain");
    }

    #[tokio::test]
    async fn what_is_settled_is_due_once_and_again_only_when_the_group_does_not_have_it() {
        let mut assignment = assignment(|_| true);
        assignment.open(partition(), None);
        hand(&mut assignment, 4);
        let mut due = Vec::new();
        until(&mut assignment, |assignment| {
            due = assignment.due();
            !due.is_empty()
        })
        .await;
        assert_eq!(due, [(partition(), 5)]);
        assert!(assignment.due().is_empty());
        assert_eq!(assignment.unconfirmed(), [partition()]);

        assignment.confirm(&partition(), Some(3));
        assert_eq!(assignment.due(), [(partition(), 5)], "the group does not have it");
        assignment.confirm(&partition(), Some(5));
        assert!(
            assignment.due().is_empty() && assignment.unconfirmed().is_empty() && assignment.all_confirmed()
        );
    }

    #[tokio::test]
    async fn what_a_lane_reports_after_its_partition_was_closed_is_not_heard() {
        let mut assignment = assignment(|offset| offset < 7);
        assignment.open(partition(), None);
        let old = assignment.lanes[&partition()].id;
        hand(&mut assignment, 6);
        hand(&mut assignment, 7);
        until(&mut assignment, |assignment| assignment.lanes[&partition()].offsets.to_commit() == Some(7))
            .await;
        assert_eq!(assignment.close(&[partition()]), [(partition(), 7)]);
        assert_eq!(assignment.stragglers.len(), 1, "it still runs");

        assignment.open(partition(), Some(7));
        hand(&mut assignment, 7);
        assignment.hear(Report::Settled { lane: old, offset: 7, bytes: 1 }).unwrap();
        assignment.hear(Report::Ended { lane: old }).unwrap();
        assert_eq!(assignment.due(), [], "the old lane's word counts for nothing");
    }

    #[tokio::test]
    async fn a_lane_that_ends_unasked_is_found() {
        let mut assignment = Assignment::new(Handle::current(), Arc::new(|_| Box::pin(async {})), LIMITS);
        assignment.open(partition(), None);
        let found = async {
            while assignment.collect().is_ok() {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(Duration::from_secs(10), found).await.expect("it was not found");
    }

    #[tokio::test]
    async fn a_record_of_a_partition_that_is_not_open_is_dropped() {
        let mut assignment = assignment(|_| true);
        assert_eq!(assignment.hand(Record::bare("orders", 0, 1), &partition()), Handed::NotOurs);
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 1)]
    async fn stopping_waits_for_the_deadline_at_most() {
        let mut assignment = assignment(|_| false);
        assignment.open(partition(), None);
        hand(&mut assignment, 1);
        let begun = Instant::now();
        assignment.stop(&[partition()], begun + Duration::from_millis(50));
        assert!(begun.elapsed() < Duration::from_secs(5));
        assert!(assignment.close(&[partition()]).is_empty());
        assert_eq!(assignment.take_stragglers().len(), 1);
    }
}

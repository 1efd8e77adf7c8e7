//! One partition's records: of each key one after the other, of different keys as many at once as was set.
//!
//! A lane first asks which keys have records set aside, so that none of theirs is handled before its turn. What it has
//! settled, in whatever order, it reports; the poll thread commits what is contiguous. It is asked to stop by a flag, takes no
//! more then, and ends when what is in hand has ended.

use std::pin::pin;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::future::BoxFuture;
use futures_util::stream::FuturesUnordered;
use tokio::sync::{Semaphore, mpsc, watch};

use super::LaneId;
use super::next::OUTAGE;
use super::queues::{Left, Queues, Turn};
use super::worker::{Progress, Worker};
use crate::Record;
use crate::apply::Apply;

/// Starts a lane: what turns an inlet into the task's future.
pub(crate) type Spawn = Arc<dyn Fn(Inlet) -> BoxFuture<'static, ()> + Send + Sync>;

/// What a lane is given.
pub(crate) struct Inlet {
    pub(crate) topic: Arc<str>,
    pub(crate) records: mpsc::UnboundedReceiver<Record>,
    pub(crate) stop: Stop,
    pub(crate) reporter: Reporter,
}

/// What a lane says to the poll thread.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Report {
    /// The record at this offset has its effect committed, or is safely set aside.
    Settled { lane: LaneId, offset: i64, bytes: usize },
    /// The lane has ended: its last report.
    Ended { lane: LaneId },
}

/// Reports for one lane, and its end when it is dropped, however that comes.
pub(crate) struct Reporter {
    pub(crate) lane: LaneId,
    pub(crate) reports: Sender<Report>,
}

impl Reporter {
    pub(super) fn settled(&self, offset: i64, bytes: usize) {
        // The poll thread is gone only when nothing counts any more.
        let _ = self.reports.send(Report::Settled { lane: self.lane, offset, bytes });
    }
}

impl Drop for Reporter {
    fn drop(&mut self) {
        let _ = self.reports.send(Report::Ended { lane: self.lane });
    }
}

/// Tells a lane to take no further record and to wait for nothing.
#[derive(Clone)]
pub(crate) struct Stop(pub(crate) watch::Receiver<bool>);

impl Stop {
    pub(crate) async fn requested(&mut self) {
        // A sender that is gone asks for the same.
        let _ = self.0.wait_for(|stop| *stop).await;
    }

    pub(crate) async fn sleep(&mut self, delay: Duration) -> Rest {
        self.unless(tokio::time::sleep(delay)).await.map_or(Rest::Stopped, |()| Rest::Over)
    }

    /// What comes of `wait`, which must be safe to drop, unless a stop is asked for first.
    pub(crate) async fn unless<T>(&mut self, wait: impl Future<Output = T>) -> Option<T> {
        tokio::select! {
            biased;
            () = self.requested() => None,
            out = wait => Some(out),
        }
    }
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Rest {
    Over,
    Stopped,
}

/// A record whose turn is over.
struct Ended {
    key: Option<Bytes>,
    offset: i64,
    bytes: usize,
    progress: Progress,
}

impl<A: Apply> Worker<A> {
    /// A lane's life: until it is asked to stop or its records end.
    pub(crate) async fn run(&self, mut inlet: Inlet) {
        let Some(aside) = self.load_aside(&inlet.topic, &mut inlet.stop).await else { return };
        let mut queues = Queues::new(aside);
        let permits = Semaphore::new(self.terms.concurrency);
        let mut turns = pin!(FuturesUnordered::new());
        let stop = inlet.stop.clone();
        let begin = |turn| self.turn(turn, &permits, stop.clone());
        let most = self.apply.most();
        loop {
            let record = tokio::select! {
                biased;
                () = inlet.stop.requested() => break,
                Some(ended) = turns.next() => {
                    turns.extend(report(&inlet.reporter, &mut queues, &ended).map(begin));
                    continue;
                }
                // What is tried alone of a batch comes before the next batch.
                record = inlet.records.recv(), if most == 1 || turns.is_empty() => record,
            };
            let Some(record) = record else { break };
            #[cfg(feature = "plants")]
            if self.inbox.has(crate::plant::Plant::OffsetBeforeEffect) {
                inlet.reporter.settled(record.offset(), record.size());
            }
            let mut records = vec![record];
            while records.len() < most
                && let Ok(record) = inlet.records.try_recv()
            {
                records.push(record);
            }
            for record in self.together(records, &queues, &mut inlet).await {
                turns.extend(queues.arrived(record).map(begin));
            }
        }
        while let Some(ended) = turns.next().await {
            report(&inlet.reporter, &mut queues, &ended);
        }
    }

    /// The keys of the topic that have records set aside, however long it takes to learn.
    async fn load_aside(&self, topic: &str, stop: &mut Stop) -> Option<Vec<Vec<u8>>> {
        let mut waits = OUTAGE.delays();
        loop {
            match self.inbox.parked_keys(topic, self.after_on(topic)).await {
                Ok(keys) => return Some(keys),
                Err(error) => {
                    tracing::warn!(topic, error = %baton_protocol::report::chain(&error), "a partition waits until this can be read");
                    if stop.sleep(waits.next_delay()).await == Rest::Stopped {
                        return None;
                    }
                }
            }
        }
    }

    /// Settles what can be settled together, and gives back, in order, what is to be tried alone.
    async fn together(&self, records: Vec<Record>, queues: &Queues, inlet: &mut Inlet) -> Vec<Record> {
        let (mut together, mut alone) = (Vec::new(), Vec::new());
        if records.len() == 1 {
            return records;
        }
        for record in &records {
            let shared = Arc::new(record.clone());
            match self.message(&shared) {
                // What an operator replays may take a dead row up, which is done alone.
                Ok(message) if !queues.is_behind(record) && message.work.replay.is_none() => {
                    together.push(message);
                }
                _ => alone.push(record.clone()),
            }
        }
        if !self.are_settled(&together, &mut inlet.stop).await {
            return records;
        }
        for message in &together {
            inlet.reporter.settled(message.record.offset(), message.record.size());
        }
        alone
    }

    async fn turn(&self, turn: Turn, permits: &Semaphore, mut stop: Stop) -> Ended {
        let Turn { record, way } = turn;
        let (key, offset, bytes) = (record.shared_key().cloned(), record.offset(), record.size());
        let progress = self.settle(Arc::new(record), way, permits, &mut stop).await;
        Ended { key, offset, bytes, progress }
    }
}

/// Says what is settled. Whose turn is next; nobody's behind what was not settled.
fn report(reporter: &Reporter, queues: &mut Queues, ended: &Ended) -> Option<Turn> {
    let left = match ended.progress {
        Progress::Settled => Left::Free,
        Progress::Aside => Left::Aside,
        Progress::Abandoned => return None,
    };
    reporter.settled(ended.offset, ended.bytes);
    queues.ended(ended.key.as_ref(), left)
}

//! *Fenced*: a statement of ours matched no row, because its lease has run out or is another's. The one place that hears of it.
//!
//! Every refusal is counted, by the operation that was refused. It is logged once for a shard and generation, however many
//! statements of that generation are refused after the first: the lease is lost once.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

/// What was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Operation {
    /// Claiming a shard anew by the generation this process held it by. That another relay was faster to take a free
    /// shard is not this: nothing was lost.
    Claim,
    Renew,
    Advance,
    /// Writing down why a shard stands still.
    Stop,
    /// Writing down what became of messages that were set aside, or looking for those that may be tried.
    Settle,
    Release,
}

impl Operation {
    pub(crate) const ALL: [Self; 6] =
        [Self::Claim, Self::Renew, Self::Advance, Self::Stop, Self::Settle, Self::Release];

    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Claim => "claim",
            Self::Renew => "renew",
            Self::Advance => "advance",
            Self::Stop => "stop",
            Self::Settle => "settle",
            Self::Release => "release",
        }
    }
}

/// What this process was refused since it started.
#[derive(Debug, Default)]
pub(crate) struct Fences {
    counts: [AtomicU64; Operation::ALL.len()],
    /// The generation that was logged last, by shard.
    logged: Mutex<BTreeMap<i16, i64>>,
}

impl Fences {
    /// Counts a refusal, and logs it unless an earlier one of this generation was.
    pub(crate) fn note(&self, shard: i16, generation: i64, operation: Operation) {
        self.counter(operation).fetch_add(1, Ordering::Relaxed);
        if self.is_news(shard, generation) {
            tracing::warn!(
                shard,
                generation,
                operation = operation.as_str(),
                "fenced: the lease has run out or is another's, what was in flight is dropped"
            );
        }
    }

    /// Whether nothing of this generation was refused before.
    fn is_news(&self, shard: i16, generation: i64) -> bool {
        let mut logged = self.logged.lock().unwrap_or_else(PoisonError::into_inner);
        logged.insert(shard, generation) != Some(generation)
    }

    /// How often this operation was refused.
    pub(crate) fn count(&self, operation: Operation) -> u64 {
        self.counter(operation).load(Ordering::Relaxed)
    }

    fn counter(&self, operation: Operation) -> &AtomicU64 {
        let [claim, renew, advance, stop, settle, release] = &self.counts;
        match operation {
            Operation::Claim => claim,
            Operation::Renew => renew,
            Operation::Advance => advance,
            Operation::Stop => stop,
            Operation::Settle => settle,
            Operation::Release => release,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loss_of_a_lease_is_news_once() {
        let fences = Fences::default();
        let seen: Vec<bool> = [(3, 7), (3, 7), (4, 7), (3, 8), (3, 8)]
            .into_iter()
            .map(|(shard, generation)| fences.is_news(shard, generation))
            .collect();
        assert_eq!(seen, [true, false, true, true, false]);
    }

    #[test]
    fn each_operation_is_counted_by_itself() {
        let fences = Fences::default();
        for (times, operation) in Operation::ALL.into_iter().enumerate() {
            for _ in 0..=times {
                fences.note(3, 7, operation);
            }
        }
        let counts: Vec<u64> = Operation::ALL.into_iter().map(|operation| fences.count(operation)).collect();
        assert_eq!(counts, [1, 2, 3, 4, 5, 6]);
    }
}

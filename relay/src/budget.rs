//! The bytes that all shards of a relay may hold at once: read and not yet acknowledged.
//!
//! ```text
//!   total = half shared by whoever comes first │ half reserved, in equal parts, one for each shard of the outbox
//! ```
//!
//! A shard whose messages do not leave (a partition without a leader, a missing topic) keeps what it holds. With one common
//! heap a few such shards would stop all others; with a reserve a shard always gets its part, whatever the others hold.
//!
//! Pages are admitted at one place, the reader, and give their bytes back when they are dropped, however that happens. A
//! page ends with the row that reaches its limit, because a message larger than all of it must still pass. So at most
//! `total` and one message of each shard are held at any time.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

/// The rule, without clock or lock.
#[derive(Debug)]
struct Shares {
    /// What is there for whoever comes first.
    shared: usize,
    /// What is kept for each shard.
    reserve: usize,
    /// What each shard holds; none that holds nothing.
    held: BTreeMap<i16, usize>,
}

impl Shares {
    fn new(total: usize, shards: usize) -> Self {
        let reserve = total / 2 / shards.max(1);
        Self { shared: total - reserve * shards.max(1), reserve, held: BTreeMap::new() }
    }

    /// What each of these shards may take in one read: what is left of its reserve, and an equal part of what is shared.
    fn allow(&self, asking: &[i16]) -> Vec<usize> {
        let taken: usize = self.held.values().map(|held| held.saturating_sub(self.reserve)).sum();
        // Rounded up, or a part of less than a byte would stop everybody; a page ends beyond its limit anyway.
        let part = self.shared.saturating_sub(taken).div_ceil(asking.len().max(1));
        asking
            .iter()
            .map(|shard| self.reserve.saturating_sub(self.held.get(shard).copied().unwrap_or(0)) + part)
            .collect()
    }

    fn take(&mut self, shard: i16, bytes: usize) {
        *self.held.entry(shard).or_default() += bytes;
    }

    fn give_back(&mut self, shard: i16, bytes: usize) {
        if let Some(held) = self.held.get_mut(&shard) {
            *held = held.saturating_sub(bytes);
        }
        self.held.retain(|_, held| *held > 0);
    }
}

/// Shared by the reader and every page it gave out.
#[derive(Debug, Clone)]
pub(crate) struct Budget {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    shares: Mutex<Shares>,
    freed: Notify,
}

impl Inner {
    fn shares(&self) -> MutexGuard<'_, Shares> {
        // A panic while it was held leaves plain counters, which stay meaningful.
        self.shares.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Bytes taken from the budget, given back on drop.
#[derive(Debug)]
pub(crate) struct Held {
    shard: i16,
    bytes: usize,
    inner: Arc<Inner>,
}

impl Budget {
    /// `total` bytes for an outbox of so many shards, whichever of them this relay comes to hold.
    pub(crate) fn new(total: usize, shards: usize) -> Self {
        Self {
            inner: Arc::new(Inner { shares: Mutex::new(Shares::new(total, shards)), freed: Notify::new() }),
        }
    }

    /// What each of these shards may take in one read; 0 for one that must wait.
    pub(crate) fn allow(&self, asking: &[i16]) -> Vec<usize> {
        self.inner.shares().allow(asking)
    }

    /// Returns once something was given back since the last call.
    pub(crate) async fn freed(&self) {
        self.inner.freed.notified().await;
    }

    pub(crate) fn hold(&self, shard: i16, bytes: usize) -> Held {
        self.inner.shares().take(shard, bytes);
        Held { shard, bytes, inner: Arc::clone(&self.inner) }
    }
}

impl Held {
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.inner.shares().give_back(self.shard, self.bytes);
        self.inner.freed.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[tokio::test]
    async fn what_is_dropped_is_given_back_and_wakes_the_reader() {
        let budget = Budget::new(16, 2);
        let held = budget.hold(0, 40);
        assert_eq!(budget.allow(&[0]), [0]);
        drop(held);
        budget.freed().await;
        assert_eq!(budget.allow(&[0]), [12]);
    }

    /// What happens: these shards read together, each finding rows of this size (0: none); or the oldest page of one goes.
    #[derive(Debug, Clone)]
    enum Step {
        Read(Vec<(i16, usize)>),
        Drop(i16),
    }

    const SHARDS: i16 = 6;

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let asking =
            prop::collection::btree_map(0..SHARDS, prop_oneof![0usize..4, 0usize..200, 0usize..5_000], 1..6);
        let read = asking.prop_map(|asking| Step::Read(asking.into_iter().collect()));
        prop::collection::vec(prop_oneof![2 => read, 1 => (0..SHARDS).prop_map(Step::Drop)], 1..80)
    }

    /// The bytes of a page of equal rows under a limit, as the statement cuts it.
    fn page(limit: usize, row: usize) -> usize {
        if limit == 0 || row == 0 { 0 } else { limit.div_ceil(row) * row }
    }

    proptest! {
        #[test]
        fn a_shard_always_gets_its_reserve_and_all_hold_the_total_and_a_message_each(
            total in 1usize..3_000,
            steps in steps(),
        ) {
            let mut shares = Shares::new(total, SHARDS as usize);
            let reserve = total / 2 / SHARDS as usize;
            let mut pages: Vec<(i16, usize)> = Vec::new();
            let mut largest = [0usize; SHARDS as usize];
            for step in steps {
                match step {
                    Step::Read(asking) => {
                        let shards: Vec<i16> = asking.iter().map(|(shard, _)| *shard).collect();
                        let allowed = shares.allow(&shards);
                        prop_assert_eq!(allowed.len(), shards.len());
                        for ((shard, row), allowed) in asking.into_iter().zip(allowed) {
                            let held: usize = pages.iter().filter(|p| p.0 == shard).map(|p| p.1).sum();
                            prop_assert!(held + allowed >= reserve, "shard {shard} holds {held} and may take {allowed}");
                            let bytes = page(allowed, row);
                            if bytes > 0 {
                                let largest = &mut largest[usize::from(shard.unsigned_abs())];
                                *largest = row.max(*largest);
                                shares.take(shard, bytes);
                                pages.push((shard, bytes));
                            }
                        }
                    }
                    Step::Drop(shard) => {
                        if let Some(oldest) = pages.iter().position(|p| p.0 == shard) {
                            let (shard, bytes) = pages.remove(oldest);
                            shares.give_back(shard, bytes);
                        }
                    }
                }
                let held: usize = pages.iter().map(|p| p.1).sum();
                let bound = total + largest.iter().sum::<usize>();
                prop_assert!(held <= bound, "{held} bytes are held, {bound} is the bound");
            }
        }
    }
}

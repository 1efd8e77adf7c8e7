//! The bytes that all shards of a relay may hold at once: read and not yet acknowledged.
//!
//! Pages are admitted at one place, the reader, and give their bytes back when they are dropped, however that happens.
//! The last page admitted may exceed the budget: one message larger than all of it must still pass.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::sync::Notify;

/// Shared by the reader and every page it gave out.
#[derive(Debug, Clone)]
pub(crate) struct Budget {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    total: usize,
    held: AtomicUsize,
    freed: Notify,
}

/// Bytes taken from the budget, given back on drop.
#[derive(Debug)]
pub(crate) struct Held {
    bytes: usize,
    inner: Arc<Inner>,
}

impl Budget {
    pub(crate) fn new(total: usize) -> Self {
        Self { inner: Arc::new(Inner { total, held: AtomicUsize::new(0), freed: Notify::new() }) }
    }

    pub(crate) fn left(&self) -> usize {
        self.inner.total.saturating_sub(self.inner.held.load(Ordering::Acquire))
    }

    pub(crate) fn is_spent(&self) -> bool {
        self.left() == 0
    }

    /// Returns once something was given back since the last call.
    pub(crate) async fn freed(&self) {
        self.inner.freed.notified().await;
    }

    pub(crate) fn hold(&self, bytes: usize) -> Held {
        self.inner.held.fetch_add(bytes, Ordering::AcqRel);
        Held { bytes, inner: Arc::clone(&self.inner) }
    }
}

impl Held {
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.inner.held.fetch_sub(self.bytes, Ordering::AcqRel);
        self.inner.freed.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn what_is_dropped_is_given_back_and_wakes_the_reader() {
        let budget = Budget::new(10);
        let held = budget.hold(25);
        assert!(budget.is_spent());
        drop(held);
        budget.freed().await;
        assert_eq!(budget.left(), 10);
    }
}

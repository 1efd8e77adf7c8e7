//! What is in flight of one shard, and the contiguous prefix of it that Kafka has acknowledged. Pure.
//!
//! Rows are numbered as they are handed over. Delivery reports come in any order; progress is the longest prefix without
//! a gap, and only that may move the cursor. The first failed report ends the prefix for good: the producer is then
//! replaced and a new window begins at the first unacknowledged row.

use std::collections::VecDeque;

/// The acknowledgements of one producer's rows.
#[derive(Debug)]
pub(crate) struct Window<F> {
    /// Rows before `base` are acknowledged without a gap.
    base: u64,
    acked: VecDeque<bool>,
    /// Handed over and not reported on.
    unreported: usize,
    failure: Option<(u64, F)>,
    /// Every row that failed.
    failed: Vec<(u64, F)>,
    /// A row failed only because it was in one batch with another that was named.
    is_told_apart: bool,
    awaited: Option<u64>,
    #[cfg(feature = "plants")]
    last_acked: Option<u64>,
}

impl<F: Clone> Window<F> {
    pub(crate) fn new() -> Self {
        Self {
            base: 0,
            acked: VecDeque::new(),
            unreported: 0,
            failure: None,
            failed: Vec::new(),
            is_told_apart: false,
            awaited: None,
            #[cfg(feature = "plants")]
            last_acked: None,
        }
    }

    /// Numbers the next row to be handed over.
    pub(crate) fn hand_over(&mut self) -> u64 {
        self.acked.push_back(false);
        self.unreported += 1;
        self.base + self.acked.len() as u64 - 1
    }

    /// Takes back the last number: the producer did not take the row.
    pub(crate) fn take_back(&mut self) {
        if self.acked.pop_back().is_some() {
            self.unreported -= 1;
        }
    }

    /// Whether Kafka is known to have the row.
    pub(crate) fn is_acked(&self, number: u64) -> bool {
        match number.checked_sub(self.base) {
            None => true,
            Some(index) => usize::try_from(index).ok().and_then(|i| self.acked.get(i)) == Some(&true),
        }
    }

    /// Somebody waits for the report on this row.
    pub(crate) fn wait_for(&mut self, number: u64) {
        self.awaited = Some(number);
    }

    /// Whether somebody waited for the report on this row; not any more.
    pub(crate) fn was_awaited(&mut self, number: u64) -> bool {
        self.awaited.take_if(|awaited| *awaited == number).is_some()
    }

    /// Kafka has the row.
    pub(crate) fn ack(&mut self, number: u64) {
        #[cfg(feature = "plants")]
        {
            self.last_acked = self.last_acked.max(Some(number));
        }
        self.unreported = self.unreported.saturating_sub(1);
        let Some(index) = number.checked_sub(self.base).and_then(|i| usize::try_from(i).ok()) else { return };
        if let Some(slot) = self.acked.get_mut(index) {
            *slot = true;
        }
        while self.acked.front() == Some(&true) {
            self.acked.pop_front();
            self.base += 1;
        }
    }

    /// A row was thrown away because of another's failure.
    pub(crate) fn purged(&mut self) {
        self.unreported = self.unreported.saturating_sub(1);
    }

    /// The row failed. Kept is the failure of the lowest row.
    pub(crate) fn fail(&mut self, number: u64, failure: F) {
        self.unreported = self.unreported.saturating_sub(1);
        if self.failure.as_ref().is_none_or(|(first, _)| number < *first) {
            self.failure = Some((number, failure.clone()));
        }
        self.failed.push((number, failure));
    }

    /// The row failed because another one of its batch did, which is reported on its own.
    pub(crate) fn beside(&mut self) {
        self.unreported = self.unreported.saturating_sub(1);
        self.is_told_apart = true;
    }

    /// How many rows from the first on are acknowledged without a gap.
    pub(crate) fn prefix(&self) -> u64 {
        self.base
    }

    /// Rows handed over of which nothing was heard yet.
    pub(crate) fn unreported(&self) -> usize {
        self.unreported
    }

    /// Rows handed over that the prefix does not cover.
    pub(crate) fn in_flight(&self) -> usize {
        self.acked.len()
    }

    /// The highest row that Kafka has.
    #[cfg(feature = "plants")]
    pub(crate) fn last_acked(&self) -> Option<u64> {
        self.last_acked
    }

    /// Every row that failed for its own sake, or with its whole batch.
    pub(crate) fn failed(&self) -> &[(u64, F)] {
        &self.failed
    }

    /// Whether the broker has told those that failed from the others of their batch.
    pub(crate) fn is_told_apart(&self) -> bool {
        self.is_told_apart
    }

    /// The lowest failed row and why.
    pub(crate) fn failure(&self) -> Option<&(u64, F)> {
        self.failure.as_ref()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn the_prefix_is_what_is_acked_without_a_gap_in_any_order_of_reports(
            order in Just((0u64..40).collect::<Vec<_>>()).prop_shuffle(),
            failed in prop::collection::btree_set(0u64..40, 0..4),
        ) {
            let mut window = Window::new();
            for n in 0..40 {
                prop_assert_eq!(window.hand_over(), n);
            }
            let mut acked = [false; 40];
            for (reported, number) in order.iter().enumerate() {
                if failed.contains(number) {
                    window.fail(*number, ());
                } else {
                    window.ack(*number);
                    acked[usize::try_from(*number).unwrap()] = true;
                }
                prop_assert!((0..40u64).all(|n| window.is_acked(n) == acked[usize::try_from(n).unwrap()]));
                let expected = acked.iter().take_while(|a| **a).count() as u64;
                prop_assert_eq!(window.prefix(), expected);
                prop_assert_eq!(window.unreported(), 40 - reported - 1);
            }
            prop_assert_eq!(window.failure().map(|f| f.0), failed.first().copied());
        }
    }

    #[test]
    fn a_row_the_producer_did_not_take_gets_the_same_number_again() {
        let mut window = Window::<()>::new();
        window.hand_over();
        assert_eq!(window.hand_over(), 1);
        window.take_back();
        assert_eq!(window.hand_over(), 1);
        window.ack(0);
        window.ack(1);
        assert_eq!((window.prefix(), window.in_flight(), window.unreported()), (2, 0, 0));
    }
}

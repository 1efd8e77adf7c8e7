//! Which offset of a partition may be committed. The one place that adds 1 to an offset.
//!
//! What is committed is the offset of the next record to read: one past the last record of the longest run, from the
//! first record handed out on, in which every record is settled. Offsets have gaps (compaction, transaction markers), so
//! the run is over the records handed out, not over the numbers. A record may be settled before an earlier one.

use std::collections::VecDeque;

/// The records of one partition that were handed to its lane, in order.
#[derive(Debug, Default)]
pub(crate) struct Offsets {
    /// Handed out and after the settled run.
    waiting: VecDeque<(i64, Settled)>,
    /// The offset to commit; none until a first record is settled.
    next: Option<i64>,
    /// One past the last record handed out.
    read: Option<i64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Settled {
    Yes,
    No,
}

impl Offsets {
    /// A record goes to the lane. Offsets only rise within one assignment.
    pub(crate) fn handed(&mut self, offset: i64) {
        debug_assert!(self.read.is_none_or(|read| offset >= read), "offset {offset} after {:?}", self.read);
        self.waiting.push_back((offset, Settled::No));
        self.read = Some(offset + 1);
    }

    /// A record's effect is committed, or it is safely set aside. Unknown offsets change nothing.
    pub(crate) fn settled(&mut self, offset: i64) {
        if let Ok(at) = self.waiting.binary_search_by_key(&offset, |(waiting, _)| *waiting) {
            self.waiting[at].1 = Settled::Yes;
        }
        while let Some((offset, Settled::Yes)) = self.waiting.front() {
            self.next = Some(offset + 1);
            self.waiting.pop_front();
        }
    }

    /// The offset to commit: that of the next record to read. None while nothing is settled.
    pub(crate) fn to_commit(&self) -> Option<i64> {
        self.next
    }

    /// Where reading goes on: one past the last record handed out.
    pub(crate) fn read_to(&self) -> Option<i64> {
        self.read
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn nothing_is_committed_before_a_record_is_settled() {
        let mut offsets = Offsets::default();
        offsets.handed(7);
        assert_eq!(offsets.to_commit(), None);
        offsets.settled(7);
        assert_eq!(offsets.to_commit(), Some(8));
    }

    #[test]
    fn an_unsettled_record_holds_back_all_later_ones() {
        let mut offsets = Offsets::default();
        for offset in [1, 2, 3] {
            offsets.handed(offset);
        }
        offsets.settled(3);
        offsets.settled(2);
        assert_eq!(offsets.to_commit(), None);
        offsets.settled(1);
        assert_eq!(offsets.to_commit(), Some(4));
    }

    proptest! {
        #[test]
        fn what_is_committed_covers_settled_records_only_and_all_of_a_settled_run(
            gaps in proptest::collection::vec(1_i64..5, 1..60),
            order in proptest::collection::vec(any::<prop::sample::Index>(), 0..60),
        ) {
            let mut offsets = Offsets::default();
            let handed: Vec<i64> = gaps.iter().scan(0, |at, gap| { *at += gap; Some(*at) }).collect();
            for offset in &handed {
                offsets.handed(*offset);
            }
            let mut settled = std::collections::BTreeSet::new();
            let mut last = None;
            for index in order {
                let offset = handed[index.index(handed.len())];
                settled.insert(offset);
                offsets.settled(offset);
                let run = handed.iter().take_while(|offset| settled.contains(offset)).last();
                prop_assert_eq!(offsets.to_commit(), run.map(|offset| offset + 1));
                prop_assert!(offsets.to_commit() >= last, "never backwards");
                last = offsets.to_commit();
            }
            prop_assert_eq!(offsets.read_to(), handed.last().map(|offset| offset + 1));
        }
    }
}

//! From when on an outbox still has all that was written. Pure.
//!
//! Slots follow each other, each a slot period long, and their rows go to four leaves in turn. No leaf is truncated before the second slot
//! after its own, and then in every fourth only:
//!
//! ```text
//!   slot          k                k + 1              k + 2               …     k + 6
//!   its leaf      written          written by         in turn                   in turn
//!                                  late writers       (truncated, or not)       (or not)
//! ```
//!
//! So a leaf that has a row from before the second slot after `k` has been truncated in none of these turns, and has all of `k`. One
//! that has none has lost it, or nothing was written in it: the ring does not remember which.

/// Since when all rows up to `to` are there, in microseconds since 1970, as the other times are: the end of the last slot of which rows
/// may be gone. `oldest` is the time of the oldest row of each leaf, `None` of an empty one. A row belongs to the slot in which its
/// transaction began.
pub(super) fn kept_from(now: i64, to: i64, period: i64, oldest: [Option<i64>; 4]) -> i64 {
    let period = period.max(1);
    let in_turn = (now.div_euclid(period) - 2).min(to.saturating_sub(1).div_euclid(period));
    let last_gone = (0_i64..).zip(oldest).map(|(leaf, oldest)| {
        let newest = oldest.map_or(in_turn, |oldest| in_turn.min(oldest.div_euclid(period) - 2));
        newest - (newest - leaf).rem_euclid(4)
    });
    (last_gone.max().unwrap_or(in_turn) + 1).saturating_mul(period)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn of_a_busy_ring_what_the_last_turn_took_is_gone() {
        // The eleventh slot: leaves 3 and 2 are written to, 1 is in turn, 0 was before it.
        assert_eq!(kept_from(115, 115, 10, [None, Some(90), Some(100), Some(110)]), 90);
        // Nothing has been taken of leaf 1 and of leaf 0: all of slots 8 to 11 is there, and leaf 3 lost slot 7.
        assert_eq!(kept_from(115, 115, 10, [Some(80), Some(90), Some(100), Some(110)]), 80);
        // Leaf 1 has been truncated as well.
        assert_eq!(kept_from(115, 115, 10, [None, None, Some(100), Some(110)]), 100);
    }

    #[test]
    fn an_old_row_in_a_leaf_that_a_shard_holds_back_does_not_stand_for_the_others() {
        assert_eq!(kept_from(115, 115, 10, [Some(3), None, Some(100), Some(110)]), 100);
        assert_eq!(kept_from(115, 115, 10, [Some(3), Some(12), Some(23), Some(31)]), 0);
    }

    #[test]
    fn a_slot_after_the_range_may_be_empty() {
        // Nothing was written in slots 9 and 8; the range lies in slot 7 and 6.
        assert_eq!(kept_from(115, 115, 10, [None, None, Some(60), Some(70)]), 100);
        assert_eq!(kept_from(115, 80, 10, [None, None, Some(60), Some(70)]), 60);
        assert_eq!(kept_from(115, 81, 10, [None, None, Some(60), Some(70)]), 90);
    }

    #[test]
    fn what_no_turn_has_come_to_yet_is_there_in_an_empty_ring_too() {
        assert_eq!(kept_from(115, 115, 10, [None; 4]), 100);
    }

    proptest! {
        /// Rows are written in every slot, and each leaf is truncated in its turn or not.
        #[test]
        fn nothing_is_gone_that_was_written_since_and_something_may_be_before(
            turns in prop::collection::vec(any::<bool>(), 3..40),
            into in 0_i64..10,
        ) {
            let mut leaves: [Vec<i64>; 4] = Default::default();
            let mut gone: Vec<i64> = Vec::new();
            for (slot, truncates) in (0_i64..).zip(&turns) {
                let leaf = |slot: i64| usize::try_from(slot.rem_euclid(4)).unwrap();
                if *truncates {
                    gone.append(&mut leaves[leaf(slot - 2)]);
                }
                leaves[leaf(slot)].push(slot * 10);
            }
            let last = i64::try_from(turns.len()).unwrap() - 1;
            let now = last * 10 + into;
            let kept = kept_from(now, now, 10, leaves.clone().map(|rows| rows.iter().min().copied()));
            prop_assert!(gone.iter().all(|row| *row < kept), "{gone:?} {kept}");
            // And it is no later than it must be.
            let newest_gone = gone.iter().max().map_or(i64::MIN, |row| row + 10);
            prop_assert!(kept <= newest_gone.max(0), "{newest_gone} {kept}");
        }
    }
}

//! How many records, and how many bytes of them, may be handed to the lanes before a partition is paused.
//!
//! A record that librdkafka has handed out cannot be handed back, so a limit is passed by at most one record: a lane is
//! paused as soon as it reaches its own limit of rows or bytes, or when all lanes together reach the total. It is resumed
//! when it is down to half its own limits and the total to three quarters (a pause throws away what was fetched ahead,
//! so it must not flicker), or when it holds nothing at all, so that a few stuck lanes never stop the others for good.

use std::collections::HashMap;

use super::LaneId;

/// The limits. Each is at least 1 in effect.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    /// Records in one lane.
    pub(crate) lane_rows: usize,
    /// Bytes in one lane.
    pub(crate) lane_bytes: usize,
    /// Bytes in all lanes.
    pub(crate) total_bytes: usize,
}

impl Limits {
    /// What is replayed comes beside the rest, and seldom: it has a quarter of that.
    pub(crate) fn of_replays(self) -> Self {
        Self { total_bytes: (self.total_bytes / 4).max(1), ..self }
    }
}

/// What a lane that was given a record does next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pressure {
    Flows,
    Pause,
}

#[derive(Debug)]
pub(crate) struct Budget {
    limits: Limits,
    total: usize,
    lanes: HashMap<LaneId, Held>,
}

#[derive(Debug, Default)]
struct Held {
    rows: usize,
    bytes: usize,
    paused: bool,
}

impl Budget {
    pub(crate) fn new(limits: Limits) -> Self {
        Self { limits, total: 0, lanes: HashMap::new() }
    }

    /// A record went to a lane.
    pub(crate) fn handed(&mut self, lane: LaneId, bytes: usize) -> Pressure {
        let held = self.lanes.entry(lane).or_default();
        held.rows += 1;
        held.bytes += bytes;
        self.total += bytes;
        let full = held.rows >= self.limits.lane_rows
            || held.bytes >= self.limits.lane_bytes
            || self.total >= self.limits.total_bytes;
        if full && !held.paused {
            held.paused = true;
            return Pressure::Pause;
        }
        Pressure::Flows
    }

    /// A lane is done with a record.
    pub(crate) fn settled(&mut self, lane: LaneId, bytes: usize) {
        let Some(held) = self.lanes.get_mut(&lane) else { return };
        held.rows = held.rows.saturating_sub(1);
        held.bytes = held.bytes.saturating_sub(bytes);
        self.total = self.total.saturating_sub(bytes);
    }

    /// A lane is gone, and with it what it held.
    pub(crate) fn closed(&mut self, lane: LaneId) {
        if let Some(held) = self.lanes.remove(&lane) {
            self.total = self.total.saturating_sub(held.bytes);
        }
    }

    /// Records and bytes in all lanes.
    pub(crate) fn held(&self) -> (usize, usize) {
        (self.lanes.values().map(|held| held.rows).sum(), self.total)
    }

    /// Takes the lanes that may flow again. They count as flowing from here on.
    pub(crate) fn resume(&mut self) -> Vec<LaneId> {
        let room = self.total <= self.limits.total_bytes / 4 * 3;
        let limits = self.limits;
        let ready = |held: &Held| {
            held.rows == 0
                || (room && held.rows <= limits.lane_rows / 2 && held.bytes <= limits.lane_bytes / 2)
        };
        self.lanes
            .iter_mut()
            .filter(|(_, held)| held.paused && ready(held))
            .map(|(lane, held)| {
                held.paused = false;
                *lane
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    const LIMITS: Limits = Limits { lane_rows: 8, lane_bytes: 1000, total_bytes: 2500 };

    #[test]
    fn a_lane_is_paused_at_its_limit_and_resumed_at_half_of_it() {
        let mut budget = Budget::new(LIMITS);
        let lane = LaneId(1);
        for _ in 0..7 {
            assert_eq!(budget.handed(lane, 10), Pressure::Flows);
        }
        assert_eq!(budget.handed(lane, 10), Pressure::Pause);
        for _ in 0..3 {
            budget.settled(lane, 10);
            assert!(budget.resume().is_empty(), "it must not flicker");
        }
        budget.settled(lane, 10);
        assert_eq!(budget.resume(), [lane]);
    }

    #[test]
    fn an_empty_lane_flows_although_stuck_ones_hold_the_total() {
        let mut budget = Budget::new(LIMITS);
        for stuck in [1, 2, 3] {
            budget.handed(LaneId(stuck), 999);
        }
        assert_eq!(budget.handed(LaneId(4), 50), Pressure::Pause);
        assert!(budget.resume().is_empty());
        budget.settled(LaneId(4), 50);
        assert_eq!(budget.resume(), [LaneId(4)]);
    }

    proptest! {
        /// Only lanes that flow are given records, as the poll thread does it.
        #[test]
        fn limits_are_passed_by_at_most_one_record_and_every_lane_comes_back(
            steps in proptest::collection::vec((0_u64..6, 1_usize..1500, any::<bool>()), 1..400),
        ) {
            const LARGEST: usize = 1500;
            let mut budget = Budget::new(LIMITS);
            let mut held: HashMap<u64, Vec<usize>> = HashMap::new();
            let mut paused = std::collections::HashSet::new();
            for (lane, bytes, give) in steps {
                if give && !paused.contains(&lane) {
                    held.entry(lane).or_default().push(bytes);
                    if budget.handed(LaneId(lane), bytes) == Pressure::Pause {
                        paused.insert(lane);
                    }
                } else if let Some(bytes) = held.entry(lane).or_default().pop() {
                    budget.settled(LaneId(lane), bytes);
                }
                for LaneId(lane) in budget.resume() {
                    prop_assert!(paused.remove(&lane), "only a paused lane is resumed");
                }
                for rows in held.values() {
                    prop_assert!(rows.len() <= LIMITS.lane_rows);
                    prop_assert!(rows.iter().sum::<usize>() < LIMITS.lane_bytes + LARGEST);
                }
                let total: usize = held.values().flatten().sum();
                prop_assert!(total < LIMITS.total_bytes + 6 * LARGEST);
            }
            for (lane, rows) in held {
                for bytes in rows {
                    budget.settled(LaneId(lane), bytes);
                }
            }
            for LaneId(lane) in budget.resume() {
                paused.remove(&lane);
            }
            prop_assert!(paused.is_empty(), "still paused: {paused:?}");
        }
    }
}

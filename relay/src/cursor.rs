//! The cursor of a shard, and how a page moves it. Pure: the rule of the whole reading design in one place.
//!
//! A cursor is `(position, snapshot, ceiling)`. The shard's consumed set is exactly
//! `{ m : m.position <= position and m.xid visible in snapshot }`. What a later snapshot S′ shows beyond that is
//!
//! * **late**: at or below `position`, visible in S′ but not in `snapshot`. Only transactions below `ceiling` can own
//!   such rows: a row takes its xid before its position, so whatever lies below a row that was read took an xid before
//!   the snapshot it was read at, and the ceiling is the next xid as of then;
//! * **fresh**: above `position`.
//!
//! A page is a prefix of late, then fresh, both in order of position. Any prefix of a page may be acknowledged when the
//! process dies, so there is a cursor for each prefix:
//!
//! ```text
//!   page:   l1  l2  l3 │ f1  f2  f3            read at S′ from (p, S, c)
//!            └── (p, S, c, late (S′, l2))       ends inside late: S′ stays fixed until the late ones are worked off
//!                        └── (f1, S′, c′)       ends inside fresh: every late row came first, so S′ is complete up to f1
//! ```
//!
//! While `late` is set, a page is read against its fixed snapshot and holds late rows only; an empty one ends it.

/// How far a shard is published. Snapshots and xids are kept as Postgres prints them: they are compared only there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cursor {
    /// The highest position consumed as fresh.
    pub position: i64,
    /// What was visible when everything up to `position` was consumed.
    pub snapshot: String,
    /// No transaction at or above this xid owns a row at or below `position`.
    pub ceiling: String,
    /// Set while late rows are being worked off.
    pub late: Option<Late>,
}

/// The late rows visible in `snapshot` are consumed up to `position`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Late {
    /// The snapshot the late rows are read against, fixed until they are done.
    pub snapshot: String,
    /// The last late position consumed.
    pub position: i64,
}

/// When a page was read: one statement, so one snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReadAt {
    /// `pg_current_snapshot()` of the statement.
    pub snapshot: String,
    /// The next xid, as of after the snapshot.
    pub ceiling: String,
}

impl Cursor {
    /// The cursor once the rows of a page up to and including the one at `position` are acknowledged.
    #[must_use]
    pub fn after(&self, read: &ReadAt, position: i64) -> Self {
        if position > self.position {
            return Self {
                position,
                snapshot: read.snapshot.clone(),
                ceiling: read.ceiling.clone(),
                late: None,
            };
        }
        let snapshot = self.late.as_ref().map_or(&read.snapshot, |late| &late.snapshot).clone();
        Self { late: Some(Late { snapshot, position }), ..self.clone() }
    }

    /// The cursor once a page came back empty: nothing is left to find in the snapshot it was read at.
    #[must_use]
    pub fn after_empty(&self, read: &ReadAt) -> Self {
        let snapshot = self.late.as_ref().map_or(&read.snapshot, |late| &late.snapshot).clone();
        Self { snapshot, late: None, ..self.clone() }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    /// A row of the model: its transaction took xid, later a position; `committed_at` is a logical time.
    #[derive(Debug, Clone, Copy)]
    struct Row {
        xid: u64,
        position: i64,
        committed_at: u64,
    }

    #[derive(Debug)]
    /// What Postgres would answer at `time`, in the model: snapshots are printed as the logical time itself.
    struct Model {
        rows: Vec<Row>,
        /// When each xid was assigned.
        begun: Vec<u64>,
    }

    impl Model {
        fn read_at(&self, time: u64) -> ReadAt {
            let next = self.begun.iter().filter(|b| **b <= time).count();
            ReadAt { snapshot: time.to_string(), ceiling: next.to_string() }
        }

        fn visible(&self, row: &Row, snapshot: &str) -> bool {
            row.committed_at <= snapshot.parse().unwrap()
        }

        fn page(&self, cursor: &Cursor, read: &ReadAt, limit: usize) -> Vec<Row> {
            let shown = cursor.late.as_ref().map_or(&read.snapshot, |l| &l.snapshot);
            let after = cursor.late.as_ref().map_or(-1, |l| l.position);
            let ceiling: u64 = cursor.ceiling.parse().unwrap();
            let late = self.rows.iter().filter(|r| {
                r.position <= cursor.position
                    && r.position > after
                    && self.visible(r, shown)
                    && !self.visible(r, &cursor.snapshot)
                    && r.xid < ceiling
            });
            let fresh = self.rows.iter().filter(|r| {
                cursor.late.is_none() && r.position > cursor.position && self.visible(r, &read.snapshot)
            });
            let mut page: Vec<Row> = late.chain(fresh).copied().collect();
            page.sort_by_key(|r| r.position);
            page.truncate(limit);
            page
        }
    }

    /// Transactions that take an xid, then positions, then commit, in any interleaving.
    fn model() -> impl Strategy<Value = Model> {
        prop::collection::vec((0u64..60, 1u64..6, 0u64..60, 1usize..5), 1..14).prop_map(|txs| {
            let mut begun: Vec<(u64, usize)> = txs.iter().enumerate().map(|(i, t)| (t.0, i)).collect();
            begun.sort_unstable();
            let mut positions: Vec<(u64, usize)> = Vec::new();
            for (i, t) in txs.iter().enumerate() {
                positions.extend((0..t.3).map(|n| (t.0 + t.1 * (n as u64 + 1), i)));
            }
            positions.sort_unstable();
            let xid_of = |i: usize| begun.iter().position(|b| b.1 == i).unwrap() as u64;
            let last_of = |i: usize| txs[i].0 + txs[i].1 * txs[i].3 as u64;
            let rows = positions
                .iter()
                .enumerate()
                .map(|(p, (_, i))| Row {
                    xid: xid_of(*i),
                    position: p as i64 + 1,
                    committed_at: last_of(*i) + txs[*i].2 + 1,
                })
                .collect();
            Model { rows, begun: begun.iter().map(|b| b.0).collect() }
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2_000))]

        #[test]
        fn every_committed_row_is_read_once_whatever_the_pages_and_prefixes(
            model in model(),
            steps in prop::collection::vec((1usize..4, 0usize..5, 0u64..9), 1..60),
        ) {
            let start = model.read_at(0);
            let mut cursor = Cursor { position: 0, snapshot: start.snapshot, ceiling: start.ceiling, late: None };
            let mut seen = BTreeSet::new();
            let mut time = 0;
            let settled = steps.iter().map(|s| s.2).sum::<u64>() + 1_000;
            let quiet = std::iter::repeat_n((3, 3, 0), 400);
            for (i, (limit, acked, wait)) in steps.iter().copied().chain(quiet).enumerate() {
                time = if i < steps.len() { time + wait } else { settled };
                let read = model.read_at(time);
                let page = model.page(&cursor, &read, limit);
                if page.is_empty() {
                    cursor = cursor.after_empty(&read);
                    continue;
                }
                let acked = &page[..acked.min(page.len())];
                for row in acked {
                    prop_assert!(seen.insert(row.position), "read twice: {row:?}");
                }
                if let Some(last) = acked.last() {
                    cursor = cursor.after(&read, last.position);
                }
            }
            prop_assert_eq!(seen.len(), model.rows.len(), "lost");
        }
    }
}

//! Which records of a partition may be handled at once: at most one of each key, in the order in which they came.
//!
//! A record without a key has nothing before it. Keys whose earlier records are set aside are known here, so that a later one
//! goes behind them; `inbox.parked` decides, and this is only told so that it need not be asked for every record.

use std::collections::{HashMap, HashSet, VecDeque};

use bytes::Bytes;

use crate::Record;

/// A record whose turn it is.
#[derive(Debug)]
pub(super) struct Turn {
    pub(super) record: Record,
    pub(super) way: Way,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    Free,
    /// Earlier ones of its key are set aside, as far as is known.
    Behind,
}

/// What a record's turn did to its key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Left {
    Free,
    /// It is set aside, or went behind others.
    Aside,
}

#[derive(Debug, Default)]
pub(super) struct Queues {
    /// By key: what waits while one is handled.
    keys: HashMap<Bytes, VecDeque<Record>>,
    aside: HashSet<Bytes>,
}

impl Queues {
    pub(super) fn new(aside: impl IntoIterator<Item = Vec<u8>>) -> Self {
        Self { keys: HashMap::new(), aside: aside.into_iter().map(Bytes::from).collect() }
    }

    /// Whether earlier ones of its key are set aside, as far as is known.
    pub(super) fn is_behind(&self, record: &Record) -> bool {
        record.shared_key().is_some_and(|key| self.aside.contains(key))
    }

    /// A record came. Nothing: it waits for its turn.
    pub(super) fn arrived(&mut self, record: Record) -> Option<Turn> {
        let Some(key) = record.shared_key().cloned() else {
            return Some(Turn { record, way: Way::Free });
        };
        if let Some(waiting) = self.keys.get_mut(&key) {
            waiting.push_back(record);
            return None;
        }
        let way = self.way(&key);
        self.keys.insert(key, VecDeque::new());
        Some(Turn { record, way })
    }

    /// The turn of a record with that key is over; whose is next.
    pub(super) fn ended(&mut self, key: Option<&Bytes>, left: Left) -> Option<Turn> {
        let key = key?;
        match left {
            Left::Free => self.aside.remove(key),
            Left::Aside => self.aside.insert(key.clone()),
        };
        let next = self.keys.get_mut(key).and_then(VecDeque::pop_front);
        let Some(record) = next else {
            self.keys.remove(key);
            return None;
        };
        Some(Turn { record, way: self.way(key) })
    }

    fn way(&self, key: &Bytes) -> Way {
        if self.aside.contains(key) { Way::Behind } else { Way::Free }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn of_each_key_one_at_a_time_in_order_and_none_is_forgotten(
            keys in proptest::collection::vec(proptest::option::of(0_u8..4), 1..80),
            ends in proptest::collection::vec((any::<proptest::sample::Index>(), any::<bool>()), 0..200),
        ) {
            let mut queues = Queues::new([vec![3]]);
            let mut aside = std::collections::BTreeSet::from([3]);
            let mut running: Vec<(Option<u8>, i64)> = Vec::new();
            let mut last: HashMap<u8, i64> = HashMap::new();
            let mut seen = 0;
            let mut begin = |turn: Option<Turn>, running: &mut Vec<(Option<u8>, i64)>, aside: &std::collections::BTreeSet<u8>| {
                let Some(turn) = turn else { return Ok(()) };
                let (key, offset) = (turn.record.key().map(|key| key[0]), turn.record.offset());
                if let Some(key) = key {
                    prop_assert!(running.iter().all(|(other, _)| *other != Some(key)), "two of one key at once");
                    prop_assert!(last.insert(key, offset).is_none_or(|last| last < offset), "out of order");
                    prop_assert_eq!(turn.way == Way::Behind, aside.contains(&key));
                } else {
                    prop_assert_eq!(turn.way, Way::Free);
                }
                running.push((key, offset));
                seen += 1;
                Ok(())
            };
            let mut ends = ends.into_iter();
            let mut end = |queues: &mut Queues, running: &mut Vec<(Option<u8>, i64)>, aside: &mut std::collections::BTreeSet<u8>| {
                let (index, parks) = ends.next().map_or((0, false), |(index, parks)| (index.index(running.len()), parks));
                let (key, _) = running.remove(index);
                let key_bytes = key.map(|key| Bytes::from(vec![key]));
                if let Some(key) = key {
                    if parks { aside.insert(key); } else { aside.remove(&key); }
                }
                queues.ended(key_bytes.as_ref(), if parks { Left::Aside } else { Left::Free })
            };
            let total = keys.len();
            for (offset, key) in (0_i64..).zip(keys) {
                let mut record = Record::bare("orders", 0, offset);
                record.set_key(key.map(|key| vec![key]));
                let turn = queues.arrived(record);
                begin(turn, &mut running, &aside)?;
                if offset % 3 == 0 && !running.is_empty() {
                    let turn = end(&mut queues, &mut running, &mut aside);
                    begin(turn, &mut running, &aside)?;
                }
            }
            while !running.is_empty() {
                let turn = end(&mut queues, &mut running, &mut aside);
                begin(turn, &mut running, &aside)?;
            }
            prop_assert_eq!(seen, total);
            prop_assert!(queues.keys.is_empty());
        }
    }
}

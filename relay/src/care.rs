//! Which messages of a shard are handled with care after a refusal, and which are refused for good. Pure.
//!
//! A broker refuses whole batches, and its limit on sizes counts the batch. So a refusal condemns nobody as long as others were
//! in it. Who was in the refused batch is a *suspect*: suspects go in groups that get smaller with each refusal, with nothing else in
//! flight, until one is refused alone. That one is *condemned*: the next producer sets it aside when it comes to it.
//!
//! ```text
//!   refused batch of n ──▶ suspects, groups of n/8 ──refused──▶ groups of n/64 ── … ──▶ one alone ──refused──▶ condemned
//!                              └────────── acknowledged: suspects no longer ──────────────┘
//! ```
//!
//! Where the broker has told the invalid records of a batch from the others, they are condemned at once.

use std::collections::{BTreeMap, BTreeSet};

use baton_protocol::lifecycle::message::Cause;

/// By how much the groups get smaller with each refusal.
const NARROWER: usize = 8;

/// The messages of one shard that are under suspicion, by position.
#[derive(Debug, Default)]
pub(crate) struct Care {
    suspects: BTreeSet<i64>,
    /// How many of them may be in flight together.
    group: usize,
    condemned: BTreeMap<i64, (Cause, String)>,
}

/// How sure it is whom a refusal was meant for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sure {
    /// For each of those that were named: they were alone, or the broker told them from the others.
    Exactly,
    /// For one of them, or all together.
    Among,
}

impl Care {
    /// Kafka refused these for their own sake, or for that of their batch. Whether the next one will be narrower.
    pub(crate) fn refused(&mut self, positions: &[i64], sure: Sure, cause: Cause, error: &str) {
        match (sure, positions) {
            (Sure::Among, [_, _, ..]) => {
                self.suspects.extend(positions);
                self.group = (positions.len() / NARROWER).max(1);
            }
            (Sure::Exactly | Sure::Among, _) => {
                for position in positions {
                    self.suspects.remove(position);
                    self.condemned.insert(*position, (cause, error.to_owned()));
                }
            }
        }
    }

    /// How many messages may be in flight together with this one, where it matters.
    pub(crate) fn group(&self, position: i64) -> Option<usize> {
        self.suspects.contains(&position).then_some(self.group)
    }

    /// Why a message is to be set aside.
    pub(crate) fn condemned(&self, position: i64) -> Option<&(Cause, String)> {
        self.condemned.get(&position)
    }

    /// The message is acknowledged or set aside.
    pub(crate) fn settled(&mut self, position: i64) {
        if !self.is_idle() {
            self.suspects.remove(&position);
            self.condemned.remove(&position);
        }
    }

    /// Whether nobody is under suspicion.
    pub(crate) fn is_idle(&self) -> bool {
        self.suspects.is_empty() && self.condemned.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn whoever_is_too_large_is_condemned_and_nobody_else_however_the_batches_fall(
            rows in 1_i64..300, bad in prop::collection::btree_set(0_i64..300, 0..4), batch in 1_usize..300,
        ) {
            let (mut care, mut refusals) = (Care::default(), 0);
            let (mut published, mut aside) = (BTreeSet::new(), BTreeSet::new());
            let mut next = 0;
            while next < rows {
                if care.condemned(next).is_some() {
                    aside.insert(next);
                    care.settled(next);
                    next += 1;
                    continue;
                }
                // What may be in flight together: suspects by themselves, others by themselves.
                let group = care.group(next);
                let together: Vec<i64> = (next..rows)
                    .take_while(|row| care.group(*row) == group && care.condemned(*row).is_none())
                    .take(group.unwrap_or(batch))
                    .collect();
                if together.iter().any(|row| bad.contains(row)) {
                    refusals += 1;
                    prop_assert!(refusals < 100, "it does not end");
                    let sure = if together.len() == 1 { Sure::Exactly } else { Sure::Among };
                    care.refused(&together, sure, Cause::TooLarge, "too large");
                } else {
                    for row in together {
                        published.insert(row);
                        care.settled(row);
                        next = row + 1;
                    }
                }
            }
            let bad: BTreeSet<i64> = bad.into_iter().filter(|row| *row < rows).collect();
            prop_assert_eq!(&aside, &bad);
            prop_assert_eq!(published.len() + aside.len(), usize::try_from(rows).unwrap());
            prop_assert!(care.is_idle());
        }
    }

    #[test]
    fn whom_the_broker_names_is_condemned_at_once() {
        let mut care = Care::default();
        care.refused(&[3, 5], Sure::Exactly, Cause::InvalidRecord, "compact");
        assert_eq!(care.condemned(3).map(|(cause, _)| *cause), Some(Cause::InvalidRecord));
        assert!(care.condemned(4).is_none() && care.group(4).is_none());
    }
}

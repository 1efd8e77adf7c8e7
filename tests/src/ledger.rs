//! The ledger: what was committed, what was seen of it, and what is wrong with that.
//!
//! One side is the truth (what the database table holds once everything is quiet), the other is what was seen: the
//! records of a topic in wire order, or the effects in the order they were applied. [`judge`] compares the two and
//! counts faults of six kinds:
//!
//! | fault | meaning |
//! |---|---|
//! | lost | committed, never seen |
//! | phantom | seen, never committed |
//! | repeated | seen once more (on the wire that is allowed, as an effect it is a double effect) |
//! | out of order | the first sight of a message comes after the first sight of a later one of the same key |
//! | conflicting | seen under a committed id, but with another content |
//! | split | a key on more than one lane, where no order between its messages exists |
//!
//! Nothing here reads a log or a clock, so a verdict depends on nothing but the two histories. The checker is itself
//! tested with planted bad histories of each kind; a checker that misses them would make every test above it worthless.

use std::collections::{HashMap, HashSet};
use std::fmt;

/// One message as the database holds it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Committed {
    /// The identity under which it is seen later.
    pub id: String,
    /// The ordering scope. Messages without one have no order.
    pub key: Option<String>,
    /// Its place among the messages of its key: a number drawn under the lock that the key's producers share.
    pub rank: i64,
    /// What must arrive unchanged.
    pub content: Vec<u8>,
}

/// One sight of a message: a record of a topic, or an effect.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seen {
    /// The identity it carries.
    pub id: String,
    /// Where it was seen. Sights of one lane are in order; between lanes there is none. A record's is its partition.
    pub lane: String,
    /// What arrived.
    pub content: Vec<u8>,
}

/// The faults found, each by the id of the message concerned (the key, for `split`).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Findings {
    /// How many messages were committed.
    pub committed: usize,
    /// How many sights there were, repeated ones included.
    pub seen: usize,
    /// Committed, never seen.
    pub lost: Vec<String>,
    /// Seen, never committed.
    pub phantom: Vec<String>,
    /// Seen once more; an id stands here as often as it was repeated.
    pub repeated: Vec<String>,
    /// First seen after a later one of its key.
    pub out_of_order: Vec<String>,
    /// Seen with another content than was committed.
    pub conflicting: Vec<String>,
    /// Keys on more than one lane.
    pub split: Vec<String>,
}

impl Findings {
    /// True when the wire kept the promise of at-least-once delivery: nothing but repeats.
    #[must_use]
    pub fn wire_is_right(&self) -> bool {
        [&self.lost, &self.phantom, &self.out_of_order, &self.conflicting, &self.split]
            .iter()
            .all(|faults| faults.is_empty())
    }

    /// True when every message took effect exactly as committed: not even repeats.
    #[must_use]
    pub fn effects_are_right(&self) -> bool {
        self.wire_is_right() && self.repeated.is_empty()
    }
}

/// Counts first, then a few names of each fault, to look them up by.
impl fmt::Display for Findings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 3;
        let faults = [
            ("lost", &self.lost),
            ("phantom", &self.phantom),
            ("out of order", &self.out_of_order),
            ("conflicting", &self.conflicting),
            ("split", &self.split),
        ];
        write!(f, "{} committed, {} seen:", self.committed, self.seen)?;
        for (name, ids) in faults {
            write!(f, " {} {name},", ids.len())?;
        }
        write!(f, " {} repeated", self.repeated.len())?;
        for (name, ids) in faults.into_iter().filter(|(_, ids)| !ids.is_empty()) {
            let shown: Vec<&str> = ids.iter().take(SHOWN).map(String::as_str).collect();
            write!(f, "; {name}: {}", shown.join(", "))?;
            if ids.len() > SHOWN {
                write!(f, ", …")?;
            }
        }
        Ok(())
    }
}

/// Compares what was seen with what was committed. `seen` is in order within each lane.
#[must_use]
pub fn judge(committed: &[Committed], seen: &[Seen]) -> Findings {
    let truth: HashMap<&str, &Committed> = committed.iter().map(|c| (c.id.as_str(), c)).collect();
    let mut findings = Findings { committed: committed.len(), seen: seen.len(), ..Findings::default() };
    let mut met: HashSet<&str> = HashSet::new();
    let mut highest: HashMap<(&str, &str), i64> = HashMap::new();
    let mut lane_of: HashMap<&str, &str> = HashMap::new();
    let mut split: HashSet<&str> = HashSet::new();

    for sight in seen {
        let Some(message) = truth.get(sight.id.as_str()) else {
            findings.phantom.push(sight.id.clone());
            continue;
        };
        if sight.content != message.content {
            findings.conflicting.push(sight.id.clone());
        }
        let key = message.key.as_deref();
        if let Some(key) = key
            && *lane_of.entry(key).or_insert(&sight.lane) != sight.lane
            && split.insert(key)
        {
            findings.split.push(key.to_owned());
        }
        if !met.insert(&sight.id) {
            findings.repeated.push(sight.id.clone());
            continue;
        }
        if let Some(key) = key {
            let highest = highest.entry((key, &sight.lane)).or_insert(message.rank);
            if message.rank < *highest {
                findings.out_of_order.push(sight.id.clone());
            }
            *highest = (*highest).max(message.rank);
        }
    }
    findings.lost = committed.iter().filter(|c| !met.contains(c.id.as_str())).map(|c| c.id.clone()).collect();
    findings
}

/// How many messages were taken late: first seen after one of the same group that has a higher position.
///
/// `sights` gives, in order of sight, the group within which positions ascend unless something came late (a shard and
/// the lane it was seen on) and the position. Repeats count once. A message that came late onto an empty lane goes
/// uncounted, so this is a lower bound.
#[must_use]
pub fn late<G: Eq + std::hash::Hash>(sights: impl IntoIterator<Item = (G, i64)>) -> usize {
    let mut highest: HashMap<G, i64> = HashMap::new();
    let mut met = HashSet::new();
    let mut late = 0;
    for (group, position) in sights {
        if !met.insert(position) {
            continue;
        }
        let highest = highest.entry(group).or_insert(position);
        late += usize::from(position < *highest);
        *highest = (*highest).max(position);
    }
    late
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn message(key: Option<&str>, rank: i64) -> Committed {
        let id = format!("{}-{rank}", key.unwrap_or("none"));
        Committed { content: id.clone().into_bytes(), id, key: key.map(str::to_owned), rank }
    }

    fn sight(message: &Committed) -> Seen {
        let lane = message.key.as_ref().map_or(0, |key| key.len() % 2);
        Seen { id: message.id.clone(), lane: lane.to_string(), content: message.content.clone() }
    }

    /// Three keys of four messages on two lanes, and two messages without a key.
    fn story() -> (Vec<Committed>, Vec<Seen>) {
        let committed: Vec<Committed> = (1..=4)
            .flat_map(|rank| ["a", "b", "cc"].map(|key| message(Some(key), rank)))
            .chain([message(None, 1), message(None, 2)])
            .collect();
        let seen = committed.iter().map(sight).collect();
        (committed, seen)
    }

    #[test]
    fn a_faithful_history_is_right() {
        let (committed, seen) = story();
        let findings = judge(&committed, &seen);
        assert!(findings.effects_are_right(), "{findings}");
        assert_eq!((findings.committed, findings.seen), (14, 14));
    }

    #[test]
    fn a_missing_message_is_lost() {
        let (committed, mut seen) = story();
        seen.retain(|s| s.id != "b-2");
        let findings = judge(&committed, &seen);
        assert_eq!(findings.lost, ["b-2"]);
        assert!(!findings.wire_is_right());
    }

    #[test]
    fn a_message_that_nobody_committed_is_a_phantom() {
        let (mut committed, seen) = story();
        committed.retain(|c| c.id != "a-4");
        let findings = judge(&committed, &seen);
        assert_eq!(findings.phantom, ["a-4"]);
        assert!(!findings.wire_is_right());
    }

    #[test]
    fn a_repeat_is_right_on_the_wire_and_wrong_as_an_effect() {
        let (committed, mut seen) = story();
        let tail = seen[seen.len() - 5..].to_vec();
        seen.extend(tail);
        let findings = judge(&committed, &seen);
        assert_eq!(findings.repeated.len(), 5);
        assert!(findings.wire_is_right(), "{findings}");
        assert!(!findings.effects_are_right());
    }

    #[test]
    fn a_message_first_seen_after_a_later_one_of_its_key_is_out_of_order() {
        let (committed, mut seen) = story();
        let at = |seen: &[Seen], id: &str| seen.iter().position(|s| s.id == id).unwrap();
        let (second, third) = (at(&seen, "a-2"), at(&seen, "a-3"));
        seen.swap(second, third);
        let findings = judge(&committed, &seen);
        assert_eq!(findings.out_of_order, ["a-2"]);
        assert!(!findings.wire_is_right());
    }

    #[test]
    fn a_repeat_of_an_old_message_is_not_out_of_order() {
        let (committed, mut seen) = story();
        seen.push(sight(&message(Some("a"), 1)));
        assert!(judge(&committed, &seen).wire_is_right());
    }

    #[test]
    fn messages_without_a_key_have_no_order() {
        let (committed, mut seen) = story();
        let last = seen.len() - 1;
        seen.swap(last, last - 1);
        assert!(judge(&committed, &seen).effects_are_right());
    }

    #[test]
    fn one_changed_byte_is_a_conflict_even_in_a_repeat() {
        let (committed, mut seen) = story();
        let mut again = seen[0].clone();
        again.content[0] ^= 1;
        seen.push(again);
        let findings = judge(&committed, &seen);
        assert_eq!(findings.conflicting, ["a-1"]);
        assert!(!findings.wire_is_right());
    }

    #[test]
    fn a_key_on_two_lanes_is_split() {
        let (committed, mut seen) = story();
        for sight in seen.iter_mut().filter(|s| s.id == "cc-3") {
            sight.lane = "1".to_owned();
        }
        let findings = judge(&committed, &seen);
        assert_eq!(findings.split, ["cc"]);
        assert!(!findings.wire_is_right());
    }

    #[test]
    fn the_summary_names_counts_and_examples() {
        let (committed, mut seen) = story();
        seen.retain(|s| s.id != "b-2");
        assert_eq!(
            judge(&committed, &seen).to_string(),
            "14 committed, 13 seen: 1 lost, 0 phantom, 0 out of order, 0 conflicting, 0 split, 0 repeated; lost: b-2"
        );
    }

    #[test]
    fn what_is_seen_below_a_higher_position_of_its_group_is_late() {
        let sights = [("s1", 1), ("s1", 4), ("s2", 2), ("s1", 3), ("s1", 5), ("s1", 4), ("s1", 3)];
        assert_eq!(late(sights), 1);
    }

    /// A right history: messages of some keys, interleaved in order, with stretches handed over again as after a crash.
    fn right_history() -> impl Strategy<Value = (Vec<Committed>, Vec<Seen>)> {
        let keys = prop::collection::vec(0..5_usize, 1..80);
        (keys, prop::collection::vec((any::<prop::sample::Index>(), 0..10_usize), 0..4)).prop_map(
            |(keys, crashes)| {
                let mut ranks = [0; 5];
                let committed: Vec<Committed> = keys
                    .into_iter()
                    .map(|key| {
                        ranks[key] += 1;
                        message(Some(&"k".repeat(key + 1)), ranks[key])
                    })
                    .collect();
                let mut seen: Vec<Seen> = committed.iter().map(sight).collect();
                for (at, back) in crashes {
                    let at = at.index(seen.len());
                    let again = seen[at.saturating_sub(back)..at].to_vec();
                    seen.splice(at..at, again);
                }
                (committed, seen)
            },
        )
    }

    proptest! {
        #[test]
        fn a_right_history_is_never_blamed((committed, seen) in right_history()) {
            let findings = judge(&committed, &seen);
            prop_assert!(findings.wire_is_right(), "{findings}");
            prop_assert_eq!(findings.repeated.len(), seen.len() - committed.len());
        }

        #[test]
        fn a_loss_planted_anywhere_is_found((committed, mut seen) in right_history(), at in any::<prop::sample::Index>()) {
            let victim = committed[at.index(committed.len())].id.clone();
            seen.retain(|s| s.id != victim);
            prop_assert_eq!(judge(&committed, &seen).lost, vec![victim]);
        }

        #[test]
        fn a_phantom_planted_anywhere_is_found((mut committed, seen) in right_history(), at in any::<prop::sample::Index>()) {
            let victim = committed.remove(at.index(committed.len())).id;
            let findings = judge(&committed, &seen);
            prop_assert!(findings.phantom.contains(&victim));
            prop_assert!(findings.lost.is_empty());
        }

        #[test]
        fn an_inversion_planted_anywhere_is_found(
            (committed, mut seen) in right_history(), at in any::<prop::sample::Index>()
        ) {
            // The first sight of one message moves behind everything, so it follows whatever its key has later.
            let victim = committed[at.index(committed.len())].clone();
            let has_later = committed.iter().any(|c| c.key == victim.key && c.rank > victim.rank);
            seen.retain(|s| s.id != victim.id);
            seen.push(sight(&victim));
            let findings = judge(&committed, &seen);
            prop_assert_eq!(findings.out_of_order, if has_later { vec![victim.id] } else { vec![] });
        }
    }
}

//! Visits every state, breadth first.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt;

use super::world::{Deed, Rules, World, Wrong};

/// What there was to see.
#[derive(Debug)]
pub(super) struct Explored {
    pub(super) states: usize,
    pub(super) transitions: usize,
    /// States with everything published.
    pub(super) ended: usize,
    /// States from which no run without further faults leads there.
    pub(super) hopeless: usize,
}

/// A promise that was broken, and the shortest way to it. Which relay is called 0 may change from one step to the next:
/// states that differ by their names alone are one.
#[derive(Debug)]
pub(super) struct Found {
    pub(super) wrong: Wrong,
    way: Vec<Deed>,
    states: usize,
}

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} after {} states, by", self.wrong, self.states)?;
        self.way.iter().try_for_each(|deed| write!(f, " ▸ {deed:?}"))
    }
}

/// Visits every state that comes about under `rules`, or stops at the first broken promise.
pub(super) fn explore(rules: Rules) -> Result<Explored, Found> {
    let start = World::start();
    let mut numbers = HashMap::from([(start, 0_u32)]);
    let mut worlds = vec![start];
    // By which deed in which state each one came about first.
    let mut came_by: Vec<Option<(u32, Deed)>> = vec![None];
    // Transitions that are no fault, as (to, from).
    let mut calm: Vec<(u32, u32)> = Vec::new();
    let mut transitions = 0;
    let mut at = 0_u32;
    while let Some(world) = worlds.get(at as usize).copied() {
        for step in world.steps(rules) {
            let next = match step.after {
                Ok(next) => next,
                Err(wrong) => {
                    return Err(Found { wrong, way: way(&came_by, at, step.deed), states: worlds.len() });
                }
            };
            transitions += 1;
            let number = match numbers.entry(next) {
                Entry::Occupied(known) => *known.get(),
                Entry::Vacant(new) => {
                    let number = u32::try_from(worlds.len()).expect("fewer states than a u32 counts");
                    worlds.push(next);
                    came_by.push(Some((at, step.deed)));
                    *new.insert(number)
                }
            };
            if !step.deed.is_fault() && number != at {
                calm.push((number, at));
            }
        }
        at += 1;
    }
    let ended: Vec<u32> =
        (0_u32..).zip(&worlds).filter(|(_, world)| world.is_ended()).map(|(number, _)| number).collect();
    let hopeful = leading_to(&ended, calm, worlds.len());
    Ok(Explored { states: worlds.len(), transitions, ended: ended.len(), hopeless: worlds.len() - hopeful })
}

fn way(came_by: &[Option<(u32, Deed)>], mut at: u32, last: Deed) -> Vec<Deed> {
    let mut way = vec![last];
    while let Some((before, deed)) = came_by[at as usize] {
        way.push(deed);
        at = before;
    }
    way.reverse();
    way
}

/// How many states lead to one of `ends` by the transitions `back`, given as (to, from).
fn leading_to(ends: &[u32], mut back: Vec<(u32, u32)>, states: usize) -> usize {
    back.sort_unstable();
    let mut seen = vec![false; states];
    let mut open = ends.to_vec();
    ends.iter().for_each(|end| seen[*end as usize] = true);
    let mut count = open.len();
    while let Some(to) = open.pop() {
        let first = back.partition_point(|(t, _)| *t < to);
        for (_, from) in back[first..].iter().take_while(|(t, _)| *t == to) {
            if !seen[*from as usize] {
                seen[*from as usize] = true;
                open.push(*from);
                count += 1;
            }
        }
    }
    count
}

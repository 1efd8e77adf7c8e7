//! The verdict of `orders check`: what was placed, against what was published and what was billed.
//!
//! The table `orders.placed` is authoritative: an order exists if its transaction committed, whatever the program that
//! placed it was told. Five things can be said of orders, and the first four must never be:
//!
//! | word | meaning |
//! |---|---|
//! | lost | placed, but neither billed nor waiting in the dead-letter topic |
//! | phantom | on a topic or billed, but not placed, or not placed like that |
//! | doubled | billed more than once |
//! | out of order | published or billed for the first time after a later one of the same customer |
//! | dead-lettered | waiting in the dead-letter topic, not billed |
//!
//! What has ever been in the dead-letter topic is billed when an operator says so; its place among its customer's others
//! means nothing. A record that comes twice is at-least-once delivery and no fault; it is counted for people to see.
//! Nothing here reads a clock, a table or a topic, so the judge itself can be judged, with planted bad histories.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::fmt;

use serde::Serialize;
use uuid::Uuid;

use crate::order::Facts;

/// What a record of a topic says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Content {
    /// An order.
    Order(Facts),
    /// It is named like this order, but its payload does not say the same.
    Garbled(Uuid),
    /// It is no order at all: somebody else's record.
    Foreign,
}

/// A record of a topic.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// Records of one partition are in order; between partitions there is none.
    pub partition: i32,
    /// What it says.
    pub content: Content,
}

/// Everything there is to see, in the order in which it must be looked at while orders keep flowing.
#[derive(Debug, Clone, Default)]
pub struct Evidence {
    /// `orders.placed`, read before anything else: these must be found further down.
    pub placed: Vec<Facts>,
    /// The topic, in offset order within each partition.
    pub published: Vec<Record>,
    /// The dead-letter topic.
    pub dead_lettered: Vec<Record>,
    /// `billing.invoice`, in the order in which it was written.
    pub billed: Vec<Facts>,
    /// `orders.placed` once more, read after everything else: what was found further up must be among these.
    pub placed_by_now: Vec<Facts>,
}

/// What is wrong, by order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Verdict {
    /// How many orders were placed.
    pub placed: usize,
    /// How many records the topic holds.
    pub published: usize,
    /// How many invoices there are.
    pub billed: usize,
    /// Placed, but neither billed nor waiting in the dead-letter topic.
    pub lost: BTreeSet<Uuid>,
    /// On a topic or billed, but not placed, or not placed like that.
    pub phantom: BTreeSet<Uuid>,
    /// Billed more than once.
    pub doubled: BTreeSet<Uuid>,
    /// Published for the first time after a later one of the same customer, or on another partition than those.
    pub published_out_of_order: BTreeSet<Uuid>,
    /// Billed for the first time after a later one of the same customer.
    pub billed_out_of_order: BTreeSet<Uuid>,
    /// Waiting in the dead-letter topic.
    pub dead_lettered: BTreeSet<Uuid>,
    /// Records that repeat an order: allowed, and what the inbox is for.
    pub wire_duplicates: usize,
    /// Records that are no orders.
    pub foreign: usize,
}

impl Verdict {
    /// Orders that are out of order anywhere.
    #[must_use]
    pub fn out_of_order(&self) -> BTreeSet<Uuid> {
        &self.published_out_of_order | &self.billed_out_of_order
    }

    /// Whether none of the four faults was found.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        self.lost.is_empty()
            && self.phantom.is_empty()
            && self.doubled.is_empty()
            && self.out_of_order().is_empty()
    }

    /// The same for programs: counts, and a few orders of each fault to look up.
    #[must_use]
    pub fn summary(&self) -> Summary {
        const SHOWN: usize = 10;
        let some = |orders: &BTreeSet<Uuid>| orders.iter().copied().take(SHOWN).collect();
        Summary {
            lost: self.lost.len(),
            phantom: self.phantom.len(),
            doubled: self.doubled.len(),
            out_of_order: self.out_of_order().len(),
            dead_lettered: self.dead_lettered.len(),
            placed: self.placed,
            published: self.published,
            billed: self.billed,
            wire_duplicates: self.wire_duplicates,
            foreign: self.foreign,
            examples: Examples {
                lost: some(&self.lost),
                phantom: some(&self.phantom),
                doubled: some(&self.doubled),
                published_out_of_order: some(&self.published_out_of_order),
                billed_out_of_order: some(&self.billed_out_of_order),
                dead_lettered: some(&self.dead_lettered),
            },
        }
    }
}

/// The line that `orders check` ends with.
impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Summary { lost, phantom, doubled, out_of_order, dead_lettered, .. } = self.summary();
        write!(
            f,
            "check: {lost} lost, {phantom} phantom, {doubled} doubled, {out_of_order} out of order, {dead_lettered} dead-lettered"
        )
    }
}

/// A [`Verdict`] in numbers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Summary {
    /// See [`Verdict::lost`].
    pub lost: usize,
    /// See [`Verdict::phantom`].
    pub phantom: usize,
    /// See [`Verdict::doubled`].
    pub doubled: usize,
    /// See [`Verdict::out_of_order`].
    pub out_of_order: usize,
    /// See [`Verdict::dead_lettered`].
    pub dead_lettered: usize,
    /// See [`Verdict::placed`].
    pub placed: usize,
    /// See [`Verdict::published`].
    pub published: usize,
    /// See [`Verdict::billed`].
    pub billed: usize,
    /// See [`Verdict::wire_duplicates`].
    pub wire_duplicates: usize,
    /// See [`Verdict::foreign`].
    pub foreign: usize,
    /// Up to ten orders of each kind.
    pub examples: Examples,
}

/// A few orders of each kind, to look up.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Examples {
    /// See [`Verdict::lost`].
    pub lost: Vec<Uuid>,
    /// See [`Verdict::phantom`].
    pub phantom: Vec<Uuid>,
    /// See [`Verdict::doubled`].
    pub doubled: Vec<Uuid>,
    /// See [`Verdict::published_out_of_order`].
    pub published_out_of_order: Vec<Uuid>,
    /// See [`Verdict::billed_out_of_order`].
    pub billed_out_of_order: Vec<Uuid>,
    /// See [`Verdict::dead_lettered`].
    pub dead_lettered: Vec<Uuid>,
}

/// Compares what is seen with what was placed.
#[must_use]
pub fn judge(evidence: &Evidence) -> Verdict {
    let truth: HashMap<Uuid, &Facts> =
        evidence.placed_by_now.iter().map(|facts| (facts.order_id, facts)).collect();
    let is_placed = |facts: &Facts| truth.get(&facts.order_id).is_some_and(|placed| *placed == facts);
    let mut verdict = Verdict {
        placed: evidence.placed.len(),
        published: evidence.published.len(),
        billed: evidence.billed.len(),
        ..Verdict::default()
    };

    let mut published = HashSet::new();
    let mut order = InOrder::default();
    for record in &evidence.published {
        match &record.content {
            Content::Foreign => verdict.foreign += 1,
            Content::Garbled(order_id) => {
                verdict.phantom.insert(*order_id);
            }
            Content::Order(facts) if !is_placed(facts) => {
                verdict.phantom.insert(facts.order_id);
            }
            Content::Order(facts) if !published.insert(facts.order_id) => verdict.wire_duplicates += 1,
            Content::Order(facts) => {
                if order.next(facts, record.partition) == Place::Wrong {
                    verdict.published_out_of_order.insert(facts.order_id);
                }
            }
        }
    }

    let mut dead = HashSet::new();
    for record in &evidence.dead_lettered {
        match &record.content {
            Content::Foreign => {}
            Content::Garbled(order_id) => {
                verdict.phantom.insert(*order_id);
            }
            Content::Order(facts) if !is_placed(facts) => {
                verdict.phantom.insert(facts.order_id);
            }
            Content::Order(facts) => {
                dead.insert(facts.order_id);
            }
        }
    }

    let mut billed = HashSet::new();
    let mut order = InOrder::default();
    for facts in &evidence.billed {
        if !is_placed(facts) {
            verdict.phantom.insert(facts.order_id);
        } else if !billed.insert(facts.order_id) {
            verdict.doubled.insert(facts.order_id);
        } else if !dead.contains(&facts.order_id) && order.next(facts, 0) == Place::Wrong {
            verdict.billed_out_of_order.insert(facts.order_id);
        }
    }

    let settled = |order_id: &Uuid| billed.contains(order_id) || dead.contains(order_id);
    verdict.lost =
        evidence.placed.iter().map(|facts| facts.order_id).filter(|order_id| !settled(order_id)).collect();
    verdict.dead_lettered = dead.into_iter().filter(|order_id| !billed.contains(order_id)).collect();
    verdict
}

/// Follows each customer's orders along one sequence of events.
#[derive(Default)]
struct InOrder<'e> {
    last: HashMap<&'e str, (i64, i32)>,
}

#[derive(PartialEq, Eq)]
enum Place {
    Right,
    Wrong,
}

impl<'e> InOrder<'e> {
    fn next(&mut self, facts: &'e Facts, partition: i32) -> Place {
        let (highest, home) = self.last.entry(&facts.customer).or_insert((facts.seq, partition));
        let place = if facts.seq < *highest || partition != *home { Place::Wrong } else { Place::Right };
        *highest = (*highest).max(facts.seq);
        place
    }
}

#[cfg(test)]
mod tests;

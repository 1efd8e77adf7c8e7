//! The consumer's fault table: what happens to a process at each point of its work on one message, in both ways of owning
//! it, and what has then taken effect.
//!
//! ```text
//! C1 read, nothing claimed · C2 in the handler · C3 COMMIT in flight · C4 committed, its offset not · C5 in the handler, while
//! a rebalance takes partitions away
//!
//! the group is whole ─▶ one of two is held at the point ─▶ fault ─▶ released ─▶ the other does the work ─▶ whole again ─▶ …
//! ```
//!
//! Nothing in the product holds it: the server does, by locks of the test's own connection. What a process stopped for longer
//! than session and lease still writes when it wakes is waited for and must change nothing. The ledger judges effects (rows of
//! a table without a unique constraint, calls in a service's journal); the group's committed offsets are read before
//! each fault.
//!
//! What a SIGKILL at each step of dead-lettering leaves is shown in `consumer_held/letters.rs`.
//!
//! By default half of the cells, twice each; `BATON_TIER=full` has each twenty times, `BATON_TEST_POINT=C2` all of one
//! point twice.

pub(crate) mod case;
mod letters;
pub(crate) mod verdict;

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use baton_tests::{Harness, Load, Outcome, fail, figure, test};
use futures_util::StreamExt as _;
use futures_util::stream;

use case::Case;
use verdict::Score;

/// Long, because the whole table keeps the machine busy.
const PATIENCE: Duration = Duration::from_secs(60);

/// How many cells run at once. Most of the time they wait for a session to time out.
const AT_ONCE: usize = 20;

/// How a message is owned while it is handled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Owning {
    Transactional,
    Leased,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Point {
    C1,
    C2,
    C3,
    C4,
    C5,
}

/// What is done to the process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Fault {
    Kill,
    /// SIGSTOP until another one has done its work, then SIGCONT.
    Sleep,
}

const OWNINGS: [Owning; 2] = [Owning::Transactional, Owning::Leased];
const POINTS: [Point; 5] = [Point::C1, Point::C2, Point::C3, Point::C4, Point::C5];
const FAULTS: [Fault; 2] = [Fault::Kill, Fault::Sleep];

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Cell {
    pub(crate) owning: Owning,
    pub(crate) point: Point,
    pub(crate) fault: Fault,
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}, {:?}, {:?}", self.owning, self.point, self.fault)
    }
}

#[test]
fn a_fault_at_any_point_of_a_consumers_work_loses_nothing_and_nothing_takes_effect_twice() {
    let full = std::env::var("BATON_TIER").is_ok_and(|tier| tier == "full");
    let only: Option<String> = std::env::var("BATON_TEST_POINT").ok();
    let (rounds, limit, load) = if full { (20, 1_800, Load::Alone) } else { (2, 240, Load::Light) };
    test(Duration::from_secs(limit), load, async |harness: &mut Harness| {
        let mut cases = Vec::new();
        for (o, owning) in OWNINGS.into_iter().enumerate() {
            for (p, point) in POINTS.into_iter().enumerate() {
                for (f, fault) in FAULTS.into_iter().enumerate() {
                    let chosen = match &only {
                        Some(only) => format!("{point:?}") == *only,
                        None => full || (o + p + f).is_multiple_of(2),
                    };
                    if chosen {
                        cases.push(Case::new(harness, Cell { owning, point, fault }, None).await?);
                    }
                }
            }
        }
        let ends: Vec<(Cell, Outcome<Score>)> = stream::iter(cases)
            .map(async |mut case: Case| (case.cell(), case.run(rounds).await))
            .buffer_unordered(AT_ONCE)
            .collect()
            .await;
        let mut table = Table::default();
        let mut wrong = Vec::new();
        for (cell, end) in ends {
            match end {
                Ok(score) => {
                    wrong.extend(score.wrong.iter().map(|words| format!("{cell}: {words}")));
                    table.0.insert(cell, score);
                }
                Err(failure) => wrong.push(format!("{cell}: {failure}")),
            }
        }
        figure(&format!("consumer faults: {table}"));
        if wrong.is_empty() { Ok(()) } else { fail!("{}", wrong.join("\n")) }
    });
}

#[derive(Debug, Default)]
struct Table(BTreeMap<Cell, Score>);

/// A row a way and point, a column a fault.
impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "runs / calls repeated / lost / double (of the runs, offset not committed at the fault)")?;
        write!(f, "\n{:16} | {:>26} | {:>26}", "", "SIGKILL", "SIGSTOP+SIGCONT")?;
        for owning in OWNINGS {
            for point in POINTS {
                write!(f, "\n{:16}", format!("{owning:?} {point:?}"))?;
                for fault in FAULTS {
                    let cell = self.0.get(&Cell { owning, point, fault });
                    let text = cell.map_or_else(|| "-".to_owned(), Score::to_string);
                    write!(f, " | {text:>26}")?;
                }
            }
        }
        Ok(())
    }
}

//! Bugs planted into the consumer one at a time: each is found, as what it is, by the checkers of the fault table, which find
//! nothing in the same cell without it.
//!
//! | plant | cell | found as |
//! |---|---|---|
//! | offset before effect | killed in a transactional handler | the group's offset is past it; ledger: lost |
//! | no claim | killed between commit and offset | ledger: a second effect |
//! | no look-up at takeover | killed after the call | journal: called again unasked |
//! | stale generation accepted | stopped in a leased handler, and woken while the next owner looks | inbox: row changed by a stale owner |
//! | fingerprint skipped at takeover | killed in a leased handler, and a forged record read | ledger: another content |
//!
//! The plants are in `consumer/src/plant.rs`.

use std::time::Duration;

use baton_tests::{Harness, Load, Outcome, fail, figure, test};
use futures_util::future::join_all;

use crate::consumer_held::case::Case;
use crate::consumer_held::verdict::Score;
use crate::consumer_held::{Cell, Fault, Owning, Point};

/// The first is held before its effect, the second after it.
const ROUNDS: usize = 2;

struct Planted {
    plant: &'static str,
    cell: Cell,
    /// How often it was found, as what it is.
    found: fn(&Score) -> usize,
}

const fn cell(owning: Owning, point: Point, fault: Fault) -> Cell {
    Cell { owning, point, fault }
}

const PLANTED: [Planted; 5] = [
    Planted {
        plant: "offset-before-effect",
        cell: cell(Owning::Transactional, Point::C2, Fault::Kill),
        found: |score| score.early.min(score.lost),
    },
    Planted {
        plant: "unclaimed",
        cell: cell(Owning::Transactional, Point::C4, Fault::Kill),
        found: |score| score.double,
    },
    Planted {
        plant: "no-look-up",
        cell: cell(Owning::Leased, Point::C2, Fault::Kill),
        found: |score| score.double,
    },
    Planted {
        plant: "stale-generation",
        cell: cell(Owning::Leased, Point::C2, Fault::Sleep),
        found: |score| score.stale,
    },
    Planted {
        plant: "fingerprint-skipped",
        cell: cell(Owning::Leased, Point::C2, Fault::Kill),
        found: |score| score.conflicting,
    },
];

#[test]
fn each_bug_planted_into_a_consumer_is_found_as_what_it_is_and_without_it_nothing_is() {
    test(Duration::from_secs(240), Load::Light, async |harness: &mut Harness| {
        let mut cells: Vec<Cell> = PLANTED.iter().map(|planted| planted.cell).collect();
        cells.sort_unstable();
        cells.dedup();
        let (mut right, mut bad) = (Vec::new(), Vec::new());
        for cell in cells {
            right.push(Case::new(harness, cell, None).await?);
        }
        for planted in &PLANTED {
            bad.push(Case::new(harness, planted.cell, Some(planted.plant)).await?);
        }
        let run = async |mut case: Case| -> (Cell, Outcome<Score>) { (case.cell(), case.run(ROUNDS).await) };
        let (right, bad) =
            tokio::join!(join_all(right.into_iter().map(&run)), join_all(bad.into_iter().map(&run)));
        let mut missed = Vec::new();
        for (cell, score) in right {
            match score {
                Ok(score) if score.wrong.is_empty() => {}
                Ok(score) => missed.push(format!("{cell} without a plant: {}", score.wrong.join("; "))),
                Err(failure) => missed.push(format!("{cell} without a plant: {failure}")),
            }
        }
        for (planted, (cell, score)) in PLANTED.iter().zip(bad) {
            let score = score.map_err(|failure| failure.during(format!("{cell} with {}", planted.plant)))?;
            figure(&format!("{} at {cell}: {}", planted.plant, score.wrong.join("; ")));
            if (planted.found)(&score) == 0 {
                missed.push(format!("{} was not found", planted.plant));
            }
        }
        if missed.is_empty() { Ok(()) } else { fail!("{}", missed.join("\n")) }
    });
}

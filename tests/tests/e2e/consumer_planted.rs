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
//! | budget not counted across restarts | a record fails for ever, and its consumer is killed twice | more tries than its budget, no dead letter |
//! | a parked key's later record not held back | its partition goes to another process | effects out of order |
//!
//! The plants are in `consumer/src/plant.rs`.

use std::time::Duration;

use baton_tests::{Draft, Harness, Load, Outcome, Process, Site, eventually, fail, figure, program, test};
use futures_util::future::join_all;
use sqlx::Executor as _;

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

const PATIENCE: Duration = Duration::from_secs(60);

/// Tries a record that was set aside gets at most, in all: its budget is 3, one of which the lane spends; each of two kills may cost one.
const MOST_TRIES: i64 = 5;

/// Counts what takes a record that was set aside.
const TRIED: &str = "
    CREATE TABLE effect (n bigint GENERATED ALWAYS AS IDENTITY, key text, content bytea, partition int);
    CREATE TABLE tried (n bigint GENERATED ALWAYS AS IDENTITY);
    CREATE FUNCTION count_try() RETURNS trigger LANGUAGE plpgsql AS
        $$ BEGIN INSERT INTO tried DEFAULT VALUES; RETURN NEW; END $$;
    CREATE TRIGGER count_try AFTER UPDATE ON inbox.parked FOR EACH ROW
        WHEN (NEW.owner IS NOT NULL AND NEW.generation > OLD.generation) EXECUTE FUNCTION count_try()";

struct Shop {
    site: Site,
    topic: String,
    group: String,
    plant: Option<&'static str>,
    started: usize,
}

impl Shop {
    async fn open(harness: &mut Harness, plant: Option<&'static str>) -> Outcome<Self> {
        let site = harness.site().await?;
        let (topic, group) = (site.topic("tired", 1).await?, site.topic_name("group"));
        site.pool().execute(TRIED).await?;
        Ok(Self { site, topic, group, plant, started: 0 })
    }

    /// A consumer that gives a record so many attempts.
    fn start(&mut self, attempts: &str) -> Outcome<Process> {
        self.started += 1;
        let name = format!("consumer-{}", self.started);
        let launch = self.site.launch(&name, program("effect_consumer")?).args([&self.topic, &self.group]);
        let launch =
            launch.env("EFFECTS_NAME", &name).env("EFFECTS_PARK", "1").env("EFFECTS_ATTEMPTS", attempts);
        match self.plant {
            Some(plant) => launch.env("EFFECTS_PLANT", plant),
            None => launch,
        }
        .start()
    }

    async fn produce(&self, key: &str, id: &str, behave: &str) -> Outcome {
        let draft = Draft::new(key, format!(r#"{{"behave":"{behave}"}}"#)).header("idempotency-key", id);
        self.site.kafka().produce(&self.topic, vec![draft]).await
    }

    async fn number(&self, of: &'static str) -> Outcome<i64> {
        Ok(sqlx::query_scalar(of).fetch_one(self.site.pool()).await?)
    }

    async fn tries(&self) -> Outcome<i64> {
        self.number("SELECT count(*) FROM tried").await
    }

    /// Whether more was tried than the budget allows, in place of a dead letter.
    async fn is_tried_for_ever(&mut self) -> Outcome<bool> {
        let mut consumer = self.start("3")?;
        self.produce("k", "tired", "tired").await?;
        for kill in 1..=2 {
            eventually("a try", PATIENCE, async || {
                let tries = self.tries().await?;
                if tries >= kill { Ok(()) } else { fail!("{tries}") }
            })
            .await?;
            consumer.kill().await?;
            consumer = self.start("3")?;
        }
        let letters = format!("{}.effects.dlt", self.topic);
        let mut is_beyond = false;
        eventually("a dead letter, or too many tries", PATIENCE, async || {
            is_beyond = self.tries().await? > MOST_TRIES;
            let letters = self.site.kafka().count(&letters).await?;
            if is_beyond || letters == 1 { Ok(()) } else { fail!("{letters} letters") }
        })
        .await?;
        Ok(is_beyond)
    }

    /// Whether a later record of a key took effect before one that was set aside.
    async fn is_overtaken(&mut self) -> Outcome<bool> {
        let mut first = self.start("1000")?;
        self.produce("k", "a", "tired").await?;
        eventually("it to be set aside", PATIENCE, async || {
            match self.number("SELECT count(*) FROM inbox.parked").await? {
                0 => fail!("none"),
                _ => Ok(()),
            }
        })
        .await?;
        first.terminate(PATIENCE).await?;
        let _second = self.start("1000")?;
        self.produce("k", "b", "").await?;
        self.produce("other", "c", "").await?;
        eventually("the one of another key", PATIENCE, async || {
            match self.number("SELECT count(*) FROM effect WHERE key = 'c'").await? {
                0 => fail!("none"),
                _ => Ok(()),
            }
        })
        .await?;
        self.number("SELECT count(*) FROM effect WHERE key = 'b'").await.map(|early| early > 0)
    }
}

#[test]
fn a_budget_that_is_not_counted_and_a_parked_key_that_is_overtaken_are_found_where_they_are_planted() {
    test(Duration::from_secs(240), Load::Light, async |harness: &mut Harness| {
        let mut shops = Vec::new();
        for plant in [None, Some("attempts-forgotten"), None, Some("parked-keys-forgotten")] {
            shops.push(Shop::open(harness, plant).await?);
        }
        let [counted, forgotten, held, overtaken] = &mut shops[..] else { fail!("four shops") };
        let (counted, forgotten, held, overtaken) = tokio::try_join!(
            counted.is_tried_for_ever(),
            forgotten.is_tried_for_ever(),
            held.is_overtaken(),
            overtaken.is_overtaken(),
        )?;
        figure(&format!(
            "must show 5: tried beyond its budget: {counted}, with the budget forgotten: {forgotten}; overtaken after a rebalance: {held}, \
             with the keys forgotten: {overtaken}"
        ));
        assert_eq!((counted, forgotten, held, overtaken), (false, true, false, true));
        Ok(())
    });
}

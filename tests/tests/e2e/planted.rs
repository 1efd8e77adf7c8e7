//! Bugs that people have shipped, planted into the relay one at a time: each is found, as what it is, by the checkers that
//! find nothing in the same relay without it.
//!
//! | plant | what happens | found by |
//! |---|---|---|
//! | naive cursor, horizon cursor | a message commits below a position that is published | ledger: lost |
//! | order by (xid, position) | an early transaction id comes late to its key | ledger: out of order |
//! | cursor not fenced | a relay wakes after another took over | cursors: moved back, by a stale owner |
//! | generation not compared | a relay wakes after its namesake took over | cursors: moved back |
//! | advance before the report | SIGKILL while the broker is away | ledger: lost |
//! | finite `message.timeout.ms` | the broker is away for longer | ledger: out of order |
//! | cursor kept in memory | the server dies, and its successor lacks the tail | ledger: lost |
//!
//! The relays of a test, with plant and without, live through the same at the same time. The plants are in
//! `relay/src/plant.rs`.

use std::collections::HashMap;
use std::path::Path;
use std::time::Duration;

use baton_tests::ledger::Findings;
use baton_tests::workload::{self, Row};
use baton_tests::{
    Harness, Launch, Load, Outcome, OwnStack, Place, Process, Schema, Site, Standby, eventually, fail,
    figure, lasts, program, test,
};
use futures_util::future::try_join_all;
use sqlx::{Executor, PgConnection};

use crate::leases::watch_leases;

const PATIENCE: Duration = Duration::from_secs(30);

/// What the ledger says of a relay, where it is one thing only.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    Right,
    Lost(usize),
    OutOfOrder(usize),
}

impl Verdict {
    fn of(findings: &Findings) -> Outcome<Self> {
        let Findings { lost, phantom, out_of_order, conflicting, split, .. } = findings;
        match [lost, phantom, out_of_order, conflicting, split].map(Vec::len) {
            [0, 0, 0, 0, 0] => Ok(Self::Right),
            [lost, 0, 0, 0, 0] => Ok(Self::Lost(lost)),
            [0, 0, swapped, 0, 0] => Ok(Self::OutOfOrder(swapped)),
            _ => fail!("{findings}"),
        }
    }
}

/// A relay with a plant, or with none, in a database of its own.
#[derive(Debug)]
struct Trial {
    plant: &'static str,
    site: Site,
    topic: String,
    /// Keys of one shard.
    keys: Vec<String>,
}

impl Trial {
    async fn new(harness: &mut Harness, place: &Place, plant: &'static str) -> Outcome<Self> {
        let site = harness.site_at(place, Schema::Both { shards: 8 }).await?;
        let topic = site.topic("planted", 1).await?;
        let keys = sqlx::query_scalar(
            "SELECT key FROM (SELECT 'key-' || i AS key FROM generate_series(1, 200) i) keys
             WHERE outbox.shard_of(key, 0) = 3 ORDER BY key LIMIT 3",
        )
        .fetch_all(site.pool())
        .await?;
        Ok(Self { plant, site, topic, keys })
    }

    fn launch(&self, owner: &str) -> Outcome<Launch> {
        let name = format!("{owner}-{}", self.plant);
        let launch = self.site.launch(&name, program("planted_relay")?).arg(self.plant);
        Ok(self.site.as_relay(launch, owner))
    }

    /// A relay that has published a message of the first key already.
    async fn at_work(&self) -> Outcome<Process> {
        let relay = self.launch("relay")?.start()?;
        self.enqueue(&mut self.site.connect().await?, 0, 0..=0).await?;
        self.sees(0, 0).await?;
        Ok(relay)
    }

    /// Messages of one key, in the order of their numbers.
    async fn enqueue(
        &self,
        connection: &mut PgConnection,
        key: usize,
        numbers: std::ops::RangeInclusive<i64>,
    ) -> Outcome {
        sqlx::query(
            r#"INSERT INTO outbox.message (topic, key, payload)
               SELECT $1, $2, convert_to(format('{"seq":%s}', seq), 'UTF8') FROM generate_series($3::bigint, $4) seq"#,
        )
        .bind(&self.topic)
        .bind(&self.keys[key])
        .bind(numbers.start())
        .bind(numbers.end())
        .execute(connection)
        .await?;
        Ok(())
    }

    /// Waits until that message is on the topic.
    async fn sees(&self, key: usize, number: i64) -> Outcome {
        let (key, payload) = (self.keys[key].as_str(), format!(r#"{{"seq":{number}}}"#));
        eventually(format!("{}: {payload} of {key} on the topic", self.plant), PATIENCE, async || {
            let records = self.site.kafka().records(&self.topic).await?;
            let mut of_it = records.iter().filter(|record| record.key_text() == Some(key));
            if of_it.any(|record| record.payload_text() == Some(&payload)) {
                return Ok(());
            }
            fail!("{} records", records.len())
        })
        .await
    }

    async fn truth(&self) -> Outcome<Vec<Row>> {
        workload::truth(&self.site, &self.topic).await
    }

    /// What the topic shows against the table.
    async fn verdict(&self) -> Outcome<Verdict> {
        self.judge(&self.truth().await?).await
    }

    async fn judge(&self, truth: &[Row]) -> Outcome<Verdict> {
        let (findings, _) = workload::judge(truth, &self.site.kafka().records(&self.topic).await?);
        println!("{}: {findings}", self.plant);
        Verdict::of(&findings)
    }

    fn found(&self, verdict: &str) {
        if self.plant != "none" {
            figure(&format!("must show 3: {}: {verdict}; without the plant nothing", self.plant));
        }
    }
}

/// Trials of these plants on the same servers.
async fn trials<const N: usize>(
    harness: &mut Harness,
    place: &Place,
    plants: [&'static str; N],
) -> Outcome<[Trial; N]> {
    let mut trials = Vec::new();
    for plant in plants {
        trials.push(Trial::new(harness, place, plant).await?);
    }
    trials.try_into().map_err(|_| baton_tests::Failure::new("as many trials as plants"))
}

// A horizon is the whole server's: on a shared one a transaction of another test would hold it.

#[test]
fn readers_by_position_alone_and_by_position_below_the_horizon_are_found_to_lose() {
    test(Duration::from_secs(200), Load::Alone, async |harness: &mut Harness| {
        let stack = OwnStack::up().await?;
        let trials = trials(harness, stack.place(), ["none", "naive-cursor", "horizon-cursor"]).await?;
        let verdicts = try_join_all(trials.iter().map(Trial::commits_below)).await?;
        assert_eq!(verdicts, [Verdict::Right, Verdict::Lost(1), Verdict::Lost(1)]);
        trials.iter().for_each(|trial| trial.found("1 of 4 messages lost"));
        Ok(())
    });
}

#[test]
fn a_reader_in_order_of_transaction_ids_is_found_to_reorder() {
    test(Duration::from_secs(200), Load::Alone, async |harness: &mut Harness| {
        let stack = OwnStack::up().await?;
        let trials = trials(harness, stack.place(), ["none", "xid-order"]).await?;
        let verdicts = try_join_all(trials.iter().map(Trial::comes_late_to_its_key)).await?;
        assert_eq!(verdicts, [Verdict::Right, Verdict::OutOfOrder(1)]);
        trials.iter().for_each(|trial| trial.found("1 of 3 messages out of order"));
        Ok(())
    });
}

impl Trial {
    /// A message commits below a position that is published, and the transaction published there is an earlier one.
    async fn commits_below(&self) -> Outcome<Verdict> {
        let _relay = self.at_work().await?;
        let (mut early, mut slow) = (self.site.connect().await?, self.site.connect().await?);
        early.execute("CREATE TABLE elsewhere (n int)").await?;
        early.execute("BEGIN; INSERT INTO elsewhere VALUES (1)").await?;
        slow.execute("BEGIN").await?;
        self.enqueue(&mut slow, 0, 1..=1).await?;
        self.enqueue(&mut early, 1, 1..=1).await?;
        early.execute("COMMIT").await?;
        self.sees(1, 1).await?;
        slow.execute("COMMIT").await?;
        // Of the same shard: once it is there, what is not there will not come.
        self.enqueue(&mut early, 2, 1..=1).await?;
        self.sees(2, 1).await?;
        self.verdict().await
    }

    /// A transaction takes its id, another one commits a message of the key, and then comes the first one's.
    async fn comes_late_to_its_key(&self) -> Outcome<Verdict> {
        let _relay = self.at_work().await?;
        let (mut early, mut quick) = (self.site.connect().await?, self.site.connect().await?);
        early.execute("CREATE TABLE elsewhere (n int)").await?;
        early.execute("BEGIN; INSERT INTO elsewhere VALUES (1)").await?;
        self.enqueue(&mut quick, 0, 1..=1).await?;
        self.enqueue(&mut early, 0, 2..=2).await?;
        early.execute("COMMIT").await?;
        self.sees(0, 1).await?;
        self.sees(0, 2).await?;
        self.verdict().await
    }
}

/// What became of the durable cursors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Moves {
    back: bool,
    /// By a relay that was not the owner.
    by_another: bool,
}

#[test]
fn an_advance_without_its_fence_is_found_to_move_a_cursor_back_under_another_owner() {
    test(Duration::from_secs(120), Load::Light, async |harness: &mut Harness| {
        let trials = trials(harness, &Place::shared()?, ["none", "unfenced-cursor"]).await?;
        let released = harness.directory();
        let moves =
            try_join_all(trials.iter().map(|trial| trial.wakes_after_its_lease("heir", released))).await?;
        let right = Moves { back: false, by_another: false };
        assert_eq!(moves, [right, Moves { back: true, by_another: true }]);
        trials.iter().for_each(|trial| trial.found("a stale owner moved a cursor back"));
        Ok(())
    });
}

#[test]
fn an_advance_that_accepts_a_stale_generation_is_found_to_move_a_namesakes_cursor_back() {
    test(Duration::from_secs(120), Load::Light, async |harness: &mut Harness| {
        let trials = trials(harness, &Place::shared()?, ["none", "stale-generation"]).await?;
        let released = harness.directory();
        let moves =
            try_join_all(trials.iter().map(|trial| trial.wakes_after_its_lease("zombie", released))).await?;
        let right = Moves { back: false, by_another: false };
        assert_eq!(moves, [right, Moves { back: true, by_another: false }]);
        trials.iter().for_each(|trial| trial.found("a stale namesake moved a cursor back"));
        Ok(())
    });
}

impl Trial {
    /// A relay is stopped before it writes a cursor, another one does all the work, and the first one wakes.
    async fn wakes_after_its_lease(&self, heir: &str, directory: &Path) -> Outcome<Moves> {
        const MESSAGES: i64 = 1_000;
        watch_leases(&self.site).await?;
        // A statement that is refused writes no row; what is written down here is that it was run.
        self.site
            .pool()
            .execute(
                "CREATE TABLE asked (pid int);
                 CREATE FUNCTION note_asked() RETURNS trigger LANGUAGE plpgsql AS
                     $$ BEGIN INSERT INTO asked VALUES (pg_backend_pid()); RETURN NULL; END $$;
                 CREATE TRIGGER note_asked AFTER INSERT ON outbox.advance FOR EACH STATEMENT EXECUTE FUNCTION note_asked()",
            )
            .await?;
        self.enqueue(&mut self.site.connect().await?, 0, 1..=MESSAGES).await?;
        let release = directory.join(format!("release-{}", self.plant));
        let launch = self.launch("zombie")?.args(["hold", "P5", &release.display().to_string()]);
        let mut zombie = launch.start()?;
        eventually("the relay to be about to write its cursor", PATIENCE, async || {
            if zombie.stderr().contains("held at P5") { Ok(()) } else { fail!("it is not") }
        })
        .await?;
        self.stop_between_statements(&zombie).await?;
        let writer: i32 = sqlx::query_scalar(
            "SELECT pid FROM pg_stat_activity
             WHERE datname = current_database() AND application_name = 'baton cursor zombie'",
        )
        .fetch_one(self.site.pool())
        .await?;
        let mut heir = self.site.relay(heir)?.start()?;
        self.site.emptied().await?;
        let asked = async || -> Outcome<i64> {
            let count = sqlx::query_scalar("SELECT count(*) FROM asked WHERE pid = $1");
            Ok(count.bind(writer).fetch_one(self.site.pool()).await?)
        };
        let before = asked().await?;
        std::fs::write(&release, "")?;
        zombie.go_on()?;
        eventually("its write to be decided on", PATIENCE, async || {
            if asked().await? > before {
                Ok(())
            } else {
                fail!("it has not asked; {:?}", zombie.try_exited()?)
            }
        })
        .await?;
        let (back, by_another): (bool, bool) = sqlx::query_as(
            "SELECT coalesce(bool_or(position < position_before), false),
                    coalesce(bool_or(by <> 'baton cursor ' || owner), false) FROM cursor_change",
        )
        .fetch_one(self.site.pool())
        .await?;
        assert_eq!(heir.try_exited()?, None, "{}", heir.stderr());
        assert_eq!(self.verdict().await?, Verdict::Right);
        Ok(Moves { back, by_another })
    }

    /// Stops the relay while it waits for no answer: one that it had waited for would end its session when it wakes, and
    /// nothing of what it still has to write would be sent.
    async fn stop_between_statements(&self, relay: &Process) -> Outcome {
        let clock = "SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint";
        for _ in 0..50 {
            let before: i64 = sqlx::query_scalar(clock).fetch_one(self.site.pool()).await?;
            relay.stop()?;
            lasts("what was on its way to the server", Duration::from_millis(50)).await;
            let quiet: bool = sqlx::query_scalar(
                "SELECT bool_and(state = 'idle' AND extract(epoch FROM state_change) * 1000 < $1 - 30)
                 FROM pg_stat_activity
                 WHERE datname = current_database() AND application_name LIKE 'baton % zombie'",
            )
            .bind(before)
            .fetch_one(self.site.pool())
            .await?;
            if quiet {
                return Ok(());
            }
            relay.go_on()?;
            lasts("a moment of work", Duration::from_millis(40)).await;
        }
        fail!("it waits for an answer all the time")
    }
}

#[test]
fn an_advance_before_the_report_is_found_to_lose_and_a_finite_message_timeout_to_reorder() {
    test(Duration::from_secs(200), Load::Alone, async |harness: &mut Harness| {
        let stack = OwnStack::up().await?;
        let plants = ["none", "advance-before-report", "none", "finite-message-timeout"];
        let trials = trials(harness, stack.place(), plants).await?;
        let mut relays = try_join_all(trials.iter().map(Trial::at_work)).await?;

        stack.kill_broker().await?;
        for trial in &trials {
            trial.enqueue(&mut trial.site.connect().await?, 0, 1..=1).await?;
        }
        // The first two die in the outage.
        trials[1].site.emptied().await?;
        for relay in &mut relays[..2] {
            relay.kill().await?;
        }
        lasts("the broker's absence, longer than the finite time-out", Duration::from_secs(6)).await;
        stack.repair().await?;
        for (relay, trial) in relays.iter_mut().zip(&trials).take(2) {
            *relay = trial.launch("heir")?.start()?;
        }

        let verdicts = try_join_all(trials.iter().map(Trial::goes_on_after_the_outage)).await?;
        assert_eq!(verdicts, [Verdict::Right, Verdict::Lost(1), Verdict::Right, Verdict::OutOfOrder(1)]);
        trials[1].found("1 of 3 messages lost");
        trials[3].found("1 of 3 messages out of order");
        Ok(())
    });
}

impl Trial {
    async fn goes_on_after_the_outage(&self) -> Outcome<Verdict> {
        self.enqueue(&mut self.site.connect().await?, 0, 2..=2).await?;
        self.sees(0, 2).await?;
        if self.plant != "advance-before-report" {
            self.sees(0, 1).await?;
        }
        self.verdict().await
    }
}

#[test]
fn a_cursor_kept_in_memory_over_a_crash_that_lost_the_tail_is_found_to_lose() {
    test(Duration::from_secs(150), Load::Alone, async |harness: &mut Harness| {
        const TAIL: i64 = 100;
        const ANEW: i64 = 200;
        let stack = OwnStack::up().await?;
        let trials = trials(harness, stack.place(), ["none", "cursor-in-memory"]).await?;
        let relays = try_join_all(trials.iter().map(Trial::at_work)).await?;
        let mut standby = Standby::of(&stack, harness.directory()).await?;
        standby.follows().await?;
        standby.stop().await?;
        let mut tails = Vec::new();
        for trial in &trials {
            trial.enqueue(&mut trial.site.connect().await?, 0, 1..=TAIL).await?;
            trial.site.emptied().await?;
            tails.push(trial.truth().await?);
        }
        stack.kill_postgres().await?;
        standby.take_over().await?;

        let mut verdicts = Vec::new();
        for (trial, tail) in trials.iter().zip(tails) {
            let mut connection =
                eventually("the new primary", PATIENCE, async || trial.site.connect().await).await?;
            trial.enqueue(&mut connection, 1, 1..=ANEW).await?;
            trial.sees(1, ANEW).await?;
            let now = trial.truth().await?;
            assert_eq!(now.len(), 1 + usize::try_from(ANEW)?, "the tail must be lost, or nothing is shown");
            let last = tail.iter().map(|row| row.position).max().unwrap_or(0);
            let reused = now.iter().filter(|row| row.message.rank > 0 && row.position <= last).count();
            // What nobody can take back is judged as what it was when it was published.
            let all: HashMap<String, Row> =
                tail.into_iter().chain(now).map(|row| (row.message.id.clone(), row)).collect();
            verdicts.push((trial.judge(&all.into_values().collect::<Vec<_>>()).await?, reused));
        }
        drop(relays);
        drop(standby);
        stack.repair().await?;
        let [(without, _), (with, reused)] = verdicts[..] else { fail!("{verdicts:?}") };
        assert!(reused > 0, "no position was given out again");
        assert_eq!((without, with), (Verdict::Right, Verdict::Lost(reused)));
        trials[1]
            .found(&format!("{reused} of {ANEW} messages lost, all whose positions the lost tail had had"));
        Ok(())
    });
}

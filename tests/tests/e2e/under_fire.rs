//! The run that counts: twelve writers, three relays, and everything killed while they work.
//!
//! ```text
//! writers ══════════════════════════════════════════════════════╗ stop
//! relays   ×  ×   ×  ×  ×   ×  (SIGKILL at random, started anew) ╬══ all up ══▶ until empty ─▶ verdict
//! broker          ╳ killed ── 15 s ── started                    ║
//! Postgres                                ╳ children killed      ║
//! ```
//!
//! The table at the end is the truth: with `synchronous_commit = off` a crash takes commits back, and what is on the topic
//! but no more in the table is a phantom. [`crate::planted`] shows
//! that bugs are found. `BATON_TEST_SEED` repeats a seed.

use std::time::Duration;

use baton_tests::ledger::Findings;
use baton_tests::workload::{self, Done, Workload, Writers};
use baton_tests::{
    Flush, Harness, Load, Outcome, OwnStack, Process, Schema, Site, eventually, fail, figure, lasts, test,
};
use fastrand::Rng;

#[test]
fn nothing_is_lost_forged_or_reordered_while_relays_broker_and_database_are_killed() {
    test(Duration::from_secs(240), Load::Alone, async |harness: &mut Harness| {
        let mut story = Story::begin(harness).await?;
        story.chaos(Duration::from_secs(12)).await?;
        story.broker_away(Duration::from_secs(15)).await?;
        story.chaos(Duration::from_secs(2)).await?;
        // Relays at the end of the table see commits that are not on the disk, and must not believe them.
        story.caught_up().await?;
        story.stack.flush(Flush::Late).await?;
        lasts("load with late flushes", Duration::from_secs(1)).await;
        let killed = story.stack.crash_postgres().await?;
        story.stack.flush(Flush::Soon).await?;
        story.chaos(Duration::from_secs(8)).await?;
        let end = story.end().await?;
        let taken_back = end.done.messages - i64::try_from(end.findings.committed)?;
        end.report(
            "must show 4",
            &format!(
                "; broker away 15 s; {killed} Postgres processes killed, {taken_back} confirmed messages taken back by it"
            ),
        );

        assert!(end.findings.wire_is_right(), "{}", end.findings);
        assert!(end.findings.committed >= 10_000, "too few to mean something: {}", end.findings);
        assert!(end.late >= 50, "only {} were late", end.late);
        assert!(taken_back > 0, "the crash took nothing back, so nothing was shown about it");
        Ok(())
    });
}

struct Story {
    stack: OwnStack,
    site: Site,
    topic: String,
    writers: Writers,
    relays: Vec<Process>,
    random: Rng,
    seed: u64,
    kills: u32,
}

struct End {
    findings: Findings,
    late: usize,
    done: Done,
    kills: u32,
    seed: u64,
}

impl Story {
    async fn begin(harness: &mut Harness) -> Outcome<Self> {
        let seed = match std::env::var("BATON_TEST_SEED") {
            Ok(seed) => seed.parse()?,
            Err(_) => fastrand::u64(..1_000_000),
        };
        println!("seed {seed}");
        let stack = OwnStack::up().await?;
        let site = harness.site_at(stack.place(), Schema::Both { shards: 8 }).await?;
        let topic = site.topic("fire", 3).await?;
        let writers = Workload { asynchronous: true, ..Workload::new(seed, &topic) }.start(&site).await?;
        let mut story = Self {
            stack,
            site,
            topic,
            writers,
            relays: Vec::new(),
            random: Rng::with_seed(seed),
            seed,
            kills: 0,
        };
        for number in 0..3 {
            let relay = story.site.relay(&format!("relay-{number}"))?.start()?;
            story.relays.push(relay);
        }
        Ok(story)
    }

    /// Kills a relay every one to three seconds and starts it anew, by the same name or by another.
    async fn chaos(&mut self, period: Duration) -> Outcome {
        let mut left = period;
        while !left.is_zero() {
            let pause = Duration::from_millis(self.random.u64(1000..3000)).min(left);
            left -= pause;
            lasts("load between two kills", pause).await;
            let victim = self.random.usize(..self.relays.len());
            if self.relays[victim].try_exited()?.is_none() {
                self.relays[victim].kill().await?;
            }
            self.kills += 1;
            let owner = if self.random.bool() {
                format!("relay-{victim}")
            } else {
                format!("relay-{victim}-{}", self.kills)
            };
            self.relays[victim] = self.site.relay(&owner)?.start()?;
            self.supervise()?;
        }
        Ok(())
    }

    /// Starts anew what has given up, as whatever runs it in production would: a relay that finds no broker when it
    /// starts says so and ends. Nothing else ends one.
    fn supervise(&mut self) -> Outcome {
        for number in 0..self.relays.len() {
            let Some(status) = self.relays[number].try_exited()? else { continue };
            let words = self.relays[number].stderr();
            if status.code() != Some(1) || !words.contains("did not answer") {
                fail!("relay {number} ended by itself with {status}: {words}");
            }
            self.relays[number] = self.site.relay(&format!("relay-{number}"))?.start()?;
        }
        Ok(())
    }

    /// Waits until the relays are as far as the writers.
    async fn caught_up(&self) -> Outcome {
        eventually("the relays to catch up with the writers", Duration::from_secs(40), async || {
            let pending = self.site.pending().await?;
            if pending < 300 { Ok(()) } else { fail!("{pending} messages wait") }
        })
        .await
    }

    async fn broker_away(&mut self, period: Duration) -> Outcome {
        self.stack.kill_broker().await?;
        self.chaos(period).await?;
        self.stack.repair().await
    }

    /// Lets all heal, drains with a fourth relay that ends by itself, and judges.
    async fn end(mut self) -> Outcome<End> {
        let done = self.writers.stop().await?;
        self.supervise()?;
        let last = self.site.baton(&["relay", "--until-empty"])?.env("BATON_LEASE__TTL", "3s");
        last.finish(Duration::from_secs(90)).await?.success()?;
        for relay in &mut self.relays {
            relay.ask_to_end()?;
        }
        for relay in &mut self.relays {
            let status = relay.exited(Duration::from_secs(20)).await?;
            assert!(status.success(), "{} drained with {status}", relay.name());
        }
        judge(&self.site, &self.topic, done, self.kills, self.seed).await
    }
}

async fn judge(site: &Site, topic: &str, done: Done, kills: u32, seed: u64) -> Outcome<End> {
    let truth = workload::truth(site, topic).await?;
    let records = site.kafka().records(topic).await?;
    let (findings, late) = workload::judge(&truth, &records);
    Ok(End { findings, late, done, kills, seed })
}

impl End {
    fn report(&self, what: &str, more: &str) {
        let Done { commits, rollbacks, broken, .. } = self.done;
        figure(&format!(
            "{what} (seed {}): {}; {} late; {} relays killed; {commits} commits, {rollbacks} rollbacks, {broken} \
             broken{more}",
            self.seed, self.findings, self.late, self.kills
        ));
    }
}

//! The steps of dead-lettering, and a SIGKILL at each of them.
//!
//! ```text
//! given up ─▶ letter handed over ─▶ on the broker ─▶ acknowledged ─▶ marked ─▶ offset committed
//!          L1 held on its way there        L2 its answer held    L3 held    L4 held on its way
//! ```
//!
//! The wire to the broker is a proxy's, and the mark waits for a lock of the test's own connection; nothing in the product holds it.
//! Each victim has written a dead letter before, so that its producer is connected. What the next process makes of it is judged by
//! the dead-letter topic: the letter is there, once or twice as the step has it, and says the same each time.
//!
//! One round a step and way of owning by default; `BATON_TIER=full` has twenty.

use std::fmt;
use std::time::Duration;

use baton_tests::service::Service;
use baton_tests::{
    Draft, GroupWatch, Harness, Load, Outcome, OwnStack, Process, Proxy, Record, Schema, Site, Way,
    eventually, fail, figure, program, stays, test,
};
use sqlx::{Executor, PgConnection};

use super::{OWNINGS, Owning, PATIENCE};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    /// L1: nothing of the letter has reached the broker.
    Unproduced,
    /// L2: the broker has it, and the consumer does not know.
    Unacknowledged,
    /// L3: acknowledged, and its row is not marked.
    Unmarked,
    /// L4: marked, and its offset is not committed.
    Uncommitted,
}

const STEPS: [Step; 4] = [Step::Unproduced, Step::Unacknowledged, Step::Unmarked, Step::Uncommitted];

impl Step {
    /// How many letters there are once the next process is done.
    fn letters(self) -> usize {
        match self {
            Self::Unproduced | Self::Uncommitted => 1,
            Self::Unacknowledged | Self::Unmarked => 2,
        }
    }
}

/// The mark of a dead one waits at the lock 2.
const TABLES: &str = "
    CREATE TABLE effect (n bigint GENERATED ALWAYS AS IDENTITY, key text, content bytea, partition int);
    CREATE FUNCTION wait_to_mark() RETURNS trigger LANGUAGE plpgsql AS
        $$ BEGIN PERFORM pg_advisory_xact_lock_shared(2); RETURN NEW; END $$;
    CREATE TRIGGER wait_to_mark BEFORE INSERT OR UPDATE ON inbox.message FOR EACH ROW
        WHEN (NEW.state = 'dead') EXECUTE FUNCTION wait_to_mark()";

#[test]
fn a_consumer_killed_at_any_step_of_dead_lettering_loses_no_dead_letter_and_commits_no_offset_ahead_of_it() {
    let full = std::env::var("BATON_TIER").is_ok_and(|tier| tier == "full");
    let (rounds, limit) = if full { (20, 1_800) } else { (1, 300) };
    test(Duration::from_secs(limit), Load::Alone, async |harness: &mut Harness| {
        let stack = OwnStack::up().await?;
        let proxy = stack.kafka_proxy().await?;
        let mut said = Vec::new();
        for owning in OWNINGS {
            for step in STEPS {
                let site = harness.site_at(stack.place(), Schema::Both { shards: 8 }).await?;
                let mut case = Case::new(site, &proxy, owning, step).await?;
                let letters = case.run(rounds).await.map_err(|failure| failure.during(case.to_string()))?;
                said.push(format!(
                    "{case}: {rounds} kills, {letters} letters of {rounds} records, none missing"
                ));
            }
        }
        figure(&format!("must show 4: {}", said.join("; ")));
        Ok(())
    });
}

struct Case<'a> {
    site: Site,
    proxy: &'a Proxy,
    owning: Owning,
    step: Step,
    topic: String,
    group: String,
    watch: GroupWatch,
    service: Service,
    lock: PgConnection,
    started: usize,
}

impl fmt::Display for Case<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}, {:?}", self.owning, self.step)
    }
}

impl<'a> Case<'a> {
    async fn new(site: Site, proxy: &'a Proxy, owning: Owning, step: Step) -> Outcome<Self> {
        let topic = site.topic("letters", 1).await?;
        let group = site.topic_name("group");
        site.pool().execute(TABLES).await?;
        Ok(Self {
            watch: site.kafka().watch(&group, &topic)?,
            service: Service::start().await?,
            lock: site.connect().await?,
            started: 0,
            site,
            proxy,
            owning,
            step,
            topic,
            group,
        })
    }

    /// How many letters of the victims' records there are in the end.
    async fn run(&mut self, rounds: usize) -> Outcome<usize> {
        let mut letters = 0;
        let mut consumer = self.start()?;
        for round in 0..rounds {
            self.round(round, &mut consumer)
                .await
                .map_err(|failure| failure.during(format!("round {round}")))?;
            consumer = self.start()?;
            self.done().await?;
            letters += self.judge(round).await.map_err(|failure| failure.during(format!("round {round}")))?;
        }
        let status = consumer.terminate(PATIENCE).await?;
        if status.success() { Ok(letters) } else { fail!("{status}: {}", consumer.stderr()) }
    }

    /// As a static member, so that the next one has the partition at once.
    fn start(&mut self) -> Outcome<Process> {
        self.started += 1;
        let name = format!("member-{}", self.started);
        let launch = self.site.launch(&name, program("effect_consumer")?).args([&self.topic, &self.group]);
        let launch = launch
            .env("KAFKA_BROKERS", self.proxy.address())
            .env("EFFECTS_NAME", &name)
            .env("EFFECTS_INSTANCE", "the-one")
            .env("EFFECTS_STALL", "30");
        match self.owning {
            Owning::Transactional => launch,
            Owning::Leased => launch.env("EFFECTS_SERVICE", self.service.address()),
        }
        .start()
    }

    fn name(&self) -> String {
        format!("member-{}", self.started)
    }

    fn letters(&self) -> String {
        format!("{}.effects.dlt", self.topic)
    }

    /// Everything is read, and every offset committed.
    async fn done(&self) -> Outcome {
        eventually(format!("{self}: all to be committed"), PATIENCE, async || {
            match self.watch.lag().await? {
                0 => Ok(()),
                lag => fail!("lag {lag}"),
            }
        })
        .await
    }

    async fn round(&mut self, round: usize, consumer: &mut Process) -> Outcome {
        let poison = |id: String, hold: &str| {
            let content = format!(r#"{{"behave":"poison","hold":"{hold}"}}"#);
            Draft::new("k", content).header("idempotency-key", &id)
        };
        self.site.kafka().produce(&self.topic, vec![poison(format!("warm-{round}"), "")]).await?;
        self.done().await?;
        let before = self.site.kafka().count(&self.letters()).await?;
        let committed = self.watch.committed().await?;

        self.lock.execute("SELECT pg_advisory_lock(1)").await?;
        let behind = Draft::new("other", "{}").header("idempotency-key", &format!("ok-{round}"));
        self.site
            .kafka()
            .produce(&self.topic, vec![poison(format!("victim-{round}"), "before"), behind])
            .await?;
        self.waits(1).await?;
        match self.step {
            Step::Unproduced => {
                self.proxy.hold(Way::There);
                self.lock.execute("SELECT pg_advisory_unlock(1)").await?;
                self.goes_on(1).await?;
            }
            Step::Unacknowledged => {
                self.proxy.hold(Way::Back);
                self.lock.execute("SELECT pg_advisory_unlock(1)").await?;
                self.is_on_the_broker(before + 1).await?;
            }
            Step::Unmarked | Step::Uncommitted => {
                self.lock.execute("SELECT pg_advisory_lock(2); SELECT pg_advisory_unlock(1)").await?;
                self.waits(2).await?;
                self.is_on_the_broker(before + 1).await?;
            }
        }
        if self.step == Step::Uncommitted {
            self.proxy.hold(Way::There);
            self.lock.execute("SELECT pg_advisory_unlock(2)").await?;
            self.is_marked(round).await?;
        }
        stays(format!("{self}: the offset before the record"), Duration::from_millis(500), async || {
            let now = self.watch.committed().await?;
            if now == committed { Ok(()) } else { fail!("{now:?} was committed, after {committed:?}") }
        })
        .await?;
        consumer.kill().await?;
        // What it had sent and nobody has got is gone with it.
        self.proxy.reset_all();
        self.proxy.heal();
        if self.step == Step::Unmarked {
            self.lock.execute("SELECT pg_advisory_unlock(2)").await?;
        }
        let there = self.site.kafka().count(&self.letters()).await? - before;
        let expected = i64::from(self.step != Step::Unproduced);
        if there != expected {
            fail!("{there} letters were written before the kill, not {expected}");
        }
        let is_dead = self.row(round).await?.as_deref() == Some("dead");
        if is_dead != (self.step == Step::Uncommitted) {
            fail!("marked before the kill: {is_dead}");
        }
        Ok(())
    }

    /// Waits until the consumer waits for that lock.
    async fn waits(&self, lock: i64) -> Outcome {
        eventually(format!("{self}: the consumer at lock {lock}"), PATIENCE, async || {
            match self.waiting(lock).await? {
                0 => fail!("it does not wait"),
                _ => Ok(()),
            }
        })
        .await
    }

    async fn waiting(&self, lock: i64) -> Outcome<i64> {
        Ok(sqlx::query_scalar(
            "SELECT count(*) FROM pg_locks l JOIN pg_stat_activity a USING (pid)
             WHERE a.datname = current_database() AND a.application_name = $1 AND NOT l.granted
               AND l.locktype = 'advisory' AND l.objid::bigint = $2 AND l.classid = 0",
        )
        .bind(self.name())
        .bind(lock)
        .fetch_one(self.site.pool())
        .await?)
    }

    /// Waits until the consumer waits for that lock no more: within a moment it hands its letter over.
    async fn goes_on(&self, lock: i64) -> Outcome {
        eventually(format!("{self}: the consumer past lock {lock}"), PATIENCE, async || {
            match self.waiting(lock).await? {
                0 => Ok(()),
                waiting => fail!("{waiting} wait"),
            }
        })
        .await
    }

    async fn is_on_the_broker(&self, count: i64) -> Outcome {
        eventually(format!("{self}: the letter on the broker"), PATIENCE, async || {
            match self.site.kafka().count(&self.letters()).await? {
                found if found == count => Ok(()),
                found => fail!("{found} letters, not {count}"),
            }
        })
        .await
    }

    async fn row(&self, round: usize) -> Outcome<Option<String>> {
        Ok(sqlx::query_scalar("SELECT state FROM inbox.message WHERE key = $1")
            .bind(format!("victim-{round}"))
            .fetch_optional(self.site.pool())
            .await?)
    }

    async fn is_marked(&self, round: usize) -> Outcome {
        eventually(format!("{self}: the mark"), PATIENCE, async || match self.row(round).await?.as_deref() {
            Some("dead") => Ok(()),
            other => fail!("{other:?}"),
        })
        .await
    }

    /// The letters of that round's record are as many as they must be, and all say the same.
    async fn judge(&self, round: usize) -> Outcome<usize> {
        let id = format!("victim-{round}");
        let all = self.site.kafka().records(&self.letters()).await?;
        let letters: Vec<&Record> =
            all.iter().filter(|letter| letter.header("idempotency-key") == Some(id.as_str())).collect();
        if letters.len() != self.step.letters() {
            fail!("{} letters of {id}, not {}", letters.len(), self.step.letters());
        }
        // But for the times of its two deaths.
        let said = |letter: &Record| {
            let mut letter = letter.clone();
            letter.headers.retain(|(name, _)| !name.ends_with("failed-at"));
            (letter.key, letter.payload, letter.headers, letter.timestamp_ms)
        };
        let first = said(letters[0]);
        if letters.iter().any(|letter| said(letter) != first) {
            fail!("they differ: {letters:?}");
        }
        let row = self.row(round).await?;
        let cause = letters[0].header("dlt-cause");
        if row.as_deref() != Some("dead") || cause != Some("permanent") {
            fail!("{id} is {row:?}, its letter says {cause:?}");
        }
        Ok(letters.len())
    }
}

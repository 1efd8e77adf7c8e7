//! One cell: its database, topic and group, its processes, and what is done to them in each round.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use baton_tests::ledger::Committed;
use baton_tests::service::{Asked, Service};
use baton_tests::{
    Draft, Group, GroupWatch, Harness, Outcome, Process, Site, eventually, fail, lasts, program, stays,
};
use futures_util::future::try_join;
use sqlx::{Executor, PgConnection};
use tokio::time::timeout;

use super::verdict::{self, Score};
use super::{Cell, Fault, Owning, PATIENCE, Point};

/// Two keys a partition at the least, whatever the partitioner does with them.
const KEYS_A_PARTITION: usize = 8;

/// Everything the test itself puts into the database. A deferred trigger makes COMMIT itself wait; a statement's trigger
/// also sees a statement that changes no row.
const TABLES: &str = "
    CREATE TABLE effect (n bigint GENERATED ALWAYS AS IDENTITY, key text, content bytea, partition int,
                         who text DEFAULT current_setting('application_name'));
    CREATE FUNCTION wait_at_commit() RETURNS trigger LANGUAGE plpgsql AS
        $$ BEGIN PERFORM pg_advisory_xact_lock_shared(1); RETURN NULL; END $$;
    CREATE CONSTRAINT TRIGGER wait_at_commit AFTER UPDATE ON inbox.message DEFERRABLE INITIALLY DEFERRED FOR EACH ROW
        WHEN (NEW.state = 'done' AND NEW.key LIKE 'commit-%') EXECUTE FUNCTION wait_at_commit();
    CREATE TABLE asked (who text DEFAULT current_setting('application_name'), statement text);
    CREATE FUNCTION note_asked() RETURNS trigger LANGUAGE plpgsql AS
        $$ BEGIN INSERT INTO asked (statement) VALUES (current_query()); RETURN NULL; END $$;
    CREATE TRIGGER note_asked AFTER UPDATE ON inbox.message FOR EACH STATEMENT EXECUTE FUNCTION note_asked()";

pub(crate) struct Case {
    pub(super) cell: Cell,
    pub(super) site: Site,
    pub(super) topic: String,
    group: String,
    watch: GroupWatch,
    /// Where the effects of leased messages go.
    pub(super) service: Service,
    /// Has the locks that hold.
    lock: PgConnection,
    members: BTreeMap<String, Process>,
    /// A bug in them.
    plant: Option<&'static str>,
    started: usize,
    /// Of each partition.
    keys: BTreeMap<i32, Vec<String>>,
    ranks: BTreeMap<String, i64>,
    pub(super) sent: Vec<Committed>,
    /// Records with the key of another one and another payload.
    pub(super) forged: usize,
    uncommitted: usize,
    /// Messages whose offset was committed before their effect.
    early: Vec<String>,
    /// Messages whose row an owner changed that was none any more.
    stale: Vec<String>,
    /// Messages that were not held where they should have been.
    elsewhere: Vec<String>,
}

/// One round's message: which, and who will have it.
struct Held {
    id: String,
    victim: String,
    /// Before or after its effect.
    at: &'static str,
    /// What waits in the server goes through after the fault; else the server ends it.
    at_once: bool,
}

/// A row of the inbox, as far as an owner may change it.
type Row = (String, Option<String>, i64, Option<String>, Option<String>);

impl Case {
    /// A cell whose processes have that plant, or none.
    pub(crate) async fn new(harness: &mut Harness, cell: Cell, plant: Option<&'static str>) -> Outcome<Self> {
        let site = harness.site().await?;
        // At C5 each of three gets two, so that each of two has to give one away.
        let topic = site.topic("faults", if cell.point == Point::C5 { 6 } else { 2 }).await?;
        let group = site.topic_name("group");
        site.pool().execute(TABLES).await?;
        Ok(Self {
            cell,
            watch: site.kafka().watch(&group, &topic)?,
            service: Service::start().await?,
            lock: site.connect().await?,
            members: BTreeMap::new(),
            plant,
            started: 0,
            keys: BTreeMap::new(),
            ranks: BTreeMap::new(),
            sent: Vec::new(),
            forged: 0,
            uncommitted: 0,
            early: Vec::new(),
            stale: Vec::new(),
            elsewhere: Vec::new(),
            site,
            topic,
            group,
        })
    }

    pub(crate) fn cell(&self) -> Cell {
        self.cell
    }

    pub(crate) async fn run(&mut self, rounds: usize) -> Outcome<Score> {
        self.fill().await?;
        for _ in 0..2 {
            self.start()?;
        }
        for round in 0..rounds {
            self.round(round).await.map_err(|failure| failure.during(format!("round {round}")))?;
        }
        self.whole().await?;
        for process in self.members.values_mut() {
            process.ask_to_end()?;
        }
        for process in self.members.values_mut() {
            let status = process.exited(PATIENCE).await?;
            if !status.success() {
                fail!("{status}: {}", process.stderr());
            }
        }
        let mut score = verdict::of(self).await?;
        score.runs = rounds;
        score.uncommitted = self.uncommitted;
        score.add("offsets committed before their effects", &self.early);
        score.add("rows changed by a stale owner", &self.stale);
        score.add("not held where they should have been", &self.elsewhere);
        score.early = self.early.len();
        score.stale = self.stale.len();
        Ok(score)
    }

    /// A message of each of some keys, which tells where the keys lie.
    async fn fill(&mut self) -> Outcome {
        let partitions = if self.cell.point == Point::C5 { 6 } else { 2 };
        let names: Vec<String> = (0..partitions * KEYS_A_PARTITION).map(|n| format!("key-{n}")).collect();
        let drafts = names.iter().map(|key| self.message(key, "", "")).collect();
        self.site.kafka().produce(&self.topic, drafts).await?;
        for record in self.site.kafka().records(&self.topic).await? {
            let key = record.key_text().unwrap_or_default().to_owned();
            self.keys.entry(record.partition).or_default().push(key);
        }
        if self.keys.len() == partitions && self.keys.values().all(|keys| keys.len() >= 2) {
            Ok(())
        } else {
            fail!("some partition has fewer than two keys: {:?}", self.keys)
        }
    }

    /// The next message of a key, to be committed to.
    fn message(&mut self, key: &str, prefix: &str, hold: &str) -> Draft {
        let rank = self.ranks.entry(key.to_owned()).or_default();
        *rank += 1;
        let id = format!("{prefix}{key}:{rank}");
        let content = format!(r#"{{"key":"{key}","seq":{rank},"hold":"{hold}"}}"#);
        let draft = Draft::new(key, content.clone()).header("idempotency-key", &id);
        self.sent.push(Committed { id, key: Some(key.to_owned()), rank: *rank, content: content.into() });
        draft
    }

    fn start(&mut self) -> Outcome<String> {
        self.started += 1;
        let name = format!("member-{}", self.started);
        let launch = self
            .site
            .launch(&name, program("effect_consumer")?)
            .args([&self.topic, &self.group])
            .env("EFFECTS_NAME", &name)
            // At C5 a rebalance has to begin meanwhile.
            .env("EFFECTS_STALL", if self.cell.point == Point::C5 { "8" } else { "3" });
        let launch = match self.cell.owning {
            Owning::Transactional => launch,
            Owning::Leased => launch.env("EFFECTS_SERVICE", self.service.address()),
        };
        let launch = match self.plant {
            Some(plant) => launch.env("EFFECTS_PLANT", plant),
            None => launch,
        };
        self.members.insert(name.clone(), launch.start()?);
        Ok(name)
    }

    /// Waits until everything is settled and exactly our processes share all partitions.
    async fn whole(&self) -> Outcome<Group> {
        eventually(format!("{}: the group to be whole and done", self.cell), PATIENCE, async || {
            let group = self.watch.group().await?;
            let names: BTreeSet<&String> = group.members.keys().collect();
            let mut shared: Vec<i32> = group.members.values().flatten().copied().collect();
            shared.sort_unstable();
            let is_whole = group.state == "Stable"
                && names == self.members.keys().collect()
                && shared.iter().eq(self.keys.keys())
                && group.members.values().all(|of_it| !of_it.is_empty());
            if !is_whole {
                fail!("{group:?}, not {:?}", self.members.keys());
            }
            self.is_done().await?;
            Ok(group)
        })
        .await
    }

    /// Every offset is committed, and nothing waits aside.
    async fn is_done(&self) -> Outcome {
        let lag = self.watch.lag().await?;
        let waiting: i64 =
            sqlx::query_scalar("SELECT count(*) FROM inbox.parked WHERE state IN ('retrying', 'blocked')")
                .fetch_one(self.site.pool())
                .await?;
        if (lag, waiting) == (0, 0) {
            Ok(())
        } else {
            fail!("{lag} records are not committed, {waiting} wait")
        }
    }

    async fn round(&mut self, round: usize) -> Outcome {
        let group = self.whole().await?;
        let before = self.watch.committed().await?;
        let shares: Vec<(&String, &Vec<i32>)> = group.members.iter().collect();
        let (victim, shares) = shares[round / 2 % shares.len()];
        let partition = shares[0];
        let (drafts, id) = self.drafts(round, partition);
        let is_even = round.is_multiple_of(2);
        let held = Held { id, victim: victim.clone(), at: at(round), at_once: is_even };

        self.block().await?;
        let Some(mut process) = self.members.remove(&held.victim) else { fail!("no {}", held.victim) };
        let mut third = None;
        if self.cell.point == Point::C4 {
            let (site, topic) = (self.site.clone(), self.topic.clone());
            let produced = async { site.kafka().produce(&topic, drafts).await };
            try_join(produced, async {
                self.is_marked(&held.id).await?;
                self.hurt(&mut process).await
            })
            .await?;
            let committed = self.watch.committed().await?;
            self.uncommitted += usize::from(committed[&partition] == before[&partition]);
        } else {
            self.site.kafka().produce(&self.topic, drafts).await?;
            let all = if self.cell.point == Point::C5 { shares.len() } else { 1 };
            self.waits(&held.victim, all).await?;
            if self.cell.point == Point::C5 {
                let name = self.start()?;
                self.gives_away(&held.victim, shares.len(), &name).await?;
                self.waits(&held.victim, 1).await?;
                third = Some(name);
            }
            if self.cell.point == Point::C1 && self.is_claimed(&held.id).await? {
                self.elsewhere.push(held.id.clone());
            }
            match self.is_not_committed(partition, before[&partition]).await {
                Ok(()) => self.uncommitted += 1,
                Err(failure) => self.early.push(format!("{}: {failure}", held.id)),
            }
            self.hurt(&mut process).await?;
        }
        self.release(&held).await?;
        if self.cell.owning == Owning::Leased && self.cell.point == Point::C2 && held.at == "before" {
            self.forge(&held, &group).await?;
        }
        match self.cell.fault {
            Fault::Kill => {
                if third.is_none() {
                    self.start()?;
                }
            }
            Fault::Sleep => {
                self.wakes(&held, process).await?;
                if let Some(name) = third {
                    let Some(mut process) = self.members.remove(&name) else { fail!("no {name}") };
                    let status = process.terminate(PATIENCE).await?;
                    if !status.success() {
                        fail!("{status}: {}", process.stderr());
                    }
                }
            }
        }
        self.whole().await?;
        self.is_what_it_is_called(&held).await
    }

    /// The message that is held, then others behind it and beside it. At C5 one in each partition is held.
    fn drafts(&mut self, round: usize, partition: i32) -> (Vec<Draft>, String) {
        let keys = self.keys.clone();
        let of = |partition: &i32, n: usize| keys[partition][n % keys[partition].len()].clone();
        let (prefix, hold) = match self.cell.point {
            Point::C1 | Point::C4 => ("", ""),
            Point::C2 | Point::C5 => ("", at(round)),
            Point::C3 => ("commit-", ""),
        };
        let mut drafts = vec![self.message(&of(&partition, round), prefix, hold)];
        let id = self.sent[self.sent.len() - 1].id.clone();
        for other in keys.keys().filter(|other| **other != partition) {
            let hold = if self.cell.point == Point::C5 { hold } else { "" };
            drafts.push(self.message(&of(other, round), "", hold));
        }
        for partition in keys.keys() {
            drafts.push(self.message(&of(partition, round), "", ""));
            drafts.push(self.message(&of(partition, round + 1), "", ""));
            drafts.push(self.message(&of(partition, round), "", ""));
        }
        (drafts, id)
    }

    /// Takes what the point waits for.
    async fn block(&mut self) -> Outcome {
        let sql = match self.cell.point {
            Point::C1 => "BEGIN; LOCK TABLE inbox.message IN ACCESS EXCLUSIVE MODE",
            Point::C2 | Point::C3 | Point::C5 => "SELECT pg_advisory_lock(1)",
            Point::C4 => return Ok(()),
        };
        self.lock.execute(sql).await?;
        Ok(())
    }

    /// Lets go. At C3 of every second round only after the server has ended what waits, which is then rolled back; it does not
    /// do so by itself, because no time-out of a statement counts while COMMIT runs.
    async fn release(&mut self, held: &Held) -> Outcome {
        if self.cell.point == Point::C3 && !held.at_once {
            sqlx::query(
                "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity
                 WHERE datname = current_database() AND application_name = $1 AND query = 'COMMIT' AND wait_event = 'advisory'",
            )
            .bind(&held.victim)
            .execute(self.site.pool())
            .await?;
            match self.waiting(&held.victim).await? {
                0 => {}
                waiting => fail!("{waiting} of {} still wait at the commit", held.victim),
            }
        }
        let sql = match self.cell.point {
            Point::C1 => "ROLLBACK",
            Point::C2 | Point::C3 | Point::C5 => "SELECT pg_advisory_unlock(1)",
            Point::C4 => return Ok(()),
        };
        self.lock.execute(sql).await?;
        Ok(())
    }

    /// How many connections of that process wait at the point.
    async fn waiting(&self, who: &str) -> Outcome<usize> {
        let count: i64 = sqlx::query_scalar(
            "SELECT count(*) FROM pg_locks l JOIN pg_stat_activity a USING (pid)
             WHERE a.datname = current_database() AND a.application_name = $1 AND NOT l.granted
               AND CASE $2 WHEN 'C1' THEN l.relation = 'inbox.message'::regclass
                           WHEN 'C3' THEN l.locktype = 'advisory' AND a.query = 'COMMIT'
                           ELSE l.locktype = 'advisory' END",
        )
        .bind(who)
        .bind(format!("{:?}", self.cell.point))
        .fetch_one(self.site.pool())
        .await?;
        Ok(usize::try_from(count)?)
    }

    async fn waits(&self, who: &str, connections: usize) -> Outcome {
        eventually(format!("{}: {who} at the point", self.cell), PATIENCE, async || {
            let waiting = self.waiting(who).await?;
            if waiting >= connections { Ok(()) } else { fail!("{waiting} of {connections} wait") }
        })
        .await
    }

    /// Looks without a pause that grows: an offset is committed at most 200 ms later.
    async fn is_marked(&self, id: &str) -> Outcome {
        let marked = async {
            let sql = match self.cell.owning {
                Owning::Transactional => "SELECT EXISTS (SELECT FROM effect WHERE key = $1)",
                Owning::Leased => {
                    "SELECT EXISTS (SELECT FROM inbox.message WHERE key = $1 AND state = 'done')"
                }
            };
            while !sqlx::query_scalar::<_, bool>(sql).bind(id).fetch_one(self.site.pool()).await? {
                lasts("a moment of work", Duration::from_millis(2)).await;
            }
            Ok(())
        };
        match timeout(PATIENCE, marked).await {
            Ok(marked) => marked,
            Err(_) => fail!("{id} was not applied within {PATIENCE:?}"),
        }
    }

    /// Whatever a consumer might commit of what it has in hand comes within 200 ms.
    async fn is_not_committed(&self, partition: i32, before: i64) -> Outcome {
        stays("the group's offset before what is held", Duration::from_millis(600), async || {
            let now = self.watch.committed().await?[&partition];
            if now == before { Ok(()) } else { fail!("it is {now}, and was {before}") }
        })
        .await
    }

    /// Waits until the group's leader has told `who` to give a partition away.
    async fn gives_away(&self, who: &str, had: usize, third: &str) -> Outcome {
        eventually(format!("{}: {who} to give a partition away", self.cell), PATIENCE, async || {
            let group = self.watch.group().await?;
            let has = group.members.get(who).map_or(had, Vec::len);
            if group.state == "Stable" && group.members.contains_key(third) && has < had {
                Ok(())
            } else {
                fail!("{group:?}")
            }
        })
        .await
    }

    async fn hurt(&self, process: &mut Process) -> Outcome {
        match self.cell.fault {
            Fault::Kill => process.kill().await,
            Fault::Sleep => {
                if self.holds_the_taker() {
                    self.service.hold_looks();
                }
                process.stand_still().await
            }
        }
    }

    /// Whether a stale owner wakes while the next one is at it.
    fn holds_the_taker(&self) -> bool {
        self.cell.owning == Owning::Leased && self.cell.point == Point::C2
    }

    /// The held one's key with another payload, where another process reads it.
    async fn forge(&mut self, held: &Held, group: &Group) -> Outcome {
        let elsewhere = group.members.iter().find(|(name, _)| **name != held.victim);
        let Some((_, partitions)) = elsewhere else { fail!("no other member in {group:?}") };
        let forged = Draft::new(&self.keys[&partitions[0]][0], r#"{"forged":true}"#);
        self.site.kafka().produce(&self.topic, vec![forged.header("idempotency-key", &held.id)]).await?;
        self.forged += 1;
        Ok(())
    }

    /// Waits until others have done the stopped one's work, or are at it, and continues it: it must change nothing.
    async fn wakes(&mut self, held: &Held, process: Process) -> Outcome {
        eventually(format!("{}: the group to do without {}", self.cell, held.victim), PATIENCE, async || {
            let group = self.watch.group().await?;
            if group.members.contains_key(&held.victim) {
                fail!("{group:?}");
            }
            if !self.holds_the_taker() {
                return self.is_done().await;
            }
            if self.service.journal().iter().any(|entry| is_look(entry, &held.id)) {
                Ok(())
            } else {
                fail!("none asks")
            }
        })
        .await?;
        let (row, asked) = (self.row(&held.id).await?, self.asked(&held.victim).await?);
        process.go_on()?;
        if self.holds_the_taker() {
            eventually(format!("{} to write what it no longer may", held.victim), PATIENCE, async || {
                let now = self.asked(&held.victim).await?;
                if now > asked { Ok(()) } else { fail!("it has written nothing") }
            })
            .await?;
            let now = self.row(&held.id).await?;
            // A look that was not answered in time gives the work back, and it is taken once more.
            let stands = now.0 == "in_progress" && now.1 == row.1 && now.2 >= row.2;
            if !stands {
                self.stale.push(format!("{} from {row:?} to {now:?}", held.id));
            }
            self.service.answer_looks();
        }
        self.members.insert(held.victim.clone(), process);
        self.whole().await?;
        let now = self.row(&held.id).await?;
        if !self.holds_the_taker() && now != row {
            self.stale.push(format!("{} from {row:?} to {now:?}", held.id));
        }
        Ok(())
    }

    /// By the connection that has the table for itself.
    async fn is_claimed(&mut self, id: &str) -> Outcome<bool> {
        let claimed = sqlx::query_scalar("SELECT EXISTS (SELECT FROM inbox.message WHERE key = $1)");
        Ok(claimed.bind(id).fetch_one(&mut self.lock).await?)
    }

    async fn row(&self, id: &str) -> Outcome<Row> {
        Ok(sqlx::query_as(
            "SELECT state, owner, generation, outcome::text, finished_at::text FROM inbox.message WHERE key = $1",
        )
        .bind(id)
        .fetch_one(self.site.pool())
        .await?)
    }

    /// How often that process has tried to renew, complete or give back.
    async fn asked(&self, who: &str) -> Outcome<i64> {
        Ok(sqlx::query_scalar("SELECT count(*) FROM asked WHERE who = $1 AND statement LIKE '%lease_until > clock_timestamp()%'")
            .bind(who)
            .fetch_one(self.site.pool())
            .await?)
    }

    /// The point is what it is called: who did it, and whether it had to be asked after.
    async fn is_what_it_is_called(&mut self, held: &Held) -> Outcome {
        let by_victim = match self.cell.point {
            Point::C3 => held.at_once,
            Point::C4 => true,
            Point::C1 | Point::C2 | Point::C5 => false,
        };
        let is_so = match self.cell.owning {
            Owning::Transactional => {
                let by: Vec<String> = sqlx::query_scalar("SELECT who FROM effect WHERE key = $1")
                    .bind(&held.id)
                    .fetch_all(self.site.pool())
                    .await?;
                by.iter().all(|who| (*who == held.victim) == by_victim)
            }
            Owning::Leased => {
                let looks = self.service.journal().iter().filter(|entry| is_look(entry, &held.id)).count();
                match self.cell.point {
                    // Nobody else had it, which was looked at then.
                    Point::C1 => true,
                    Point::C3 | Point::C4 => (looks == 0) == by_victim,
                    Point::C2 | Point::C5 => looks > 0,
                }
            }
        };
        if !is_so {
            self.elsewhere.push(held.id.clone());
        }
        Ok(())
    }
}

fn is_look(entry: &baton_tests::service::Entry, id: &str) -> bool {
    entry.asked == Asked::Look && entry.key == id
}

/// Where a message of that round stands still.
fn at(round: usize) -> &'static str {
    if round.is_multiple_of(2) { "before" } else { "after" }
}

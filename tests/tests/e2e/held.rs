//! The fault table: what happens to a relay at each point of its work, and what is then on the topic.
//!
//! ```text
//! P0 before the lease · P1 lease held · P2 page read · P3 half of it acknowledged · P4 all acknowledged, cursor not written
//! P5 cursor written, its reply lost · P6 reply received
//!
//! fill ─▶ relay, all 8 shards held at the point ─▶ fault ─▶ released ─▶ everything published ─▶ verdict
//! ```
//!
//! A killed, stopped or terminated relay is followed by a second one, a relay whose database went goes on by itself. The
//! ledger judges the topic, a trigger the cursors, and no shard may repeat more messages than the relay itself has
//! said that a crash repeats. At P5 a proxy swallows what the server answers to the cursor's statement.
//!
//! By default some cells of the table; `BATON_TIER=full` has each of them ten times, `BATON_TEST_POINT=P5` the row of one
//! point once.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use baton_relay::hold::Point;
use baton_tests::workload::{self, Row};
use baton_tests::{
    Draft, Harness, Kafka, Load, Outcome, OwnStack, Place, Process, Proxy, Schema, Site, Way, eventually,
    fail, figure, lasts, program, test,
};
use futures_util::StreamExt as _;
use futures_util::stream;

use crate::leases::{shares, watch_leases};
use crate::zombies::no_cursor_went_back;

const POINTS: [Point; 7] = [Point::P0, Point::P1, Point::P2, Point::P3, Point::P4, Point::P5, Point::P6];

/// Long, because the whole table keeps the machine busy.
const PATIENCE: Duration = Duration::from_secs(60);

/// Three keys of each shard, so many messages each: three times what a relay hands over without a cursor.
const MESSAGES_OF_A_KEY: i64 = 100;

/// How many cases run at once.
const AT_ONCE: usize = 6;

/// What is done to the relay.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Fault {
    Kill,
    /// SIGSTOP until another relay has done its work, then SIGCONT.
    Sleep,
    Terminate,
    /// The server ends its connections.
    Cut,
    /// The server stops at once and comes back.
    Restart,
}

const FAULTS: [Fault; 5] = [Fault::Kill, Fault::Sleep, Fault::Terminate, Fault::Cut, Fault::Restart];

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Kill => "SIGKILL",
            Self::Sleep => "SIGSTOP+SIGCONT",
            Self::Terminate => "SIGTERM",
            Self::Cut => "lost connection",
            Self::Restart => "Postgres restart",
        })
    }
}

#[test]
fn a_fault_at_any_point_loses_forges_and_reorders_nothing_and_repeats_no_more_than_was_said() {
    let full = std::env::var("BATON_TIER").is_ok_and(|tier| tier == "full");
    let only: Option<String> = std::env::var("BATON_TEST_POINT").ok();
    let limit = Duration::from_secs(if full { 3600 } else { 240 });
    test(limit, Load::Alone, async |harness: &mut Harness| {
        let stack = OwnStack::up().await?;
        let mut table = Table::default();
        let rounds = if full { 10 } else { 1 };
        for round in 0..rounds {
            let only = only.as_deref();
            // Each fault's line through the points begins elsewhere: the small tier has each point and each fault.
            let cells = POINTS.into_iter().enumerate().flat_map(|(p, point)| {
                FAULTS.into_iter().enumerate().filter_map(move |(f, fault)| {
                    let chosen = match only {
                        Some(only) => format!("{point:?}") == only,
                        None => full || (p + 3 * f).is_multiple_of(4),
                    };
                    chosen.then_some((point, fault))
                })
            });
            let (restarts, others): (Vec<_>, Vec<_>) =
                cells.partition(|(_, fault): &(Point, Fault)| *fault == Fault::Restart);
            table.run(harness, &stack, others, round).await?;
            table.run(harness, &stack, restarts, round).await?;
            figure(&format!("must show 2, round {} of {rounds}: {table}", round + 1));
        }
        Ok(())
    });
}

/// How often each cell was run, and the most that a shard repeated.
#[derive(Debug, Default)]
struct Table {
    cells: BTreeMap<(usize, Fault), (usize, usize)>,
    bound: usize,
}

impl Table {
    async fn run(
        &mut self,
        harness: &mut Harness,
        stack: &OwnStack,
        cells: Vec<(Point, Fault)>,
        round: usize,
    ) -> Outcome {
        let mut cases = Vec::new();
        for (point, fault) in cells {
            cases.push(Case::new(harness, stack.place(), point, fault, round).await?);
        }
        let ends = if cases.iter().all(|case| case.fault == Fault::Restart) {
            restart(stack, &cases).await?
        } else {
            stream::iter(&cases)
                .map(async |case: &Case| {
                    let relay = case.held().await?;
                    case.hurt(relay).await
                })
                .buffer_unordered(AT_ONCE)
                .collect()
                .await
        };
        for end in ends {
            let End { point, fault, repeated, bound } = end?;
            let cell = self.cells.entry((point as usize, fault)).or_default();
            *cell = (cell.0 + 1, cell.1.max(repeated));
            self.bound = bound;
        }
        for case in &cases {
            harness.leave(&case.site).await;
        }
        Ok(())
    }
}

/// One restart for all cases: each relay is at its point before, and goes on after.
async fn restart(stack: &OwnStack, cases: &[Case]) -> Outcome<Vec<Outcome<End>>> {
    let held: Vec<Outcome<HeldRelay>> =
        stream::iter(cases).map(Case::held).buffered(cases.len().max(1)).collect().await;
    let mut relays = Vec::new();
    for relay in held {
        relays.push(relay?);
    }
    stack.restart_postgres().await?;
    Ok(stream::iter(cases.iter().zip(relays))
        .map(async |(case, relay)| case.hurt(relay).await)
        .buffer_unordered(cases.len().max(1))
        .collect()
        .await)
}

/// Runs and the most repeated by a shard, a row a point, a column a fault.
impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "runs / most repeated by one shard (said: at most {})", self.bound)?;
        write!(f, "  ")?;
        for fault in FAULTS {
            write!(f, " | {:>16}", fault.to_string())?;
        }
        for point in POINTS {
            write!(f, "\n{point:?}")?;
            for fault in FAULTS {
                let cell = self.cells.get(&(point as usize, fault));
                let text = cell.map_or_else(|| "-".to_owned(), |(runs, most)| format!("{runs} / {most}"));
                write!(f, " | {text:>16}")?;
            }
        }
        Ok(())
    }
}

/// One relay, one database, one topic.
#[derive(Debug)]
struct Case {
    point: Point,
    fault: Fault,
    site: Site,
    topic: String,
    /// Of the relay and of its output, which is read: no two cases may share one.
    name: String,
    release: PathBuf,
}

/// A relay all of whose shards are at the point, and the proxy it reaches its database through.
#[derive(Debug)]
struct HeldRelay {
    relay: Process,
    proxy: Proxy,
}

#[derive(Debug)]
struct End {
    point: Point,
    fault: Fault,
    /// By the shard that repeated most.
    repeated: usize,
    /// What the relay said at its start.
    bound: usize,
}

impl Case {
    async fn new(
        harness: &mut Harness,
        place: &Place,
        point: Point,
        fault: Fault,
        round: usize,
    ) -> Outcome<Self> {
        let site = harness.site_at(place, Schema::Both { shards: 8 }).await?;
        let topic = site.topic("held", 3).await?;
        watch_leases(&site).await?;
        sqlx::query(
            r#"INSERT INTO outbox.message (topic, key, payload)
               SELECT $1, key, convert_to(format('{"seq":%s}', seq), 'UTF8')
               FROM generate_series(1, $2) seq, (
                   SELECT key, row_number() OVER (PARTITION BY outbox.shard_of(key, 0) ORDER BY key) AS n
                   FROM (SELECT 'key-' || i AS key FROM generate_series(1, 300) i) every
               ) keys
               WHERE n <= 3 ORDER BY seq"#,
        )
        .bind(&topic)
        .bind(MESSAGES_OF_A_KEY)
        .execute(site.pool())
        .await?;
        let name = format!("held-{round}-{point:?}-{fault:?}");
        let release = harness.directory().join(format!("release-{name}"));
        Ok(Self { point, fault, site, topic, name, release })
    }

    /// Starts the relay and waits until all of its shards are at the point.
    async fn held(&self) -> Outcome<HeldRelay> {
        let (proxy, place) = Proxy::before_postgres(self.site.place()).await?;
        let release = self.release.display().to_string();
        let launch = self
            .site
            .launch(&self.name, program("planted_relay")?)
            .args(["hold", &format!("{:?}", self.point), &release])
            .env("DATABASE_URL", &place.database_url)
            .env("BATON_RELAY__OWNER", "held");
        let relay = launch.start()?;
        // One task claims for all shards, one after another.
        let expected = if self.point == Point::P0 { 1 } else { 8 };
        eventually(format!("{} to be held", self.name), PATIENCE, async || {
            let line = format!("held at {:?} shard ", self.point);
            let held = relay.stderr().lines().filter(|found| found.starts_with(&line)).count();
            if held >= expected { Ok(()) } else { fail!("{held} shards") }
        })
        .await?;
        if self.point == Point::P5 {
            proxy.only("baton cursor");
            proxy.swallow(Way::Back);
            let changes: i64 = sqlx::query_scalar("SELECT coalesce(max(n), 0) FROM cursor_change")
                .fetch_one(self.site.pool())
                .await?;
            self.let_go()?;
            eventually("the cursors to move without the relay's knowing", PATIENCE, async || {
                let moved =
                    sqlx::query_scalar("SELECT count(DISTINCT shard) FROM cursor_change WHERE n > $1");
                let moved: i64 = moved.bind(changes).fetch_one(self.site.pool()).await?;
                if moved == 8 && proxy.swallowed(Way::Back) > 0 { Ok(()) } else { fail!("{moved} moved") }
            })
            .await?;
        }
        Ok(HeldRelay { relay, proxy })
    }

    /// Does the harm, lets what is left go on, and judges once everything is published. A restart has been done.
    async fn hurt(&self, held: HeldRelay) -> Outcome<End> {
        let HeldRelay { mut relay, proxy } = held;
        let words = format!("{:?}, {}", self.point, self.fault);
        match self.fault {
            Fault::Kill => {
                relay.kill().await?;
                proxy.heal();
                self.heir().await?;
            }
            Fault::Sleep => {
                relay.stop()?;
                self.heir().await?;
                proxy.heal();
                self.let_go()?;
                relay.go_on()?;
                eventually("the relay that slept to take part again", PATIENCE, async || {
                    shares(&self.site, &[8]).await
                })
                .await?;
                assert!(relay.terminate(PATIENCE).await?.success(), "{words}: {}", relay.stderr());
            }
            Fault::Terminate => {
                relay.ask_to_end()?;
                proxy.heal();
                self.let_go()?;
                let status = relay.exited(PATIENCE).await.map_err(|failure| failure.during(&words))?;
                assert!(status.success(), "{words}: {status}");
                self.heir().await?;
            }
            Fault::Cut | Fault::Restart => {
                if self.fault == Fault::Cut {
                    cut(&self.site).await.map_err(|failure| failure.during(&words))?;
                }
                proxy.heal();
                self.let_go()?;
                self.site.emptied().await.map_err(|failure| failure.during(&words))?;
                assert!(relay.terminate(PATIENCE).await?.success(), "{words}: {}", relay.stderr());
            }
        }
        self.verdict(&relay).await
    }

    /// A second relay, that ends when everything is published.
    async fn heir(&self) -> Outcome {
        let launch = self.site.baton(&["relay", "--until-empty"])?;
        let launch = self.site.as_relay(launch, "heir").env("BATON_LEASE__TTL", "2s");
        launch.finish(PATIENCE).await?.success().map(drop)
    }

    fn let_go(&self) -> Outcome {
        Ok(std::fs::write(&self.release, "")?)
    }

    async fn verdict(&self, relay: &Process) -> Outcome<End> {
        let words = format!("{:?}, {}", self.point, self.fault);
        let truth = workload::truth(&self.site, &self.topic).await?;
        assert_eq!(truth.len(), 2400);
        let (findings, _) = workload::judge(&truth, &self.site.kafka().records(&self.topic).await?);
        assert!(findings.wire_is_right(), "{words}: {findings}");
        no_cursor_went_back(&self.site).await.map_err(|failure| failure.during(&words))?;
        let bound = said(relay)?;
        let shards = by_shard(&truth, &findings.repeated);
        let repeated = shards.values().copied().max().unwrap_or(0);
        assert!(repeated <= bound, "{words}: a shard repeated {repeated} of {bound}: {shards:?}");
        // The points are what they are called.
        let (least, most) = match (self.point, self.fault) {
            // A relay that has not noticed yet that its database went may begin to hand over.
            (Point::P0 | Point::P1 | Point::P2, Fault::Kill | Fault::Sleep | Fault::Terminate) => (0, 0),
            (Point::P3, Fault::Kill) => (bound / 2, bound / 2),
            (Point::P4, Fault::Kill) => (bound, bound),
            _ => (0, bound),
        };
        assert!((least..=most).contains(&repeated), "{words}: a shard repeated {repeated}: {shards:?}");
        Ok(End { point: self.point, fault: self.fault, repeated, bound })
    }
}

/// The server ends every connection of the relay.
async fn cut(site: &Site) -> Outcome {
    let cut: i64 = sqlx::query_scalar(
        "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
         WHERE datname = current_database() AND application_name LIKE 'baton %'",
    )
    .fetch_one(site.pool())
    .await?;
    if cut >= 4 { Ok(()) } else { fail!("it had {cut} connections") }
}

/// How many messages of each shard a crash repeats, in the relay's own words.
fn said(relay: &Process) -> Outcome<usize> {
    let words = relay.stderr();
    let number = words.split_once("a crash repeats at most ").and_then(|(_, rest)| rest.split(' ').next());
    match number {
        Some(number) => Ok(number.parse()?),
        None => fail!("it does not say what a crash repeats: {words}"),
    }
}

fn by_shard(truth: &[Row], repeated: &[String]) -> BTreeMap<i16, usize> {
    let shards: BTreeMap<&str, i16> = truth.iter().map(|row| (row.message.id.as_str(), row.shard)).collect();
    let mut counts = BTreeMap::new();
    for shard in repeated.iter().filter_map(|id| shards.get(id.as_str())) {
        *counts.entry(*shard).or_default() += 1;
    }
    counts
}

#[test]
fn a_relay_that_is_told_to_stop_ends_also_if_its_database_goes_while_it_drains() {
    test(Duration::from_secs(120), Load::Light, async |harness: &mut Harness| {
        let place = Place::shared()?;
        // Its shards stand still, so the drain lasts.
        let case = Case::new(harness, &place, Point::P2, Fault::Terminate, 0).await?;
        let HeldRelay { mut relay, proxy: _proxy } = case.held().await?;
        relay.ask_to_end()?;
        lasts("the drain", Duration::from_secs(1)).await;
        cut(&case.site).await?;
        case.let_go()?;
        let status = relay.exited(Duration::from_secs(20)).await?;
        assert!(status.success(), "{status}: {}", relay.stderr());
        case.heir().await?;
        case.verdict(&relay).await.map(drop)
    });
}

#[test]
fn clients_of_the_brokers_proxy_stay_behind_it() {
    test(Duration::from_secs(200), Load::Alone, async |harness: &mut Harness| {
        let stack = OwnStack::up().await?;
        let site = harness.site_at(stack.place(), Schema::Empty).await?;
        let topic = site.topic("behind", 2).await?;
        let proxy = stack.kafka_proxy().await?;
        let behind = Kafka::new(&proxy.address());
        behind.produce(&topic, vec![Draft::new("key", "value")]).await?;
        assert!(proxy.passed(Way::There) > 0);
        proxy.hold(Way::There);
        let producing = tokio::spawn({
            let topic = topic.clone();
            async move { behind.produce(&topic, vec![Draft::new("key", "late")]).await }
        });
        eventually(
            "a connection",
            PATIENCE,
            async || {
                if proxy.connections() > 0 { Ok(()) } else { fail!("none") }
            },
        )
        .await?;
        assert_eq!(site.kafka().count(&topic).await?, 1);
        proxy.heal();
        producing.await??;
        assert_eq!(site.kafka().count(&topic).await?, 2);
        Ok(())
    });
}

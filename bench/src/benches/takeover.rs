//! How long nobody publishes a shard after its relay dies, and after it is asked to end.
//!
//! Two relays share 8 shards, each of which gets a message forty times a second. One is ended, by SIGKILL and by SIGTERM
//! in turn, and of each shard it held the time is taken from the signal to the other's first record on the topic, by the
//! broker's append time: all clocks are this machine's. Both limits are promises: a lease's length and a second, and a second.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use sqlx::PgConnection;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep};

use crate::arena::Arena;
use crate::broker::Record;
use crate::lab::{Lab, Result};
use crate::measure::float;
use crate::process::Relay;
use crate::report::{Bar, Report};

const TTL_SECONDS: f64 = 2.0;
const OWNERS: [&str; 2] = ["even", "odd"];
const SHARDS: usize = 8;
const PATIENCE: Duration = Duration::from_secs(30);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    Kill,
    Terminate,
}

/// A relay that was made to end.
struct End {
    fault: Fault,
    /// In milliseconds, just before the signal.
    at: i64,
    keys: Vec<String>,
    /// The source of the relay that stayed.
    heir: String,
}

pub(crate) async fn run(lab: &Lab) -> Result<Report> {
    let times = lab.tier.choose(10, 3);
    let arena = Arc::new(lab.arena().await?);
    let keys = key_of_each_shard(&arena).await?;
    let before = arena.broker.ends(&arena.topic)?;
    let stop = Arc::new(AtomicBool::new(false));
    let load = tokio::spawn(trickle(Arc::clone(&arena), keys.clone(), Arc::clone(&stop)));

    let mut relays = Relays::start(lab, &arena).await?;
    let mut ends = Vec::new();
    for round in 0..times * 2 {
        let fault = if round % 4 < 2 { Fault::Kill } else { Fault::Terminate };
        ends.push(relays.lose(lab, &arena, round % 2, fault, &keys).await?);
    }
    stop.store(true, Ordering::Relaxed);
    load.await??;
    for relay in relays.processes.into_iter().flatten() {
        relay.terminate().await?;
    }
    let records = arena.broker.records(&arena.topic, &before, &arena.broker.ends(&arena.topic)?)?;
    Arc::into_inner(arena).ok_or("the arena is still in use")?.close().await?;

    let mut report = Report::new("takeover");
    for (fault, name, limit) in [
        (Fault::Kill, "SIGKILL to the next publish of the shard", TTL_SECONDS + 1.0),
        (Fault::Terminate, "SIGTERM to the next publish of the shard", 1.0),
    ] {
        let mut gaps = Vec::new();
        for end in ends.iter().filter(|end| end.fault == fault) {
            for key in &end.keys {
                gaps.push(end.gap(&records, key)?);
            }
        }
        let worst = gaps.iter().copied().fold(0.0, f64::max);
        report.figure(name, "s", gaps);
        let of = match fault {
            Fault::Kill => "longest gap after SIGKILL / (lease of 2 s + 1 s)",
            Fault::Terminate => "longest gap after SIGTERM / 1 s",
        };
        report.verdict(vec![worst / limit], of, Bar::AtMost(1.0));
    }
    Ok(report)
}

impl End {
    /// Seconds until the heir's first record of this key.
    fn gap(&self, records: &[Record], key: &str) -> Result<f64> {
        let mine = |record: &&Record| record.key == key && record.source == self.heir && record.at >= self.at;
        let first = records.iter().filter(mine).map(|record| record.at).min();
        let first = first.ok_or_else(|| format!("{} has published nothing of {key}", self.heir))?;
        Ok(float(first - self.at) / 1000.0)
    }
}

/// Two relays. Each process has a source of its own, so that records name who published them.
struct Relays {
    processes: [Option<Relay>; 2],
    sources: [String; 2],
    started: usize,
}

impl Relays {
    async fn start(lab: &Lab, arena: &Arena) -> Result<Self> {
        let sources = ["/0".to_owned(), "/1".to_owned()];
        let processes = [Some(relay(lab, arena, 0, "/0")?), Some(relay(lab, arena, 1, "/1")?)];
        at_rest(arena).await?;
        Ok(Self { processes, sources, started: 2 })
    }

    /// Ends one of them, waits until the other has published all that was its, and starts it again.
    async fn lose(
        &mut self,
        lab: &Lab,
        arena: &Arena,
        which: usize,
        fault: Fault,
        keys: &[String],
    ) -> Result<End> {
        let mut connection = arena.connect().await?;
        let shards: Vec<i16> =
            sqlx::query_scalar("SELECT shard FROM outbox.shard WHERE owner = $1 ORDER BY shard")
                .bind(OWNERS[which])
                .fetch_all(&mut connection)
                .await?;
        let relay = self.processes[which].take().ok_or("a relay that is not running")?;
        let at: i64 =
            sqlx::query_scalar("SELECT floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint")
                .fetch_one(&mut connection)
                .await?;
        match fault {
            Fault::Kill => relay.kill().await?,
            Fault::Terminate => relay.terminate().await?,
        }
        // Else the next one could take a shard back of which its owner had not yet published anything.
        until("the other to have published all", async || {
            let published: i64 = sqlx::query_scalar(
                "SELECT count(*) FROM outbox.shard s WHERE shard = ANY ($1) AND owner = $2 AND EXISTS (
                     SELECT FROM outbox.advance a WHERE a.shard = s.shard AND a.generation = s.generation)",
            )
            .bind(&shards)
            .bind(OWNERS[1 - which])
            .fetch_one(&mut arena.connect().await?)
            .await?;
            Ok(usize::try_from(published)? == shards.len())
        })
        .await?;
        let heir = self.sources[1 - which].clone();
        self.sources[which] = format!("/{}", self.started);
        self.processes[which] = Some(self::relay(lab, arena, which, &self.sources[which])?);
        self.started += 1;
        at_rest(arena).await?;
        let mut held = Vec::new();
        for shard in shards {
            held.push(keys.get(usize::try_from(shard)?).ok_or("a shard without a key")?.clone());
        }
        Ok(End { fault, at, keys: held, heir })
    }
}

fn relay(lab: &Lab, arena: &Arena, which: usize, source: &str) -> Result<Relay> {
    let settings = [
        ("BATON_LEASE__TTL", format!("{TTL_SECONDS}s")),
        ("BATON_LEASE__MARGIN", "400ms".to_owned()),
        ("BATON_RELAY__SOURCE", source.to_owned()),
    ];
    Relay::start(lab, arena, OWNERS[which], &settings)
}

/// Waits until both hold half of the shards.
async fn at_rest(arena: &Arena) -> Result<()> {
    let mut connection = arena.connect().await?;
    until("fair shares", async || {
        let shares: Vec<i64> = sqlx::query_scalar(
            "SELECT count(*) FROM outbox.shard WHERE lease_until > clock_timestamp() GROUP BY owner",
        )
        .fetch_all(&mut connection)
        .await?;
        Ok(shares == [4, 4])
    })
    .await
}

async fn until(what: &str, mut is_so: impl AsyncFnMut() -> Result<bool>) -> Result<()> {
    let started = Instant::now();
    while !is_so().await? {
        if started.elapsed() > PATIENCE {
            return Err(format!("waited {PATIENCE:?} for {what}").into());
        }
        sleep(Duration::from_millis(20)).await;
    }
    Ok(())
}

async fn key_of_each_shard(arena: &Arena) -> Result<Vec<String>> {
    let mut keys: HashMap<i16, String> = HashMap::new();
    let all: Vec<(i16, String)> =
        sqlx::query_as("SELECT outbox.shard_of('key-' || n, 0), 'key-' || n FROM generate_series(1, 1000) n")
            .fetch_all(&mut arena.connect().await?)
            .await?;
    for (shard, key) in all {
        keys.entry(shard).or_insert(key);
    }
    (0..SHARDS)
        .map(|shard| keys.remove(&i16::try_from(shard)?).ok_or_else(|| "a shard without a key".into()))
        .collect()
}

/// A message of every shard forty times a second.
async fn trickle(arena: Arc<Arena>, keys: Vec<String>, stop: Arc<AtomicBool>) -> Result<()> {
    let mut connection: PgConnection = arena.connect().await?;
    let mut tick = interval(Duration::from_millis(25));
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    while !stop.load(Ordering::Relaxed) {
        tick.tick().await;
        sqlx::query("INSERT INTO outbox.message (topic, key, payload) SELECT $1, key, 'x' FROM unnest($2::text[]) key")
            .bind(&arena.topic)
            .bind(&keys)
            .execute(&mut connection)
            .await?;
    }
    Ok(())
}

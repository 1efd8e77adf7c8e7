//! What a relay costs that holds 8 shards and has nothing to do, against nothing at all.
//!
//! The process by the scheduler's own count, because its ticks of 10 ms are too coarse here. Postgres as a whole with the
//! relay less Postgres without it, over windows of the same length in turn, and the transactions of the outbox's database.

use std::time::Duration;

use tokio::time::{Instant, sleep};

use crate::arena::Arena;
use crate::lab::{Lab, Result};
use crate::process::Relay;
use crate::report::{Bar, MIB, Report};

/// Within this a started relay holds all shards.
const PATIENCE: Duration = Duration::from_secs(30);

/// What one window of the idle machine showed.
struct Window {
    seconds: f64,
    postgres_cpu: Option<f64>,
    transactions: f64,
}

pub(crate) async fn run(lab: &Lab) -> Result<Report> {
    let window = Duration::from_secs(lab.tier.choose(20, 5));
    let rounds = 5;
    let arena = lab.arena().await?;
    let (mut relay_cpu, mut resident, mut with, mut without) =
        (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for round in 0..rounds {
        for running in if round % 2 == 0 { [true, false] } else { [false, true] } {
            if !running {
                without.push(watch(lab, &arena, window).await?);
                continue;
            }
            let relay = Relay::start(lab, &arena, "relay", &[])?;
            rests(&arena).await?;
            let before = relay.fine_cpu_seconds()?;
            let seen = watch(lab, &arena, window).await?;
            relay_cpu.push((relay.fine_cpu_seconds()? - before) / seen.seconds);
            resident.push(relay.memory()?.now / MIB);
            with.push(seen);
            relay.terminate().await?;
        }
    }
    arena.close().await?;

    let percent = |share: f64| share * 100.0;
    let mut report = Report::new("idle");
    report.figure("relay", "% of a core", relay_cpu.iter().copied().map(percent).collect());
    report.figure("relay: resident", "MiB", resident);
    for (name, windows) in [("with the relay", &with), ("without", &without)] {
        let cpu: Option<Vec<f64>> =
            windows.iter().map(|w| Some(percent(w.postgres_cpu? / w.seconds))).collect();
        let name_cpu = format!("Postgres {name}");
        match cpu {
            Some(cpu) => report.figure(name_cpu, "% of a core", cpu),
            None => report.absent(name_cpu, "% of a core", lab.servers.unseen.join("; ")),
        }
        let rate = windows.iter().map(|w| w.transactions / w.seconds).collect();
        report.figure(format!("transactions {name}"), "per second", rate);
    }
    let of_one_percent = relay_cpu.iter().map(|share| share / 0.01).collect();
    report.verdict(of_one_percent, "CPU of the relay / 1% of a core", Bar::AtMost(1.0));
    Ok(report)
}

/// Waits until one relay holds every shard, and then until its poll has slowed down.
pub(crate) async fn rests(arena: &Arena) -> Result<()> {
    let mut connection = arena.connect().await?;
    let started = Instant::now();
    loop {
        let free: i64 = sqlx::query_scalar(
            "SELECT count(*) FROM outbox.shard WHERE owner IS NULL OR lease_until < clock_timestamp()",
        )
        .fetch_one(&mut connection)
        .await?;
        if free == 0 {
            break;
        }
        if started.elapsed() > PATIENCE {
            return Err(format!("{free} shards have no owner after {PATIENCE:?}").into());
        }
        sleep(Duration::from_millis(100)).await;
    }
    sleep(Duration::from_secs(2)).await;
    Ok(())
}

async fn watch(lab: &Lab, arena: &Arena, window: Duration) -> Result<Window> {
    let transactions = transactions(arena).await?;
    let (started, servers) = (Instant::now(), lab.servers.cpu());
    sleep(window).await;
    let seconds = started.elapsed().as_secs_f64();
    let servers = lab.servers.cpu().since(servers);
    Ok(Window {
        seconds,
        postgres_cpu: servers.postgres,
        transactions: (self::transactions(arena).await? - transactions).max(0.0),
    })
}

/// Transactions of the outbox's database so far. A backend tells them with a delay of up to a second when it is idle.
async fn transactions(arena: &Arena) -> Result<f64> {
    let count: i64 = sqlx::query_scalar(
        "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = current_database()",
    )
    .fetch_one(&mut arena.connect().await?)
    .await?;
    Ok(crate::measure::float(count))
}

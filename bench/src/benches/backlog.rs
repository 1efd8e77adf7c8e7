//! Ten million messages waiting against a hundred thousand: what waits behind must cost nothing.
//!
//! Each side has an outbox of its own, and each run publishes from its cursors until 300,000 have come or nothing is left.
//! Compared is the same stretch of both: from the first append to that of the 100,000th record, by the broker's clock. The
//! long backlog is drained from its beginning and, in turn, from its middle.

use crate::arena::{Arena, Backlog};
use crate::broker::between;
use crate::lab::{Lab, Result};
use crate::measure::{float, published, ratios};
use crate::process::Relay;
use crate::report::{Bar, MIB, Report};

/// What both sides have waiting at least, and what is compared.
const STRETCH: i64 = 100_000;
const KEYS: i64 = 10_000;

/// How many connections fill the long backlog: as many as there are cores to use.
const WRITERS: i64 = 2;

struct Drained {
    rate: f64,
    cpu_per_million: f64,
    peak: f64,
}

pub(crate) async fn run(lab: &Lab) -> Result<Report> {
    let (waiting, window, pairs) = lab.tier.choose((10_000_000, 300_000, 6), (1_000_000, 200_000, 4));
    let short = lab.arena().await?;
    short.fill(Backlog { messages: STRETCH, keys: KEYS }).await?;
    let long = lab.arena().await?;
    let part = Backlog { messages: waiting / WRITERS, keys: KEYS };
    futures_util::future::try_join_all((0..WRITERS).map(|_| long.write(part))).await?;
    long.sql(&["VACUUM ANALYZE outbox.message"]).await?;
    drained(lab, &short, 0, STRETCH).await?;

    let (mut few, mut many) = (Vec::new(), Vec::new());
    let mut deep = Vec::new();
    for pair in 0..pairs {
        // Every other one starts in the middle.
        let from = if pair % 2 == 0 { 0 } else { waiting / 2 };
        for is_long in if pair % 4 < 2 { [false, true] } else { [true, false] } {
            if is_long {
                many.push(drained(lab, &long, from, window).await?);
            } else {
                few.push(drained(lab, &short, 0, STRETCH).await?);
            }
        }
        deep.push(from > 0);
    }
    short.close().await?;
    long.close().await?;

    let rates = |runs: &[Drained]| runs.iter().map(|run| run.rate).collect::<Vec<_>>();
    let mut report = Report::new("backlog");
    let few_name = format!("{STRETCH} waiting");
    let many_name = format!("{waiting} waiting");
    for (name, runs) in [(&few_name, &few), (&many_name, &many)] {
        report.figure(name.clone(), "messages/s", rates(runs));
        let cpu = runs.iter().map(|run| run.cpu_per_million).collect();
        report.figure(format!("{name}: the relay"), "CPU s per million", cpu);
        let peak = runs.iter().map(|run| run.peak / MIB).collect();
        report.figure(format!("{name}: the relay, resident"), "MiB", peak);
    }
    let started_deep = rates(&many).into_iter().zip(&deep).filter(|(_, deep)| **deep).map(|(rate, _)| rate);
    report.figure(format!("{many_name}, from the middle"), "messages/s", started_deep.collect());
    let peak = many.iter().map(|run| run.peak / MIB).fold(0.0, f64::max);
    report.verdict(
        ratios(&rates(&many), &rates(&few)),
        format!("{waiting} waiting / {STRETCH} waiting"),
        Bar::AtLeast(0.85),
    );
    report.verdict(vec![peak], "most MiB resident of the relay", Bar::AtMost(128.0));
    Ok(report)
}

async fn drained(lab: &Lab, arena: &Arena, from: i64, messages: i64) -> Result<Drained> {
    arena.place(from).await?;
    arena.settle().await?;
    let before = arena.broker.ends(&arena.topic)?;
    let mut relay = Relay::start(lab, arena, "relay", &[])?;
    let after = published(arena, &before, messages, &mut relay).await?;
    let (cpu, peak) = (relay.cpu_seconds()?, relay.memory()?.peak);
    relay.terminate().await?;
    let times = arena.broker.append_times(&arena.topic, &before, &after)?;
    let stretch = usize::try_from(STRETCH)?;
    let (Some(first), Some(last)) = (times.first(), times.get(stretch - 1)) else {
        return Err(format!("{} records came instead of {stretch}", times.len()).into());
    };
    Ok(Drained {
        rate: float(STRETCH) * 1000.0 / float((last - first).max(1)),
        cpu_per_million: cpu * 1e6 / float(between(&before, &after)),
        peak,
    })
}

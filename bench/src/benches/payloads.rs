//! Payloads from 100 bytes to a megabyte, each size through the relay and through the bare pipe.
//!
//! About as many bytes a run at every size, so that all take seconds; the smallest is bound by messages instead. Payloads
//! are noise: neither Postgres nor anybody else compresses them.

use crate::lab::{Lab, Result};
use crate::measure::{Run, Spread, float, limit_run, ratios, relay_run};
use crate::report::{Bar, MIB, Report};

const SIZES: [(i32, &str); 5] =
    [(100, "100 B"), (1_000, "1 kB"), (10_000, "10 kB"), (100_000, "100 kB"), (1_000_000, "1 MB")];

pub(crate) async fn run(lab: &Lab) -> Result<Report> {
    let (bytes, most, pairs) = lab.tier.choose((400_000_000, 500_000, 5), (100_000_000, 100_000, 3));
    let arena = lab.arena().await?;
    let mut report = Report::new("payloads");
    let mut worst: Option<(f64, Vec<f64>, &str)> = None;
    for (size, name) in SIZES {
        let messages = (bytes / i64::from(size)).min(most);
        arena.empty().await?;
        arena.fill_with(size, messages, 1_000).await?;
        let (mut pipe, mut relay) = (Vec::new(), Vec::new());
        for pair in 0..pairs {
            for is_relay in if pair % 2 == 0 { [false, true] } else { [true, false] } {
                arena.place(0).await?;
                arena.settle().await?;
                if is_relay {
                    relay.push(relay_run(lab, &arena, messages).await?);
                } else {
                    pipe.push(limit_run(lab, &arena, messages, &["limit-pipe"]).await?);
                }
            }
        }
        for (side, runs) in [("bare pipe", &pipe), ("relay", &relay)] {
            let side = format!("{name}, {side}");
            report.runs(lab, &side, float(messages), runs);
            let rate = runs.iter().map(|run| run.rate * f64::from(size) / MIB).collect();
            report.figure(format!("{side}: payload"), "MiB/s", rate);
        }
        let rates = |runs: &[Run]| runs.iter().map(|run| run.rate).collect::<Vec<_>>();
        let ratios = ratios(&rates(&relay), &rates(&pipe));
        let median = Spread::of(&ratios).ok_or("no pairs")?.median;
        report.note(format!("{name}: relay / bare pipe {median:.2}"));
        if worst.as_ref().is_none_or(|(least, ..)| median < *least) {
            worst = Some((median, ratios, name));
        }
    }
    arena.close().await?;
    let (_, ratios, name) = worst.ok_or("no sizes")?;
    report.verdict(ratios, format!("relay / bare pipe, at {name}, where it is least"), Bar::None);
    Ok(report)
}

//! A backlog through the relay, against the bare pipe, beside the bare read and the bare produce.
//!
//! All are rates between the first and the last append by the broker's own clock, but for the read: from its first row to
//! its last. So what a process does before its first record counts for none; its CPU counts from its start for all.

use crate::arena::Backlog;
use crate::lab::{Lab, Result};
use crate::measure::{Spread, float, limit_run, ratios, relay_run};
use crate::process;
use crate::report::{Bar, Report};

#[derive(Debug, Clone, Copy)]
enum Side {
    Read,
    Produce,
    Pipe,
    Relay,
}

pub(crate) async fn run(lab: &Lab) -> Result<Report> {
    let messages = lab.tier.choose(1_000_000, 200_000);
    let (keys, rounds) = (10_000, 5);
    let arena = lab.arena().await?;
    arena.fill(Backlog { messages, keys }).await?;
    let (count, distinct) = (messages.to_string(), keys.to_string());
    let produce = ["limit-produce", "--messages", &count, "--keys", &distinct];
    // Not counted: the broker's code is compiled as it runs.
    limit_run(lab, &arena, messages, &produce).await?;

    let (mut read, mut made, mut pipe, mut relay) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for round in 0..rounds {
        let mut order = [Side::Read, Side::Produce, Side::Pipe, Side::Relay];
        if round % 2 == 1 {
            order.reverse();
        }
        for side in order {
            arena.place(0).await?;
            arena.settle().await?;
            match side {
                Side::Read => {
                    let told = process::limit(&arena, &["limit-read"]).await?;
                    read.push(float(messages) / told.seconds);
                }
                Side::Produce => made.push(limit_run(lab, &arena, messages, &produce).await?),
                Side::Pipe => pipe.push(limit_run(lab, &arena, messages, &["limit-pipe"]).await?),
                Side::Relay => relay.push(relay_run(lab, &arena, messages).await?),
            }
        }
    }
    arena.close().await?;

    let mut report = Report::new("drain");
    let rates = |runs: &[crate::measure::Run]| runs.iter().map(|run| run.rate).collect::<Vec<_>>();
    let (r, p) = (Spread::of(&read), Spread::of(&rates(&made)));
    report.figure("bare read R", "messages/s", read);
    report.runs(lab, "bare produce P", float(messages), &made);
    report.runs(lab, "bare pipe", float(messages), &pipe);
    if let Some((r, p)) = r.zip(p) {
        let one_after_the_other = 1.0 / (1.0 / r.median + 1.0 / p.median);
        report.figure("1 / (1/R + 1/P), of the medians", "messages/s", vec![one_after_the_other]);
    }
    report.runs(lab, "relay", float(messages), &relay);
    report.verdict(ratios(&rates(&relay), &rates(&pipe)), "relay / bare pipe", Bar::AtLeast(0.75));
    Ok(report)
}

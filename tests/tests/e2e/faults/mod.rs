//! What goes wrong around a relay, one fault a test, on real servers wherever these can be brought to it.
//!
//! | module | fault |
//! |---|---|
//! | [`promotion`] | a standby without the last commits takes the primary's place |
//! | [`unflushed`] | the server is killed with confirmed commits that are not on its disk |
//! | [`read_only`] | the database takes no more writes for a while |
//! | [`rollbacks`] | half of all transactions are rolled back, and half of all savepoints |
//! | [`held_open`] | a transaction, or an orphaned prepared one, stays open all the time |
//! | [`brokers_away`] | the broker is killed, and comes back at once, or after long |
//! | [`forgotten`] | the broker comes back and says that the topic does not exist |
//! | [`fatal`] | the broker answers so that the producer cannot go on |
//! | [`heartbeats`] | what a relay works on is slow, for longer than its lease lasts |
//! | [`network`] | the database is silent, answers late or is cut off; the broker is slow |
//!
//! Every test ends with the verdict of the ledger. `BATON_TIER=full` makes the long ones long.

use std::time::Duration;

use baton_tests::ledger::Findings;
use baton_tests::{Failure, Harness, Outcome, Process, Site, workload};

mod brokers_away;
mod fatal;
mod forgotten;
mod heartbeats;
mod held_open;
mod network;
mod promotion;
mod read_only;
mod rollbacks;
mod unflushed;

/// How long a relay may take for what it does at once on a machine that is not busy.
const PATIENCE: Duration = Duration::from_secs(30);

/// The first where a run is to be short, the second where it is to be as long as the fault in question.
fn tier(small: Duration, full: Duration) -> Duration {
    if is_full() { full } else { small }
}

fn is_full() -> bool {
    std::env::var("BATON_TIER").is_ok_and(|tier| tier == "full")
}

/// The arguments of a relay whose batches wait, so that it can be caught in the middle of its work.
fn unhurried(harness: &Harness) -> Outcome<[String; 2]> {
    let file = harness.directory().join("unhurried.toml");
    std::fs::write(
        &file,
        "[kafka.properties]\n\"linger.ms\" = 100\n[publish]\npage_rows = 100\nin_flight_rows = 200\n",
    )?;
    Ok(["--config".to_owned(), file.display().to_string()])
}

/// What the topic shows against the table.
async fn verdict(site: &Site, topic: &str) -> Outcome<Findings> {
    let records = site.kafka().records(topic).await?;
    Ok(workload::judge(&workload::truth(site, topic).await?, &records).0)
}

/// Ends the relay as an operator does, and makes sure that it had nothing to say against it.
async fn ends_well(relay: &mut Process) -> Outcome {
    let status = relay.terminate(PATIENCE).await?;
    if status.success() { Ok(()) } else { Err(Failure::new(format!("{} ended with {status}", relay.name()))) }
}

/// Bytes of memory that the process has in use.
fn resident(process: &Process) -> Outcome<u64> {
    let status = std::fs::read_to_string(format!("/proc/{}/status", process.id()))?;
    let kilobytes = status.lines().find_map(|line| line.strip_prefix("VmRSS:")?.trim().strip_suffix(" kB"));
    let kilobytes =
        kilobytes.ok_or_else(|| Failure::new("the kernel does not say how much memory it has"))?;
    Ok(kilobytes.trim().parse::<u64>()? << 10)
}

/// Seconds of processor time that the process has used.
fn processor_seconds(process: &Process) -> Outcome<f64> {
    /// What Linux counts in, on every machine that we run on.
    const TICKS: f64 = 100.0;
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", process.id()))?;
    let after_name = stat.rsplit_once(") ").map_or("", |(_, rest)| rest);
    let fields: Vec<&str> = after_name.split(' ').collect();
    let ticks = |field: usize| fields.get(field).unwrap_or(&"").parse::<f64>();
    Ok((ticks(11)? + ticks(12)?) / TICKS)
}

/// How often the relay has said these words.
fn said(relay: &Process, words: &str) -> usize {
    let (out, err) = (relay.stdout(), relay.stderr());
    out.lines().chain(err.lines()).filter(|line| line.contains(words)).count()
}

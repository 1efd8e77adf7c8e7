//! Benchmarks, each beside its limit in the same run.
//!
//! ```text
//! lab: the two servers ▶ arena: a database, a topic ▶ benches: side, limit, side, limit … ▶ report
//!                                                       └▶ process: the relay and the limits as processes of their own
//! ```
//!
//! Absolute figures mean little on small shared machines: what is printed last is a ratio, and what is printed before it are
//! CPU seconds, bytes and counts. `bench/README.md` says how to read them.

mod arena;
mod benches;
mod broker;
mod lab;
mod limits;
mod measure;
mod proc;
mod process;
mod report;

use std::process::ExitCode;

use clap::{Parser, ValueEnum as _};
use tokio::signal::unix::{SignalKind, signal};

use benches::Bench;
use lab::{Lab, Result, Tier};
use limits::Limit;

#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

/// Benchmarks on the Postgres and Kafka that DATABASE_URL and KAFKA_BROKERS name.
#[derive(Debug, Parser)]
#[command(args_conflicts_with_subcommands = true)]
struct Cli {
    /// Which; without a name all, one after the other
    name: Option<Bench>,
    /// Exit 1 when a recorded bar is missed
    #[arg(long)]
    check: bool,
    /// About a minute for one; its result goes to target/bench instead of bench/results
    #[arg(long)]
    quick: bool,
    #[command(subcommand)]
    limit: Option<Limit>,
}

#[tokio::main]
async fn main() -> ExitCode {
    let done = tokio::select! {
        done = run(Cli::parse()) => done,
        told = told_to_end() => Err(told),
    };
    match done {
        Ok(code) => code,
        Err(error) => {
            eprintln!("bench: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Whoever is told to end drops, and so kills, what it started.
async fn told_to_end() -> Box<dyn std::error::Error + Send + Sync> {
    match (signal(SignalKind::terminate()), signal(SignalKind::interrupt())) {
        (Ok(mut terminate), Ok(mut interrupt)) => {
            tokio::select! { _ = terminate.recv() => {}, _ = interrupt.recv() => {} }
            "told to end; what is left in the database and on the broker goes with the next run".into()
        }
        (Err(error), _) | (_, Err(error)) => error.into(),
    }
}

async fn run(cli: Cli) -> Result<ExitCode> {
    if let Some(limit) = cli.limit {
        limits::run(limit).await?;
        return Ok(ExitCode::SUCCESS);
    }
    let tier = if cli.quick { Tier::Quick } else { Tier::Full };
    let mut missed = Vec::new();
    for bench in cli.name.map_or_else(|| Bench::value_variants().to_vec(), |name| vec![name]) {
        let lab = Lab::open(tier).await?;
        let report = bench.run(&lab).await?;
        let path = report.save(&lab)?;
        println!("{}", path.display());
        report.print();
        if !report.is_met() {
            missed.push(bench);
        }
    }
    if cli.check && !missed.is_empty() {
        eprintln!("bench: bars were missed by {missed:?}");
        return Ok(ExitCode::FAILURE);
    }
    Ok(ExitCode::SUCCESS)
}

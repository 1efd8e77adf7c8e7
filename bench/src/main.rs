//! Benchmarks, each beside its limit in the same run.
//!
//! Absolute figures mean little on small shared machines: what is printed last is a ratio. `drain` publishes the same rows
//! in turn through the relay and through the *bare pipe*, which is one binary `COPY` straight into one producer with the
//! same settings and headers and nothing else. Both are timed by the broker: records over last minus first append time.

mod arena;
mod pipe;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use arena::{Arena, Result};

#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

/// Benchmarks on the Postgres and Kafka that DATABASE_URL and KAFKA_BROKERS name.
#[derive(Debug, Parser)]
struct Cli {
    #[command(subcommand)]
    bench: Bench,
}

#[derive(Debug, Subcommand)]
enum Bench {
    /// A backlog through the relay, against the bare pipe
    Drain {
        /// Messages of about 200 bytes
        #[arg(long, default_value_t = 500_000)]
        messages: i64,
        /// Keys
        #[arg(long, default_value_t = 10_000)]
        keys: i64,
        /// Pairs of runs, interleaved
        #[arg(long, default_value_t = 5)]
        runs: usize,
    },
}

#[tokio::main]
async fn main() -> ExitCode {
    let Bench::Drain { messages, keys, runs } = Cli::parse().bench;
    match drain(messages, keys, runs).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn drain(messages: i64, keys: i64, runs: usize) -> Result<()> {
    let arena = Arena::open().await?;
    arena.fill(messages, keys).await?;
    let mut ratios = Vec::new();
    for run in 1..=runs {
        let pipe = arena.timed(messages, pipe::run(&arena)).await?;
        arena.rewind().await?;
        let relay = arena.timed(messages, arena.relay()).await?;
        println!(
            "run {run}: pipe {:.0}/s ({:.2} s cpu), relay {:.0}/s ({:.2} s cpu), ratio {:.2}",
            pipe.rate,
            pipe.cpu,
            relay.rate,
            relay.cpu,
            relay.rate / pipe.rate
        );
        ratios.push(relay.rate / pipe.rate);
    }
    arena.close().await?;
    ratios.sort_by(f64::total_cmp);
    let median = ratios.get(ratios.len() / 2).copied().unwrap_or(0.0);
    let (min, max) = (ratios.first().copied().unwrap_or(0.0), ratios.last().copied().unwrap_or(0.0));
    println!("bench drain: ratio {median:.2} (relay / bare pipe; min {min:.2}, max {max:.2})");
    Ok(())
}

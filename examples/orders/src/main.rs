//! The binary `orders`: a small service that uses Baton on both sides, and a check that nothing was lost in between.
//!
//! Reads `DATABASE_URL` and `KAFKA_BROKERS`, nothing else. Results go to stdout, progress and errors to stderr. Exit 0 done,
//! 1 failed (or a check that found something), 2 usage.

mod args;

use std::error::Error;
use std::io::IsTerminal as _;
use std::process::ExitCode;

use baton_protocol::report::chain;
use clap::Parser as _;
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::EnvFilter;

use args::{Cli, Command};
use orders::place::Load;
use orders::{bill, check, database, place, setup};

/// Why a command did not do what it was asked to.
enum Failure {
    Usage(Box<dyn Error>),
    Failed(Box<dyn Error>),
    /// The check found something, and has said what.
    Found,
}

/// A variable that is needed.
#[derive(Debug, thiserror::Error)]
#[error("{name} is not set; set it to {form}")]
struct Missing {
    name: &'static str,
    form: &'static str,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    logs();
    let done = match tokio::runtime::Runtime::new() {
        Ok(runtime) => runtime.block_on(run(cli.command)),
        Err(e) => Err(Failure::Failed(Box::new(e))),
    };
    let (error, code) = match done {
        Ok(()) => return ExitCode::SUCCESS,
        Err(Failure::Found) => return ExitCode::from(1),
        Err(Failure::Failed(error)) => (error, 1),
        Err(Failure::Usage(error)) => (error, 2),
    };
    eprintln!("error: {}", chain(error.as_ref()));
    ExitCode::from(code)
}

/// The commands say themselves how they are getting on. With RUST_LOG=warn each failed attempt is seen, with info more.
fn logs() {
    let filter = std::env::var("RUST_LOG")
        .ok()
        .filter(|filter| !filter.is_empty())
        .unwrap_or_else(|| "error".to_owned());
    let coloured =
        std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|v| v.is_empty());
    tracing_subscriber::fmt()
        .with_env_filter(EnvFilter::builder().parse_lossy(filter))
        .with_writer(std::io::stderr)
        .log_internal_errors(false)
        .with_ansi(coloured)
        .init();
}

async fn run(command: Command) -> Result<(), Failure> {
    let database_url = variable("DATABASE_URL", "postgres://user:password@host:5432/database")?;
    database::options(&database_url).map_err(|e| Failure::Usage(Box::new(e)))?;
    match command {
        Command::Setup { fresh } => {
            if fresh {
                setup::forget(&database_url, &brokers()?).await?;
                println!("forgot an earlier run, if there was one");
            }
            let topic = setup::run(&database_url, &brokers()?).await?;
            let topic = match topic {
                setup::Topic::Made => "made",
                setup::Topic::WasThere => "was there",
            };
            println!("migrations and tables are up to date, topic orders {topic}");
        }
        Command::Place { count, rate, keys, writers, mix } => {
            let mix = mix.mix().map_err(|e| Failure::Usage(Box::new(e)))?;
            let load = Load { count, rate: rate.map(|rate| rate.0), customers: keys, writers, mix };
            let began = tokio::time::Instant::now();
            let done = place::run(&database_url, load, shutdown()?, |progress| {
                eprintln!("placed {} of {count}", progress.placed);
            })
            .await?;
            let seconds = began.elapsed().as_secs_f64();
            println!("placed {} orders in {seconds:.1} s{}", done.placed, unknown(done.unknown));
        }
        Command::Bill => {
            let tell = |progress: bill::Progress| {
                eprintln!(
                    "billed {}, refused {}, tried again {}",
                    progress.billed, progress.refused, progress.again
                );
            };
            let done = bill::run(&database_url, &brokers()?, shutdown()?, tell).await?;
            println!("billed {} orders, refused {}, tried again {}", done.billed, done.refused, done.again);
        }
        Command::Check { json, wait } => {
            let verdict = check::run(&database_url, &brokers()?, wait.0).await?;
            let summary = verdict.summary();
            if json {
                println!(
                    "{}",
                    serde_json::to_string_pretty(&summary).map_err(|e| Failure::Failed(Box::new(e)))?
                );
            } else {
                args::print(&verdict);
            }
            if !verdict.is_clean() {
                return Err(Failure::Found);
            }
        }
    }
    Ok(())
}

fn brokers() -> Result<String, Failure> {
    variable("KAFKA_BROKERS", "host:port[,host:port…]")
}

fn variable(name: &'static str, form: &'static str) -> Result<String, Failure> {
    let value = std::env::var(name).ok().filter(|value| !value.is_empty());
    value.ok_or_else(|| Failure::Usage(Box::new(Missing { name, form })))
}

fn unknown(count: u64) -> String {
    if count == 0 {
        String::new()
    } else {
        format!("; {count} more were being committed when the connection was lost")
    }
}

/// Resolves at the first SIGTERM or SIGINT; the second ends the process, which is safe at any time.
fn shutdown() -> Result<impl Future<Output = ()> + Send, Failure> {
    let failed = |e| Failure::Failed(Box::new(e));
    let mut term = signal(SignalKind::terminate()).map_err(failed)?;
    let mut int = signal(SignalKind::interrupt()).map_err(failed)?;
    let (asked, asked_for) = tokio::sync::oneshot::channel::<()>();
    tokio::spawn(async move {
        tokio::select! { _ = term.recv() => {}, _ = int.recv() => {} }
        drop(asked);
        tokio::select! { _ = term.recv() => {}, _ = int.recv() => {} }
        std::process::exit(1);
    });
    Ok(async move {
        // Resolves when the other end is dropped.
        let _ = asked_for.await;
    })
}

macro_rules! failed {
    ($($error:ty),*) => {
        $(impl From<$error> for Failure {
            fn from(error: $error) -> Self {
                Self::Failed(Box::new(error))
            }
        })*
    };
}
failed!(check::Error, setup::Error, place::Error, bill::Error);

//! The binary `baton`.
//!
//! A command reads its configuration, does one thing through the libraries, prints what it did to stdout, and ends with 0
//! (done), 1 (failed) or 2 (usage or configuration). Errors and logs go to stderr. No output ever holds a password.

mod args;
mod audit;
mod config;
mod database;
mod doctor;
mod failure;
mod inbox;
mod logging;
mod migrate;
mod out;
mod parked;
mod progress;
mod rebase;
mod relay;
mod replay;
mod republish;
mod signals;
mod status;
mod table;

use std::process::ExitCode;

use clap::Parser as _;
use tikv_jemallocator::Jemalloc;

use args::{Cli, Command, LogFormat};
use config::{Effective, Sources};
use failure::Failure;
use logging::Talk;

// librdkafka allocates for every header of every record; it is served too, which halves the relay's cost.
#[global_allocator]
static ALLOCATOR: Jemalloc = Jemalloc;

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return usage(&error),
    };
    let mut format = cli.global.log_format.unwrap_or_default();
    match run(&cli, &mut format) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(format),
    }
}

/// clap shows what it did not understand, which may be a URL with its password.
fn usage(error: &clap::Error) -> ExitCode {
    let text = error.to_string();
    let masked = config::mask_urls(&text);
    if masked == text {
        error.exit();
    }
    eprint!("{masked}");
    ExitCode::from(2)
}

fn run(cli: &Cli, format: &mut LogFormat) -> Result<(), Failure> {
    let mut sources = Sources::read(cli.global.config.as_deref(), std::env::vars_os())?;
    sources.database_url.clone_from(&cli.global.database_url);
    sources.log_format = cli.global.log_format.map(LogFormat::as_str);
    let config = Effective::load(&sources)?;
    *format = config.config.log.format;

    let talk = match cli.command {
        Command::Relay { .. } => Talk::Service,
        _ => Talk::Command,
    };
    logging::init(*format, talk).map_err(Failure::usage)?;
    let runtime = tokio::runtime::Runtime::new().map_err(Failure::failed)?;
    runtime.block_on(async {
        match &cli.command {
            Command::Migrate { line } => migrate::run(&config, line).await,
            Command::Relay { until_empty } => relay::run(&config, *until_empty).await,
            Command::Status { json } => status::run(&config, *json).await,
            Command::Parked { act } => parked::run(&config, act).await,
            Command::Pause { topic } => parked::pause(&config, topic).await,
            Command::Resume { topic } => parked::resume(&config, topic).await,
            Command::Republish(wish) => republish::run(&config, wish).await,
            Command::Rebase { dry_run } => rebase::run(&config, *dry_run).await,
            Command::Audit { json, limit } => audit::run(&config, *json, *limit).await,
            Command::Doctor { older_than, json } => doctor::run(&config, *older_than, *json).await,
            Command::Replay { command } => replay::run(&config, command).await,
            Command::Inbox { command } => inbox::run(&config, command).await,
            Command::Config { json } => show(&config, *json),
        }
    })
}

/// `baton config`. What cannot be used is shown all the same, and then said.
fn show(config: &Effective, json: bool) -> Result<(), Failure> {
    let rows = config.rows()?;
    if json {
        out::json(&rows)?;
    } else {
        let absent = || "-".to_owned();
        let rows: Vec<_> =
            rows.into_iter().map(|row| [row.key, row.value.unwrap_or_else(absent), row.origin]).collect();
        out::text(&table::render(
            [table::words("key"), table::words("value"), table::words("origin")],
            &rows,
        ))?;
    }
    config.check_ranges()?;
    Ok(())
}

//! `cargo xtask`: what a developer types to have, use and leave a stack.
//!
//! | command | does |
//! |---|---|
//! | `up`, `down`, `env` | Postgres and Kafka for this workspace, see [`stack`] |
//! | `test` | every check in the order in which a failure is cheapest, see [`check`] |
//!
//! Messages for people go to stderr; stdout carries only what is asked for (`env`) or what a step prints.
//! Exit codes: 0 done, 1 failed, 2 usage; `test` passes on the code of the step that failed.

mod check;
mod command;
mod error;
mod paths;
mod stack;
mod tools;

use std::error::Error as _;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

use error::Result;
use paths::Paths;
use stack::Flavour;

/// Development commands of this workspace.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", disable_help_subcommand = true)]
struct Cli {
    #[command(subcommand)]
    command: Task,
}

#[derive(Debug, Subcommand)]
enum Task {
    /// Bring Postgres and Kafka up, or reuse those that are
    Up {
        /// Start natively, with this Postgres
        #[arg(long, value_enum)]
        postgres: Option<Flavour>,
    },
    /// End what `up` started; the data stay for the next `up`
    Down {
        /// Delete the data as well
        #[arg(long)]
        wipe: bool,
    },
    /// Print DATABASE_URL and KAFKA_BROKERS of the stack that is up, for `eval "$(cargo xtask env)"`
    Env,
    /// Bring the stack up and pass every check and test
    Test {
        /// Run only the tests whose name contains one of these
        filter: Vec<String>,
    },
}

fn main() -> ExitCode {
    match run(Cli::parse().command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let mut chain = format!("error: {error}");
            let mut source = error.source();
            while let Some(cause) = source {
                chain.push_str(&format!(": {cause}"));
                source = cause.source();
            }
            eprintln!("{chain}");
            ExitCode::from(error.exit_code())
        }
    }
}

fn run(task: Task) -> Result<()> {
    let paths = Paths::find()?;
    match task {
        Task::Up { postgres } => stack::up(&paths, postgres),
        Task::Down { wipe } => stack::down(&paths, wipe),
        Task::Env => {
            let stack = stack::running(&paths)?;
            println!("export DATABASE_URL='{}'", stack.database_url);
            println!("export KAFKA_BROKERS='{}'", stack.kafka_brokers);
            Ok(())
        }
        Task::Test { filter } => check::test(&paths, &filter),
    }
}

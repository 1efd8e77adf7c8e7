//! `cargo xtask`: what a developer types to have, use and leave a stack.
//!
//! | command | does |
//! |---|---|
//! | `up`, `down`, `env` | Postgres and Kafka for this workspace, see [`stack`] |
//! | `demo` | the whole story on real servers, see [`demo`] |
//! | `test` | every check in the order in which a failure is cheapest, see [`check`] |
//! | `bench` | measurements beside their limits, by `baton-bench`, see [`mod@bench`] |
//!
//! Messages for people go to stderr; stdout carries only what is asked for (`env`) or what a step prints.
//! Exit codes: 0 done, 1 failed, 2 usage; `test` and `bench` pass on the code of the step that failed.

mod args;
mod bench;
mod check;
mod command;
mod demo;
mod error;
mod paths;
mod stack;
mod tools;

use std::error::Error as _;
use std::process::ExitCode;

use args::Task;
use error::Result;
use paths::Paths;

fn main() -> ExitCode {
    match args::parse(std::env::args().skip(1)).and_then(run) {
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
        Task::Help => {
            println!("{}", args::USAGE);
            Ok(())
        }
        Task::Up { postgres } => stack::up(&paths, postgres),
        Task::Down { wipe } => stack::down(&paths, wipe),
        Task::Env => {
            let stack = stack::running(&paths)?;
            println!("export DATABASE_URL='{}'", stack.database_url);
            println!("export KAFKA_BROKERS='{}'", stack.kafka_brokers);
            Ok(())
        }
        Task::Demo { keep } => demo::demo(&paths, keep),
        Task::Test { filter } => check::test(&paths, &filter),
        Task::Bench { args } => bench::bench(&paths, &args),
    }
}

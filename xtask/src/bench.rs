//! `cargo xtask bench`: the stack, the programs, and then `baton-bench`, which measures.
//!
//! ```text
//! tools ▶ stack ▶ build ▶ baton-bench [NAME] [--check] [--quick]
//! ```
//!
//! The programs are those of the tests and the demo: the workspace's one profile has what matters optimised, so that figures
//! mean something without a second build. What is printed last, and the exit code, are `baton-bench`'s.

use std::process::Command;

use crate::error::Result;
use crate::paths::Paths;
use crate::{check, stack, tools};

/// # Errors
///
/// When the stack or the programs cannot be had, or with the exit code of `baton-bench`.
pub(crate) fn bench(paths: &Paths, args: &[String]) -> Result<()> {
    tools::ensure(tools::BUILD)?;
    let stack = stack::ensure(paths, None)?;
    check::build_programs(paths)?;
    let mut bench = Command::new(paths.bin.join("baton-bench"));
    bench
        .args(args)
        .env("DATABASE_URL", &stack.database_url)
        .env("KAFKA_BROKERS", &stack.kafka_brokers)
        .env("BATON_BIN_DIR", &paths.bin);
    check::run("bench", bench, paths)
}

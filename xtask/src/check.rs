//! `cargo xtask test`: every check, in the order in which a failure is cheapest to find.
//!
//! ```text
//! tools ▶ stack ▶ compose file ▶ fmt ▶ clippy ▶ doc ▶ build ▶ unit tests ▶ examples in docs ▶ tests on the servers
//! ```
//!
//! The first step that fails ends the run with its exit code. Each step says on stderr how long it took;
//! the tests on the servers come last and theirs is the last output, so that it ends with the runner's own summary, and what
//! a red one of them said stands near the end.
//! The test processes get `DATABASE_URL`, `KAFKA_BROKERS`, `BATON_BIN_DIR` (where `baton` and `orders` lie) and
//! `BATON_STACK_DIR` (as an absolute path, because cargo runs each test program in its package's folder).

use std::ffi::OsString;
use std::process::{Command, Stdio};

use crate::error::{Error, Result};
use crate::paths::Paths;
use crate::stack::{self, Stack, Stopwatch};
use crate::tools;

/// # Errors
///
/// When the stack cannot be had, or with the first step that failed and its exit code.
pub(crate) fn test(paths: &Paths, filter: &[String]) -> Result<()> {
    tools::ensure(&[tools::BUILD, tools::TEST].concat())?;
    let stack = stack::ensure(paths, None)?;
    if stack::has_compose() {
        let mut compose = Command::new("docker");
        compose.args(["compose", "--file", "docker-compose.yml", "config", "--quiet"]);
        step("compose config", compose, paths)?;
    }
    step("fmt", cargo(&["fmt", "--all", "--check"]), paths)?;
    step("clippy", cargo(&["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"]), paths)?;
    let mut doc = cargo(&["doc", "--workspace", "--no-deps"]);
    doc.env("RUSTDOCFLAGS", "-D warnings");
    step("doc", doc, paths)?;
    build(paths)?;
    step("unit tests", test_command(&["--lib", "--bins"], paths, &stack, filter), paths)?;
    step("examples in docs", test_command(&["--doc"], paths, &stack, filter), paths)?;
    run("test", test_command(&["--test", "*"], paths, &stack, filter), paths)
}

/// Builds every program and test, so that those that start others find them in [`Paths::bin`].
pub(crate) fn build(paths: &Paths) -> Result<()> {
    step("build", cargo(&["build", "--workspace", "--all-targets"]), paths)
}

/// Builds the programs that a demo runs. Of the whole workspace, so that the dependencies get the features with which the
/// tests want them too: a demo before the tests costs no second build.
pub(crate) fn build_programs(paths: &Paths) -> Result<()> {
    step("build", cargo(&["build", "--workspace", "--bins"]), paths)
}

/// Always of the whole workspace, whose features the build step has resolved; which tests of it, `targets` says.
fn test_command(targets: &[&str], paths: &Paths, stack: &Stack, filter: &[String]) -> Command {
    let mut tests = cargo(&["test", "--workspace", "--no-fail-fast"]);
    tests.args(targets);
    if !filter.is_empty() {
        tests.arg("--").args(filter);
    }
    tests
        .env("DATABASE_URL", &stack.database_url)
        .env("KAFKA_BROKERS", &stack.kafka_brokers)
        .env("BATON_BIN_DIR", &paths.bin)
        .env("BATON_STACK_DIR", &paths.stack);
    tests
}

fn cargo(args: &[&str]) -> Command {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| OsString::from("cargo")));
    cargo.args(args);
    cargo
}

fn step(name: &'static str, command: Command, paths: &Paths) -> Result<()> {
    let watch = Stopwatch::start();
    run(name, command, paths)?;
    crate::say!("{name}: {:.1} s", watch.seconds());
    Ok(())
}

pub(crate) fn run(name: &'static str, mut command: Command, paths: &Paths) -> Result<()> {
    let status = command
        .current_dir(&paths.root)
        .stdin(Stdio::null())
        .status()
        .map_err(|source| Error::Io { what: format!("start {name}"), source })?;
    if status.success() {
        return Ok(());
    }
    // Ended by a signal there is no code; any but 0 will do.
    let code = status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1);
    Err(Error::Step { name, code })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn paths() -> Paths {
        Paths { root: ".".into(), bin: "/b".into(), stack: "/s".into() }
    }

    #[test]
    fn a_failed_step_passes_its_exit_code_on() {
        let mut shell = Command::new("sh");
        shell.args(["-c", "exit 101"]);
        assert_eq!(step("try", shell, &paths()).unwrap_err().exit_code(), 101);
    }

    #[test]
    fn a_step_that_is_killed_fails() {
        let mut shell = Command::new("sh");
        shell.args(["-c", "kill -KILL $$"]);
        assert_eq!(step("try", shell, &paths()).unwrap_err().exit_code(), 1);
    }

    #[test]
    fn filters_go_to_the_test_runner_with_the_addresses() {
        let stack = Stack { database_url: "d".to_owned(), kafka_brokers: "k".to_owned(), ours: true };
        let command = test_command(&["--lib"], &paths(), &stack, &["one".to_owned(), "two".to_owned()]);
        let args: Vec<_> = command.get_args().collect();
        assert_eq!(args, ["test", "--workspace", "--no-fail-fast", "--lib", "--", "one", "two"]);
        assert!(
            command.get_envs().any(|(name, value)| name == "KAFKA_BROKERS" && value == Some("k".as_ref()))
        );
    }
}

//! Starting other programs: one that must succeed quietly, one that people watch, one that stays.
//!
//! A failed program's last lines are in the error, because its output was kept back until then.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use crate::error::{Error, Result};

/// A line for people, on stderr.
#[macro_export]
macro_rules! say {
    ($($text:tt)*) => { eprintln!("xtask: {}", format_args!($($text)*)) };
}

/// An unprivileged user, to run what refuses to run as root.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Account {
    pub(crate) uid: u32,
    pub(crate) gid: u32,
}

/// Makes the program run as `account`; without one it runs as whoever started us.
pub(crate) fn run_as(command: &mut Command, account: Option<Account>) {
    if let Some(account) = account {
        command.uid(account.uid).gid(account.gid);
    }
}

/// Runs to the end without showing anything and gives what it printed.
pub(crate) fn quiet(command: &mut Command) -> Result<Output> {
    let shown = show(command);
    let output = command.output().map_err(|source| Error::Io { what: format!("start `{shown}`"), source })?;
    if output.status.success() {
        return Ok(output);
    }
    let mut text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.push_str(&String::from_utf8_lossy(&output.stderr));
    Err(Error::failed(format!("`{shown}` ended with {}:\n{}", output.status, last_lines(&text, 15))))
}

/// Runs to the end with everything it prints on our stderr, so that stdout stays clean.
pub(crate) fn watched(command: &mut Command) -> Result<()> {
    let shown = show(command);
    let status = command
        .stdin(Stdio::null())
        .stdout(Stdio::from(io::stderr()))
        .status()
        .map_err(|source| Error::Io { what: format!("start `{shown}`"), source })?;
    if status.success() { Ok(()) } else { Err(Error::failed(format!("`{shown}` ended with {status}"))) }
}

/// Whether a program can be started at all and says yes.
pub(crate) fn succeeds(program: impl AsRef<OsStr>, args: &[&str]) -> bool {
    Command::new(program)
        .args(args)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

/// Starts a program that outlives us: a session of its own, its output appended to `log`.
///
/// The shell in between closes what a caller may have left open in us (the pipe of a `$(…)`, cargo's job
/// server): a server that held it would keep that caller waiting for its end for ever. `setsid` replaces
/// the shell and is then replaced by the program, so the child's pid is the program's.
pub(crate) fn detached(
    program: &Path,
    args: &[String],
    account: Option<Account>,
    log: &Path,
) -> Result<Child> {
    let out = File::options().create(true).append(true).open(log).map_err(Error::io("open", log))?;
    let err = out.try_clone().map_err(Error::io("open", log))?;
    let mut command = Command::new("sh");
    command
        .arg("-c")
        .arg(r#"exec 3>&- 4>&- 5>&- 6>&- 7>&- 8>&- 9>&-; exec setsid "$@""#)
        .arg("sh")
        .arg(program)
        .args(args)
        .current_dir("/")
        .env("LC_ALL", "C")
        .stdin(Stdio::null())
        .stdout(out)
        .stderr(err);
    run_as(&mut command, account);
    command.spawn().map_err(|source| Error::Io { what: format!("start {}", program.display()), source })
}

/// The end of a log, for an error message.
pub(crate) fn log_tail(log: &Path) -> String {
    let bytes = std::fs::read(log).unwrap_or_default();
    last_lines(&String::from_utf8_lossy(&bytes), 15)
}

fn last_lines(text: &str, count: usize) -> String {
    let lines: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
    let first = lines.len().saturating_sub(count);
    lines[first..].iter().map(|line| format!("  {line}")).collect::<Vec<_>>().join("\n")
}

fn show(command: &Command) -> String {
    let mut shown = command.get_program().to_string_lossy().into_owned();
    for arg in command.get_args() {
        shown.push(' ');
        shown.push_str(&arg.to_string_lossy());
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_program_is_quoted_with_its_last_lines() {
        let error = quiet(Command::new("sh").args(["-c", "echo one; echo two >&2; exit 3"])).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("exit status: 3"), "{text}");
        assert!(text.contains("  one\n  two"), "{text}");
    }

    #[test]
    fn only_the_last_lines_are_kept_and_blank_ones_dropped() {
        assert_eq!(last_lines("a\n\nb\nc\n", 2), "  b\n  c");
    }
}

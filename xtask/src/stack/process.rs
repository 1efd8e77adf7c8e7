//! Which processes are ours, read from `/proc`: there is no pid file to go stale.
//!
//! Each server is started with an argument that no other process has (the stack's mark, a random id). A
//! process is ours if that very argument is in its command line now. A zombie has an empty command line and
//! counts as gone. Signals go through the shell's `kill`, which needs neither `unsafe` nor a package.

use std::fs;
use std::time::Duration;

use super::wait::{self, Deadline};
use crate::command;
use crate::error::{Error, Result};

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Process {
    pub(crate) pid: u32,
    pub(crate) args: Vec<String>,
}

/// What may be sent, by the name that `kill` knows.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Signal {
    Interrupt,
    Terminate,
    Kill,
    Continue,
}

impl Signal {
    fn name(self) -> &'static str {
        match self {
            Self::Interrupt => "INT",
            Self::Terminate => "TERM",
            Self::Kill => "KILL",
            Self::Continue => "CONT",
        }
    }
}

/// The living processes for which `ours` says yes to the command line.
pub(crate) fn find(ours: impl Fn(&[String]) -> bool) -> Vec<Process> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    entries
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .filter_map(|pid: u32| {
            let args = split_cmdline(&fs::read(format!("/proc/{pid}/cmdline")).ok()?);
            (!args.is_empty() && ours(&args)).then_some(Process { pid, args })
        })
        .collect()
}

fn split_cmdline(bytes: &[u8]) -> Vec<String> {
    bytes
        .split(|byte| *byte == 0)
        .filter(|arg| !arg.is_empty())
        .map(|arg| String::from_utf8_lossy(arg).into_owned())
        .collect()
}

/// Sends a signal; a process that is gone already is no error.
pub(crate) fn signal(pid: u32, signal: Signal) {
    let _ = command::succeeds("sh", &["-c", "kill -s \"$1\" \"$2\"", "sh", signal.name(), &pid.to_string()]);
}

/// Ends what `search` finds: politely with `first`, and with SIGKILL after `patience`.
///
/// # Errors
///
/// When something is still there a while after SIGKILL (another user's process, or the kernel holds it).
pub(crate) fn end(search: impl Fn() -> Vec<Process>, first: Signal, patience: Duration) -> Result<()> {
    for (kind, patience) in [(first, patience), (Signal::Kill, Duration::from_secs(10))] {
        for process in search() {
            signal(process.pid, kind);
            // A stopped process takes no other signal than SIGKILL until it runs again.
            signal(process.pid, Signal::Continue);
        }
        let deadline = Deadline::after(patience);
        while !search().is_empty() {
            if deadline.passed() {
                break;
            }
            wait::briefly();
        }
        if search().is_empty() {
            return Ok(());
        }
    }
    let pids: Vec<String> = search().iter().map(|process| process.pid.to_string()).collect();
    Err(Error::failed(format!("process {} does not end, not even by SIGKILL", pids.join(", "))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_line_is_split_at_its_nul_bytes() {
        assert_eq!(split_cmdline(b"java\0-Dbaton.stack=1\0\0"), ["java", "-Dbaton.stack=1"]);
        assert!(split_cmdline(b"").is_empty());
    }

    #[test]
    fn this_process_is_found_by_its_own_arguments() {
        let own: Vec<String> = std::env::args().collect();
        let found = find(|args| args == own);
        assert!(found.iter().any(|process| process.pid == std::process::id()), "{found:?}");
    }
}

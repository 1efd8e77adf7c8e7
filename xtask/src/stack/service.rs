//! One server of the native stack, from whatever state it is in to serving.
//!
//! ```text
//!            ┌────────── answers ───────────▶ reused
//! a process ─┤
//!            └─ silent for PATIENCE ─▶ killed ─┐
//! none ────────────────────────────────────────┴▶ leftovers killed ─▶ started ─▶ answers ─▶ started
//!                                                                        └─ ends or stays silent ─▶ error
//!                                                                           with the end of its log
//! ```
//!
//! Who is authoritative: `/proc` for what runs, the server's own answer for whether it serves. The caller
//! holds the stack's lock, so nobody else starts or ends it meanwhile.

use std::path::PathBuf;
use std::time::Duration;

use super::probe::Answer;
use super::process::{self, Process, Signal};
use super::wait::{self, Deadline};
use crate::command::{self, Account};
use crate::error::{Error, Result};

/// How long a server may take to answer: it may be recovering, and the machine may be busy compiling.
const PATIENCE: Duration = Duration::from_secs(90);

#[derive(Debug)]
pub(crate) struct Service {
    /// For people: `kafka 4.3.0`.
    pub(crate) name: String,
    /// `host:port`.
    pub(crate) address: String,
    pub(crate) program: PathBuf,
    pub(crate) args: Vec<String>,
    /// The argument among `args` by which the server is known.
    pub(crate) mark: String,
    /// How the titles of its children begin, where they rename themselves.
    pub(crate) children: Option<String>,
    pub(crate) account: Option<Account>,
    pub(crate) log: PathBuf,
    pub(crate) probe: fn(&str) -> Answer,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    Reused,
    Started,
}

impl Service {
    /// # Errors
    ///
    /// When the server ends or does not answer in time; the message has the end of its log.
    pub(crate) fn ensure(&self) -> Result<Outcome> {
        if self.is_running() {
            // A fault test that was itself killed may have left it stopped.
            self.processes().iter().for_each(|process| process::signal(process.pid, Signal::Continue));
            if self.answers_in_time() {
                return Ok(Outcome::Reused);
            }
            crate::say!("{} runs but does not answer at {}: restarting it", self.name, self.address);
        }
        process::end(|| self.processes(), Signal::Kill, Duration::from_secs(10))?;
        self.start()?;
        Ok(Outcome::Started)
    }

    pub(crate) fn is_running(&self) -> bool {
        runs(&self.mark)
    }

    /// The server and what it left behind.
    fn processes(&self) -> Vec<Process> {
        find(&self.mark, self.children.as_deref())
    }

    fn answers_in_time(&self) -> bool {
        let deadline = Deadline::after(PATIENCE);
        loop {
            if (self.probe)(&self.address) == Answer::Ready {
                return true;
            }
            if deadline.passed() || !self.is_running() {
                return false;
            }
            wait::briefly();
        }
    }

    fn start(&self) -> Result<()> {
        let mut child = command::detached(&self.program, &self.args, self.account, &self.log)?;
        let deadline = Deadline::after(PATIENCE);
        loop {
            let answer = (self.probe)(&self.address);
            // Asked after the answer: only a server that still lives may have given it.
            let ended = child
                .try_wait()
                .map_err(|source| Error::Io { what: format!("wait for {}", self.name), source })?;
            let complaint = match (answer, ended) {
                (_, Some(status)) => format!("ended at once ({status})"),
                (Answer::Ready, None) => return Ok(()),
                (Answer::NotReady(why), None) if deadline.passed() => {
                    process::end(|| self.processes(), Signal::Kill, Duration::from_secs(10))?;
                    format!("did not serve at {} within {} s ({why})", self.address, PATIENCE.as_secs())
                }
                (Answer::NotReady(_), None) => {
                    wait::briefly();
                    continue;
                }
            };
            return Err(Error::failed(format!(
                "{} {complaint}; the end of {}:\n{}\nmend what it says and run `cargo xtask up` again, or \
                 begin anew with `cargo xtask down --wipe`",
                self.name,
                self.log.display(),
                command::log_tail(&self.log),
            )));
        }
    }
}

/// Whether a server with this mark runs.
pub(crate) fn runs(mark: &str) -> bool {
    !find(mark, None).is_empty()
}

/// The server with this mark, and its children by the beginning of their titles.
pub(crate) fn find(mark: &str, children: Option<&str>) -> Vec<Process> {
    process::find(|args| belongs(args, mark, children))
}

fn belongs(args: &[String], mark: &str, children: Option<&str>) -> bool {
    // The shell that starts a server has the mark in its arguments too, but is replaced at once.
    args.iter().any(|arg| arg == mark) || children.is_some_and(|title| args[0].starts_with(title))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_belongs_by_the_whole_mark_only() {
        let args = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
        assert!(belongs(&args("java -Dbaton.stack=1 kafka.Kafka"), "-Dbaton.stack=1", None));
        assert!(!belongs(&args("java -Dbaton.stack=12 kafka.Kafka"), "-Dbaton.stack=1", None));
        assert!(!belongs(&args("grep -- x-Dbaton.stack=1"), "-Dbaton.stack=1", None));
    }

    #[test]
    fn children_belong_by_the_beginning_of_their_title() {
        let title = ["postgres: baton-1: checkpointer".to_owned()];
        assert!(belongs(&title, "cluster_name=baton-1", Some("postgres: baton-1:")));
        assert!(!belongs(&title, "cluster_name=baton-1", Some("postgres: baton-12:")));
        assert!(!belongs(&title, "cluster_name=baton-1", None));
    }
}

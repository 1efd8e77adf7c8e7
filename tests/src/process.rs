//! Programs under test as child processes: started with an environment of their own, watched, killed, stopped, drained.
//!
//! A child gets nothing of this process's environment but what every program needs (`PATH` and the like), so that no
//! `BATON_…` or `PG…` variable of the person who runs the tests changes what is tested. Its two outputs go to files of
//! the test's directory, which are shown when the test fails. It leads a process group; dropping a [`Process`] kills the
//! group with SIGKILL, and [`crate::guard`] does the same should this process die first.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process_group};
use tokio::process::{Child, Command};
use tokio::time::timeout;

use crate::failure::{Failure, Outcome};
use crate::guard;
use crate::wait::eventually;

/// What a child inherits.
const INHERITED: [&str; 8] =
    ["PATH", "HOME", "USER", "LANG", "TMPDIR", "LD_LIBRARY_PATH", "JAVA_HOME", "LLVM_PROFILE_FILE"];

/// How long SIGKILL may take on a busy machine.
const KILL_PATIENCE: Duration = Duration::from_secs(20);

/// A program about to be started.
#[derive(Debug)]
pub struct Launch {
    name: String,
    directory: PathBuf,
    program: PathBuf,
    args: Vec<OsString>,
    env: Vec<(String, String)>,
    input: Option<String>,
    user: Option<(u32, u32)>,
    has_full_log: bool,
}

impl Launch {
    /// `name` names the output files, which lie in `directory`; that is also where the program runs.
    #[must_use]
    pub fn new(name: &str, directory: &Path, program: impl Into<PathBuf>) -> Self {
        Self {
            name: name.to_owned(),
            directory: directory.to_owned(),
            program: program.into(),
            args: Vec::new(),
            env: Vec::new(),
            input: None,
            user: None,
            has_full_log: false,
        }
    }

    /// Every write to its standard error fails, as on a full disk.
    #[must_use]
    pub fn full_log(mut self) -> Self {
        self.has_full_log = true;
        self
    }

    /// Runs it as this user and group, in the root directory: others may not enter ours. Only root may ask for another
    /// user than itself.
    #[must_use]
    pub fn user(mut self, user: u32, group: u32) -> Self {
        self.user = Some((user, group));
        self
    }

    /// One more argument.
    #[must_use]
    pub fn arg(mut self, arg: impl AsRef<OsStr>) -> Self {
        self.args.push(arg.as_ref().to_owned());
        self
    }

    /// More arguments.
    #[must_use]
    pub fn args<A: AsRef<OsStr>>(mut self, args: impl IntoIterator<Item = A>) -> Self {
        self.args.extend(args.into_iter().map(|arg| arg.as_ref().to_owned()));
        self
    }

    /// Sets a variable, the last one of a name counts.
    #[must_use]
    pub fn env(mut self, name: &str, value: impl Into<String>) -> Self {
        self.env.push((name.to_owned(), value.into()));
        self
    }

    /// Takes a variable away again.
    #[must_use]
    pub fn without_env(mut self, name: &str) -> Self {
        self.env.retain(|(given, _)| given != name);
        self
    }

    /// What the program reads from its standard input; without this, nothing.
    #[must_use]
    pub fn input(mut self, text: impl Into<String>) -> Self {
        self.input = Some(text.into());
        self
    }

    /// Starts it.
    ///
    /// # Errors
    ///
    /// When it cannot be started: the message names the program.
    pub fn start(self) -> Outcome<Process> {
        let output = |suffix: &str| self.directory.join(format!("{}.{suffix}", self.name));
        let (out, err) = (output("out"), output("err"));
        let append = |path: &Path| File::options().create(true).append(true).open(path);
        let stdin = match &self.input {
            None => Stdio::null(),
            Some(text) => {
                let path = output("in");
                std::fs::write(&path, text)?;
                File::open(path)?.into()
            }
        };
        let mut command = Command::new(&self.program);
        command
            .args(&self.args)
            .current_dir(&self.directory)
            .env_clear()
            .envs(INHERITED.iter().filter_map(|name| Some((name, std::env::var_os(name)?))))
            .envs(self.env.iter().map(|(name, value)| (name, value)))
            .stdin(stdin)
            .stdout(append(&out)?)
            .stderr(append(if self.has_full_log { Path::new("/dev/full") } else { &err })?)
            .process_group(0)
            .kill_on_drop(true);
        if let Some((user, group)) = self.user {
            command.current_dir("/");
            if rustix::process::getuid().is_root() {
                command.uid(user).gid(group);
            }
        }
        let child = command
            .spawn()
            .map_err(|error| Failure::from(error).during(format!("start {}", self.program.display())))?;
        let id = child.id().ok_or_else(|| Failure::new("a child without a process id"))?;
        guard::started(id)?;
        Ok(Process { name: self.name, child, id, gone: false, out, err })
    }

    /// Runs it to its end. Two runs under one name share their files, so give each its own.
    ///
    /// # Errors
    ///
    /// When it cannot be started or does not end in time; an exit code is no error.
    pub async fn finish(self, patience: Duration) -> Outcome<Finished> {
        let mut process = self.start()?;
        let status = process.exited(patience).await?;
        Ok(Finished { status, stdout: read(&process.out), stderr: read(&process.err) })
    }
}

/// How a program ended.
#[derive(Debug)]
pub struct Finished {
    /// The code, or the signal that ended it.
    pub status: ExitStatus,
    /// All of its standard output.
    pub stdout: String,
    /// All of its standard error.
    pub stderr: String,
}

impl Finished {
    /// Standard output, if it ended with 0.
    ///
    /// # Errors
    ///
    /// Any other end, with what it printed.
    #[track_caller]
    pub fn success(self) -> Outcome<String> {
        if self.status.success() { Ok(self.stdout) } else { Err(Failure::new(self.to_string())) }
    }
}

impl std::fmt::Display for Finished {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}\nstdout: {}\nstderr: {}", self.status, self.stdout.trim_end(), self.stderr.trim_end())
    }
}

/// A running child, killed on drop.
#[derive(Debug)]
pub struct Process {
    name: String,
    child: Child,
    id: u32,
    gone: bool,
    out: PathBuf,
    err: PathBuf,
}

impl Process {
    /// The name it was given.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its process id, which is also its group's.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.id
    }

    /// Standard output so far.
    #[must_use]
    pub fn stdout(&self) -> String {
        read(&self.out)
    }

    /// Standard error so far.
    #[must_use]
    pub fn stderr(&self) -> String {
        read(&self.err)
    }

    /// SIGKILL, and waits until the kernel has taken it away.
    ///
    /// # Errors
    ///
    /// When the kernel does not.
    pub async fn kill(&mut self) -> Outcome {
        self.signal(Signal::KILL)?;
        self.exited(KILL_PATIENCE).await.map(drop)
    }

    /// SIGSTOP: it stands still, its connections stay open.
    ///
    /// # Errors
    ///
    /// When it is gone.
    pub fn stop(&self) -> Outcome {
        self.signal(Signal::STOP)
    }

    /// SIGSTOP, and waits until no thread of it runs any more: on a busy machine some go on for a while.
    ///
    /// # Errors
    ///
    /// When it is gone, or the kernel does not stop it.
    pub async fn stand_still(&self) -> Outcome {
        self.stop()?;
        eventually(format!("{} to stand still", self.name), KILL_PATIENCE, async || {
            for thread in std::fs::read_dir(format!("/proc/{}/task", self.id))? {
                let status = std::fs::read_to_string(thread?.path().join("stat"))?;
                // The name before the state may hold anything, a parenthesis too.
                if !status.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('T')) {
                    crate::fail!("a thread runs: {status}");
                }
            }
            Ok(())
        })
        .await
    }

    /// SIGCONT.
    ///
    /// # Errors
    ///
    /// When it is gone.
    pub fn go_on(&self) -> Outcome {
        self.signal(Signal::CONT)
    }

    /// SIGTERM, and how it then ends.
    ///
    /// # Errors
    ///
    /// When it does not end in time.
    pub async fn terminate(&mut self, patience: Duration) -> Outcome<ExitStatus> {
        self.signal(Signal::TERM)?;
        self.exited(patience).await.map_err(|failure| failure.during("after SIGTERM"))
    }

    /// SIGTERM, without waiting.
    ///
    /// # Errors
    ///
    /// When it is gone.
    pub fn ask_to_end(&self) -> Outcome {
        self.signal(Signal::TERM)
    }

    /// How it ended, if it has.
    ///
    /// # Errors
    ///
    /// When the kernel does not say.
    pub fn try_exited(&mut self) -> Outcome<Option<ExitStatus>> {
        let status = self.child.try_wait()?;
        if status.is_some() {
            self.forget();
        }
        Ok(status)
    }

    /// Waits for its end.
    ///
    /// # Errors
    ///
    /// When it has not ended in time.
    pub async fn exited(&mut self, patience: Duration) -> Outcome<ExitStatus> {
        let Ok(status) = timeout(patience, self.child.wait()).await else {
            crate::fail!("{} (process {}) has not ended within {patience:?}", self.name, self.id);
        };
        self.forget();
        Ok(status?)
    }

    fn signal(&self, signal: Signal) -> Outcome {
        if self.gone {
            crate::fail!("{} has ended already", self.name);
        }
        let group = i32::try_from(self.id).ok().and_then(Pid::from_raw);
        let group = group.ok_or_else(|| Failure::new("process id 0"))?;
        kill_process_group(group, signal)
            .map_err(|error| Failure::from(error).during(format!("signal {}", self.name)))
    }

    /// From now on its number may be another's: never signal it again.
    fn forget(&mut self) {
        if !self.gone {
            self.gone = true;
            guard::gone(self.id);
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Not waited for: until then the number stays its own, so this cannot hit another group.
        if !self.gone && self.signal(Signal::KILL).is_ok() {
            self.forget();
        }
    }
}

fn read(path: &Path) -> String {
    std::fs::read(path).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scratch() -> PathBuf {
        let directory = std::env::temp_dir().join(format!("baton-process-{}", uuid::Uuid::new_v4()));
        std::fs::create_dir(&directory).unwrap();
        directory
    }

    fn shell(directory: &Path, script: &str) -> Launch {
        Launch::new("sh", directory, "/bin/sh").args(["-c", script])
    }

    const PATIENCE: Duration = Duration::from_secs(10);

    #[tokio::test]
    async fn both_outputs_and_the_code_are_caught() {
        let directory = scratch();
        let finished =
            shell(&directory, "cat; echo bad >&2; exit 3").input("good").finish(PATIENCE).await.unwrap();
        assert_eq!(finished.status.code(), Some(3));
        assert_eq!((finished.stdout.as_str(), finished.stderr.as_str()), ("good", "bad\n"));
        assert!(finished.success().unwrap_err().to_string().contains("stderr: bad"));
    }

    #[tokio::test]
    async fn a_child_sees_only_the_environment_it_is_given() {
        let directory = scratch();
        let script = shell(&directory, "env").env("BATON_A", "1").env("BATON_B", "2").without_env("BATON_A");
        let seen = script.finish(PATIENCE).await.unwrap().success().unwrap();
        assert!(seen.contains("PATH=") && seen.contains("BATON_B=2"), "{seen}");
        assert!(!seen.contains("CARGO") && !seen.contains("BATON_A"), "{seen}");
    }

    #[tokio::test]
    async fn dropping_it_kills_its_whole_group() {
        let directory = scratch();
        let process = shell(&directory, "sleep 61 & echo $!; wait").start().unwrap();
        let grandchild: String = eventually("the grandchild", PATIENCE, async || {
            let text = process.stdout();
            if text.ends_with('\n') { Ok(text.trim().to_owned()) } else { crate::fail!("{text}") }
        })
        .await
        .unwrap();
        drop(process);
        eventually("its death", PATIENCE, async || {
            let state = std::fs::read_to_string(format!("/proc/{grandchild}/stat")).unwrap_or_default();
            if state.is_empty() || state.contains(") Z") { Ok(()) } else { crate::fail!("{state}") }
        })
        .await
        .unwrap();
    }

    #[tokio::test]
    async fn one_that_does_not_end_is_named() {
        let directory = scratch();
        let failure = shell(&directory, "sleep 62").finish(Duration::from_millis(50)).await.unwrap_err();
        assert!(failure.message().starts_with("sh (process "), "{failure}");
    }
}

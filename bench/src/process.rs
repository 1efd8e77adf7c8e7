//! The processes under test: the relay as users run it, and the limits, each apart from this one.
//!
//! A relay gets of the environment what every program needs, and the settings that were given as `BATON_SECTION__KEY`,
//! which the report then names. Its log goes to `bench/` beside the programs; the end of it is in the error when it ends by itself.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use tokio::process::{Child, Command};
use tokio::time::timeout;

use crate::arena::Arena;
use crate::lab::{Lab, Result};
use crate::proc::{self, Memory};

/// Within this a relay that was asked to end has ended.
const PATIENCE: Duration = Duration::from_secs(30);

/// The relay's settings that were given by environment.
pub(crate) fn given_settings() -> Vec<(String, String)> {
    std::env::vars().filter(|(name, _)| name.starts_with("BATON_") && name.contains("__")).collect()
}

/// Where logs and the results of quick runs go.
pub(crate) fn scratch(lab: &Lab) -> Result<PathBuf> {
    let target = lab.bin.parent().unwrap_or(&lab.bin);
    let scratch = target.join("bench");
    std::fs::create_dir_all(&scratch)?;
    Ok(scratch)
}

/// A program with nothing of our environment but what every program needs.
fn command(program: &Path, arena: &Arena) -> Command {
    let mut command = Command::new(program);
    command
        .env_clear()
        .envs(["PATH", "HOME", "TMPDIR"].iter().filter_map(|name| Some((name, std::env::var_os(name)?))))
        .env("DATABASE_URL", &arena.settings.database_url)
        .env("KAFKA_BROKERS", &arena.settings.brokers)
        // Where no baton.toml lies.
        .current_dir("/")
        .stdin(Stdio::null())
        .kill_on_drop(true);
    command
}

/// A running `baton relay`, killed on drop.
pub(crate) struct Relay {
    child: Child,
    pid: u32,
    log: PathBuf,
}

impl Relay {
    pub(crate) fn start(lab: &Lab, arena: &Arena, owner: &str, settings: &[(&str, String)]) -> Result<Self> {
        let log = scratch(lab)?.join(format!("{owner}.log"));
        let out = File::create(&log)?;
        let child = command(&lab.bin.join("baton"), arena)
            .arg("relay")
            .env("BATON_RELAY__OWNER", owner)
            .env("BATON_HTTP__LISTEN", "off")
            .envs(given_settings())
            .envs(settings.iter().map(|(name, value)| (name, value)))
            .stdout(out.try_clone()?)
            .stderr(out)
            .spawn()?;
        let pid = child.id().ok_or("a relay without a process id")?;
        Ok(Self { child, pid, log })
    }

    /// An error with the end of its log when it has ended.
    pub(crate) fn must_run(&mut self) -> Result<()> {
        match self.child.try_wait()? {
            None => Ok(()),
            Some(status) => Err(self.ended(status)),
        }
    }

    fn ended(&self, status: ExitStatus) -> Box<dyn std::error::Error + Send + Sync> {
        let log = std::fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        let tail = lines.get(lines.len().saturating_sub(10)..).unwrap_or_default().join("\n");
        format!("the relay ended by itself ({status}); {}:\n{tail}", self.log.display()).into()
    }

    pub(crate) fn cpu_seconds(&self) -> Result<f64> {
        proc::cpu_seconds(self.pid)
    }

    pub(crate) fn fine_cpu_seconds(&self) -> Result<f64> {
        proc::fine_cpu_seconds(self.pid)
    }

    pub(crate) fn memory(&self) -> Result<Memory> {
        proc::memory(self.pid)
    }

    fn signal(&self, signal: Signal) -> Result<()> {
        let pid = Pid::from_raw(i32::try_from(self.pid)?).ok_or("no process id")?;
        Ok(kill_process(pid, signal)?)
    }

    /// SIGTERM, and waits for its end.
    pub(crate) async fn terminate(mut self) -> Result<()> {
        self.must_run()?;
        self.signal(Signal::TERM)?;
        let status = timeout(PATIENCE, self.child.wait()).await.map_err(|_| "the relay does not end")??;
        if status.success() { Ok(()) } else { Err(self.ended(status)) }
    }

    /// SIGKILL, and waits for its end.
    pub(crate) async fn kill(mut self) -> Result<()> {
        self.must_run()?;
        self.signal(Signal::KILL)?;
        self.child.wait().await?;
        Ok(())
    }
}

/// What a limit says of itself when it is done.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Told {
    /// From its first row to its last, by its own clock.
    pub(crate) seconds: f64,
    pub(crate) cpu: f64,
    pub(crate) peak: f64,
}

impl Told {
    /// Of this process, so far.
    pub(crate) fn print(seconds: f64) -> Result<()> {
        let pid = std::process::id();
        println!("{seconds} {} {}", proc::cpu_seconds(pid)?, proc::memory(pid)?.peak);
        Ok(())
    }

    fn parse(line: &str) -> Option<Self> {
        let mut numbers = line.split_whitespace().map(str::parse::<f64>);
        let mut next = || numbers.next()?.ok();
        Some(Self { seconds: next()?, cpu: next()?, peak: next()? })
    }
}

/// Runs one of this program's own limits to its end as a process of its own.
pub(crate) async fn limit(arena: &Arena, args: &[&str]) -> Result<Told> {
    let output = command(&std::env::current_exe()?, arena)
        .args(args)
        .arg("--topic")
        .arg(&arena.topic)
        .stderr(Stdio::inherit())
        .output()
        .await?;
    if !output.status.success() {
        return Err(format!("`baton-bench {}` ended with {}", args.join(" "), output.status).into());
    }
    let line = String::from_utf8_lossy(&output.stdout).into_owned();
    Told::parse(&line).ok_or_else(|| format!("`baton-bench {}` said {line:?}", args.join(" ")).into())
}

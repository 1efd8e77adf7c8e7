//! Servers that a test may break: a Postgres and a Kafka of this test program's own, beside the shared ones.
//!
//! `cargo xtask up` starts them, in a directory named by `BATON_STACK_DIR`, from the same programs and with the same
//! configuration as every other stack, and starts again whichever of them is dead. What is killed here is found as xtask
//! finds it, by the mark in the server's command line; nothing else on the machine has that mark. There is one such stack
//! in a test program, made by the first test that asks; only tests that run [alone](crate::Load::Alone) may ask. The
//! guard kills it with this process and removes its directory.

use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use sqlx::{Connection, Executor, PgConnection};
use tokio::sync::Mutex;
use tokio::time::{Instant, sleep, timeout};

use crate::database;
use crate::failure::{Failure, Outcome};
use crate::guard;
use crate::place::{self, Place};
use crate::process::Launch;
use crate::proxy::Proxy;
use crate::wait::eventually;

/// What a start from nothing may take on a busy machine, Maven's copying included.
const START: Duration = Duration::from_secs(150);

/// How soon Postgres puts commits on the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flush {
    /// As by default.
    Soon,
    /// A tenth of a second late.
    Late,
}

/// A stack of our own.
#[derive(Debug, Clone)]
pub struct OwnStack {
    directory: PathBuf,
    place: Place,
    mark: String,
    /// Kafka's listener for clients that come through a proxy, and the port where it tells them the proxy is.
    proxied: u16,
    proxy: u16,
}

impl OwnStack {
    /// The stack, with both servers serving: started, repaired or as it is.
    ///
    /// # Errors
    ///
    /// When `xtask` is not built or a server does not come; the message has xtask's own words.
    pub async fn up() -> Outcome<Self> {
        static TURN: Mutex<()> = Mutex::const_new(());
        let _turn = TURN.lock().await;
        let directory = place::scratch()?.join(format!("stack.{}", std::process::id()));
        if !directory.is_dir() {
            std::fs::create_dir_all(&directory)?;
            guard::remove_at_the_end(&directory)?;
            share_programs(&directory)?;
        }
        let stack = raise(&directory).await?;
        stack.guard()?;
        Ok(stack)
    }

    /// Where it is.
    #[must_use]
    pub fn place(&self) -> &Place {
        &self.place
    }

    /// A proxy before the broker that its clients cannot leave: the broker tells whoever comes through it that it lives at
    /// the proxy's address. At most one at a time. Give its address to what shall be behind it
    /// (`KAFKA_BROKERS`, or [`Place::brokers`]); everybody else keeps the broker's own.
    ///
    /// # Errors
    ///
    /// When another such proxy is there.
    pub async fn kafka_proxy(&self) -> Outcome<Proxy> {
        Proxy::at(self.proxy, &format!("127.0.0.1:{}", self.proxied)).await
    }

    /// SIGKILL to the broker; returns when it is gone.
    ///
    /// # Errors
    ///
    /// When there is none, or it does not go.
    pub async fn kill_broker(&self) -> Outcome {
        let pid = self.broker().ok_or_else(|| Failure::new("the own broker does not run"))?;
        signal(pid, Signal::KILL)?;
        eventually("the killed broker to be gone", Duration::from_secs(20), async || match self.broker() {
            None => Ok(()),
            Some(pid) => crate::fail!("process {pid} is there"),
        })
        .await?;
        guard::gone(u32::try_from(pid)?);
        Ok(())
    }

    /// Starts what is dead and returns when both serve.
    ///
    /// # Errors
    ///
    /// When a server does not come.
    pub async fn repair(&self) -> Outcome {
        raise(&self.directory).await?.guard()
    }

    /// Makes Postgres slow to put commits on the disk, or as it is by default: every flush waits 100 ms first, and nobody
    /// flushes asynchronous commits in the background. What a crash then takes back is what a reader that does not wait
    /// for the flush has long seen.
    ///
    /// # Errors
    ///
    /// When Postgres does not take the settings, for half a minute.
    pub async fn flush(&self, pace: Flush) -> Outcome {
        let statements = match pace {
            Flush::Late => [
                "ALTER SYSTEM SET commit_delay = 100000",
                "ALTER SYSTEM SET commit_siblings = 0",
                "ALTER SYSTEM SET wal_writer_delay = '10s'",
                "ALTER SYSTEM SET wal_writer_flush_after = '1GB'",
            ],
            Flush::Soon => [
                "ALTER SYSTEM RESET commit_delay",
                "ALTER SYSTEM RESET commit_siblings",
                "ALTER SYSTEM RESET wal_writer_delay",
                "ALTER SYSTEM RESET wal_writer_flush_after",
            ],
        };
        // It may be in the middle of its recovery.
        eventually("Postgres to take settings", Duration::from_secs(30), async || {
            let mut admin = database::connect(&self.place.database_url).await?;
            for statement in statements {
                admin.execute(statement).await?;
            }
            admin.execute("SELECT pg_reload_conf()").await?;
            admin.close().await?;
            Ok(())
        })
        .await
    }

    /// SIGKILL to every child of the postmaster, sessions and background processes alike: Postgres then ends all the
    /// rest, runs crash recovery and serves again by itself. The moment is chosen: some of the log must not be written
    /// yet. Returns how many were killed; recovery is still under way.
    ///
    /// # Errors
    ///
    /// When there is no postmaster, or all of the log is written for twenty seconds: nobody commits.
    pub async fn crash_postgres(&self) -> Outcome<usize> {
        /// Bytes of log that make it likely that commits are among them.
        const AHEAD: i64 = 32 << 10;
        let postmaster = self.postmaster().ok_or_else(|| Failure::new("the own Postgres does not run"))?;
        let mut admin = database::connect(&self.place.database_url).await?;
        let own: i32 = sqlx::query_scalar("SELECT pg_backend_pid()").fetch_one(&mut admin).await?;
        let began = Instant::now();
        let victims = loop {
            if began.elapsed() > Duration::from_secs(20) {
                crate::fail!("the log is never written late");
            }
            // Where writers are slow, or others make the server write often, less has to do.
            let enough = AHEAD >> (began.elapsed().as_secs() / 4);
            if unwritten(&mut admin).await? < enough {
                sleep(Duration::from_millis(2)).await;
                continue;
            }
            let victims = children(postmaster);
            let halt = |how: Signal| {
                for victim in victims.iter().filter(|victim| **victim != own) {
                    signal(*victim, how).ok();
                }
            };
            // Once they stand still nobody writes the log: what is only in memory when it is looked at again never leaves it.
            halt(Signal::STOP);
            // One may have been stopped with a lock in its hand: then nothing can be asked.
            match timeout(Duration::from_secs(1), unwritten(&mut admin)).await {
                Ok(Ok(ahead)) if ahead >= enough => break victims,
                _ => halt(Signal::CONT),
            }
        };
        for victim in &victims {
            // One that has just ended by itself is as dead.
            signal(*victim, Signal::KILL).ok();
        }
        Ok(victims.len())
    }

    /// SIGKILL to the postmaster and all of its children; returns when they are gone. [`repair`](Self::repair) starts it
    /// again.
    ///
    /// # Errors
    ///
    /// When there is none, or it does not go.
    pub async fn kill_postgres(&self) -> Outcome {
        let postmaster = self.postmaster().ok_or_else(|| Failure::new("the own Postgres does not run"))?;
        let mut victims = children(postmaster);
        // First the one that would start others anew.
        victims.insert(0, postmaster);
        for victim in &victims {
            signal(*victim, Signal::KILL).ok();
        }
        eventually("the killed Postgres to be gone", Duration::from_secs(20), async || {
            match victims
                .iter()
                .find(|pid| std::fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| !line.is_empty()))
            {
                None => Ok(()),
                Some(pid) => crate::fail!("process {pid} is there"),
            }
        })
        .await?;
        guard::gone(u32::try_from(postmaster)?);
        Ok(())
    }

    /// The program that Postgres runs, and its data directory.
    pub(crate) fn postgres_program(&self) -> Outcome<(PathBuf, PathBuf)> {
        let postmaster = self.postmaster().ok_or_else(|| Failure::new("the own Postgres does not run"))?;
        let line = std::fs::read_to_string(format!("/proc/{postmaster}/cmdline"))?;
        let mut words = line.split('\0').skip_while(|word| *word != "-D");
        let data = words.nth(1).ok_or_else(|| Failure::new("Postgres runs without -D"))?;
        Ok((std::fs::read_link(format!("/proc/{postmaster}/exe"))?, PathBuf::from(data)))
    }

    /// Postgres stops at once, without a word to anybody, and starts again: crash recovery, as after a power cut that lost
    /// nothing. Returns when it serves.
    ///
    /// # Errors
    ///
    /// When there is none, or it does not go or come.
    pub async fn restart_postgres(&self) -> Outcome {
        let postmaster = self.postmaster().ok_or_else(|| Failure::new("the own Postgres does not run"))?;
        signal(postmaster, Signal::QUIT)?;
        eventually("Postgres to be gone", Duration::from_secs(30), async || match self.postmaster() {
            None => Ok(()),
            Some(pid) => crate::fail!("process {pid} is there"),
        })
        .await?;
        guard::gone(u32::try_from(postmaster)?);
        self.repair().await
    }

    fn broker(&self) -> Option<i32> {
        find(&format!("-Dbaton.stack={}", self.mark))
    }

    fn postmaster(&self) -> Option<i32> {
        find(&format!("cluster_name=baton-{}", self.mark))
    }

    /// The end of this process is the end of these servers: each leads a group of its own.
    fn guard(&self) -> Outcome {
        for pid in [self.broker(), self.postmaster()].into_iter().flatten() {
            guard::started(u32::try_from(pid)?)?;
        }
        Ok(())
    }
}

/// The folder with Kafka's jars, for its own command line tools.
///
/// # Errors
///
/// When no stack was ever started natively by this workspace, and none can be.
pub async fn kafka_jars() -> Outcome<PathBuf> {
    let own = place::scratch()?.join(format!("stack.{}", std::process::id()));
    for stack in shared_stacks()?.iter().chain([&own]) {
        if let Some(jars) = jars_in(stack) {
            return Ok(jars);
        }
    }
    OwnStack::up().await?;
    jars_in(&own).ok_or_else(|| Failure::new(format!("there are no Kafka jars in {}", own.display())))
}

fn jars_in(stack: &Path) -> Option<PathBuf> {
    std::fs::read_dir(stack.join("lib"))
        .ok()?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .find(|path| path.is_dir() && has_tools(path))
}

fn has_tools(folder: &Path) -> bool {
    let is_complete = folder.extension().is_none();
    is_complete
        && std::fs::read_dir(folder).is_ok_and(|mut entries| {
            entries.any(|entry| {
                entry.is_ok_and(|entry| entry.file_name().to_string_lossy().starts_with("kafka-tools-4"))
            })
        })
}

/// Where the shared stack's programs may lie.
fn shared_stacks() -> Outcome<Vec<PathBuf>> {
    let named = std::env::var_os("BATON_STACK_DIR").map(PathBuf::from);
    let usual = place::scratch()?.with_file_name("stack");
    Ok(named.into_iter().chain([usual]).collect())
}

/// Lets the own stack use the programs that the shared one has already got from Maven.
fn share_programs(directory: &Path) -> Outcome {
    for stack in shared_stacks()? {
        let programs = stack.join("lib");
        if programs.is_dir() {
            std::os::unix::fs::symlink(std::path::absolute(programs)?, directory.join("lib"))?;
            break;
        }
    }
    Ok(())
}

async fn raise(directory: &Path) -> Outcome<OwnStack> {
    // Naming a Postgres keeps xtask from taking docker's.
    let debian = Path::new("/usr/lib/postgresql").is_dir();
    Launch::new("xtask", directory, place::program("xtask")?)
        .args(["up", "--postgres", if debian { "debian" } else { "embedded" }])
        .env("BATON_STACK_DIR", directory.display().to_string())
        .finish(START)
        .await?
        .success()
        .map_err(|failure| failure.during("start an own stack"))?;
    let record = std::fs::read_to_string(directory.join("record"))?;
    let value = |key: &str| {
        let found = record.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('='));
        found.map(str::to_owned).ok_or_else(|| Failure::new(format!("xtask's record does not name {key}")))
    };
    // Under root Postgres may have to live elsewhere.
    let home = PathBuf::from(value("postgres_home")?);
    if !home.starts_with(directory) {
        guard::remove_at_the_end(&home)?;
    }
    Ok(OwnStack {
        directory: directory.to_owned(),
        place: Place { database_url: value("database_url")?, brokers: value("kafka_brokers")? },
        mark: value("mark")?,
        proxied: value("proxied_port")?.parse()?,
        proxy: value("proxy_port")?.parse()?,
    })
}

/// The process that has exactly this argument. A zombie has none.
fn find(argument: &str) -> Option<i32> {
    processes().find(|pid| {
        std::fs::read(format!("/proc/{pid}/cmdline"))
            .is_ok_and(|line| line.split(|byte| *byte == 0).any(|arg| arg == argument.as_bytes()))
    })
}

/// How many bytes of the log are in memory only. None while somebody writes: who is at it has given the kernel more than it has
/// told the others.
async fn unwritten(admin: &mut PgConnection) -> Outcome<i64> {
    Ok(sqlx::query_scalar(
        "SELECT CASE WHEN EXISTS (SELECT FROM pg_stat_get_activity(NULL) WHERE wait_event_type = 'IO' AND wait_event IN ('WALWrite', 'WALSync')) THEN 0
                     ELSE (pg_current_wal_insert_lsn() - pg_current_wal_lsn())::bigint END",
    )
    .fetch_one(admin)
    .await?)
}

fn children(parent: i32) -> Vec<i32> {
    processes()
        .filter(|pid| {
            std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| {
                // pid (name, which may hold anything) state parent …
                let after_name = stat.rsplit_once(") ").map_or("", |(_, rest)| rest);
                after_name.split(' ').nth(1) == Some(&parent.to_string())
            })
        })
        .collect()
}

fn processes() -> impl Iterator<Item = i32> {
    std::fs::read_dir("/proc")
        .into_iter()
        .flatten()
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
}

fn signal(pid: i32, signal: Signal) -> Outcome {
    let pid = Pid::from_raw(pid).ok_or_else(|| Failure::new("process id 0"))?;
    kill_process(pid, signal).map_err(|error| Failure::from(error).during("signal a server of the own stack"))
}

//! Postgres and Kafka for this workspace: given, by docker compose, or natively.
//!
//! What it guarantees:
//!
//! * The first of these that applies is used: `DATABASE_URL` and `KAFKA_BROKERS` from the environment; a
//!   stack of ours that is up; docker compose, if an engine answers; native servers on loopback.
//! * `up` ends with both servers having answered, or with an error. What is up already is reused, what is
//!   half dead is repaired, and nothing but the servers' own answers counts as up.
//! * Two commands at once take turns: they hold a lock that the kernel frees when its holder dies.
//! * `down` ends only what `up` started.
//!
//! Architecture invariant: stdout stays empty here, for `eval "$(cargo xtask env)"`.

mod compose;
mod files;
mod given;
mod home;
mod kafka;
mod native;
mod ports;
mod postgres;
mod probe;
mod process;
mod record;
mod service;
mod wait;

use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};

pub(crate) use compose::has_plugin as has_compose;
use probe::Answer;
use record::{Record, Way};
pub(crate) use wait::{Deadline, Stopwatch, briefly};

use crate::error::{Error, Result};
use crate::paths::Paths;

/// Which Postgres a native stack runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Flavour {
    /// The server of the machine's distribution.
    Debian,
    /// PostgreSQL 18 as Maven brings it.
    Embedded,
}

/// Where the servers are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Stack {
    pub(crate) database_url: String,
    pub(crate) kafka_brokers: String,
    /// Started for this workspace, so that nothing in it is anybody's data.
    pub(crate) ours: bool,
}

impl Stack {
    fn of(record: &Record) -> Self {
        Self {
            database_url: record.database_url.clone(),
            kafka_brokers: record.kafka_brokers.clone(),
            ours: record.way != Way::Compose { owned: false },
        }
    }

    /// Whether both servers of a stack of ours serve now; the error says which does not, and why.
    fn answers(&self) -> Result<()> {
        let postgres = given::postgres_address(&self.database_url)?.unwrap_or_default();
        for (name, answer) in
            [("postgres", probe::postgres(&postgres)), ("kafka", probe::kafka(&self.kafka_brokers))]
        {
            if let Answer::NotReady(why) = answer {
                return Err(Error::failed(format!("{name} does not serve ({why})")));
            }
        }
        Ok(())
    }
}

/// `cargo xtask up`.
pub(crate) fn up(paths: &Paths, wanted: Option<Flavour>) -> Result<()> {
    ensure(paths, wanted)?;
    crate::say!("the stack is up; for a shell: eval \"$(cargo xtask env)\"");
    Ok(())
}

/// A stack that serves: what the other commands begin with.
///
/// # Errors
///
/// When a given server does not answer, or none can be started.
pub(crate) fn ensure(paths: &Paths, wanted: Option<Flavour>) -> Result<Stack> {
    let (dir, _lock) = lock(&paths.stack)?;
    let record = Record::load(&dir)?;
    if let Some(given) = given_by_others(record.as_ref())? {
        if wanted.is_some() {
            return Err(Error::Usage(
                "--postgres starts a server, but DATABASE_URL and KAFKA_BROKERS say which to use: unset them"
                    .to_owned(),
            ));
        }
        given::check(&given)?;
        return Ok(given);
    }
    let by_compose = record.as_ref().is_some_and(|record| record.way != Way::Native);
    let native_runs = record.as_ref().is_some_and(native::runs_in_part);
    if by_compose && wanted.is_some() && compose::is_available() {
        return Err(Error::failed("docker compose runs the stack: run `cargo xtask down` first"));
    }
    if native_runs || wanted.is_some() || !compose::is_available() {
        return native::up(&dir, wanted);
    }
    let stack = compose::addresses()?;
    let mut record = record.map_or_else(|| native::fresh(&dir), Ok)?;
    let owned = record.way == Way::Compose { owned: true } || !compose::running(&paths.root)?;
    record.way = Way::Compose { owned };
    record.database_url.clone_from(&stack.database_url);
    record.kafka_brokers.clone_from(&stack.kafka_brokers);
    // Before anything starts, so that `down` ends what an interrupted `up` has begun.
    record.save(&dir)?;
    compose::up(&paths.root, &stack)?;
    Ok(Stack { ours: owned, ..stack })
}

/// `cargo xtask env`: the stack that is up now.
pub(crate) fn running(paths: &Paths) -> Result<Stack> {
    let nothing = || Error::failed("no stack is up: run `cargo xtask up`");
    let record = match fs::canonicalize(&paths.stack) {
        Ok(dir) => Record::load(&dir)?,
        Err(_) => None,
    };
    if let Some(given) = given_by_others(record.as_ref())? {
        return Ok(given);
    }
    let record = record.ok_or_else(nothing)?;
    if record.way == Way::Native && !native::is_up(&record) {
        return Err(nothing());
    }
    let stack = Stack::of(&record);
    match stack.answers() {
        Ok(()) => Ok(stack),
        Err(error) => Err(Error::failed(format!("{error}: run `cargo xtask up`"))),
    }
}

/// `cargo xtask down`.
pub(crate) fn down(paths: &Paths, wipe: bool) -> Result<()> {
    if !paths.stack.is_dir() {
        crate::say!("nothing to take down: no stack was started in {}", paths.stack.display());
        return Ok(());
    }
    let (dir, _lock) = lock(&paths.stack)?;
    let Some(mut record) = Record::load(&dir)? else {
        crate::say!("nothing to take down: no stack was started in {}", dir.display());
        return Ok(());
    };
    match record.way {
        Way::Native => native::down(&record)?,
        Way::Compose { owned: true } if compose::is_available() => compose::down(&paths.root, wipe)?,
        Way::Compose { owned: true } => {
            crate::say!("no docker engine answers, so nothing of docker compose runs");
        }
        Way::Compose { owned: false } => {
            crate::say!("left as it is: docker compose ran before `cargo xtask up` used it");
        }
    }
    record.way = Way::Native;
    record.save(&dir)?;
    if wipe {
        native::wipe(&dir, &record)?;
        crate::say!("the data are deleted");
    }
    Ok(())
}

/// The addresses in the environment, unless they are our own stack's: then it is ours to repair.
fn given_by_others(record: Option<&Record>) -> Result<Option<Stack>> {
    let given = given::from_environment()?;
    let is_ours = |given: &Stack| {
        record.is_some_and(|r| r.database_url == given.database_url && r.kafka_brokers == given.kafka_brokers)
    };
    Ok(given.filter(|given| !is_ours(given)))
}

/// Makes the directory, takes its lock, waiting if need be, and gives its real path.
fn lock(stack: &Path) -> Result<(PathBuf, File)> {
    fs::create_dir_all(stack).map_err(Error::io("create", stack))?;
    let dir = fs::canonicalize(stack).map_err(Error::io("resolve", stack))?;
    let path = dir.join("lock");
    let file = File::create(&path).map_err(Error::io("create", &path))?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            crate::say!("waiting for another `cargo xtask` that starts or ends this stack");
            file.lock().map_err(Error::io("lock", &path))?;
        }
        Err(TryLockError::Error(error)) => return Err(Error::io("lock", &path)(error)),
    }
    Ok((dir, file))
}

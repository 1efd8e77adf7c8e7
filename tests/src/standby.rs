//! A standby of the own Postgres: made from a base backup, following by streaming, and put in the primary's place.
//!
//! ```text
//! primary ══ backup ═▶ standby ◀═ streams ═ primary
//!                         └ stopped: it is k commits behind ─▶ primary killed ─▶ takes its port, promoted
//! ```
//!
//! The backup is the server's own low-level one (`pg_backup_start`, a copy, `pg_backup_stop`), because the Postgres that
//! Maven brings has no `pg_basebackup`. The server is the very program that the primary runs.

use std::fs;
use std::io;
use std::net::TcpListener;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, chown};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use sqlx::Connection;
use sqlx::postgres::PgConnection;

use crate::database;
use crate::failure::{Failure, Outcome};
use crate::own_stack::OwnStack;
use crate::place::Place;
use crate::process::{Launch, Process};
use crate::wait::eventually;

/// How long a server may take to serve, to stop, to be promoted.
const PATIENCE: Duration = Duration::from_secs(30);

/// A standby that can take its primary's place. Dropping it kills it and removes its files.
#[derive(Debug)]
pub struct Standby {
    program: PathBuf,
    data: PathBuf,
    logs: PathBuf,
    primary: Place,
    own: Place,
    process: Option<Process>,
}

impl Standby {
    /// A standby of the own stack's Postgres, in a copy made now. `logs` is where its output goes.
    ///
    /// # Errors
    ///
    /// When the primary does not answer or the standby does not follow.
    pub async fn of(stack: &OwnStack, logs: &Path) -> Outcome<Self> {
        let (program, source) = stack.postgres_program()?;
        let data = source.with_file_name(format!("standby-{}", std::process::id()));
        let port = TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port();
        let primary = stack.place().clone();
        let own = primary.with_postgres_address(&format!("127.0.0.1:{port}"))?;
        // From here on the files are removed, whatever happens.
        let mut standby = Self { program, data, logs: logs.to_owned(), primary, own, process: None };
        standby.back_up(&source).await?;
        standby.start("standby", port, &format!("primary_conninfo={}", standby.primary.database_url))?;
        standby.follows().await?;
        Ok(standby)
    }

    async fn back_up(&self, source: &Path) -> Outcome {
        let mut session = database::connect(&self.primary.database_url).await?;
        sqlx::query("SELECT pg_backup_start('standby', true)").execute(&mut session).await?;
        remove(&self.data)?;
        let (from, to) = (source.to_owned(), self.data.clone());
        tokio::task::spawn_blocking(move || copy(&from, &to)).await??;
        let label: String =
            sqlx::query_scalar("SELECT labelfile FROM pg_backup_stop(false)").fetch_one(&mut session).await?;
        session.close().await?;
        for (name, text) in [("backup_label", label.as_str()), ("standby.signal", "")] {
            let path = self.data.join(name);
            fs::write(&path, text)?;
            like(&path, &fs::metadata(source)?)?;
        }
        Ok(())
    }

    fn start(&mut self, name: &str, port: u16, follows: &str) -> Outcome {
        let owner = fs::metadata(&self.data)?;
        let process = Launch::new(name, &self.logs, &self.program)
            .args(["-D", &self.data.display().to_string(), "-c", &format!("port={port}"), "-c", follows])
            .user(owner.uid(), owner.gid())
            .start()?;
        self.process = Some(process);
        Ok(())
    }

    /// Where it serves, reading only.
    #[must_use]
    pub fn place(&self) -> &Place {
        &self.own
    }

    /// Waits until it has replayed all that the primary has written by now.
    ///
    /// # Errors
    ///
    /// When it does not.
    pub async fn follows(&self) -> Outcome {
        let mut primary = database::connect(&self.primary.database_url).await?;
        let written: String =
            sqlx::query_scalar("SELECT pg_current_wal_flush_lsn()::text").fetch_one(&mut primary).await?;
        primary.close().await?;
        eventually("the standby to follow", PATIENCE, async || {
            let mut standby = database::connect(&self.own.database_url).await?;
            let there: bool = sqlx::query_scalar("SELECT pg_last_wal_replay_lsn() >= $1::pg_lsn")
                .bind(&written)
                .fetch_one(&mut standby)
                .await?;
            standby.close().await?;
            if there { Ok(()) } else { crate::fail!("it has not replayed {written}") }
        })
        .await
    }

    /// Stops it: what is committed from now on it will never have.
    ///
    /// # Errors
    ///
    /// When it does not stop.
    pub async fn stop(&mut self) -> Outcome {
        let Some(mut process) = self.process.take() else { return Ok(()) };
        // SIGINT to the postmaster alone, whose fast shutdown ends its children in order.
        let pid = i32::try_from(process.id()).ok().and_then(Pid::from_raw);
        let pid = pid.ok_or_else(|| Failure::new("process id 0"))?;
        kill_process(pid, Signal::INT).map_err(|error| Failure::from(error).during("stop the standby"))?;
        let status = process.exited(PATIENCE).await?;
        if status.success() { Ok(()) } else { crate::fail!("the standby stopped with {status}") }
    }

    /// Serves at the address of the primary, which must be gone, and is one: promoted, and written to.
    ///
    /// # Errors
    ///
    /// When it does not come.
    pub async fn take_over(&mut self) -> Outcome {
        // Two servers of one directory cannot be.
        self.stop().await?;
        let address = self.primary.postgres_address()?;
        let port = address.rsplit(':').next().unwrap_or_default().parse()?;
        self.start("promoted", port, "primary_conninfo=")?;
        let mut session: PgConnection =
            eventually("the standby to serve in the primary's place", PATIENCE, async || {
                database::connect(&self.primary.database_url).await
            })
            .await?;
        let promoted: bool =
            sqlx::query_scalar("SELECT pg_promote(true, 30)").fetch_one(&mut session).await?;
        session.close().await?;
        if promoted { Ok(()) } else { crate::fail!("the standby was not promoted in 30 s") }
    }
}

impl Drop for Standby {
    fn drop(&mut self) {
        // Its children see that it is gone and follow; what one of them still writes makes no difference.
        drop(self.process.take());
        remove(&self.data).ok();
    }
}

fn remove(directory: &Path) -> io::Result<()> {
    match fs::remove_dir_all(directory) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Gives the file to whom the other one belongs: only root has to.
fn like(path: &Path, other: &fs::Metadata) -> io::Result<()> {
    match fs::metadata(path) {
        Ok(own) if own.uid() == other.uid() => Ok(()),
        _ => chown(path, Some(other.uid()), Some(other.gid())),
    }
}

/// Copies a running server's files, without those that are only the running server's. What vanishes meanwhile is in the log
/// that is streamed.
fn copy(from: &Path, to: &Path) -> io::Result<()> {
    fs::DirBuilder::new().mode(0o700).create(to)?;
    like(to, &fs::metadata(from)?)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let (path, copied) = (entry.path(), to.join(entry.file_name()));
        let kind = match entry.file_type() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            kind => kind?,
        };
        let name = entry.file_name();
        if ["postmaster.pid", "postmaster.opts"].iter().any(|own| name == *own) {
            continue;
        }
        if kind.is_dir() {
            if name == "pg_wal" {
                for directory in [copied.clone(), copied.join("archive_status")] {
                    fs::DirBuilder::new().mode(0o700).create(&directory)?;
                    like(&directory, &fs::metadata(from)?)?;
                }
                continue;
            }
            copy(&path, &copied)?;
        } else if kind.is_file() {
            match fs::copy(&path, &copied) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                done => done?,
            };
            like(&copied, &fs::metadata(from)?)?;
        }
    }
    Ok(())
}

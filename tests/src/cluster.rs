//! A Postgres cluster of a test's own, made from nothing in a second or two: another system identifier, another count of
//! transactions. For what happens to an outbox that moves from one cluster to another.
//!
//! It does not wait for its disk (`fsync = off`), so nothing may be killed in it that is to be found again. The programs are
//! those of the machine's Postgres, `pg_dump` and `pg_restore` included.

use std::fs;
use std::io;
use std::net::TcpListener;
use std::os::unix::fs::{DirBuilderExt, chown};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use sqlx::{AssertSqlSafe, Connection, Executor};

use crate::database;
use crate::failure::{Failure, Outcome};
use crate::guard;
use crate::place::Place;
use crate::process::{Launch, Process};
use crate::wait::eventually;

const PATIENCE: Duration = Duration::from_secs(60);

/// Where a machine's Postgres has its programs, one directory a version.
const INSTALLED: &str = "/usr/lib/postgresql";

/// A running cluster. Dropping it kills it and removes its files.
#[derive(Debug)]
pub struct Cluster {
    data: PathBuf,
    place: Place,
    process: Option<Process>,
}

impl Cluster {
    /// A new cluster, serving, beside the shared Kafka. `logs` is where its output goes.
    ///
    /// # Errors
    ///
    /// When the machine has no Postgres, or it does not start.
    pub async fn start(logs: &Path) -> Outcome<Self> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let name = format!("cluster-{}-{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
        // Not below the target directory, which the user that Postgres runs as may not be able to enter.
        let data = Path::new("/var/tmp").join(format!("baton-{name}"));
        let account = account()?;
        guard::remove_at_the_end(&data)?;
        fs::DirBuilder::new().mode(0o700).create(&data)?;
        let port = TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port();
        let place = Place {
            database_url: format!("postgres://baton@127.0.0.1:{port}/postgres"),
            brokers: Place::shared()?.brokers,
        };
        let mut cluster = Self { data, place, process: None };
        let data = cluster.data.display().to_string();
        let launch = |program: &str| -> Outcome<Launch> {
            let launch = Launch::new(&format!("{name}-{program}"), logs, postgres_program(program)?);
            Ok(match account {
                Some((user, group)) => launch.user(user, group),
                None => launch,
            })
        };
        if let Some((user, group)) = account {
            chown(&cluster.data, Some(user), Some(group))?;
        }
        let initdb =
            ["--username=baton", "--auth=trust", "--encoding=UTF8", "--no-locale", "--no-sync", "-D"];
        launch("initdb")?.args(initdb).arg(&data).finish(PATIENCE).await?.success()?;
        let port = format!("port={port}");
        let settings = [
            port.as_str(),
            "listen_addresses=127.0.0.1",
            "unix_socket_directories=",
            "fsync=off",
            "shared_buffers=32MB",
            "wal_level=logical",
            "max_prepared_transactions=10",
        ];
        let server = launch("postgres")?.args(["-D", &data]);
        let server = settings.iter().fold(server, |server, setting| server.args(["-c", setting]));
        cluster.process = Some(server.start()?);
        eventually("the new cluster to serve", PATIENCE, async || {
            Ok(database::connect(&cluster.place.database_url).await?.close().await?)
        })
        .await?;
        Ok(cluster)
    }

    /// Its address, for [`site_at`](crate::Harness::site_at).
    #[must_use]
    pub fn place(&self) -> &Place {
        &self.place
    }

    /// Spends transaction ids until the next one is about `next`; does nothing where it is beyond that.
    ///
    /// # Errors
    ///
    /// When the server does not answer.
    pub async fn reach(&self, next: i64) -> Outcome {
        let mut admin = database::connect(&self.place.database_url).await?;
        let spend = format!(
            "DO $$ BEGIN WHILE pg_current_xact_id()::text::bigint < {next} - 1 LOOP COMMIT; END LOOP; END $$"
        );
        admin.execute(AssertSqlSafe(spend)).await?;
        Ok(admin.close().await?)
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        drop(self.process.take());
        match fs::remove_dir_all(&self.data) {
            // What its children still write is removed by the guard.
            Err(error) if error.kind() != io::ErrorKind::NotFound => {}
            _ => {}
        }
    }
}

/// A program of the machine's newest Postgres.
///
/// # Errors
///
/// When there is none.
pub fn postgres_program(name: &str) -> Outcome<PathBuf> {
    let versions = fs::read_dir(INSTALLED).into_iter().flatten().flatten();
    let newest = versions
        .filter_map(|entry| Some((entry.file_name().to_str()?.parse::<u32>().ok()?, entry.path())))
        .map(|(version, path)| (version, path.join("bin").join(name)))
        .filter(|(_, program)| program.is_file())
        .max();
    newest.map(|(_, program)| program).ok_or_else(|| {
        Failure::new(format!(
            "there is no {name} in {INSTALLED}/*/bin: install it with `apt-get install postgresql`"
        ))
    })
}

/// As whom Postgres runs, which refuses to be root.
fn account() -> Outcome<Option<(u32, u32)>> {
    if !rustix::process::getuid().is_root() {
        return Ok(None);
    }
    let users = fs::read_to_string("/etc/passwd")?;
    let found = ["postgres", "baton-pg"].into_iter().find_map(|name| {
        let line = users.lines().find(|line| line.split(':').next() == Some(name))?;
        let mut fields = line.split(':').skip(2);
        Some((fields.next()?.parse().ok()?, fields.next()?.parse().ok()?))
    });
    found.map(Some).ok_or_else(|| Failure::new("there is no user postgres for Postgres to run as"))
}

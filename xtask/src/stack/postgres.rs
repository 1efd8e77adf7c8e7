//! One Postgres server on loopback, Debian's or the one that Maven brings.
//!
//! A cluster is made under another name and renamed when it is complete. A server that was killed leaves
//! `postmaster.pid`, which could name a stranger by now: it is removed once no process of ours is left.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use super::Flavour;
use super::files::{self, Bundle};
use super::home::{self, make_dir, own};
use super::native::fill;
use super::probe;
use super::process::Signal;
use super::record::Record;
use super::service::{self, Service};
use crate::command::{self, Account, run_as};
use crate::error::{Error, Result};
use crate::tools::{self, Need};

const BUNDLE: Bundle = Bundle {
    name: "postgres",
    pom: include_str!("../../postgres/pom.xml"),
    goal: "unpack-dependencies",
    options: if cfg!(target_arch = "aarch64") { &["-Dplatform=linux-arm64v8"] } else { &[] },
    megabytes: 15,
};
const EMBEDDED: &str = "embedded-18";
const CONFIGURATION: &str = include_str!("../../postgres/baton.conf");
/// User, password and database alike: the server listens on loopback only and holds nothing of worth.
const NAME: &str = "baton";
/// Fast shutdown, which ends sessions instead of waiting for them, and how long that may take.
pub(crate) const STOP: (Signal, Duration) = (Signal::Interrupt, Duration::from_secs(30));

/// A Postgres that can be started: what it is called in the record, and where its programs are.
#[derive(Debug)]
struct Server {
    name: String,
    bin: PathBuf,
}

pub(crate) fn url(port: u16) -> String {
    format!("postgres://{NAME}:{NAME}@127.0.0.1:{port}/{NAME}")
}

pub(crate) fn mark(record: &Record) -> String {
    format!("cluster_name=baton-{}", record.mark)
}

/// How the titles of the server's children begin.
pub(crate) fn children(record: &Record) -> String {
    format!("postgres: baton-{}:", record.mark)
}

pub(crate) fn is_flavour(name: &str, flavour: Flavour) -> bool {
    (name == EMBEDDED) == (flavour == Flavour::Embedded)
}

/// Decides which Postgres this stack runs and writes it into the record: the one asked for, else the one
/// it ran before, else the machine's, else Maven's.
pub(crate) fn choose(record: &mut Record, wanted: Option<Flavour>) -> Result<()> {
    let installed = newest_installed();
    let before = record.postgres.as_str();
    let keep = match wanted {
        Some(flavour) => !before.is_empty() && is_flavour(before, flavour),
        None => !before.is_empty(),
    } && (before == EMBEDDED || debian_bin(before).is_some());
    if keep {
        return Ok(());
    }
    record.postgres = match (wanted, installed) {
        (Some(Flavour::Embedded), _) | (None, None) => EMBEDDED.to_owned(),
        (_, Some(name)) => name,
        (Some(Flavour::Debian), None) => {
            tools::ensure(&[Need::Postgres])?;
            newest_installed().ok_or_else(|| {
                Error::failed("the package postgresql is installed, but no server is in /usr/lib/postgresql")
            })?
        }
    };
    Ok(())
}

/// What [`prepare`] takes from the machine.
pub(crate) fn needs(stack: &Path, record: &Record) -> Vec<Need> {
    if record.postgres != EMBEDDED || programs(&record.postgres_home).is_dir() {
        return Vec::new();
    }
    let maven = files::is_missing(stack, BUNDLE).then_some(Need::Maven);
    [Need::Xz].into_iter().chain(maven).collect()
}

fn programs(home: &Path) -> PathBuf {
    home.join(format!("{EMBEDDED}-programs"))
}

/// Gets what the server needs, makes its cluster and writes its configuration; does not start it.
pub(crate) fn prepare(stack: &Path, record: &mut Record) -> Result<Service> {
    let (home, account) = home::open(stack, &record.postgres_home)?;
    record.postgres_home = home;
    let server = find_server(stack, record, account)?;
    let data = record.postgres_home.join(&server.name);
    if !data.join("PG_VERSION").exists() {
        make_cluster(&server, &data, account)?;
    }
    let configuration = data.join("baton.conf");
    let text = fill(CONFIGURATION, &[("port", &record.postgres_port.to_string())]);
    fs::write(&configuration, text).map_err(Error::io("write", &configuration))?;
    own(&configuration, account)?;
    if service::find(&mark(record), Some(&children(record))).is_empty() {
        let pid = data.join("postmaster.pid");
        if let Err(error) = fs::remove_file(&pid)
            && error.kind() != std::io::ErrorKind::NotFound
        {
            return Err(Error::io("remove", &pid)(error));
        }
    }
    let args = ["-D", &data.display().to_string(), "-c", &mark(record)].map(str::to_owned);
    Ok(Service {
        name: format!("postgres {} ({})", version(&data), describe(&server.name)),
        address: format!("127.0.0.1:{}", record.postgres_port),
        program: server.bin.join("postgres"),
        args: args.into(),
        mark: mark(record),
        children: Some(children(record)),
        account,
        log: stack.join("logs/postgres.log"),
        probe: probe::postgres,
    })
}

fn version(data: &Path) -> String {
    fs::read_to_string(data.join("PG_VERSION")).unwrap_or_default().trim().to_owned()
}

fn describe(name: &str) -> &str {
    if name == EMBEDDED { "by Maven" } else { "the machine's" }
}

/// `debian-15` for the newest server in `/usr/lib/postgresql`.
fn newest_installed() -> Option<String> {
    fs::read_dir("/usr/lib/postgresql")
        .ok()?
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<u32>().ok())
        .filter(|major| debian_bin(&format!("debian-{major}")).is_some())
        .max()
        .map(|major| format!("debian-{major}"))
}

fn debian_bin(name: &str) -> Option<PathBuf> {
    let bin = Path::new("/usr/lib/postgresql").join(name.strip_prefix("debian-")?).join("bin");
    (bin.join("initdb").exists() && bin.join("postgres").exists()).then_some(bin)
}

fn find_server(stack: &Path, record: &Record, account: Option<Account>) -> Result<Server> {
    let name = record.postgres.clone();
    if let Some(bin) = debian_bin(&name) {
        return Ok(Server { name, bin });
    }
    let programs = programs(&record.postgres_home);
    if !programs.is_dir() {
        let jar = files::ensure(stack, BUNDLE)?;
        let draft = files::draft_of(&programs)?;
        make_dir(&draft, account)?;
        let archive = archive_in(&jar)?;
        let file = fs::File::open(&archive).map_err(Error::io("open", &archive))?;
        let mut tar = Command::new("tar");
        tar.arg("-xJ").arg("-C").arg(&draft).stdin(file);
        run_as(&mut tar, account);
        command::quiet(&mut tar)?;
        fs::rename(&draft, &programs).map_err(Error::io("rename", &draft))?;
    }
    Ok(Server { name, bin: programs.join("bin") })
}

fn archive_in(folder: &Path) -> Result<PathBuf> {
    fs::read_dir(folder)
        .map_err(Error::io("list", folder))?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .find(|path| path.extension().is_some_and(|extension| extension == "txz"))
        .ok_or_else(|| Error::failed(format!("no .txz with Postgres in {}", folder.display())))
}

fn make_cluster(server: &Server, data: &Path, account: Option<Account>) -> Result<()> {
    let draft = files::draft_of(data)?;
    files::remove_tree(data)?;
    make_dir(&draft, account)?;
    let password = data.with_file_name("password");
    fs::write(&password, NAME).map_err(Error::io("write", &password))?;
    own(&password, account)?;
    let mut initdb = Command::new(server.bin.join("initdb"));
    initdb
        .args(["--username", NAME, "--auth", "scram-sha-256", "--encoding", "UTF8", "--no-locale"])
        .arg(format!("--pwfile={}", password.display()))
        .arg("-D")
        .arg(&draft);
    as_postgres(&mut initdb, account);
    command::quiet(&mut initdb)?;

    let main = draft.join("postgresql.conf");
    fs::File::options()
        .append(true)
        .open(&main)
        .and_then(|mut file| file.write_all(b"\ninclude_if_exists = 'baton.conf'\n"))
        .map_err(Error::io("write", &main))?;
    create_database(server, &draft, account)?;
    fs::rename(&draft, data).map_err(Error::io("rename", &draft))
}

/// In single-user mode, so that no client program is needed; it exits with 0 whatever happened.
fn create_database(server: &Server, data: &Path, account: Option<Account>) -> Result<()> {
    let mut single = Command::new(server.bin.join("postgres"));
    single
        .args(["--single", "-D"])
        .arg(data)
        .arg("postgres")
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    as_postgres(&mut single, account);
    let failed = |source| Error::Io { what: "make the database in single-user mode".to_owned(), source };
    let mut child = single.spawn().map_err(failed)?;
    if let Some(mut stdin) = child.stdin.take() {
        stdin.write_all(format!("CREATE DATABASE {NAME}\n").as_bytes()).map_err(failed)?;
    }
    let output = child.wait_with_output().map_err(failed)?;
    let said = String::from_utf8_lossy(&output.stderr);
    if output.status.success() && !said.contains("ERROR:") && !said.contains("FATAL:") {
        return Ok(());
    }
    Err(Error::failed(format!("the database {NAME} could not be made:\n{said}")))
}

/// The caller's `PGDATA`, `PGPORT` and locale are about other servers.
fn as_postgres(command: &mut Command, account: Option<Account>) {
    let path = std::env::var_os("PATH").unwrap_or_default();
    command.env_clear().env("PATH", path).env("LC_ALL", "C").env("TZ", "UTC").current_dir("/");
    run_as(command, account);
}

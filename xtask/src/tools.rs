//! What must be on the machine, and getting it where that is allowed.
//!
//! Looking is free of side effects. What is missing is installed by `apt-get` when we are root on Debian or
//! Ubuntu, all of it at once; anywhere else the error is the command to type.

use std::env;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::command;
use crate::error::{Error, Result};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Need {
    Java,
    Maven,
    Postgres,
    Xz,
    CCompiler,
    CxxCompiler,
    Make,
    Cmake,
    PkgConfig,
    OpenSsl,
    Zlib,
    Psql,
    PgBouncer,
    Javac,
}

/// What building librdkafka and the TLS bindings takes.
pub(crate) const BUILD: &[Need] = &[
    Need::CCompiler,
    Need::CxxCompiler,
    Need::Make,
    Need::Cmake,
    Need::PkgConfig,
    Need::OpenSsl,
    Need::Zlib,
];

/// What the tests run beside what was built: `psql`, as somebody would who has no driver at hand, a pooler to stand between
/// relay and Postgres, and a compiler for programs over Kafka's own client.
pub(crate) const TEST: &[Need] = &[Need::Psql, Need::PgBouncer, Need::Javac];

const JAVA: u32 = 17;

impl Need {
    fn is_there(self) -> bool {
        match self {
            Self::Java => found_java().is_some(),
            Self::Maven => on_path("mvn"),
            // Only asked for after none was found in Debian's place.
            Self::Postgres => false,
            Self::Xz => on_path("xz"),
            Self::CCompiler => on_path("cc"),
            Self::CxxCompiler => on_path("c++"),
            Self::Make => on_path("make"),
            Self::Cmake => on_path("cmake"),
            Self::PkgConfig => on_path("pkg-config"),
            Self::OpenSsl => {
                env::var_os("OPENSSL_DIR").is_some()
                    || command::succeeds("pkg-config", &["--exists", "openssl"])
            }
            Self::Zlib => command::succeeds("pkg-config", &["--exists", "zlib"]),
            Self::Psql => on_path("psql"),
            Self::Javac => on_path("javac"),
            // Debian puts it where only root's path leads.
            Self::PgBouncer => on_path("pgbouncer") || Path::new("/usr/sbin/pgbouncer").is_file(),
        }
    }

    /// What it is called where apt-get is not, and its Debian packages: the first one there is.
    fn names(self) -> (&'static str, &'static [&'static str]) {
        match self {
            Self::Java => (
                "Java 17 or newer",
                &["openjdk-17-jre-headless", "openjdk-21-jre-headless", "openjdk-25-jre-headless"],
            ),
            Self::Maven => ("Maven", &["maven"]),
            Self::Postgres => ("a PostgreSQL server", &["postgresql"]),
            Self::Xz => ("xz", &["xz-utils"]),
            Self::CCompiler => ("a C compiler", &["gcc"]),
            Self::CxxCompiler => ("a C++ compiler", &["g++"]),
            Self::Make => ("make", &["make"]),
            Self::Cmake => ("CMake", &["cmake"]),
            Self::PkgConfig => ("pkg-config", &["pkg-config"]),
            Self::OpenSsl => ("OpenSSL's headers", &["libssl-dev"]),
            Self::Zlib => ("zlib's headers", &["zlib1g-dev"]),
            Self::Psql => ("psql", &["postgresql-client"]),
            Self::PgBouncer => ("PgBouncer", &["pgbouncer"]),
            Self::Javac => (
                "a Java compiler",
                &["openjdk-17-jdk-headless", "openjdk-21-jdk-headless", "openjdk-25-jdk-headless"],
            ),
        }
    }
}

/// Makes sure that all of these are there.
///
/// # Errors
///
/// When one is missing and may not be installed, with the command that does, or cannot be.
pub(crate) fn ensure(needs: &[Need]) -> Result<()> {
    let mut missing: Vec<Need> = Vec::new();
    for need in needs {
        if !missing.contains(need) && !need.is_there() {
            missing.push(*need);
        }
    }
    if missing.is_empty() {
        return Ok(());
    }
    let what = missing.iter().map(|need| need.names().0).collect::<Vec<_>>().join(", ");
    if !has_apt() {
        return Err(Error::failed(format!("missing: {what}; install it and run this again")));
    }
    if !is_root() {
        let packages = missing.iter().filter_map(|need| need.names().1.first().copied());
        return Err(Error::failed(format!(
            "missing: {what}; run: sudo apt-get install --no-install-recommends {}",
            packages.collect::<Vec<_>>().join(" ")
        )));
    }
    crate::say!("missing: {what}; installing by apt-get (once, maybe minutes)");
    install(&missing)?;
    match missing.iter().find(|need| **need != Need::Postgres && !need.is_there()) {
        Some(need) => Err(Error::failed(format!("{} is still missing after apt-get", need.names().0))),
        None => Ok(()),
    }
}

/// The program that runs Kafka: `JAVA_HOME`'s, else the one on the path, if it is new enough.
pub(crate) fn java() -> Result<PathBuf> {
    ensure(&[Need::Java])?;
    found_java().ok_or_else(|| Error::failed("Java 17 or newer is missing"))
}

pub(crate) fn is_root() -> bool {
    fs::metadata("/proc/self").is_ok_and(|own| own.uid() == 0)
}

fn install(missing: &[Need]) -> Result<()> {
    let apt = |args: &[&str]| {
        let mut command = Command::new("apt-get");
        command
            .env("DEBIAN_FRONTEND", "noninteractive")
            .args(["-qq", "-o", "DPkg::Lock::Timeout=300"])
            .args(args);
        command::quiet(command.stdin(Stdio::null())).map(drop)
    };
    // An index that cannot be refreshed may still be good enough; if not, the next step says so.
    if let Err(error) = apt(&["update"]) {
        crate::say!("{error}");
    }
    let packages: Vec<&str> = missing.iter().filter_map(|need| candidate(need.names().1)).collect();
    apt(&[&["install", "-y", "--no-install-recommends"], packages.as_slice()].concat()).map_err(|error| {
        Error::failed(format!("{error}\ninstall these by hand and run this again: {}", packages.join(" ")))
    })
}

/// The first of the packages that this release has.
fn candidate(packages: &[&'static str]) -> Option<&'static str> {
    let known = |package: &&&str| command::succeeds("apt-cache", &["show", package]);
    packages.iter().find(known).or(packages.first()).copied()
}

fn has_apt() -> bool {
    on_path("apt-get")
}

fn on_path(program: &str) -> bool {
    find_on_path(program).is_some()
}

fn find_on_path(program: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH")?;
    env::split_paths(&path).map(|dir| dir.join(program)).find(|candidate| candidate.is_file())
}

fn found_java() -> Option<PathBuf> {
    let home = env::var_os("JAVA_HOME").map(|home| Path::new(&home).join("bin/java"));
    home.into_iter().chain(find_on_path("java")).find(|java| {
        Command::new(java).arg("-version").output().ok().is_some_and(|output| {
            java_version(&String::from_utf8_lossy(&output.stderr)).is_some_and(|version| version >= JAVA)
        })
    })
}

/// `openjdk version "17.0.15" 2025-04-15` is 17; the first line may be about `JAVA_TOOL_OPTIONS`.
fn java_version(output: &str) -> Option<u32> {
    let quoted = output.lines().find(|line| line.contains(" version \""))?.split('"').nth(1)?;
    quoted.split(['.', '-', '+']).next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn java_versions_are_read_old_and_new() {
        assert_eq!(java_version("openjdk version \"17.0.15\" 2025-04-15\n"), Some(17));
        assert_eq!(
            java_version("Picked up JAVA_TOOL_OPTIONS: -Xint\nopenjdk version \"21\" 2023\n"),
            Some(21)
        );
        assert_eq!(java_version("openjdk version \"1.8.0_402\"\n"), Some(1));
        assert_eq!(java_version("openjdk version \"25-ea\" 2025-09-16\n"), Some(25));
        assert_eq!(java_version(""), None);
    }
}

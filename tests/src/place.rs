//! Where the servers are, and where the programs under test are.
//!
//! The shared stack is named by `DATABASE_URL` and `KAFKA_BROKERS`, which `cargo xtask test` sets. Programs are looked for
//! in `BATON_BIN_DIR`, else beside this very test program, where cargo puts them.

use std::env;
use std::path::{Path, PathBuf};

use crate::failure::{Failure, Outcome};

/// A Postgres and a Kafka.
#[derive(Debug, Clone)]
pub struct Place {
    /// An address that may create databases.
    pub database_url: String,
    /// `host:port`, several separated by commas.
    pub brokers: String,
}

impl Place {
    /// The stack that all tests share. Nothing may stop or reconfigure it; a test that breaks servers brings an
    /// [`crate::OwnStack`].
    ///
    /// # Errors
    ///
    /// When a variable is missing: the message says how to run the tests.
    pub fn shared() -> Outcome<Self> {
        let variable = |name: &str| {
            env::var(name).ok().filter(|value| !value.is_empty()).ok_or_else(|| {
                Failure::new(format!(
                    "{name} is not set: run the tests with `cargo xtask test`, or start a stack with `cargo xtask up` \
                     and set what `cargo xtask env` prints"
                ))
            })
        };
        Ok(Self { database_url: variable("DATABASE_URL")?, brokers: variable("KAFKA_BROKERS")? })
    }

    /// The same servers, another database.
    #[must_use]
    pub(crate) fn with_database(&self, name: &str) -> Self {
        Self { database_url: with_database(&self.database_url, name), brokers: self.brokers.clone() }
    }

    /// `host:port` of the database server.
    ///
    /// # Errors
    ///
    /// When the URL names none: a socket's path, for example.
    pub fn postgres_address(&self) -> Outcome<&str> {
        address(&self.database_url).map(|(from, to)| &self.database_url[from..to])
    }

    /// The same database behind another `host:port`.
    ///
    /// # Errors
    ///
    /// As [`postgres_address`](Self::postgres_address).
    pub fn with_postgres_address(&self, other: &str) -> Outcome<Self> {
        let (from, to) = address(&self.database_url)?;
        let mut database_url = self.database_url.clone();
        database_url.replace_range(from..to, other);
        Ok(Self { database_url, brokers: self.brokers.clone() })
    }
}

/// Where in a URL `host:port` stands.
fn address(url: &str) -> Outcome<(usize, usize)> {
    let authority = url.find("://").map_or(0, |at| at + 3);
    let end = url[authority..].find(['/', '?']).map_or(url.len(), |at| authority + at);
    let host = url[authority..end].rfind('@').map_or(authority, |at| authority + at + 1);
    if url[host..end].contains(':') {
        Ok((host, end))
    } else {
        // The URL may hold a password.
        Err(Failure::new("DATABASE_URL names no host:port"))
    }
}

/// Replaces the path of a URL and leaves the rest as it was written: a library's own printing adds parameters that
/// `psql` does not know.
fn with_database(url: &str, name: &str) -> String {
    let authority = url.find("://").map_or(0, |at| at + 3);
    let path = url[authority..].find(['/', '?']).map_or(url.len(), |at| authority + at);
    let query = url[path..].find('?').map_or(url.len(), |at| path + at);
    format!("{}/{name}{}", &url[..path], &url[query..])
}

/// A program of this workspace.
///
/// # Errors
///
/// When it is not there: the message names the command that builds it.
pub fn program(name: &str) -> Outcome<PathBuf> {
    let directory = match env::var_os("BATON_BIN_DIR") {
        Some(directory) => std::path::absolute(directory)?,
        None => beside_us()?,
    };
    let path = directory.join(name);
    if path.is_file() {
        return Ok(path);
    }
    crate::fail!("{} is not there: build it with `cargo build --workspace --bins`", path.display())
}

/// The root of the workspace.
#[must_use]
pub fn workspace() -> PathBuf {
    let here = env::var_os("CARGO_MANIFEST_DIR")
        .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from);
    here.parent().map_or_else(|| here.clone(), Path::to_path_buf)
}

/// Where tests keep the output of their children: `e2e/` in cargo's target directory.
///
/// # Errors
///
/// When this program's own path is unknown.
pub(crate) fn scratch() -> Outcome<PathBuf> {
    let programs = beside_us()?;
    Ok(programs.parent().unwrap_or(&programs).join("e2e"))
}

/// `target/debug`, whether this is a test (in `deps/`) or a program.
fn beside_us() -> Outcome<PathBuf> {
    let own = env::current_exe()?;
    let directory = own.parent().ok_or_else(|| Failure::new("this program has no directory"))?;
    let is_deps = directory.file_name().is_some_and(|name| name == "deps");
    Ok(if is_deps { directory.parent().unwrap_or(directory) } else { directory }.to_owned())
}

#[cfg(test)]
mod tests {
    use super::{Place, with_database};

    #[test]
    fn a_database_is_found_behind_another_address() {
        let place = |url: &str| Place { database_url: url.to_owned(), brokers: "b:1".to_owned() };
        for (given, address, expected) in [
            ("postgres://u:p@h:1/a", "h:1", "postgres://u:p@x:2/a"),
            (
                "postgres://u:p%40@127.0.0.1:55?sslmode=disable",
                "127.0.0.1:55",
                "postgres://u:p%40@x:2?sslmode=disable",
            ),
        ] {
            let given = place(given);
            assert_eq!(given.postgres_address().unwrap(), address);
            assert_eq!(given.with_postgres_address("x:2").unwrap().database_url, expected);
        }
        assert!(place("postgres:///a?host=/run").postgres_address().is_err());
    }

    #[test]
    fn only_the_path_of_a_database_url_changes() {
        for (given, expected) in [
            ("postgres://u:p@h:1/a", "postgres://u:p@h:1/b"),
            ("postgres://u:p%2F@h:1/a?sslmode=disable", "postgres://u:p%2F@h:1/b?sslmode=disable"),
            ("postgres://h", "postgres://h/b"),
            ("postgresql://h?host=/run/pg", "postgresql://h/b?host=/run/pg"),
        ] {
            assert_eq!(with_database(given, "b"), expected);
        }
    }
}

//! Where Postgres keeps its files, and as whom it runs.
//!
//! Postgres refuses to run as root. Under root it therefore runs as `postgres`, else `baton-pg` (made if
//! need be), and its home must be a place that user can reach: below the stack, or in `/var/tmp` where a
//! directory above the stack is closed (`/root` is). A home that exists says by its owner who that is.

use std::fs::{self, DirBuilder};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, chown};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::files;
use crate::command::{self, Account, run_as};
use crate::error::{Error, Result};
use crate::tools;

/// Makes the home if it is not there; the account is `None` when we are not root and need no other.
pub(crate) fn open(stack: &Path, recorded: &Path) -> Result<(PathBuf, Option<Account>)> {
    if recorded.is_dir() {
        let account = owner(recorded)?;
        return Ok((recorded.to_path_buf(), account));
    }
    let account = if tools::is_root() { Some(unprivileged()?) } else { None };
    let home = match account {
        Some(account) if !can_enter(stack, account) => {
            let name = format!("baton-stack-{:016x}", files::digest(&stack.display().to_string()));
            Path::new("/var/tmp").join(name)
        }
        _ => stack.join("postgres"),
    };
    if fs::symlink_metadata(&home).is_err() {
        make_dir(&home, account)?;
    }
    if account != owner(&home)? {
        return Err(Error::failed(format!(
            "{} belongs to another user than the one Postgres would run as: remove it",
            home.display()
        )));
    }
    Ok((home, account))
}

fn owner(home: &Path) -> Result<Option<Account>> {
    let found = fs::symlink_metadata(home).map_err(Error::io("look at", home))?;
    if !found.is_dir() {
        return Err(Error::failed(format!("{} is no directory: remove it", home.display())));
    }
    match (tools::is_root(), found.uid()) {
        (false, _) => Ok(None),
        (true, 0) => Err(Error::failed(format!(
            "{} belongs to root, as whom Postgres does not run: remove it",
            home.display()
        ))),
        (true, uid) => Ok(Some(Account { uid, gid: found.gid() })),
    }
}

/// A directory that only the account may read, as Postgres wants its own.
pub(crate) fn make_dir(dir: &Path, account: Option<Account>) -> Result<()> {
    DirBuilder::new().mode(0o700).create(dir).map_err(Error::io("create", dir))?;
    own(dir, account)
}

pub(crate) fn own(path: &Path, account: Option<Account>) -> Result<()> {
    match account {
        Some(Account { uid, gid }) => {
            chown(path, Some(uid), Some(gid)).map_err(Error::io("change the owner of", path))
        }
        None => Ok(()),
    }
}

fn can_enter(dir: &Path, account: Account) -> bool {
    let mut test = Command::new("test");
    test.arg("-x").arg(dir).stdin(Stdio::null()).current_dir("/");
    run_as(&mut test, Some(account));
    test.status().is_ok_and(|status| status.success())
}

fn unprivileged() -> Result<Account> {
    const OWN: &str = "baton-pg";
    if let Some(account) = account_of("postgres")?.or(account_of(OWN)?) {
        return Ok(account);
    }
    let mut useradd = Command::new("useradd");
    useradd.args(["--system", "--user-group", "--no-create-home", "--shell", "/usr/sbin/nologin", OWN]);
    command::quiet(&mut useradd).map_err(|error| {
        Error::failed(format!("Postgres does not run as root and the user {OWN} could not be made: {error}"))
    })?;
    account_of(OWN)?
        .ok_or_else(|| Error::failed(format!("the user {OWN} was made but is not in /etc/passwd")))
}

fn account_of(name: &str) -> Result<Option<Account>> {
    let path = Path::new("/etc/passwd");
    let users = fs::read_to_string(path).map_err(Error::io("read", path))?;
    Ok(parse_passwd(&users, name))
}

fn parse_passwd(users: &str, name: &str) -> Option<Account> {
    users.lines().find_map(|line| {
        let fields: Vec<&str> = line.split(':').collect();
        match fields[..] {
            [user, _, uid, gid, ..] if user == name => {
                Some(Account { uid: uid.parse().ok()?, gid: gid.parse().ok()? })
            }
            _ => None,
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_account_is_found_by_its_whole_name() {
        let users = "root:x:0:0::/root:/bin/sh\npostgres-old:x:5:6::/:\npostgres:x:101:104::/:/bin/bash\n";
        assert_eq!(parse_passwd(users, "postgres"), Some(Account { uid: 101, gid: 104 }));
        assert_eq!(parse_passwd(users, "baton-pg"), None);
    }
}

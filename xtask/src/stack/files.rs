//! Getting the programs through Maven, once.
//!
//! A folder is filled under another name, flushed to disk and renamed: a folder with the right name is
//! complete, after a crash too, and from then on neither Maven nor the network is asked again. The name
//! carries a digest of the `pom.xml`, so another version is another folder.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::command;
use crate::error::{Error, Result};

const PLUGIN: &str = "org.apache.maven.plugins:maven-dependency-plugin:3.8.1";

/// A pom of ours and what to do with its artifacts.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Bundle {
    pub(crate) name: &'static str,
    pub(crate) pom: &'static str,
    /// `copy-dependencies` or `unpack-dependencies`.
    pub(crate) goal: &'static str,
    pub(crate) options: &'static [&'static str],
    /// How big the download is, for people who wait.
    pub(crate) megabytes: u32,
}

/// The folder with the bundle's files, filled if it is not there.
///
/// # Errors
///
/// When Maven cannot get the artifacts; its output is in the error.
pub(crate) fn ensure(stack: &Path, bundle: Bundle) -> Result<PathBuf> {
    let folder = place(stack, bundle);
    if folder.is_dir() {
        return Ok(folder);
    }
    crate::say!("getting {} by Maven (about {} MB, once)", bundle.name, bundle.megabytes);
    let lib = stack.join("lib");
    fs::create_dir_all(&lib).map_err(Error::io("create", &lib))?;
    let (draft, build) = (draft_of(&folder)?, draft_of(&lib.join("pom"))?);
    for dir in [&draft, &build] {
        fs::create_dir(dir).map_err(Error::io("create", dir))?;
    }
    let pom = build.join("pom.xml");
    fs::write(&pom, bundle.pom).map_err(Error::io("write", &pom))?;
    command::quiet(
        Command::new("mvn")
            .current_dir(&build)
            .args(["-q", "-B"])
            .arg(format!("{PLUGIN}:{}", bundle.goal))
            .arg(format!("-DoutputDirectory={}", draft.display()))
            .args(bundle.options),
    )
    .map_err(|error| {
        Error::failed(format!(
            "Maven could not get {}: {error}\nit needs the network (or a mirror in ~/.m2/settings.xml) this \
             one time; or set DATABASE_URL and KAFKA_BROKERS to servers you have",
            bundle.name
        ))
    })?;
    flush(&draft)?;
    fs::rename(&draft, &folder).map_err(Error::io("rename", &draft))?;
    remove_tree(&build)?;
    Ok(folder)
}

/// Whether Maven is still needed for this bundle.
pub(crate) fn is_missing(stack: &Path, bundle: Bundle) -> bool {
    !place(stack, bundle).is_dir()
}

fn place(stack: &Path, bundle: Bundle) -> PathBuf {
    stack.join("lib").join(format!("{}-{:08x}", bundle.name, digest(bundle.pom) & 0xffff_ffff))
}

/// Where a folder is prepared before it gets its name: a place of this process, because a program that a
/// killed one had started may still be writing to that one's. What killed ones left is removed, as far as
/// that goes while somebody writes there.
pub(crate) fn draft_of(folder: &Path) -> Result<PathBuf> {
    let name = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let parent = folder.parent().unwrap_or(Path::new("/"));
    let prefix = format!("{name}.draft.");
    for entry in fs::read_dir(parent).map_err(Error::io("list", parent))? {
        let entry = entry.map_err(Error::io("list", parent))?;
        if entry.file_name().to_string_lossy().starts_with(&prefix) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
    Ok(parent.join(format!("{prefix}{}", std::process::id())))
}

pub(crate) fn remove_tree(dir: &Path) -> Result<()> {
    match fs::remove_dir_all(dir) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(Error::io("remove", dir)(error)),
        _ => Ok(()),
    }
}

/// Puts everything below on the disk, so that the rename that follows cannot outlive its files.
fn flush(dir: &Path) -> Result<()> {
    for entry in fs::read_dir(dir).map_err(Error::io("list", dir))? {
        let entry = entry.map_err(Error::io("list", dir))?;
        let path = entry.path();
        if entry.file_type().map_err(Error::io("look at", &path))?.is_dir() {
            flush(&path)?;
        } else {
            File::open(&path).and_then(|file| file.sync_all()).map_err(Error::io("flush", &path))?;
        }
    }
    File::open(dir).and_then(|dir| dir.sync_all()).map_err(Error::io("flush", dir))
}

/// A number that stands for a text, in every build of this program (FNV-1a).
pub(crate) fn digest(text: &str) -> u64 {
    text.bytes()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_draft_replaces_those_of_killed_processes_and_nothing_else() {
        let dir = std::env::temp_dir().join(format!("xtask-draft-{}", std::process::id()));
        for name in ["kafka-1.draft.1/part", "kafka-1.draft.2", "kafka-2.draft.1", "kafka-1"] {
            fs::create_dir_all(dir.join(name)).unwrap();
        }
        let draft = draft_of(&dir.join("kafka-1")).unwrap();
        assert!(!draft.exists());
        let mut left: Vec<_> = fs::read_dir(&dir).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        left.sort();
        assert_eq!(left, ["kafka-1", "kafka-2.draft.1"]);
        remove_tree(&dir).unwrap();
    }

    #[test]
    fn a_digest_is_the_same_in_every_build() {
        assert_eq!(digest("a"), 0xaf63_dc4c_8601_ec8c);
    }
}

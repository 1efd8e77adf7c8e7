//! Where things are: the workspace, what cargo built, and the stack.
//!
//! The target directory is read off this program's own path, because cargo has put it there: that honours
//! `CARGO_TARGET_DIR`, `build.target-dir` and whatever else decides it. The stack lies in `stack/` below it
//! unless `BATON_STACK_DIR` names another place, which is how several stacks live on one machine.

use std::env;
use std::path::{Path, PathBuf, absolute};

use crate::error::{Error, Result};

#[derive(Debug)]
pub(crate) struct Paths {
    /// The root of the workspace.
    pub(crate) root: PathBuf,
    /// Where cargo puts the programs of the profile in use, `target/debug` as a rule.
    pub(crate) bin: PathBuf,
    /// Everything `up` makes lies here (but see [`crate::stack`] for a Postgres that root may not run).
    pub(crate) stack: PathBuf,
}

impl Paths {
    pub(crate) fn find() -> Result<Self> {
        // At run time cargo says where the crate is; the compiled-in path is for a program started by hand.
        let manifest = env::var_os("CARGO_MANIFEST_DIR")
            .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from);
        let root = manifest.parent().map(Path::to_path_buf).ok_or_else(|| {
            Error::failed("the workspace is not found: start this with `cargo xtask` inside it")
        })?;
        let exe = env::current_exe()
            .map_err(|source| Error::Io { what: "find this program's own path".to_owned(), source })?;
        let bin = exe.parent().map_or_else(|| root.join("target/debug"), Path::to_path_buf);
        let target = bin.parent().map_or_else(|| root.join("target"), Path::to_path_buf);
        let stack = match env::var_os("BATON_STACK_DIR") {
            Some(dir) if dir.is_empty() => {
                return Err(Error::Usage(
                    "BATON_STACK_DIR is empty: name a directory or unset it".to_owned(),
                ));
            }
            Some(dir) => absolute(&dir).map_err(Error::io("resolve BATON_STACK_DIR", Path::new(&dir)))?,
            None => target.join("stack"),
        };
        Ok(Self { root, bin, stack })
    }
}

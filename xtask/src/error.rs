//! What a development command ends with when it fails.
//!
//! Every message says what went wrong and, where there is something to do, what. `exit_code` keeps the
//! project's convention (1 failed, 2 usage or configuration) and passes on the code of a failed step.

use std::fmt;
use std::io;
use std::path::Path;

pub(crate) type Result<T> = std::result::Result<T, Error>;

#[derive(Debug)]
pub(crate) enum Error {
    /// The machine, the stack or a program is not as it must be.
    Failed(String),
    /// What the caller gave makes no sense.
    Usage(String),
    /// The operating system refused `what`.
    Io { what: String, source: io::Error },
    /// One step of `test` failed and has already said why on its own output.
    Step { name: &'static str, code: u8 },
}

impl Error {
    pub(crate) fn failed(message: impl Into<String>) -> Self {
        Self::Failed(message.into())
    }

    /// For `map_err`: the operation as a verb, then the file it was about.
    pub(crate) fn io(verb: &str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let what = format!("{verb} {}", path.display());
        move |source| Self::Io { what, source }
    }

    pub(crate) fn exit_code(&self) -> u8 {
        match self {
            Self::Failed(_) | Self::Io { .. } => 1,
            Self::Usage(_) => 2,
            Self::Step { code, .. } => *code,
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Failed(message) | Self::Usage(message) => f.write_str(message),
            Self::Io { what, .. } => write!(f, "cannot {what}"),
            Self::Step { name, code } => write!(f, "{name} failed with exit code {code}"),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Io { source, .. } => Some(source),
            _ => None,
        }
    }
}

//! What a command prints. A reader that has gone away (`baton status | head -1`) has what it wanted; a full disk is an error.

use std::io::{ErrorKind, Write as _};

use serde::Serialize;

use crate::failure::Failure;

/// Standard output cannot be written.
#[derive(Debug, thiserror::Error)]
#[error("cannot write to standard output")]
struct Unwritten(#[source] std::io::Error);

/// Prints a text as it is.
pub(crate) fn text(text: &str) -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(Failure::failed(Unwritten(error))),
        _ => Ok(()),
    }
}

/// Prints a line.
pub(crate) fn line(line: &str) -> Result<(), Failure> {
    text(&format!("{line}\n"))
}

/// Prints a value as JSON, for programs.
pub(crate) fn json(value: &impl Serialize) -> Result<(), Failure> {
    line(&serde_json::to_string_pretty(value).map_err(Failure::failed)?)
}

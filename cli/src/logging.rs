//! Log lines: to stderr, for people or as JSON, filtered by `RUST_LOG`.

use std::io::IsTerminal as _;

use tracing_subscriber::EnvFilter;

use crate::args::LogFormat;

/// `RUST_LOG` that cannot be read.
#[derive(Debug, thiserror::Error)]
#[error("RUST_LOG cannot be read as a filter; write it like info or baton_relay=debug,sqlx=warn")]
pub(crate) struct Error {
    source: tracing_subscriber::filter::ParseError,
}

/// How much is said where `RUST_LOG` says nothing.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Talk {
    /// A service tells what it does.
    Service,
    /// A command prints its result; only what goes wrong is logged.
    Command,
}

/// Sets logging up for the whole process, once.
///
/// # Errors
/// When `RUST_LOG` is set and is no filter.
pub(crate) fn init(format: LogFormat, talk: Talk) -> Result<(), Error> {
    let filter = match std::env::var("RUST_LOG") {
        Ok(directives) if !directives.trim().is_empty() => directives,
        // Postgres notices ("already exists, skipping") come from sqlx at info.
        _ => match talk {
            Talk::Service => "info,sqlx=warn".to_owned(),
            Talk::Command => "warn".to_owned(),
        },
    };
    let filter = EnvFilter::builder().parse(filter).map_err(|source| Error { source })?;
    // A log that cannot be written, on a full disk say, is no reason to end: by default that is told on stderr, and so panics.
    let lines = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .log_internal_errors(false);
    match format {
        LogFormat::Json => lines.json().init(),
        LogFormat::Human => {
            let coloured =
                std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|v| v.is_empty());
            lines.with_ansi(coloured).init();
        }
    }
    Ok(())
}

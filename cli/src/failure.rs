//! How a command ends badly: one message with everything known, and the exit code.
//!
//! 2 is for what a person must write differently (the command line, a setting), 1 for the state of things.

use std::error::Error;
use std::process::ExitCode;

use baton_relay::database::told;

use crate::args::LogFormat;
use crate::config;
use crate::database;

/// Why a command did not do what it was asked to.
#[derive(Debug)]
pub(crate) enum Failure {
    /// A setting or the command line: exit 2.
    Usage(Box<dyn Error + Send + Sync>),
    /// The state of things: exit 1.
    Failed(Box<dyn Error + Send + Sync>),
}

impl Failure {
    pub(crate) fn usage(error: impl Error + Send + Sync + 'static) -> Self {
        Self::Usage(Box::new(error))
    }

    pub(crate) fn failed(error: impl Error + Send + Sync + 'static) -> Self {
        match database::exchanged(&error) {
            // What the server says of it helps nobody: it is not the statement that is wrong.
            Some(pooled) => Self::Failed(Box::new(pooled)),
            None => Self::Failed(Box::new(error)),
        }
    }

    /// Says it on stderr, in the form the logs have, and gives the code.
    pub(crate) fn report(&self, format: LogFormat) -> ExitCode {
        let (error, code) = match self {
            Self::Usage(error) => (error, 2),
            Self::Failed(error) => (error, 1),
        };
        let message = told(error.as_ref());
        match format {
            // One form for a log collector, whether or not RUST_LOG lets it through.
            LogFormat::Json if tracing::enabled!(tracing::Level::ERROR) => tracing::error!("{message}"),
            LogFormat::Json => {
                eprintln!("{}", serde_json::json!({"level": "ERROR", "fields": {"message": message}}));
            }
            LogFormat::Human => eprintln!("error: {message}"),
        }
        ExitCode::from(code)
    }
}

impl From<config::Error> for Failure {
    fn from(error: config::Error) -> Self {
        Self::usage(error)
    }
}

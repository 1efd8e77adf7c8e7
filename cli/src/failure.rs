//! How a command ends badly: one message with everything known, and the exit code.
//!
//! 2 is for what a person must write differently (the command line, a setting), 1 for the state of things.

use std::error::Error;
use std::process::ExitCode;

use crate::args::LogFormat;
use crate::config;

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
        Self::Failed(Box::new(error))
    }

    /// Says it on stderr, in the form the logs have, and gives the code.
    pub(crate) fn report(&self, format: LogFormat) -> ExitCode {
        let (error, code) = match self {
            Self::Usage(error) => (error, 2),
            Self::Failed(error) => (error, 1),
        };
        let message = chain(error.as_ref());
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

/// The error and its causes in one line. Some causes repeat what the error above them said already; those are left out.
fn chain(error: &(dyn Error + 'static)) -> String {
    let mut message = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let text = words(error);
        if !message.contains(&text) {
            message.push_str(": ");
            message.push_str(&text);
        }
        cause = error.source();
    }
    message
}

/// sqlx wraps what the server or the system said in words that help nobody.
fn words(error: &(dyn Error + 'static)) -> String {
    match error.downcast_ref::<sqlx::Error>() {
        Some(sqlx::Error::Database(error)) => error.message().to_owned(),
        Some(sqlx::Error::Io(error)) => error.to_string(),
        _ => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("{text}")]
    struct Link {
        text: &'static str,
        source: Option<Box<Link>>,
    }

    #[test]
    fn causes_follow_their_error_and_are_not_repeated() {
        let innermost = Link { text: "refused", source: None };
        let middle = Link { text: "io: refused", source: Some(Box::new(innermost)) };
        let outermost = Link { text: "cannot connect", source: Some(Box::new(middle)) };
        assert_eq!(chain(&outermost), "cannot connect: io: refused");
    }
}

//! What makes a test fail, and what a wait has not seen yet: a text for a person, with the place it came from.
//!
//! Test code says `?` to every error there is and never unwraps, so the type takes any error, with its whole chain of
//! sources, and remembers the line of the `?`.

use std::error::Error;
use std::fmt;
use std::panic::Location;

/// What tests and waits return.
pub type Outcome<T = ()> = Result<T, Failure>;

/// Why a test fails, or why a wait is not over.
///
/// It is no [`Error`] itself: only so can it be made from every error.
pub struct Failure {
    message: String,
    place: &'static Location<'static>,
}

impl Failure {
    /// A failure in words.
    #[track_caller]
    pub fn new(message: impl Into<String>) -> Self {
        Self { message: message.into(), place: Location::caller() }
    }

    /// The words alone, without the place.
    #[must_use]
    pub fn message(&self) -> &str {
        &self.message
    }

    /// Puts what was being done before what went wrong.
    #[must_use]
    pub fn during(mut self, what: impl fmt::Display) -> Self {
        self.message = format!("{what}: {}", self.message);
        self
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (at {}:{})", self.message, self.place.file(), self.place.line())
    }
}

/// The same as [`fmt::Display`], because a test's result is shown by `Debug`.
impl fmt::Debug for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl<E: Error> From<E> for Failure {
    #[track_caller]
    fn from(error: E) -> Self {
        let mut message = error.to_string();
        let mut source = error.source();
        while let Some(cause) = source {
            let text = cause.to_string();
            // Some libraries repeat their source in their own text.
            if !message.ends_with(&text) {
                message = format!("{message}: {text}");
            }
            source = cause.source();
        }
        Self::new(message)
    }
}

/// `Err(Failure)` in the words of `format!`: in a wait, what was seen instead of what is waited for.
#[macro_export]
macro_rules! fail {
    ($($words:tt)*) => {
        return Err($crate::Failure::new(format!($($words)*)))
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fails() -> Outcome {
        "x".parse::<i32>()?;
        Ok(())
    }

    #[test]
    fn a_failure_made_by_a_question_mark_names_its_line() {
        let text = fails().unwrap_err().to_string();
        assert!(text.starts_with("invalid digit found in string (at "), "{text}");
        assert!(text.contains("failure.rs:"), "{text}");
    }

    #[test]
    fn what_was_being_done_stands_first() {
        let failure = fails().unwrap_err().during("read the port");
        assert_eq!(failure.message(), "read the port: invalid digit found in string");
    }
}

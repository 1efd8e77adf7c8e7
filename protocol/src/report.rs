//! An error and its causes in one line, for the one place that shows or logs it.
//!
//! Errors do not repeat their source in their own text, but those of other crates do: a cause that what stands before it
//! says already is left out.

use std::error::Error;

/// The error and its causes, joined by colons.
#[must_use]
pub fn chain(error: &(dyn Error + 'static)) -> String {
    chain_in(error, ToString::to_string)
}

/// The same, with the words that `words` finds for each of them.
pub fn chain_in(error: &(dyn Error + 'static), words: impl Fn(&(dyn Error + 'static)) -> String) -> String {
    let mut text = words(error);
    let mut source = error.source();
    while let Some(cause) = source {
        let part = words(cause);
        if !text.contains(&part) {
            text.push_str(": ");
            text.push_str(&part);
        }
        source = cause.source();
    }
    text
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

//! Bugs that people have shipped, planted so that the checkers of the test suite prove that they would be found.
//!
//! Compiled only with the feature `plants`, and reachable only through [`Settings::plant`](crate::Settings::plant), which
//! no configuration key sets.

/// A bug.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Plant {
    /// Reads `position > cursor` and nothing else: what commits late is never read.
    NaiveCursor,
    /// `message.timeout.ms` of 4 s, and what expired is noticed only once a later message was acknowledged.
    FiniteMessageTimeout,
}

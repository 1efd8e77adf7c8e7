//! The end-to-end tests.

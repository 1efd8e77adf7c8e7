//! Both migration lines, and the producer crate on top of them, on a real Postgres at `DATABASE_URL`.

#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test that cannot go on panics, also in what its cases share"
)]

mod cursors;
mod enqueue;
mod fixture;
mod format;
mod headers;
mod inbox;
mod migrate;
mod roles;
mod settings;

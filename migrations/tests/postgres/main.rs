//! Both migration lines, and the producer crate on top of them, on a real Postgres at `DATABASE_URL`.

mod enqueue;
mod fixture;
mod format;
mod headers;
mod inbox;
mod migrate;
mod roles;
mod settings;

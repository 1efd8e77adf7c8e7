//! The two migration lines of Baton, embedded: the outbox, which a producer's database has, and the inbox, which a
//! consumer's has. In one database they do not meet: each has its own schema and its own bookkeeping table,
//! `outbox._migrations` and `inbox._migrations`.
//!
//! ```text
//!                    migrate                                  migrate
//! Missing ──────────────────────────────▶ Current ◀────────────────────────── Behind
//!                                            │ a newer baton migrated it
//!                                            ▼
//!                                          Ahead   (this baton refuses to touch it)
//! ```
//!
//! **Guarantees.** A migration is one transaction, from the first table to the last row of settings: it is there
//! completely or not at all, and dropping the future or killing the process leaves nothing behind. One at a time runs
//! in a database, the others wait and then find nothing to do. It never keeps producers waiting for longer than 2 s at a time
//! for a lock that somebody holds (see `locks`). Running it again changes nothing, but brings back roles
//! and grants that a restore into another cluster has lost.
//!
//! **Authority.** What is recorded in the bookkeeping table, together with the tables that are there. Where the two
//! disagree somebody was here by hand, and that is an [`Error`] that says so, not something to repair by guessing.
//!
//! The owner of the connection must be allowed to create a schema and, where they are missing, roles.

#![warn(missing_docs)]

pub mod audit;
mod error;
mod line;
mod locks;
mod migrate;
pub mod rebase;
mod settings;
mod state;

pub use error::{Error, Obstacle};
pub use line::Line;
pub use locks::{Holder, Holders};
pub use migrate::{Applied, migrate_inbox, migrate_outbox};
pub use settings::Settings;
pub use state::{State, check};

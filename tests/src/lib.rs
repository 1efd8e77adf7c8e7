//! The harness of the end-to-end tests, and the ledger that judges them.
//!
//! A test is a function that calls [`test()`] with a hard time-out and a body. The body gets a [`Harness`], from which it
//! takes a [`Site`] (a database and topics of its own on the shared stack, or on an [`OwnStack`] that it may break),
//! starts the real programs in it as [`Process`]es, hurts them, waits with [`eventually`] and lets [`ledger::judge`] say
//! what was lost, forged or out of order. All it made is gone when it ends, also when it panics, and whatever this
//! process leaves behind by dying itself is killed by [`guard`] and swept by a later run.
//!
//! Nothing here decides by a log line or after a fixed sleep.

#![warn(missing_docs)]

pub mod http;
pub mod ledger;
pub mod service;
pub mod workload;

mod cluster;
mod database;
mod failure;
mod group;
mod guard;
mod harness;
mod java;
mod kafka;
mod own_stack;
mod place;
mod process;
mod proxy;
mod record;
mod run;
mod standby;
mod transfer;
mod wait;

pub use cluster::{Cluster, postgres_program};
pub use database::Schema;
pub use failure::{Failure, Outcome};
pub use group::{Group, GroupWatch};
pub use harness::{Harness, Site};
pub use java::{kafka_program, kafka_tool};
pub use kafka::Kafka;
pub use own_stack::{Flush, OwnStack, kafka_jars};
pub use place::{Place, program, workspace};
pub use process::{Finished, Launch, Process};
pub use proxy::{Proxy, Way};
pub use record::{Draft, Record};
pub use run::{Load, figure, test};
pub use standby::Standby;
pub use wait::{eventually, lasts, stays};

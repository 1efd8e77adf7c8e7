//! The leased relay: publishes committed outbox messages to Kafka, at least once and in order per key.
//!
//! Modules in the order in which a message meets them: [`settings`], `session` and `lease` (who may publish which shard,
//! until when), [`read`] and [`cursor`] (what is committed and not yet published), `budget` (how much of it may be held),
//! `shard` and `links`, `pipeline`, `route`, `publish`, `refusal` and `window` (to Kafka, and what came back), `advance` (the durable cursor), `aside`, `care`, `parked` and `retrier` (what Kafka refuses), [`operate`] (what operators do about it), [`republish`] (what was published goes once more), `retention` and [`leaves`] (space comes back), [`status`].
//! Beside the way: `metrics`, `health` and `http` (how it is seen from outside).
//!
//! What it guarantees, as long as producers of one key serialise on a lock taken before they enqueue: every committed
//! message reaches Kafka at least once; the first occurrences of one key's messages are in the order of their commits;
//! nothing is published that was not committed and durable. A crash repeats at most what was handed over since the last
//! durable cursor.

#![warn(missing_docs)]

mod advance;
mod aside;
mod budget;
mod care;
pub mod cursor;
pub mod database;
pub mod doctor;
mod fenced;
mod flight;
pub mod guards;
mod health;
#[cfg(feature = "plants")]
pub mod hold;
pub mod http;
mod lease;
pub mod leaves;
mod links;
mod metrics;
#[cfg(test)]
mod model;
mod namesake;
pub mod operate;
mod parked;
mod pipeline;
#[cfg(feature = "plants")]
pub mod plant;
mod poller;
mod publish;
mod reach;
pub mod read;
mod record;
mod refusal;
mod relay;
pub mod republish;
mod retention;
mod retrier;
mod route;
mod rules;
mod session;
pub mod settings;
mod shard;
mod sizes;
pub mod status;
mod stopped;
mod tail;
mod topics;
mod until_empty;
mod window;

pub use relay::{Error, Summary, Until, run};
pub use settings::Settings;
pub use stopped::Stopped;
pub use until_empty::SetAside;

//! The consumer kit: applies each message once, refuses the same key with another payload, sets aside what cannot be
//! applied, and never skips.
//!
//! At-least-once delivery, effectively-once processing: Kafka may hand a record over several times; its effects are
//! committed once, in the same Postgres transaction as the inbox row that says so.
//!
//! ```no_run
//! use baton_consumer::{Consumer, Delivery, Handler, Json, Kafka, Verdict};
//! use sqlx::{PgPool, Postgres, Transaction};
//!
//! #[derive(serde::Deserialize)]
//! struct Order { order_id: String, amount_cents: i64 }
//!
//! struct Billing;
//!
//! impl Handler for Billing {
//!     type Payload = Json<Order>;
//!
//!     async fn handle(&self, delivery: &Delivery<Json<Order>>, tx: &mut Transaction<'_, Postgres>) -> Verdict {
//!         let Json(order) = delivery.payload();
//!         let invoice = sqlx::query("INSERT INTO invoice (order_id, amount_cents) VALUES ($1, $2)")
//!             .bind(&order.order_id)
//!             .bind(order.amount_cents);
//!         match invoice.execute(&mut **tx).await {
//!             Ok(_) => Verdict::done(),
//!             Err(error) => error.into(),
//!         }
//!     }
//! }
//!
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! let pool = PgPool::connect("postgres://localhost/billing").await?;
//! let consumer = Consumer::builder("billing", pool, Kafka::new("localhost:9092"))
//!     .topics(["orders"])
//!     .transactional(Billing)
//!     .build()?;
//! let shutdown = async { drop(tokio::signal::ctrl_c().await) };
//! consumer.run(shutdown).await?;
//! # Ok(())
//! # }
//! ```
//!
//! In the order in which a record travels: [`Kafka`] and [`Consumer`] (the poll thread and the partition lanes),
//! [`Record`], [`Scope`], [`Fingerprints`], [`inbox`] (claim, completion), [`Routes`], [`Decode`], [`Handler`] and
//! [`LeasedHandler`] with [`Delivery`] and [`Verdict`], and where that fails the dead-letter topic `<topic>.<consumer>.dlt`.
//! [`operate`] is for the operator: what was set aside or given up, and what becomes of it.
//! Without Kafka: [`Inbox`], and over it [`http`], a `tower` layer for the header `Idempotency-Key`.
//! [`testing`] brings records to a handler without a broker.

#![warn(missing_docs)]

pub mod build;
pub mod health;
pub mod http;
pub mod inbox;
pub mod metrics;
pub mod operate;
#[cfg(feature = "plants")]
pub mod plant;
pub mod route;
pub mod run;
pub mod testing;

mod apply;
mod dead_letter;
mod decode;
mod delivery;
mod fingerprint;
mod handler;
mod kafka;
mod message;
mod record;
mod runtime;
mod scope;
mod topics;
mod trace;
mod verdict;

pub use baton_protocol::dead_letter::Format as DeadLetterFormat;
pub use baton_protocol::fingerprint::Compare;
pub use baton_protocol::retry::Policy;

pub use build::Builder;
pub use decode::{Decode, Json, Raw};
pub use delivery::Delivery;
pub use fingerprint::Fingerprints;
pub use handler::{BatchHandler, Handler, HandlerFn, LeasedHandler, handler_fn};
pub use health::Health;
pub use inbox::{AfterDeadLetter, Inbox, Once};
pub use kafka::Kafka;
pub use record::Record;
pub use route::Routes;
pub use run::Consumer;
pub use scope::Scope;
pub use topics::DeadLetterTopics;
pub use verdict::{Failure, Outcome, Verdict};

/// Any error.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

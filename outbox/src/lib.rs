//! Write a message in the transaction that changes your state: both commit, or neither does.
//!
//! ```no_run
//! # async fn example(pool: sqlx::PgPool) -> Result<(), Box<dyn std::error::Error>> {
//! use baton_outbox::Message;
//!
//! let mut tx = pool.begin().await?;
//! sqlx::query("INSERT INTO orders (id, customer) VALUES (17, 'alice')").execute(&mut *tx).await?;
//! let message = Message::builder("orders")
//!     .key("alice")
//!     .r#type("order.placed")
//!     .idempotency_key("placed:17")
//!     .json(&serde_json::json!({ "order_id": 17, "customer": "alice" }))?;
//! baton_outbox::enqueue(&mut tx, &message).await?;
//! tx.commit().await?;
//! # Ok(())
//! # }
//! ```
//!
//! **Guarantees.** A message is published, at least once, if and only if its transaction commits. Messages of one key
//! are published in the order in which they were enqueued, as long as those who enqueue them take turns: lock the row
//! that the key stands for (the order, the account) before enqueueing, which an `UPDATE` of it does anyway.
//!
//! **Authority.** The table `outbox.message` decides what is a message: its constraints refuse bad input in your
//! transaction, and come back as [`Error::Refused`]. Any language may insert into it; this crate is a comfort.
//!
//! **On failure.** An error of the database leaves your transaction aborted, as any failed statement does: roll it
//! back. What is refused before it is sent ([`Error::NulCharacter`], [`Error::Encode`]) leaves it as it was.
//!
//! With the feature `trace-context` the W3C trace context of the current `tracing` span travels along.

#![warn(missing_docs)]

mod enqueue;
mod error;
mod headers;
mod message;
#[cfg(feature = "trace-context")]
mod trace_context;

pub use enqueue::{enqueue, enqueue_all};
pub use error::{Error, Field, Refusal};
pub use headers::HeaderValue;
pub use message::{Builder, Message};

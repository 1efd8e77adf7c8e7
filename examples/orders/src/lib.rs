//! The example service, as a library for its binary and for the tests.
//!
//! ```text
//! place: orders.customer (lock, seq) ─▶ orders.placed ─▶ outbox ═ relay ═▶ topic `orders` ─▶ bill: inbox, billing.invoice
//!                                          └──────────────────── check ────────┴─────────────────────────┘
//! ```
//!
//! Placing and billing are what a team would write; `check` is what nobody has in earnest: it sees both sides and says
//! whether anything was lost, invented, doubled or reordered on the way.

#![warn(missing_docs)]

pub mod bill;
pub mod check;
pub mod database;
pub mod judge;
pub mod mix;
pub mod order;
pub mod place;
pub mod setup;
pub mod topic;

/// The topic that orders are published to.
pub const TOPIC: &str = "orders";

/// The consumer that bills them.
pub const CONSUMER: &str = "billing";

/// Where orders wait that could not be billed: `<topic>.<consumer>.dlt`.
pub const DEAD_LETTERS: &str = "orders.billing.dlt";

/// Where the consumer kit looks for dead letters that are replayed.
pub const REPLAYS: &str = "orders.billing.replay";

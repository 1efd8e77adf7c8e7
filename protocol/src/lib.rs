//! What both sides of Baton obey.
//!
//! Everything here is a rule: a pure function or a value, with no clock, no pool and no socket, so that the relay
//! and the consumer kit can share it, and so that it can be property-tested. Times are handed in: stored times come
//! from the database's clock, deadlines from a monotonic one.
//!
//! In the order in which a message meets them:
//!
//! * [`lifecycle`] — which states a message, a lease, a delivery and a dead letter go through, as tables,
//! * [`lease`] — who owns what until when, how long that may be trusted, and who should hold how many shards,
//! * [`envelope`] — which headers a record carries, and which identity a consumer reads from them,
//! * [`partition`] — on which partition a key lives,
//! * [`fingerprint`] — what makes two payloads the same,
//! * [`retry`] — how long to wait before the next try,
//! * [`dead_letter`] — what a record says that nobody could apply,
//! * [`replay`] — what is read of a dead letter, and what a replayed record carries,
//! * [`report`] — an error and its causes in one line.
//!
//! Header names, the partition of a key, the fingerprint and the topic names are a public format: golden tests hold them, and a change is a
//! decision record.

#![warn(missing_docs)]

pub mod dead_letter;
pub mod envelope;
pub mod fingerprint;
pub mod lease;
pub mod lifecycle;
pub mod partition;
pub mod replay;
pub mod report;
pub mod retry;

mod rfc3339;

//! Who owns what until when, how long a lease may be trusted, and how many shards a relay should hold.
//!
//! The database is authoritative: `lease_until` is set and compared by its clock, in the statement that acts (R5), and
//! the boundary is closed, so at exactly `lease_until` the owner is refused (R6). A relay knows that clock only through
//! its own monotonic one. It therefore trusts its lease for less time than the database does:
//!
//! ```text
//!        asked            database grants                trust ends        lease_until
//! relay  ──┼───────────────────┼──────────────────────────────┼──────────────────┼──▶
//!          │◀──────────────────── ttl − margin ──────────────▶│
//!                              │◀──────────────────── ttl ──────────────────────▶│
//! ```
//!
//! Counted from *before* the request, the trust ends at least `margin` before the lease does, however long the answer
//! took. The margin covers what happens between the last look at the clock and the broker taking the message, and two
//! clocks that run at slightly different speeds. Nothing is handed over from that moment on (R2, R21).
//!
//! * [`ownership`] — the rule of one lease: claim, renew, release, and who may write by it,
//! * [`work`] — a leased piece of work, with attempts and a result,
//! * [`share`] — how many shards a relay should hold.
//!
//! Instants of trust are durations since one origin of a monotonic clock, which the caller chooses once a process; those of
//! ownership are the store's.

pub mod ownership;
pub mod share;
mod terms;
pub mod work;

pub use terms::{Error, Terms, Trust};

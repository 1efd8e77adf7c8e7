//! What becomes of a leased piece of work.
//!
//! ```text
//!         ┌──────── released ◀──────┐
//!         ▼                         │   ┌─ renewed, reclaimed
//! free ── claimed ───────────────▶ held ◀┘ ── completed ──▶ done
//!   │                              ▲ │└────── buried ─────▶ dead
//!   │                     claimed ─┘ ▼ expired               ▲
//!   │                              expired ── buried ────────┤
//!   └────────────────────────────────────────── buried ──────┘
//! ```
//!
//! and `dead ── requeued ──▶ free`.
//!
//! `expired` is no write: the database's clock has passed `lease_until`, and from then on the owner can do nothing and
//! anybody may claim. So the next claimer is the recovery (R23). A claim that finds the attempt budget spent buries
//! instead of running (R8). What is dead stays so until an operator requeues it. A shard's lease is the part without `completed`, `buried` and `requeued`: a shard is never finished.

use super::{IllegalTransition, Lifecycle, words};

words! {
    /// Where a piece of work stands at a given moment.
    pub enum State {
        /// Nobody's: never claimed, or released.
        Free = "free",
        /// Somebody's, until `lease_until`.
        Held = "held",
        /// Somebody's who let `lease_until` pass.
        Expired = "expired",
        /// Completed, with its result.
        Done = "done",
        /// Given up.
        Dead = "dead",
    }
}

words! {
    /// What can happen to a piece of work.
    pub enum Event {
        /// Somebody takes it, under a new generation.
        Claimed = "claimed",
        /// The very process that holds it takes it anew, under a new generation: after a lost connection.
        Reclaimed = "reclaimed",
        /// The owner shows progress.
        Renewed = "renewed",
        /// The owner gives it back.
        Released = "released",
        /// Time passes `lease_until`.
        Expired = "expired",
        /// The owner finishes it, with a result.
        Completed = "completed",
        /// The owner, or a claim that finds the attempts spent, gives it up.
        Buried = "buried",
        /// An operator wants it run again, with attempts that begin anew.
        Requeued = "requeued",
    }
}

/// The table.
pub const LIFECYCLE: Lifecycle<State, Event> = Lifecycle {
    of: "piece of work",
    initial: State::Free,
    terminal: &[State::Done],
    active: &[State::Held],
    edges: &[
        (State::Free, Event::Claimed, State::Held),
        (State::Free, Event::Buried, State::Dead),
        (State::Held, Event::Renewed, State::Held),
        (State::Held, Event::Reclaimed, State::Held),
        (State::Held, Event::Released, State::Free),
        (State::Held, Event::Expired, State::Expired),
        (State::Held, Event::Completed, State::Done),
        (State::Held, Event::Buried, State::Dead),
        (State::Expired, Event::Claimed, State::Held),
        (State::Expired, Event::Buried, State::Dead),
        (State::Dead, Event::Requeued, State::Free),
    ],
};

impl State {
    /// The state after `event`.
    ///
    /// # Errors
    ///
    /// When [`LIFECYCLE`] has no such edge.
    pub fn next(self, event: Event) -> Result<Self, IllegalTransition> {
        LIFECYCLE.next(self, event)
    }

    /// As `inbox.message.state` has it. Who holds a piece of work, and whether still, is said by its `lease_until`.
    #[must_use]
    pub fn stored(self) -> &'static str {
        match self {
            Self::Free | Self::Held | Self::Expired => "in_progress",
            Self::Done => "done",
            Self::Dead => "dead",
        }
    }
}

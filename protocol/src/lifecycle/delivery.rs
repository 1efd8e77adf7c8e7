//! What becomes of a record that a consumer got.
//!
//! ```text
//!             ┌── applied ───────────────────────────────▶ done
//! received ───┼── postponed ──▶ retrying ── applied ─────▶ done
//!             │                 ▲ ▲  ▲ ├─── given up ────▶ dead ── requeued ──▶ retrying
//!             ├── queued ──▶ blocked │ └─── discarded ───▶ discarded ◀── blocked, dead
//!             └── given up ──▶ dead ─┘
//! ```
//!
//! `received` is a record in memory, its offset not committed: a crash brings it again. Every other state that is not
//! `done` is a row of `inbox.parked`, so the offset may move on. A record is `blocked` behind an earlier one of its
//! consumer, topic and key that is not settled; so is a dead one that is requeued together with, or after, an earlier one.

use super::{IllegalTransition, Lifecycle, words};

words! {
    /// Where a record stands with one consumer. All but `received` are values of `inbox.parked.state`.
    pub enum State {
        /// In memory.
        Received = "received",
        /// Set aside, and tried again by itself.
        Retrying = "retrying",
        /// Waits behind an earlier one of its key.
        Blocked = "blocked",
        /// Given up: a dead letter tells of it.
        Dead = "dead",
        /// Applied, or found applied before.
        Done = "done",
        /// An operator has given it up for good.
        Discarded = "discarded",
    }
}

words! {
    /// What can happen to a record.
    pub enum Event {
        /// The effect is committed, or was before.
        Applied = "applied",
        /// The attempt failed and another may succeed; in `retrying` an attempt more is spent.
        Postponed = "postponed",
        /// An earlier one of its key is set aside; of a dead one: an operator asked for another try, in its turn.
        Queued = "queued",
        /// Nothing earlier of its key is unsettled any more.
        Unblocked = "unblocked",
        /// No attempt will succeed, or the budget is spent; its dead letter is acknowledged.
        GivenUp = "given up",
        /// An operator asked for another try, now.
        Requeued = "requeued",
        /// An operator gave it up.
        Discarded = "discarded",
    }
}

/// The table.
pub const LIFECYCLE: Lifecycle<State, Event> = Lifecycle {
    of: "record",
    initial: State::Received,
    terminal: &[State::Done, State::Discarded],
    active: &[State::Received, State::Retrying],
    edges: &[
        (State::Received, Event::Applied, State::Done),
        (State::Received, Event::Postponed, State::Retrying),
        (State::Received, Event::Queued, State::Blocked),
        (State::Received, Event::GivenUp, State::Dead),
        (State::Retrying, Event::Applied, State::Done),
        (State::Retrying, Event::Postponed, State::Retrying),
        (State::Retrying, Event::GivenUp, State::Dead),
        (State::Retrying, Event::Requeued, State::Retrying),
        (State::Retrying, Event::Discarded, State::Discarded),
        (State::Blocked, Event::Unblocked, State::Retrying),
        (State::Blocked, Event::Discarded, State::Discarded),
        (State::Dead, Event::Requeued, State::Retrying),
        (State::Dead, Event::Queued, State::Blocked),
        (State::Dead, Event::Discarded, State::Discarded),
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

    /// Whether `inbox.parked` may hold it.
    #[must_use]
    pub fn is_parked(self) -> bool {
        self != Self::Received
    }
}

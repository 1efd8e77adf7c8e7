//! What becomes of a dead letter under one replay plan.
//!
//! ```text
//! dead ── planned ──▶ waiting ── claimed ──▶ sending ── acknowledged ──▶ sent ──▶ applied | duplicate
//!                        ▲                      │                                | conflict | dead_again
//!                        └────── lapsed ────────┘
//! ```
//!
//! A claim that lapsed may have been sent: what becomes of it may be told while it waits for the next one.
//!
//! Each dead letter is in a plan at most once, and a plan is frozen: what dies later is not part of it. A run that is
//! killed lets its claims lapse; the item is then sent again, with the same key and the same item id, and takes effect
//! once. What became of it is read back from the inbox. A record that dies again is a new dead letter, of a later
//! round: `dead_again` is the end of this one, and rounds are capped, so nothing is replayed for ever (R31).

use super::{IllegalTransition, Lifecycle, words};

words! {
    /// Where a dead letter stands.
    pub enum State {
        /// On its topic, in no plan.
        Dead = "dead",
        /// In the plan, not yet sent.
        Waiting = "waiting",
        /// Claimed by a run that is sending it.
        Sending = "sending",
        /// On the replay topic; the inbox does not say yet what became of it.
        Sent = "sent",
        /// It took effect.
        Applied = "applied",
        /// It had taken effect before.
        Duplicate = "duplicate",
        /// Its key is known with another payload.
        Conflict = "conflict",
        /// It was given up once more.
        DeadAgain = "dead_again",
    }
}

words! {
    /// What can happen to a dead letter.
    pub enum Event {
        /// An operator's plan takes it in.
        Planned = "planned",
        /// A run takes it on.
        Claimed = "claimed",
        /// The run that had it is gone.
        Lapsed = "lapsed",
        /// Kafka acknowledged the record.
        Acknowledged = "acknowledged",
        /// The consumer applied it.
        Applied = "applied",
        /// The consumer knew it.
        FoundApplied = "found applied",
        /// The consumer knew its key with another payload.
        Conflicted = "conflicted",
        /// The consumer gave it up again.
        GivenUp = "given up",
    }
}

/// The table.
pub const LIFECYCLE: Lifecycle<State, Event> = Lifecycle {
    of: "dead letter",
    initial: State::Dead,
    terminal: &[State::Applied, State::Duplicate, State::Conflict, State::DeadAgain],
    active: &[State::Sending],
    edges: &[
        (State::Dead, Event::Planned, State::Waiting),
        (State::Waiting, Event::Claimed, State::Sending),
        (State::Sending, Event::Lapsed, State::Waiting),
        (State::Sending, Event::Acknowledged, State::Sent),
        (State::Waiting, Event::Applied, State::Applied),
        (State::Waiting, Event::FoundApplied, State::Duplicate),
        (State::Waiting, Event::Conflicted, State::Conflict),
        (State::Waiting, Event::GivenUp, State::DeadAgain),
        (State::Sending, Event::Applied, State::Applied),
        (State::Sending, Event::FoundApplied, State::Duplicate),
        (State::Sending, Event::Conflicted, State::Conflict),
        (State::Sending, Event::GivenUp, State::DeadAgain),
        (State::Sent, Event::Applied, State::Applied),
        (State::Sent, Event::FoundApplied, State::Duplicate),
        (State::Sent, Event::Conflicted, State::Conflict),
        (State::Sent, Event::GivenUp, State::DeadAgain),
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
}

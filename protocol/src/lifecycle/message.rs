//! What becomes of a message of the outbox.
//!
//! ```text
//!            ┌── acknowledged ─────────────────────────────▶ published
//! pending ───┼── refused ─────▶ retrying ── acknowledged ──▶ published
//!            │                  ▲ ▲ ▲  ├──── exhausted ────▶ dead ─── requeued ──▶ retrying
//!            ├── queued ──▶ blocked │  └──── discarded ────▶ discarded ◀── blocked, paused, dead
//!            └── held ──────▶ paused
//! ```
//!
//! A message is `blocked` behind any earlier unsettled one of its topic and key, a dead one included; one without a key
//! blocks nothing. An outage is no event here: it parks nothing and spends nothing. Resuming a topic spends no attempt.
//! Attempts only count up, so that a failed message never silently becomes new again (R31): nothing leads to `pending`.

use super::{IllegalTransition, Lifecycle, Word as _, words};

words! {
    /// Where a message stands. All but `pending` are values of `outbox.parked.state`; of a message that was published
    /// without ever having been set aside there is no row there.
    pub enum State {
        /// In the outbox, not covered by its shard's cursor.
        Pending = "pending",
        /// Set aside, and tried again by itself.
        Retrying = "retrying",
        /// Waits behind an earlier one of its topic and key.
        Blocked = "blocked",
        /// Its topic is paused.
        Paused = "paused",
        /// Given up until an operator acts.
        Dead = "dead",
        /// Kafka has acknowledged it.
        Published = "published",
        /// An operator has given it up for good.
        Discarded = "discarded",
    }
}

words! {
    /// What can happen to a message.
    pub enum Event {
        /// Kafka acknowledged it, and the cursor or the row says so.
        Acknowledged = "acknowledged",
        /// Kafka refused it for a reason of its own; in `retrying` an attempt more is spent.
        Refused = "refused",
        /// An earlier one of its topic and key is set aside.
        Queued = "queued",
        /// An operator has paused its topic.
        Held = "held",
        /// Nothing earlier of its topic and key is unsettled any more.
        Unblocked = "unblocked",
        /// An operator has resumed its topic.
        Resumed = "resumed",
        /// The attempt budget is spent.
        Exhausted = "exhausted",
        /// An operator asked for another try, now.
        Requeued = "requeued",
        /// An operator gave it up.
        Discarded = "discarded",
    }
}

words! {
    /// Why a message was set aside, as in `outbox.parked.cause`.
    pub enum Cause {
        /// Larger than its topic takes, also alone.
        TooLarge = "too_large",
        /// The topic does not exist.
        UnknownTopic = "unknown_topic",
        /// The broker does not take the topic's name.
        InvalidTopic = "invalid_topic",
        /// The broker does not let the relay write there.
        NotAuthorized = "not_authorized",
        /// The broker refuses the record itself.
        InvalidRecord = "invalid_record",
        /// An operator paused the topic.
        Paused = "paused",
    }
}

/// The table.
pub const LIFECYCLE: Lifecycle<State, Event> = Lifecycle {
    of: "message",
    initial: State::Pending,
    terminal: &[State::Published, State::Discarded],
    active: &[State::Pending, State::Retrying],
    edges: &[
        (State::Pending, Event::Acknowledged, State::Published),
        (State::Pending, Event::Refused, State::Retrying),
        (State::Pending, Event::Queued, State::Blocked),
        (State::Pending, Event::Held, State::Paused),
        (State::Retrying, Event::Acknowledged, State::Published),
        (State::Retrying, Event::Refused, State::Retrying),
        (State::Retrying, Event::Exhausted, State::Dead),
        (State::Retrying, Event::Requeued, State::Retrying),
        (State::Retrying, Event::Discarded, State::Discarded),
        (State::Blocked, Event::Unblocked, State::Retrying),
        (State::Blocked, Event::Discarded, State::Discarded),
        (State::Paused, Event::Resumed, State::Retrying),
        (State::Paused, Event::Discarded, State::Discarded),
        (State::Dead, Event::Requeued, State::Retrying),
        (State::Dead, Event::Discarded, State::Discarded),
    ],
};

impl Cause {
    /// Those for which Kafka, or a check before it, refuses a message: all but what an operator does.
    pub fn refusals() -> impl Iterator<Item = Self> {
        Self::ALL.iter().copied().filter(|cause| *cause != Self::Paused)
    }

    /// Whether it may pass without the message being another: somebody makes the topic, or lets the relay write there.
    /// For the other refusals no further attempt is of use until an operator says so.
    #[must_use]
    pub fn may_pass(self) -> bool {
        matches!(self, Self::UnknownTopic | Self::NotAuthorized)
    }
}

impl State {
    /// The state after `event`.
    ///
    /// # Errors
    ///
    /// When [`LIFECYCLE`] has no such edge.
    pub fn next(self, event: Event) -> Result<Self, IllegalTransition> {
        LIFECYCLE.next(self, event)
    }

    /// Whether `outbox.parked` may hold it.
    #[must_use]
    pub fn is_parked(self) -> bool {
        self != Self::Pending
    }

    /// Whether later messages of the same topic and key wait behind it.
    #[must_use]
    pub fn blocks_its_key(self) -> bool {
        self.is_parked() && !LIFECYCLE.is_terminal(self)
    }
}

//! Which keys of a shard wait: those of whose messages one is set aside, or is about to be. In memory, for the shard's owner.
//!
//! ```text
//!  read ─▶ key waits? ──no──▶ Kafka
//!             └─yes──▶ slated ──the cursor passes it──▶ outbox.parked ──tried in turn──▶ published
//! ```
//!
//! The set may be too large, never too small. Too large costs a detour: a message joins a queue that is empty, and is the next
//! to be tried. Too small would let a message overtake those that wait. So a key is taken out in one case only: a
//! settlement says that nothing of it is left in the table, and nothing of it was slated since before that was asked.
//!
//! Keys are kept as hashes, so that what they cost does not depend on their length: two keys with one hash are a set too large.

use std::collections::HashMap;
use std::collections::hash_map::RandomState;
use std::hash::BuildHasher as _;
use std::sync::{Mutex, MutexGuard, PoisonError};

use baton_protocol::lifecycle::IllegalTransition;
use baton_protocol::lifecycle::message::{Cause, Event, State};
use tokio::sync::Notify;
use uuid::Uuid;

/// Why a message is set aside.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Reason {
    /// Kafka, or a check before it, refuses it.
    Refused { cause: Cause, error: String },
    /// An earlier one of its key waits.
    Behind,
    /// An operator has paused its topic.
    Paused,
}

/// A message on its way into `outbox.parked`, to be written by the advance that passes it.
#[derive(Debug, Clone)]
pub(crate) struct Slated {
    pub id: Uuid,
    pub position: i64,
    /// Of its topic and key; none without a key.
    pub key: Option<KeyHash>,
    pub state: State,
    pub cause: Option<Cause>,
    pub error: Option<String>,
    pub attempts: i32,
}

impl Slated {
    /// What becomes of a message that waits in the outbox and cannot go. `attempts` is the budget of one that was refused.
    pub(crate) fn new(
        id: Uuid,
        position: i64,
        key: Option<KeyHash>,
        reason: Reason,
        topic_is_paused: bool,
        attempts: u32,
    ) -> Result<Self, IllegalTransition> {
        let (state, cause, error, spent) = match reason {
            Reason::Refused { cause, error } => {
                let state = State::Pending.next(Event::Refused)?;
                (after_refusal(state, cause, 1, attempts)?, Some(cause), Some(error), 1)
            }
            // It is the pause that it waits for, too: it does not count towards what a shard may set aside.
            Reason::Behind => {
                (State::Pending.next(Event::Queued)?, topic_is_paused.then_some(Cause::Paused), None, 0)
            }
            Reason::Paused => (State::Pending.next(Event::Held)?, Some(Cause::Paused), None, 0),
        };
        Ok(Self { id, position, key, state, cause, error, attempts: spent })
    }

    /// Whether it counts towards what a shard may set aside.
    pub(crate) fn counts(&self) -> bool {
        self.cause != Some(Cause::Paused)
    }
}

/// The state of a message that is tried and was refused, when this was the `spent`th attempt of a budget of `attempts`.
pub(crate) fn after_refusal(
    state: State,
    cause: Cause,
    spent: u32,
    attempts: u32,
) -> Result<State, IllegalTransition> {
    if cause.may_pass() && spent < attempts { Ok(state) } else { state.next(Event::Exhausted) }
}

/// A topic and key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct KeyHash(u64);

/// What is known of a key that waits.
#[derive(Debug, Clone, Copy)]
struct Waiting {
    /// Some of it is in the table, or was.
    is_durable: bool,
    slated: usize,
    /// The moment it was slated last.
    moment: u64,
    /// Of its first one.
    cause: Cause,
}

#[derive(Debug, Default)]
struct Inner {
    keys: HashMap<KeyHash, Waiting>,
    /// Rows in the table that count, as far as is known: operators settle some without a word.
    counted: usize,
    slated: usize,
    slated_counted: usize,
    /// Whether there may be anything in the table.
    is_occupied: bool,
    moment: u64,
}

/// The keys of a shard that wait.
#[derive(Debug, Default)]
pub(crate) struct Aside {
    hasher: RandomState,
    inner: Mutex<Inner>,
    /// Something is in the table that was not. Coalesces.
    pub changed: Notify,
}

/// What the table had of a shard when its lease was won.
#[derive(Debug, Default)]
pub(crate) struct Loaded {
    /// Topic, key, and the cause of its first message.
    pub keys: Vec<(String, String, Option<Cause>)>,
    pub waiting: usize,
    pub counted: usize,
}

/// A moment before a settlement was asked for: see [`Aside::left`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct Moment(u64);

impl Aside {
    pub(crate) fn new(loaded: &Loaded) -> Self {
        let aside = Self::default();
        {
            let mut inner = aside.lock();
            inner.counted = loaded.counted;
            inner.is_occupied = loaded.waiting > 0;
            for (topic, key, cause) in &loaded.keys {
                let hash = aside.hash(topic, key.as_bytes());
                let cause = cause.filter(|cause| *cause != Cause::Paused).unwrap_or(Cause::UnknownTopic);
                inner.keys.insert(hash, Waiting { is_durable: true, slated: 0, moment: 0, cause });
            }
        }
        aside
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // A panic while it was held leaves a set that is too large at worst.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn hash(&self, topic: &str, key: &[u8]) -> KeyHash {
        KeyHash(self.hasher.hash_one((topic, key)))
    }

    /// Whether no key waits at all.
    pub(crate) fn is_empty(&self) -> bool {
        self.lock().keys.is_empty()
    }

    /// Whether a message of this key has to wait behind others; why the first of them does.
    pub(crate) fn waits(&self, key: KeyHash) -> Option<Cause> {
        self.lock().keys.get(&key).map(|waiting| waiting.cause)
    }

    /// How many count towards what the shard may set aside.
    pub(crate) fn counted(&self) -> usize {
        let inner = self.lock();
        inner.counted + inner.slated_counted
    }

    /// Whether something of the shard may be in the table.
    pub(crate) fn is_occupied(&self) -> bool {
        self.lock().is_occupied
    }

    /// The message goes aside with the next advance that passes it. From now on its key waits.
    pub(crate) fn slate(&self, slated: &Slated) {
        let mut inner = self.lock();
        inner.moment += 1;
        inner.slated += 1;
        inner.slated_counted += usize::from(slated.counts());
        let moment = inner.moment;
        if let Some(key) = slated.key {
            let cause = slated.cause.filter(|cause| *cause != Cause::Paused).unwrap_or(Cause::UnknownTopic);
            let waiting =
                inner.keys.entry(key).or_insert(Waiting { is_durable: false, slated: 0, moment, cause });
            waiting.slated += 1;
            waiting.moment = moment;
        }
    }

    /// These are in the table now.
    pub(crate) fn written<'s>(&self, written: impl Iterator<Item = &'s Slated>) {
        let mut inner = self.lock();
        let mut any = false;
        for slated in written {
            any = true;
            inner.slated = inner.slated.saturating_sub(1);
            if slated.counts() {
                inner.slated_counted = inner.slated_counted.saturating_sub(1);
                inner.counted += 1;
            }
            if let Some(waiting) = slated.key.and_then(|key| inner.keys.get_mut(&key)) {
                waiting.slated = waiting.slated.saturating_sub(1);
                waiting.is_durable = true;
            }
        }
        inner.is_occupied |= any;
        // A look that was asked for before does not know of them.
        inner.moment += u64::from(any);
        drop(inner);
        if any {
            self.changed.notify_one();
        }
    }

    /// A producer's life begins: what was slated and not written is read again.
    pub(crate) fn start_anew(&self) {
        let mut inner = self.lock();
        inner.slated = 0;
        inner.slated_counted = 0;
        inner.keys.retain(|_, waiting| {
            waiting.slated = 0;
            waiting.is_durable
        });
    }

    /// Now, before a settlement or a look is asked for.
    pub(crate) fn moment(&self) -> Moment {
        Moment(self.lock().moment)
    }

    /// A settlement that was asked for at this moment found nothing of the key in the table. It flows again, unless something
    /// of it was on its way there then, or has been slated since.
    pub(crate) fn none_left(&self, key: KeyHash, asked: Moment, slated_then: bool) {
        let mut inner = self.lock();
        if !slated_then
            && inner.keys.get(&key).is_some_and(|waiting| waiting.slated == 0 && waiting.moment <= asked.0)
        {
            inner.keys.remove(&key);
        }
    }

    /// Whether something of this key is slated and not written.
    pub(crate) fn is_slated(&self, key: KeyHash) -> bool {
        self.lock().keys.get(&key).is_some_and(|waiting| waiting.slated > 0)
    }

    /// What a look at the table, asked for at this moment, has found. Nothing that was slated meanwhile is part of it: then it
    /// is not used, and the next one will be.
    pub(crate) fn looked(&self, is_occupied: bool, counted: usize, asked: Moment) {
        let mut inner = self.lock();
        if inner.moment == asked.0 && inner.slated == 0 {
            inner.counted = counted;
            inner.is_occupied = is_occupied;
        }
    }

    /// So many of the table are settled, by this owner.
    pub(crate) fn settled(&self, many: usize) {
        let mut inner = self.lock();
        inner.counted = inner.counted.saturating_sub(many);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn slated(key: Option<KeyHash>, reason: Reason) -> Slated {
        Slated::new(Uuid::nil(), 1, key, reason, false, 10).unwrap()
    }

    #[test]
    fn what_cannot_pass_is_dead_at_once_and_what_may_once_its_budget_is_spent() {
        let refused = |cause| slated(None, Reason::Refused { cause, error: "e".to_owned() });
        for cause in [Cause::TooLarge, Cause::InvalidTopic, Cause::InvalidRecord] {
            assert_eq!((refused(cause).state, refused(cause).attempts), (State::Dead, 1), "{cause}");
        }
        for cause in [Cause::UnknownTopic, Cause::NotAuthorized] {
            assert_eq!(refused(cause).state, State::Retrying, "{cause}");
            assert_eq!(after_refusal(State::Retrying, cause, 9, 10), Ok(State::Retrying));
            assert_eq!(after_refusal(State::Retrying, cause, 10, 10), Ok(State::Dead));
        }
        assert_eq!(slated(None, Reason::Behind).state, State::Blocked);
        assert_eq!(slated(None, Reason::Paused).state, State::Paused);
        assert!(!slated(None, Reason::Paused).counts());
        let behind = Slated::new(Uuid::nil(), 1, None, Reason::Behind, true, 10).unwrap();
        assert_eq!((behind.state, behind.counts()), (State::Blocked, false));
    }

    #[test]
    fn a_key_flows_again_only_when_nothing_of_it_was_slated_since_the_question() {
        let aside = Aside::default();
        let key = aside.hash("t", b"k");
        let first = slated(Some(key), Reason::Behind);
        aside.slate(&first);
        aside.written([&first].into_iter());
        // Slated after the question.
        let asked = aside.moment();
        let second = slated(Some(key), Reason::Behind);
        aside.slate(&second);
        aside.written([&second].into_iter());
        aside.none_left(key, asked, false);
        assert!(aside.waits(key).is_some());
        // Slated before it, written after it.
        let third = slated(Some(key), Reason::Behind);
        aside.slate(&third);
        let (asked, was_slated) = (aside.moment(), aside.is_slated(key));
        aside.written([&third].into_iter());
        aside.none_left(key, asked, was_slated);
        assert!(aside.waits(key).is_some());
        let (asked, was_slated) = (aside.moment(), aside.is_slated(key));
        aside.none_left(key, asked, was_slated);
        assert!(aside.waits(key).is_none() && aside.is_empty());
    }

    #[test]
    fn a_look_that_was_asked_for_before_something_was_written_is_not_used() {
        let aside = Aside::default();
        let row = slated(Some(aside.hash("t", b"k")), Reason::Behind);
        aside.slate(&row);
        let asked = aside.moment();
        aside.written([&row].into_iter());
        aside.looked(false, 0, asked);
        assert!(aside.is_occupied() && aside.counted() == 1);
        aside.looked(false, 0, aside.moment());
        assert!(!aside.is_occupied());
    }

    #[test]
    fn what_a_dead_producer_had_slated_is_forgotten_and_what_is_written_is_not() {
        let aside = Aside::default();
        let [kept, gone] = [b"kept", b"gone"].map(|key| aside.hash("t", key));
        let written = slated(Some(kept), Reason::Behind);
        aside.slate(&written);
        aside.slate(&slated(Some(gone), Reason::Behind));
        aside.written([&written].into_iter());
        assert_eq!(aside.counted(), 2);
        aside.start_anew();
        assert!(aside.waits(kept).is_some() && aside.waits(gone).is_none());
        assert_eq!(aside.counted(), 1);
    }

    /// The table of one key and its owner: rows join by advances and leave by settlements, in any interleaving.
    #[derive(Debug, Clone, Copy)]
    enum Step {
        Read,
        Advance,
        Die,
        /// A settlement begins: its snapshot is taken.
        Ask,
        Answer,
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2_000))]

        #[test]
        fn nothing_flows_past_what_is_in_the_table(
            steps in prop::collection::vec(prop::sample::select(vec![Step::Read, Step::Read, Step::Advance, Step::Die, Step::Ask, Step::Answer]), 1..80),
        ) {
            let aside = Aside::default();
            let key = aside.hash("t", b"k");
            let first = slated(Some(key), Reason::Behind);
            aside.slate(&first);
            aside.written([&first].into_iter());
            let (mut table, mut on_the_way) = (1_usize, Vec::new());
            let mut asked: Option<(Moment, bool, usize)> = None;
            for step in steps {
                match step {
                    Step::Read => {
                        if aside.waits(key).is_some() {
                            let row = slated(Some(key), Reason::Behind);
                            aside.slate(&row);
                            on_the_way.push(row);
                        } else {
                            prop_assert_eq!(table, 0, "it overtakes what is in the table");
                            prop_assert!(on_the_way.is_empty(), "it overtakes what is on the way there");
                        }
                    }
                    Step::Advance => {
                        table += on_the_way.len();
                        aside.written(std::mem::take(&mut on_the_way).iter());
                    }
                    Step::Die => {
                        on_the_way.clear();
                        aside.start_anew();
                    }
                    Step::Ask if asked.is_none() => {
                        let (moment, was_slated) = (aside.moment(), aside.is_slated(key));
                        // All that its snapshot shows is settled; what joins later stays.
                        asked = Some((moment, was_slated, table));
                    }
                    Step::Answer => {
                        if let Some((moment, was_slated, seen)) = asked.take() && seen > 0 {
                            table -= seen;
                            aside.none_left(key, moment, was_slated);
                        }
                    }
                    Step::Ask => {}
                }
            }
        }
    }
}

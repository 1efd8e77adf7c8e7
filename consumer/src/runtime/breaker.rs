//! The circuit breaker: when everything fails, nothing is at fault but what everything needs.
//!
//! ```text
//!            so many keys failed for the time being, none succeeded
//!            between; or a handler says that it is an outage            its wait is over: one attempt
//!  closed ───────────────────────────────────────────────────▶ open ───────────────────────────────▶ probing
//!    ▲                                                           ▲ ◀────────── failed again ───────────┤ │
//!    └──────────────────────────── it succeeded ─────────────────┼─────────────────────────────────────┘ │
//!                                                                └──────── it said nothing either way ───┘
//! ```
//!
//! A *streak* is the time between two successes. The failures of a streak that opened the breaker are the outage's, not the
//! messages': they spend no attempt, also those that came before it opened ([`Breaker::is_outage`]). So before a failure does
//! something that cannot be taken back, whoever saw it waits a moment for the streak to show what it was ([`Breaker::settled`]).
//!
//! One breaker serves all lanes of a consumer and what retries its parked records. Nothing is kept: another process finds out
//! for itself.

use std::collections::{HashSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use baton_protocol::retry::{Delays, Policy};
use tokio::sync::watch;
use tokio::time::Instant;

use crate::metrics;

/// The waits between probes: their cap bounds how late the end of an outage is noticed.
const PROBES: Policy = Policy { base: Duration::from_millis(250), factor: 2.0, cap: Duration::from_secs(4) };
/// How long one probe keeps others from being made.
const PROBE_PATIENCE: Duration = Duration::from_secs(30);
/// How many streaks that were outages are remembered: each outlives the attempts that failed in it.
const REMEMBERED: usize = 64;

/// The attempts between two successes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Streak(u64);

/// What may be done now.
#[derive(Debug, PartialEq, Eq)]
enum Pass {
    Go,
    Probe,
    /// Nothing before this, or before somebody else's probe has ended.
    Wait(Instant),
}

#[derive(Debug)]
enum Mode {
    Closed,
    Open {
        until: Instant,
        waits: Delays,
    },
    /// Until then no other attempt is made: one that hangs must not keep everybody waiting.
    Probing {
        until: Instant,
        waits: Delays,
    },
}

/// The rule, without clock or tasks.
#[derive(Debug)]
struct State {
    keys: usize,
    mode: Mode,
    streak: u64,
    /// Hashes of the keys that failed in this streak.
    failing: HashSet<u64>,
    outages: VecDeque<u64>,
    opened_at: Option<Instant>,
}

#[derive(Debug, PartialEq, Eq)]
enum Change {
    None,
    Opened,
    Closed(Duration),
}

impl State {
    fn new(keys: usize) -> Self {
        Self {
            keys,
            mode: Mode::Closed,
            streak: 0,
            failing: HashSet::new(),
            outages: VecDeque::new(),
            opened_at: None,
        }
    }

    fn admit(&mut self, now: Instant) -> Pass {
        match std::mem::replace(&mut self.mode, Mode::Closed) {
            Mode::Closed => Pass::Go,
            Mode::Open { until, waits } if now >= until => {
                self.mode = Mode::Probing { until: now + PROBE_PATIENCE, waits };
                Pass::Probe
            }
            Mode::Open { until, waits } => {
                self.mode = Mode::Open { until, waits };
                Pass::Wait(until)
            }
            Mode::Probing { until, waits } if now >= until => {
                self.mode = Mode::Probing { until: now + PROBE_PATIENCE, waits };
                Pass::Probe
            }
            Mode::Probing { until, waits } => {
                self.mode = Mode::Probing { until, waits };
                Pass::Wait(until)
            }
        }
    }

    /// What was begun before the breaker opened says nothing about now.
    fn succeeded(&mut self, was_probe: bool, now: Instant) -> Change {
        if !was_probe && !matches!(self.mode, Mode::Closed) {
            return Change::None;
        }
        self.streak += 1;
        self.failing.clear();
        self.mode = Mode::Closed;
        self.opened_at.take().map_or(Change::None, |opened| Change::Closed(now.duration_since(opened)))
    }

    fn failed(&mut self, was_probe: bool, key: u64, is_said_outage: bool, now: Instant) -> Change {
        if was_probe {
            if let Mode::Probing { mut waits, .. } = std::mem::replace(&mut self.mode, Mode::Closed) {
                let until = now + waits.next_delay();
                self.mode = Mode::Open { until, waits };
            }
            return Change::None;
        }
        if !matches!(self.mode, Mode::Closed) {
            return Change::None;
        }
        self.failing.insert(key);
        if self.failing.len() < self.keys && !is_said_outage {
            return Change::None;
        }
        let mut waits = PROBES.delays();
        self.mode = Mode::Open { until: now + waits.next_delay(), waits };
        self.opened_at = Some(now);
        self.outages.push_back(self.streak);
        if self.outages.len() > REMEMBERED {
            self.outages.pop_front();
        }
        Change::Opened
    }

    /// A probe that said nothing either way: the next attempt is one.
    fn abandoned(&mut self, now: Instant) {
        if let Mode::Probing { waits, .. } = std::mem::replace(&mut self.mode, Mode::Closed) {
            self.mode = Mode::Open { until: now, waits };
        }
    }

    fn is_outage(&self, streak: Streak) -> bool {
        self.outages.contains(&streak.0)
    }
}

/// The breaker of one consumer.
pub(crate) struct Breaker {
    consumer: String,
    state: Mutex<State>,
    changed: watch::Sender<()>,
}

/// Leave for one attempt. Dropped without a word, it has said nothing.
pub(crate) struct Ticket {
    breaker: Arc<Breaker>,
    is_probe: bool,
    told: bool,
}

impl Breaker {
    /// Opens once `keys` different keys failed with no success between.
    pub(crate) fn new(consumer: &str, keys: usize) -> Self {
        Self {
            consumer: consumer.to_owned(),
            state: Mutex::new(State::new(keys.max(1))),
            changed: watch::Sender::new(()),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until an attempt may be made.
    ///
    /// Cancel safe: dropped, it has taken nothing.
    pub(crate) async fn admit(self: &Arc<Self>) -> Ticket {
        let mut changed = self.changed.subscribe();
        loop {
            let pass = self.state().admit(Instant::now());
            match pass {
                Pass::Go | Pass::Probe => {
                    let is_probe = pass == Pass::Probe;
                    return Ticket { breaker: Arc::clone(self), is_probe, told: false };
                }
                Pass::Wait(until) => {
                    tokio::select! {
                        _ = changed.changed() => {}
                        () = tokio::time::sleep_until(until) => {}
                    }
                }
            }
        }
    }

    /// Whether failures of that streak were an outage's.
    pub(crate) fn is_outage(&self, streak: Streak) -> bool {
        self.state().is_outage(streak)
    }

    /// Waits until it shows whether a failure of that streak was an outage's, but not for longer than `doubt`: true if it was.
    pub(crate) async fn settled(&self, streak: Streak, doubt: Duration) -> bool {
        let mut changed = self.changed.subscribe();
        let shown = async {
            loop {
                {
                    let state = self.state();
                    if state.is_outage(streak) || state.streak != streak.0 {
                        return;
                    }
                }
                if changed.changed().await.is_err() {
                    return;
                }
            }
        };
        let _ = tokio::time::timeout(doubt, shown).await;
        self.is_outage(streak)
    }

    fn said(&self, change: &Change, error: &str) {
        match change {
            Change::None => return,
            Change::Opened => {
                metrics::breaker(&self.consumer, true);
                tracing::error!(
                    consumer = self.consumer,
                    error,
                    "everything fails: reading pauses until an attempt succeeds; nothing is dead-lettered for it and no attempt is spent"
                );
            }
            Change::Closed(after) => {
                metrics::breaker(&self.consumer, false);
                tracing::info!(consumer = self.consumer, ?after, "an attempt succeeded: reading goes on");
            }
        }
        self.changed.send_replace(());
    }
}

impl Ticket {
    pub(crate) fn succeeded(mut self) {
        self.told = true;
        let change = self.breaker.state().succeeded(self.is_probe, Instant::now());
        // A streak has ended, which whoever is in doubt waits for.
        if change == Change::None {
            self.breaker.changed.send_replace(());
        }
        self.breaker.said(&change, "");
    }

    /// The key's attempt failed for the time being.
    pub(crate) fn failed(self, key: u64, error: &str) -> Streak {
        self.tell(key, false, error)
    }

    /// As [`failed`](Self::failed), of a record that has failed before: that it fails again says nothing new of the rest.
    pub(crate) fn failed_again(self, key: u64, error: &str) -> Streak {
        if self.is_probe {
            return self.tell(key, false, error);
        }
        Streak(self.breaker.state().streak)
    }

    /// The handler says that what it needs is away.
    pub(crate) fn outage(self, key: u64, error: &str) -> Streak {
        self.tell(key, true, error)
    }

    fn tell(mut self, key: u64, is_said_outage: bool, error: &str) -> Streak {
        self.told = true;
        let (change, streak) = {
            let mut state = self.breaker.state();
            let change = state.failed(self.is_probe, key, is_said_outage, Instant::now());
            (change, Streak(state.streak))
        };
        if self.is_probe {
            self.breaker.changed.send_replace(());
        }
        self.breaker.said(&change, error);
        streak
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if self.is_probe && !self.told {
            self.breaker.state().abandoned(Instant::now());
            self.breaker.changed.send_replace(());
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn one_key_that_fails_however_often_is_no_outage_and_many_without_a_success_are() {
        let (mut state, now) = (State::new(3), Instant::now());
        for _ in 0..100 {
            assert_eq!(state.failed(false, 1, false, now), Change::None);
        }
        assert_eq!(state.failed(false, 2, false, now), Change::None);
        assert_eq!(state.succeeded(false, now), Change::None);
        for key in [3, 4] {
            assert_eq!(state.failed(false, key, false, now), Change::None);
        }
        assert_eq!(state.failed(false, 5, false, now), Change::Opened);
        assert!(matches!(state.admit(now), Pass::Wait(_)));
        assert!(!state.is_outage(Streak(0)) && state.is_outage(Streak(1)));
    }

    #[test]
    fn an_outage_that_is_said_opens_at_once_and_ends_with_the_first_success() {
        let (mut state, now) = (State::new(5), Instant::now());
        assert_eq!(state.failed(false, 1, true, now), Change::Opened);
        let later = now + PROBES.cap;
        assert_eq!(state.admit(later), Pass::Probe);
        assert!(matches!(state.admit(later), Pass::Wait(_)), "one probe at a time");
        assert_eq!(state.admit(later + PROBE_PATIENCE), Pass::Probe, "unless it hangs");
        assert_eq!(state.failed(true, 1, true, later), Change::None);
        assert!(matches!(state.admit(later), Pass::Wait(_)));
        let end = later + PROBES.cap;
        assert_eq!(state.admit(end), Pass::Probe);
        assert_eq!(state.succeeded(true, end), Change::Closed(end - now));
        assert_eq!(state.admit(end), Pass::Go);
    }

    #[test]
    fn what_was_begun_before_it_opened_does_not_close_it_and_a_probe_that_is_dropped_leaves_it_open() {
        let (mut state, now) = (State::new(1), Instant::now());
        state.failed(false, 1, false, now);
        assert_eq!(state.succeeded(false, now), Change::None);
        let later = now + PROBES.cap;
        assert_eq!(state.admit(later), Pass::Probe);
        state.abandoned(later);
        assert_eq!(state.admit(later), Pass::Probe, "the next attempt is the probe");
    }

    proptest! {
        /// Whatever comes, it is never shut for good: with time alone somebody may try, and a success then opens the way.
        #[test]
        fn there_is_always_a_way_on(steps in proptest::collection::vec((0_u8..5, 0_u64..4), 0..200)) {
            let (mut state, mut now) = (State::new(3), Instant::now());
            let mut probing = false;
            for (step, key) in steps {
                match step {
                    0 => { if state.admit(now) == Pass::Probe { probing = true; } }
                    1 => { state.failed(false, key, key == 3, now); }
                    2 => { state.succeeded(false, now); }
                    3 if probing => { state.failed(true, key, false, now); probing = false; }
                    4 if probing => { state.abandoned(now); probing = false; }
                    _ => now += Duration::from_millis(700),
                }
            }
            if probing {
                state.abandoned(now);
            }
            now += PROBES.cap;
            let pass = state.admit(now);
            prop_assert!(pass == Pass::Go || pass == Pass::Probe);
            state.succeeded(pass == Pass::Probe, now);
            prop_assert_eq!(state.admit(now), Pass::Go);
        }
    }
}

//! Lifecycles as data: for each kind of thing an enum of states, an enum of events, and one table of edges.
//!
//! | lifecycle | of what | stored in |
//! |---|---|---|
//! | [`message`] | a message of the outbox | `outbox.message` while it is pending, then `outbox.parked.state` |
//! | [`lease`] | a leased piece of work, or a shard, which is never finished | `outbox.shard`, `inbox.message.state` |
//! | [`delivery`] | a record that a consumer got | `inbox.parked.state` |
//! | [`dead_letter`] | a dead letter under one replay plan | the plan's items |
//!
//! Every change of state goes through [`Lifecycle::next`], recovery and operators' commands included: an edge that is
//! not in the table is an [`IllegalTransition`] that names what would have been legal. What makes a table sound is
//! checked by [`Lifecycle::flaws`] (R25), and the database's constraints are compared with the same tables by
//! `tests/tests/e2e/lifecycles.rs`.
//!
//! States in which something is done to the world (a record sent, a handler run) are listed as *active*. A terminal
//! state is never one of them, and nothing leads out of it (R33).

use std::fmt;

pub mod dead_letter;
pub mod delivery;
pub mod lease;
pub mod message;

/// A state or an event: one of finitely many, each with the name by which tables, commands and logs call it.
pub trait Word: Copy + Eq + fmt::Debug + 'static {
    /// Every one, in the order in which they are declared.
    const ALL: &'static [Self];

    /// As tables, commands and logs write it.
    fn as_str(self) -> &'static str;

    /// The one that is written so; none for a word of another version.
    fn of_word(word: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|one| one.as_str() == word)
    }
}

/// Declares an enum and the [`Word`] of each variant, so that neither list can forget one.
macro_rules! words {
    ($(#[$about:meta])* $vis:vis enum $name:ident { $($(#[$doc:meta])* $variant:ident = $word:literal,)+ }) => {
        $(#[$about])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        $vis enum $name { $($(#[$doc])* $variant,)+ }

        impl $crate::lifecycle::Word for $name {
            const ALL: &'static [Self] = &[$(Self::$variant,)+];

            fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $word,)+ }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str($crate::lifecycle::Word::as_str(*self))
            }
        }
    };
}
pub(crate) use words;

/// One edge: in this state, this event leads to that state.
pub type Edge<S, E> = (S, E, S);

/// The table of one lifecycle.
#[derive(Debug)]
pub struct Lifecycle<S: 'static, E: 'static> {
    /// What goes through it, as an error names it.
    pub of: &'static str,
    /// Where everything begins.
    pub initial: S,
    /// What is settled for good.
    pub terminal: &'static [S],
    /// States in which something is done to the world.
    pub active: &'static [S],
    /// Every legal transition.
    pub edges: &'static [Edge<S, E>],
}

/// An event that the state it came to does not know.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("a {of} that is {state} cannot be {event}; {}", legal_here(.legal))]
pub struct IllegalTransition {
    /// What was to change.
    pub of: &'static str,
    /// The state it was in, and stays in.
    pub state: &'static str,
    /// The event that it refused.
    pub event: &'static str,
    /// The events that would have been legal; none in a terminal state.
    pub legal: Vec<&'static str>,
}

fn legal_here(legal: &[&str]) -> String {
    if legal.is_empty() { "it is settled".to_owned() } else { format!("it can be {}", legal.join(", ")) }
}

/// What is wrong with a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flaw<S, E> {
    /// No run from the initial state comes here.
    Unreachable(S),
    /// The edge ends in a state that is not one of the lifecycle's.
    UndeclaredEnd(Edge<S, E>),
    /// Not terminal, and yet it leads to no other state.
    NoWayOut(S),
    /// Not terminal, and no run from here ever ends.
    NeverEnds(S),
    /// Terminal, and yet something leads out of it.
    LeavesTerminal(Edge<S, E>),
    /// Terminal, and yet something is done in it.
    ActiveTerminal(S),
    /// Two edges for one state and event.
    Ambiguous(S, E),
}

impl<S: Word, E: Word> Lifecycle<S, E> {
    /// The state after `event`.
    ///
    /// # Errors
    ///
    /// When the table has no such edge; nothing changes then.
    pub fn next(&self, state: S, event: E) -> Result<S, IllegalTransition> {
        self.edges
            .iter()
            .find(|(from, on, _)| (*from, *on) == (state, event))
            .map(|(_, _, to)| *to)
            .ok_or_else(|| IllegalTransition {
                of: self.of,
                state: state.as_str(),
                event: event.as_str(),
                legal: self.events(state).map(Word::as_str).collect(),
            })
    }

    /// The events that are legal in `state`.
    pub fn events(&self, state: S) -> impl Iterator<Item = E> {
        self.edges.iter().filter(move |(from, _, _)| *from == state).map(|(_, event, _)| *event)
    }

    /// Whether it is settled for good.
    #[must_use]
    pub fn is_terminal(&self, state: S) -> bool {
        self.terminal.contains(&state)
    }

    /// Whether something is done to the world in this state.
    #[must_use]
    pub fn is_active(&self, state: S) -> bool {
        self.active.contains(&state)
    }

    /// Everything that is wrong with the table; empty for a sound one.
    #[must_use]
    pub fn flaws(&self) -> Vec<Flaw<S, E>> {
        self.flaws_among(S::ALL)
    }

    fn flaws_among(&self, states: &[S]) -> Vec<Flaw<S, E>> {
        let mut flaws = Vec::new();
        let reached = self.reachable(self.initial);
        for state in states.iter().copied() {
            let onward = self.reachable(state);
            if !reached.contains(&state) {
                flaws.push(Flaw::Unreachable(state));
            }
            if self.is_terminal(state) {
                if self.is_active(state) {
                    flaws.push(Flaw::ActiveTerminal(state));
                }
            } else if onward.len() == 1 {
                flaws.push(Flaw::NoWayOut(state));
            } else if !onward.iter().any(|end| self.is_terminal(*end)) {
                flaws.push(Flaw::NeverEnds(state));
            }
        }
        for (index, edge) in self.edges.iter().copied().enumerate() {
            let (from, event, to) = edge;
            if !states.contains(&to) {
                flaws.push(Flaw::UndeclaredEnd(edge));
            }
            if self.is_terminal(from) {
                flaws.push(Flaw::LeavesTerminal(edge));
            }
            if self.edges[..index].iter().any(|(f, e, _)| (*f, *e) == (from, event)) {
                flaws.push(Flaw::Ambiguous(from, event));
            }
        }
        flaws
    }

    /// Where runs from `start` come, itself included.
    fn reachable(&self, start: S) -> Vec<S> {
        let mut reached = vec![start];
        let mut looked_at = 0;
        while let Some(state) = reached.get(looked_at).copied() {
            looked_at += 1;
            for (_, _, to) in self.edges.iter().filter(|(from, _, _)| *from == state) {
                if !reached.contains(to) {
                    reached.push(*to);
                }
            }
        }
        reached
    }
}

#[cfg(test)]
mod tests;

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;

words! {
    /// States of the tables that are wrong on purpose.
    enum Planted {
        /// Where it begins.
        Start = "start",
        /// In between.
        Middle = "middle",
        /// Terminal.
        End = "end",
        /// Not declared where a test says so.
        Elsewhere = "elsewhere",
    }
}

words! {
    /// Their events.
    enum Step {
        /// One.
        Go = "gone",
        /// Another.
        Turn = "turned",
    }
}

use Planted::{Elsewhere, End, Middle, Start};
use Step::{Go, Turn};

fn planted(edges: &'static [Edge<Planted, Step>], active: &'static [Planted]) -> Lifecycle<Planted, Step> {
    Lifecycle { of: "plant", initial: Start, terminal: &[End], active, edges }
}

#[test]
fn every_lifecycle_is_sound() {
    assert_eq!(message::LIFECYCLE.flaws(), []);
    assert_eq!(lease::LIFECYCLE.flaws(), []);
    assert_eq!(delivery::LIFECYCLE.flaws(), []);
    assert_eq!(dead_letter::LIFECYCLE.flaws(), []);
}

#[test]
fn each_flaw_is_found_where_it_is_planted_and_nothing_else_is() {
    const THREE: &[Planted] = &[Start, Middle, End];
    let flaws = |edges, active| planted(edges, active).flaws_among(THREE);
    assert_eq!(flaws(&[(Start, Go, Middle), (Middle, Go, End)], &[Start]), []);
    assert_eq!(flaws(&[(Start, Go, End), (Middle, Go, End)], &[]), [Flaw::Unreachable(Middle)]);
    assert_eq!(
        flaws(&[(Start, Go, Middle), (Middle, Go, End), (Middle, Turn, Elsewhere)], &[]),
        [Flaw::UndeclaredEnd((Middle, Turn, Elsewhere))]
    );
    // A loop is no way out.
    assert_eq!(
        flaws(&[(Start, Go, Middle), (Start, Turn, End), (Middle, Go, Middle)], &[]),
        [Flaw::NoWayOut(Middle)]
    );
    assert_eq!(
        flaws(&[(Start, Go, Middle), (Middle, Go, Start)], &[]),
        [Flaw::NeverEnds(Start), Flaw::NeverEnds(Middle), Flaw::Unreachable(End)]
    );
    assert_eq!(
        flaws(&[(Start, Go, Middle), (Middle, Go, End), (End, Turn, Start)], &[]),
        [Flaw::LeavesTerminal((End, Turn, Start))]
    );
    assert_eq!(flaws(&[(Start, Go, Middle), (Middle, Go, End)], &[Start, End]), [Flaw::ActiveTerminal(End)]);
    assert_eq!(
        flaws(&[(Start, Go, Middle), (Start, Go, End), (Middle, Go, End)], &[]),
        [Flaw::Ambiguous(Start, Go)]
    );
}

#[test]
fn an_illegal_transition_says_state_event_and_what_would_be_legal() {
    let refused = message::State::Dead.next(message::Event::Acknowledged).unwrap_err();
    assert_eq!(
        refused.to_string(),
        "a message that is dead cannot be acknowledged; it can be requeued, discarded"
    );
    let refused = lease::State::Done.next(lease::Event::Renewed).unwrap_err();
    assert_eq!(refused.to_string(), "a piece of work that is done cannot be renewed; it is settled");
}

#[test]
fn a_failed_message_or_record_never_becomes_new_again() {
    assert!(message::LIFECYCLE.edges.iter().all(|(_, _, to)| *to != message::State::Pending));
    assert!(delivery::LIFECYCLE.edges.iter().all(|(_, _, to)| *to != delivery::State::Received));
    assert!(dead_letter::LIFECYCLE.edges.iter().all(|(_, _, to)| *to != dead_letter::State::Dead));
}

#[test]
fn the_transitions_of_a_message_are_those_that_were_decided() {
    use message::State::{Blocked, Dead, Discarded, Paused, Pending, Published, Retrying};
    let decided: &[(message::State, &[message::State])] = &[
        (Pending, &[Published, Retrying, Blocked, Paused]),
        (Retrying, &[Published, Dead, Discarded]),
        (Blocked, &[Retrying, Discarded]),
        (Dead, &[Retrying, Discarded]),
        (Paused, &[Retrying, Discarded]),
        (Published, &[]),
        (Discarded, &[]),
    ];
    for (from, expected) in decided {
        let to: BTreeSet<_> = message::LIFECYCLE
            .edges
            .iter()
            .filter(|(f, _, to)| f == from && to != from)
            .map(|(_, _, to)| *to)
            .collect();
        assert_eq!(to, expected.iter().copied().collect(), "{from}");
    }
    assert!([Retrying, Blocked, Paused, Dead].iter().all(|state| state.blocks_its_key()));
    assert!(![Pending, Published, Discarded].iter().any(|state| state.blocks_its_key()));
}

/// Throws events at a new thing, legal and illegal ones. What it did to the world is counted state by state.
fn walk<S: Word, E: Word>(lifecycle: &Lifecycle<S, E>, picks: &[usize]) {
    let (mut state, mut acts) = (lifecycle.initial, 0);
    let mut settled: Option<(S, usize)> = None;
    for pick in picks {
        acts += usize::from(lifecycle.is_active(state));
        // Mostly what is legal, so that walks come far; else anything.
        let legal: Vec<E> = lifecycle.events(state).collect();
        let event = match legal.get(pick % (legal.len() + 1)) {
            Some(event) => *event,
            None => E::ALL[pick / 7 % E::ALL.len()],
        };
        match lifecycle.next(state, event) {
            Ok(next) => {
                assert!(S::ALL.contains(&next) && legal.contains(&event));
                state = next;
            }
            Err(refused) => {
                assert!(!legal.contains(&event), "{refused}");
                assert_eq!((refused.state, refused.event), (state.as_str(), event.as_str()));
            }
        }
        match settled {
            Some(then) => assert_eq!((state, acts), then, "a settled one moved or did something"),
            None if lifecycle.is_terminal(state) => settled = Some((state, acts)),
            None => {}
        }
    }
}

proptest! {
    #[test]
    fn a_walk_stays_in_its_table_and_what_is_settled_neither_moves_nor_does_anything(
        picks in proptest::collection::vec(any::<usize>(), 0..200),
    ) {
        walk(&message::LIFECYCLE, &picks);
        walk(&lease::LIFECYCLE, &picks);
        walk(&delivery::LIFECYCLE, &picks);
        walk(&dead_letter::LIFECYCLE, &picks);
    }
}

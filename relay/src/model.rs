//! Every interleaving of two relays, one shard and three messages, with a crash, a pause and a lost reply at each step.
//!
//! What acts here are the product's own rules: [`Lease`](baton_protocol::lease::ownership::Lease) for claim, renewal,
//! release and the fenced advance, [`Terms`](baton_protocol::lease::Terms) for local trust, and
//! [`Window`](crate::window::Window) for the acknowledged prefix. `world` puts a database, a topic and a network around
//! them; `explore` visits every state that can come about, however many faults that takes, and keeps the shortest way
//! to the first that breaks a promise:
//!
//! * the durable cursor never goes back,
//! * it never passes a message that is not on the topic,
//! * nothing moves it but the holder of the current generation, and only before the lease's end,
//! * first occurrences reach the topic in order,
//! * from every state a run without further faults leads to all published and the cursor behind the last.
//!
//! Time is a tick: a lease lasts two of them, the trust in it one. A pause is a relay that is not the next to act, for
//! as long as that may be, also between its last look at the clock and the hand-over. What a dead session had sent
//! stays on its way: records arrive late or never, an advance is carried out late or never. One run of such records and
//! one such advance at a time: when another session dies, the older ones are lost. That is the one bound; the number of
//! faults has none, because states are told apart only by what the rules compare (order of generations, time left).

mod explore;
mod world;

use explore::{Explored, explore};
use world::{Judge, Plant, Rules, Wrong};

fn explored(plant: Plant) -> Explored {
    let explored =
        explore(Rules { plant, judge: Judge::Strict }).unwrap_or_else(|found| panic!("{plant:?}: {found}"));
    let Explored { states, transitions, ended, hopeless } = explored;
    println!(
        "model, {plant:?} planted: {states} states, {transitions} transitions, {ended} with everything published, \
         {hopeless} from which nothing more comes"
    );
    explored
}

#[test]
fn no_interleaving_of_two_relays_breaks_a_promise_and_each_can_still_end_well() {
    let Explored { states, ended, hopeless, .. } = explored(Plant::Nothing);
    assert!(states > 100_000 && ended > 0, "a model in which hardly anything happens shows nothing");
    assert_eq!(hopeless, 0, "states from which no run leads to all published");
}

#[test]
fn a_lease_that_never_ended_would_leave_states_from_which_nothing_is_published() {
    assert!(explored(Plant::LeaseWithoutEnd).hopeless > 0);
}

#[test]
fn a_bug_planted_into_the_rules_is_found_with_the_shortest_way_to_it() {
    for (plant, judge, expected) in [
        (Plant::UnfencedAdvance, Judge::Strict, Wrong::StaleAdvance),
        (Plant::UnfencedAdvance, Judge::ByConsequences, Wrong::CursorWentBack),
        (Plant::StaleGenerationAccepted, Judge::Strict, Wrong::StaleAdvance),
        (Plant::StaleGenerationAccepted, Judge::ByConsequences, Wrong::CursorWentBack),
        (Plant::ExpiredLeaseAccepted, Judge::Strict, Wrong::StaleAdvance),
        (Plant::AdvanceBeforeTheReport, Judge::Strict, Wrong::PassedWhatIsNotThere),
        (Plant::CursorKeptInMemory, Judge::Strict, Wrong::OutOfOrder),
    ] {
        let Err(found) = explore(Rules { plant, judge }) else { panic!("{plant:?} is not found") };
        println!("{plant:?}, judged {judge:?}: {found}");
        assert_eq!(found.wrong, expected, "{plant:?}: {found}");
    }
}

use proptest::prelude::*;

use super::*;
use crate::lifecycle::Word;
use crate::lifecycle::lease::LIFECYCLE;

const BUDGET: NonZeroU32 = NonZeroU32::new(3).unwrap();

fn terms() -> Terms {
    Terms::new(Duration::from_secs(3), None).unwrap()
}

fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn payload() -> Fingerprint {
    Fingerprint::exact(Some(b"payload"))
}

fn claim(work: &mut Work<&'static str>, owner: &str, now: u64) -> Claim<&'static str> {
    work.claim(owner, &payload(), BUDGET, seconds(now), terms())
}

fn claimed(claim: Claim<&'static str>) -> Holder {
    match claim {
        Claim::Claimed { holder, .. } => holder,
        other => panic!("{other:?}"),
    }
}

/// Claimed by `a` at 0 for the first time, until 3.
fn held_by_a() -> (Work<&'static str>, Holder) {
    let mut work = Work::new(payload());
    let holder = claimed(claim(&mut work, "a", 0));
    (work, holder)
}

#[derive(Debug, Clone, Copy)]
enum Deed {
    Claim { owner: usize, same_payload: bool },
    Renew { past: usize },
    Complete { past: usize },
    Release { past: usize },
    Bury { past: usize },
    Requeue,
    Wait { half_seconds: u32 },
}

fn deeds() -> impl Strategy<Value = Vec<Deed>> {
    let past = || 0_usize..3;
    let deed = prop_oneof![
        3 => (0_usize..3, prop::bool::weighted(0.9)).prop_map(|(owner, same_payload)| Deed::Claim { owner, same_payload }),
        2 => past().prop_map(|past| Deed::Renew { past }),
        1 => past().prop_map(|past| Deed::Complete { past }),
        1 => past().prop_map(|past| Deed::Release { past }),
        1 => past().prop_map(|past| Deed::Bury { past }),
        1 => Just(Deed::Requeue),
        3 => (0_u32..4).prop_map(|half_seconds| Deed::Wait { half_seconds }),
    ];
    proptest::collection::vec(deed, 0..60)
}

proptest! {
    #[test]
    fn whatever_happens_work_is_run_within_its_budget_settled_once_and_changed_as_its_table_says(deeds in deeds()) {
        let (mut work, mut now) = (Work::new(payload()), Duration::ZERO);
        let mut holders: Vec<Holder> = Vec::new();
        for deed in deeds {
            let before = work.clone();
            let state = before.state(now);
            let recent = |past: usize| holders.len().checked_sub(past + 1).map(|at| (holders[at].clone(), past == 0));
            let (event, done, rightful) = match deed {
                Deed::Wait { half_seconds } => {
                    now += Duration::from_millis(500) * half_seconds;
                    continue;
                }
                Deed::Claim { owner, same_payload } => {
                    let payload = if same_payload { payload() } else { Fingerprint::exact(None) };
                    let spent = before.attempts() >= BUDGET.get();
                    match work.claim(["a", "b", "c"][owner], &payload, BUDGET, now, terms()) {
                        Claim::Claimed { holder, attempt } => {
                            prop_assert!(same_payload && !spent && attempt == before.attempts() + 1);
                            prop_assert!(holders.iter().all(|past| past.generation < holder.generation));
                            holders.push(holder);
                        }
                        Claim::Conflict => prop_assert!(!same_payload && work == before),
                        Claim::Held { until } => prop_assert!(now < until && work == before),
                        Claim::Duplicate(_) => prop_assert!(state == State::Done && work == before),
                        Claim::Dead { attempts } => prop_assert!(attempts == before.attempts()),
                    }
                    let event = if spent { Event::Buried } else { Event::Claimed };
                    (event, work != before, same_payload && state != State::Held)
                }
                Deed::Renew { past } => {
                    let Some((holder, last)) = recent(past) else { continue };
                    (Event::Renewed, work.renew(&holder, now, terms()).is_ok(), last)
                }
                Deed::Complete { past } => {
                    let Some((holder, last)) = recent(past) else { continue };
                    (Event::Completed, work.complete(&holder, "result", now).is_ok(), last)
                }
                Deed::Release { past } => {
                    let Some((holder, last)) = recent(past) else { continue };
                    (Event::Released, work.release(&holder, now).is_ok(), last)
                }
                Deed::Bury { past } => {
                    let Some((holder, last)) = recent(past) else { continue };
                    // Not by its holder, only by a claim, is anything buried that nobody holds.
                    (Event::Buried, work.bury(&holder, now).is_ok(), last && state == State::Held)
                }
                Deed::Requeue => (Event::Requeued, work.requeue(now).is_ok(), true),
            };
            // Done exactly when the one who asked may, and the table has the edge; and then it leads where the table says.
            prop_assert_eq!(done, rightful && state.next(event).is_ok(), "{} by {:?}", event, deed);
            if done {
                prop_assert_eq!(work.state(now), state.next(event).unwrap());
            } else {
                prop_assert_eq!(&work, &before);
            }
            prop_assert!(!LIFECYCLE.is_terminal(state) || work == before, "a settled one changed");
            prop_assert!(work.attempts() <= BUDGET.get());
        }
    }
}

#[test]
fn a_claim_after_the_budget_is_spent_yields_dead_and_never_runs() {
    let mut work = Work::new(payload());
    for attempt in 1..=3 {
        let found = claim(&mut work, "a", u64::from(attempt) * 3);
        assert!(matches!(found, Claim::Claimed { attempt: a, .. } if a == attempt), "{found:?}");
    }
    // The third attempt is still running: its budget is spent, and it is left alone.
    assert_eq!(claim(&mut work, "b", 11), Claim::Held { until: seconds(12) });
    assert_eq!(claim(&mut work, "b", 12), Claim::Dead { attempts: 3 });
    assert_eq!(claim(&mut work, "a", 100), Claim::Dead { attempts: 3 });
    assert_eq!(work.state(seconds(100)), State::Dead);
}

#[test]
fn dead_work_runs_again_only_once_it_is_requeued_and_then_under_a_later_generation_with_its_whole_budget() {
    let (mut work, holder) = held_by_a();
    work.requeue(seconds(1)).unwrap_err();
    work.bury(&holder, seconds(1)).unwrap();
    assert_eq!(claim(&mut work, "b", 9), Claim::Dead { attempts: 1 });
    work.requeue(seconds(9)).unwrap();
    assert_eq!(work.complete(&holder, "stale", seconds(2)), Err(Fenced::NotHeld));
    let next = claimed(claim(&mut work, "b", 9));
    assert!(next.generation > holder.generation && work.attempts() == 1);
    work.complete(&next, "result", seconds(10)).unwrap();
    work.requeue(seconds(10)).unwrap_err();
}

#[test]
fn a_released_attempt_stays_spent() {
    let (mut work, mut holder) = held_by_a();
    for _ in 0..2 {
        work.release(&holder, seconds(0)).unwrap();
        holder = claimed(claim(&mut work, "a", 0));
    }
    work.release(&holder, seconds(0)).unwrap();
    assert_eq!(claim(&mut work, "a", 0), Claim::Dead { attempts: 3 });
}

#[test]
fn another_payload_is_a_conflict_while_it_runs_at_takeover_after_it_finished_and_after_it_died() {
    let other = Fingerprint::exact(Some(b"Payload"));
    let conflicts = |work: &mut Work<_>, now| {
        let before = work.clone();
        assert_eq!(work.claim("b", &other, BUDGET, seconds(now), terms()), Claim::Conflict);
        assert_eq!(*work, before);
    };
    let (mut work, holder) = held_by_a();
    conflicts(&mut work, 1);
    conflicts(&mut work, 3);
    let mut dead = work.clone();
    work.complete(&holder, "result", seconds(2)).unwrap();
    conflicts(&mut work, 2);
    assert_eq!(claim(&mut work, "b", 2), Claim::Duplicate("result"));
    dead.bury(&holder, seconds(2)).unwrap();
    conflicts(&mut dead, 2);
}

#[test]
fn a_completion_is_accepted_once_and_never_at_or_after_the_end_of_the_lease() {
    let (mut work, holder) = held_by_a();
    assert_eq!(work.complete(&holder, "late", seconds(3)), Err(Fenced::Expired { since: seconds(3) }));
    work.complete(&holder, "first", seconds(2)).unwrap();
    assert_eq!(work.complete(&holder, "second", seconds(2)), Err(Fenced::Settled));
    assert_eq!(claim(&mut work, "b", 9), Claim::Duplicate("first"));
}

#[test]
fn a_stuck_item_is_recovered_by_the_next_claim() {
    let (mut work, _dead_process) = held_by_a();
    assert!(matches!(claim(&mut work, "b", 3), Claim::Claimed { attempt: 2, .. }));
}

#[test]
fn an_item_left_behind_by_a_finished_batch_is_recovered_on_its_own() {
    let (mut finished, holder) = held_by_a();
    let (mut left_behind, _) = held_by_a();
    finished.complete(&holder, "result", seconds(1)).unwrap();
    assert!(matches!(claim(&mut left_behind, "b", 3), Claim::Claimed { attempt: 2, .. }));
    assert_eq!(claim(&mut finished, "b", 3), Claim::Duplicate("result"));
}

#[test]
fn a_just_started_item_is_left_alone() {
    let (mut work, _) = held_by_a();
    let before = work.clone();
    assert_eq!(claim(&mut work, "b", 0), Claim::Held { until: seconds(3) });
    assert_eq!(work, before);
}

#[test]
fn an_old_item_that_keeps_progressing_is_kept() {
    let (mut work, holder) = held_by_a();
    for now in (2..1_000).step_by(2) {
        assert_eq!(work.renew(&holder, seconds(now), terms()), Ok(seconds(now + 3)));
        assert_eq!(claim(&mut work, "b", now + 2), Claim::Held { until: seconds(now + 3) });
    }
    assert_eq!(work.complete(&holder, "result", seconds(1_000)), Ok(()));
}

#[test]
fn a_lost_recovery_race_changes_nothing() {
    let (mut work, slow) = held_by_a();
    let winner = claimed(claim(&mut work, "b", 3));
    let before = work.clone();
    assert_eq!(claim(&mut work, "c", 3), Claim::Held { until: seconds(6) });
    assert_eq!(work.complete(&slow, "stale", seconds(3)), Err(Fenced::AnotherOwner { current: 2 }));
    assert_eq!(work.renew(&slow, seconds(3), terms()), Err(Fenced::AnotherOwner { current: 2 }));
    assert_eq!(work, before);
    work.complete(&winner, "result", seconds(4)).unwrap();
    assert_eq!(work.completed_by(), Some(&winner));
}

#[test]
fn every_state_is_stored_as_one_that_a_reader_knows() {
    let stored: Vec<_> = State::ALL.iter().map(|state| state.stored()).collect();
    assert_eq!(stored, ["in_progress", "in_progress", "in_progress", "done", "dead"]);
}

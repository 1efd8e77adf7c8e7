//! Keys that fail for long: set aside in order, tried again by a lease, while everything else flows.

use std::num::{NonZeroU32, NonZeroUsize};
use std::time::Duration;

use baton_consumer::{AfterDeadLetter, Builder, Policy};

use crate::fixture::{Probe, Running, Send, World, eventually, header, in_world};

/// Sets a record aside at its first failure.
fn eager(world: &World) -> Builder {
    world.builder().park_after(Duration::ZERO).lease_ttl(Duration::from_secs(2))
}

fn start(builder: Builder, probe: &Probe) -> Running {
    Running::start(builder.transactional(probe.clone()).build().unwrap())
}

fn slow_retries() -> Policy {
    Policy { base: Duration::from_secs(3600), factor: 1.0, cap: Duration::from_secs(3600) }
}

async fn make_due(world: &World) {
    sqlx::query("UPDATE inbox.parked SET next_attempt_at = clock_timestamp() WHERE state = 'retrying'")
        .execute(&world.pool)
        .await
        .unwrap();
}

#[test]
fn a_key_that_fails_for_long_waits_in_order_while_others_flow_and_offsets_move_on() {
    in_world(1, |world| async move {
        for (id, key, payload) in [
            ("a1", "a", "sick"),
            ("b1", "b", "pay"),
            ("a2", "a", "pay"),
            ("b2", "b", "pay"),
            ("a3", "a", "pay"),
        ] {
            world.send(Send::new(id, payload).keyed(key)).await;
        }
        let probe = Probe::new();
        let running = start(eager(&world), &probe);
        world.eventually_committed(0, 5).await;
        assert_eq!(world.effect_keys().await, ["/test#b1", "/test#b2"]);
        world
            .eventually_parked(&[("/test#a1", "retrying"), ("/test#a2", "blocked"), ("/test#a3", "blocked")])
            .await;

        probe.heal();
        let keys = world.eventually_effects(5).await;
        assert_eq!(keys[2..], ["/test#a1", "/test#a2", "/test#a3"]);
        world.eventually_parked(&[]).await;
        world.send(Send::new("a4", "pay").keyed("a")).await;
        world.eventually_committed(0, 6).await;
        assert_eq!(world.effect_keys().await.len(), 6);
        assert_eq!(world.parked().await.len(), 3, "a key that is well again is not set aside");
        running.stop().await.unwrap();
    });
}

#[test]
fn a_record_that_fails_shortly_is_tried_again_in_memory_and_holds_up_its_key_only() {
    in_world(1, |world| async move {
        world.send(Send::new("a1", "flaky:3").keyed("a")).await;
        world.send(Send::new("a2", "pay").keyed("a")).await;
        world.send(Send::new("b1", "pay").keyed("b")).await;
        let probe = Probe::new();
        let builder = world.builder().park_after(Duration::from_secs(60)).retry(Policy {
            base: Duration::from_millis(200),
            factor: 1.0,
            cap: Duration::from_millis(200),
        });
        let running = start(builder, &probe);
        let keys = world.eventually_effects(3).await;
        assert_eq!(probe.attempts_on("/test#a1"), [1, 2, 3]);
        let place = |key: &str| keys.iter().position(|found| found == key).unwrap();
        assert!(place("/test#a1") < place("/test#a2"), "{keys:?}");
        assert!(place("/test#b1") < place("/test#a2"), "{keys:?}");
        assert!(world.parked().await.is_empty());
        running.stop().await.unwrap();
    });
}

#[test]
fn a_record_that_waits_in_memory_is_set_aside_when_its_partition_leaves_and_holds_no_offset_back() {
    in_world(1, |world| async move {
        world.send(Send::new("a1", "sick").keyed("a")).await;
        for nr in 0..20 {
            world.send(Send::new(&format!("b{nr}"), "pay").keyed("b")).await;
        }
        let patient = || world.builder().park_after(Duration::from_secs(3600)).retry(slow_retries());
        let probe = Probe::new();
        let running = start(patient(), &probe);
        world.eventually_effects(20).await;
        assert_eq!(world.committed(0).await, None, "it waits in memory");
        running.stop().await.unwrap();
        assert_eq!(world.committed(0).await, Some(21));
        assert_eq!(world.parked().await, [("/test#a1".to_owned(), "retrying".to_owned(), 1)]);
        let next = Probe::new();
        next.heal();
        let running = start(patient(), &next);
        make_due(&world).await;
        assert_eq!(world.eventually_effects(21).await.last().map(String::as_str), Some("/test#a1"));
        assert_eq!(next.calls().len(), 1, "nothing was read again");
        running.stop().await.unwrap();
    });
}

#[test]
fn after_a_restart_what_comes_of_a_key_goes_behind_what_was_set_aside() {
    in_world(1, |world| async move {
        world.send(Send::new("a1", "sick").keyed("a")).await;
        let probe = Probe::new();
        let running = start(eager(&world).retry(slow_retries()), &probe);
        world.eventually_committed(0, 1).await;
        running.stop().await.unwrap();

        // Another process, which has everything to learn.
        let next = Probe::new();
        next.heal();
        world.send(Send::new("a2", "pay").keyed("a")).await;
        world.send(Send::new("b1", "pay").keyed("b")).await;
        let running = start(eager(&world), &next);
        world.eventually_committed(0, 3).await;
        assert_eq!(world.effect_keys().await, ["/test#b1"], "a2 must not overtake");
        world.eventually_parked(&[("/test#a1", "retrying"), ("/test#a2", "blocked")]).await;
        make_due(&world).await;
        assert_eq!(world.eventually_effects(3).await, ["/test#b1", "/test#a1", "/test#a2"]);
        running.stop().await.unwrap();
    });
}

#[test]
fn attempts_are_counted_across_restarts_and_once_spent_it_is_a_dead_letter_and_its_key_goes_on() {
    in_world(1, |world| async move {
        world.send(Send::new("a1", "transient").keyed("a")).await;
        world.send(Send::new("a2", "pay").keyed("a")).await;
        let three = |builder: Builder| builder.attempts(NonZeroU32::new(3).unwrap()).retry(slow_retries());
        for attempt in 1..=3 {
            let probe = Probe::new();
            let running = start(three(eager(&world)), &probe);
            make_due(&world).await;
            eventually("it was tried once more", || async {
                let attempts = probe.attempts_on("/test#a1");
                if attempts == [attempt] { Ok(()) } else { Err(format!("{attempts:?}")) }
            })
            .await;
            if attempt < 3 {
                eventually("the attempt is written down", || async {
                    let parked = world.parked().await;
                    if parked.first().is_some_and(|row| row.2 == i32::try_from(attempt).unwrap()) {
                        Ok(())
                    } else {
                        Err(format!("{parked:?}"))
                    }
                })
                .await;
            } else {
                world.eventually_parked(&[("/test#a1", "dead")]).await;
                assert_eq!(world.eventually_effects(1).await, ["/test#a2"]);
            }
            running.stop().await.unwrap();
        }
        let letters = world.eventually_letters(1).await;
        assert_eq!(header(&letters[0], "dlt-cause").as_deref(), Some("exhausted"));
        assert_eq!(header(&letters[0], "dlt-attempts").as_deref(), Some("3"));
        assert_eq!(header(&letters[0], "ce_id").as_deref(), Some("a1"));
        assert_eq!(world.rows().await["/test#a1"].1.as_deref(), Some("exhausted"));
    });
}

#[test]
fn a_dead_letter_holds_its_key_up_where_that_was_asked_for() {
    in_world(1, |world| async move {
        for (id, key, payload) in [
            ("a1", "a", "permanent"),
            ("a2", "a", "pay"),
            ("b1", "b", "pay"),
            ("c1", "c", "sick"),
            ("c2", "c", "permanent"),
            ("c3", "c", "pay"),
        ] {
            world.send(Send::new(id, payload).keyed(key)).await;
        }
        let probe = Probe::new();
        let running = start(eager(&world).after_dead_letter(AfterDeadLetter::Block), &probe);
        world.eventually_committed(0, 6).await;
        probe.heal();
        world
            .eventually_parked(&[
                ("/test#a1", "dead"),
                ("/test#a2", "blocked"),
                ("/test#c2", "dead"),
                ("/test#c3", "blocked"),
            ])
            .await;
        assert_eq!(world.effect_keys().await, ["/test#b1", "/test#c1"]);
        assert_eq!(world.eventually_letters(2).await.len(), 2);
        running.stop().await.unwrap();
    });
}

#[test]
fn another_payload_behind_a_key_that_waits_is_a_conflict_when_its_turn_comes() {
    in_world(1, |world| async move {
        world.send(Send::new("a1", "sick 100").keyed("a")).await;
        world.send(Send::new("a1", "sick 900").keyed("a")).await;
        world.send(Send::new("a1", "sick 100").keyed("a")).await;
        let probe = Probe::new();
        let running = start(eager(&world), &probe);
        world.eventually_committed(0, 3).await;
        assert!(world.effect_keys().await.is_empty());
        probe.heal();
        world.eventually_parked(&[("/test#a1", "dead")]).await;
        assert_eq!(world.effects().await, [("/test#a1".to_owned(), "sick 100".to_owned())]);
        let letters = world.eventually_letters(1).await;
        assert_eq!(header(&letters[0], "dlt-cause").as_deref(), Some("conflict"));
        running.stop().await.unwrap();
    });
}

#[test]
fn a_record_that_a_dead_process_had_taken_is_tried_by_another_once_its_lease_is_over() {
    in_world(1, |world| async move {
        world.send(Send::new("a1", "sick").keyed("a")).await;
        let probe = Probe::new();
        let running = start(eager(&world).retry(slow_retries()), &probe);
        world.eventually_committed(0, 1).await;
        running.stop().await.unwrap();
        sqlx::query(
            "UPDATE inbox.parked SET next_attempt_at = clock_timestamp(), owner = 'dead', generation = 7,
             lease_until = clock_timestamp() + interval '1 hour'",
        )
        .execute(&world.pool)
        .await
        .unwrap();
        let next = Probe::new();
        next.heal();
        world.send(Send::new("b1", "pay").keyed("b")).await;
        let running = start(eager(&world), &next);
        world.eventually_effects(1).await;
        assert!(next.attempts_on("/test#a1").is_empty(), "its lease is not over");
        sqlx::query("UPDATE inbox.parked SET lease_until = clock_timestamp()")
            .execute(&world.pool)
            .await
            .unwrap();
        world.eventually_effects(2).await;
        running.stop().await.unwrap();
    });
}

/// Whoever ends the last of a key's queue and whoever puts one behind it meet again and again.
#[test]
fn nothing_is_left_behind_a_queue_that_becomes_empty_and_order_is_kept() {
    const ROUNDS: usize = 150;
    in_world(2, |world| async move {
        let probe = Probe::new();
        let member = || {
            let builder = eager(&world).concurrency(NonZeroUsize::new(4).unwrap());
            start(builder, &probe)
        };
        let (one, two) = (member(), member());
        for nr in 0..ROUNDS {
            let payload = if nr % 9 == 0 { "flaky:2" } else { "pay" };
            let (id, key) = (format!("{nr:04}"), format!("k{}", nr % 3));
            let partition = i32::try_from(nr % 3 % 2).unwrap();
            world.send(Send::new(&id, payload).keyed(&key).to(partition)).await;
        }
        let keys = world.eventually_effects(ROUNDS).await;
        for of in 0..3 {
            let numbers: Vec<usize> = keys
                .iter()
                .map(|key| key["/test#".len()..].parse().unwrap())
                .filter(|nr| nr % 3 == of)
                .collect();
            assert!(numbers.is_sorted(), "{numbers:?}");
        }
        world.eventually_parked(&[]).await;
        one.stop().await.unwrap();
        two.stop().await.unwrap();
    });
}

#[test]
fn attempts_that_end_their_process_are_counted_and_end_in_a_dead_letter() {
    in_world(1, |world| async move {
        world.send(Send::new("a1", "sick").keyed("a")).await;
        world.send(Send::new("a2", "pay").keyed("a")).await;
        let probe = Probe::new();
        let running = start(eager(&world).retry(slow_retries()), &probe);
        world.eventually_committed(0, 2).await;
        running.stop().await.unwrap();
        // As processes leave it that took it and died: two, of three attempts in all.
        sqlx::query(
            "UPDATE inbox.parked SET next_attempt_at = clock_timestamp(), attempts = 3, owner = 'dead', lease_until = clock_timestamp()
             WHERE state = 'retrying'",
        )
        .execute(&world.pool)
        .await
        .unwrap();
        let next = Probe::new();
        let running = start(eager(&world).attempts(NonZeroU32::new(3).unwrap()), &next);
        world.eventually_parked(&[("/test#a1", "dead")]).await;
        let letters = world.eventually_letters(1).await;
        assert_eq!(header(&letters[0], "dlt-cause").as_deref(), Some("exhausted"));
        assert_eq!(header(&letters[0], "dlt-attempts").as_deref(), Some("3"));
        assert_eq!(world.eventually_effects(1).await, ["/test#a2"]);
        assert!(next.attempts_on("/test#a1").is_empty(), "it is not run again");
        running.stop().await.unwrap();
    });
}

#[test]
fn what_is_blocked_behind_nothing_is_found_and_tried() {
    in_world(1, |world| async move {
        for (id, payload) in [("a1", "permanent"), ("a2", "pay"), ("a3", "pay")] {
            world.send(Send::new(id, payload).keyed("a")).await;
        }
        let running = start(eager(&world).after_dead_letter(AfterDeadLetter::Block), &Probe::new());
        world.eventually_committed(0, 3).await;
        world
            .eventually_parked(&[("/test#a1", "dead"), ("/test#a2", "blocked"), ("/test#a3", "blocked")])
            .await;
        running.stop().await.unwrap();
        // Dead ones hold nothing up any more.
        let running = start(eager(&world), &Probe::new());
        assert_eq!(world.eventually_effects(2).await, ["/test#a2", "/test#a3"]);
        running.stop().await.unwrap();
    });
}

#[test]
fn a_mark_whose_parked_row_was_not_ended_leaves_it_dead_and_not_done() {
    in_world(1, |world| async move {
        world.send(Send::new("a1", "sick").keyed("a")).await;
        let running = start(eager(&world).retry(slow_retries()), &Probe::new());
        world.eventually_committed(0, 1).await;
        running.stop().await.unwrap();
        // As a process leaves it that died after the letter and the mark.
        sqlx::query(
            "INSERT INTO inbox.message (consumer, scope, key, fingerprint, state, cause, finished_at)
             SELECT consumer, scope, idempotency_key, 'v1:sha256:' || encode(sha256('\\x01'::bytea || payload), 'hex'), 'dead', 'permanent', now()
             FROM inbox.parked",
        )
        .execute(&world.pool)
        .await
        .unwrap();
        let next = Probe::new();
        let running = start(eager(&world), &next);
        make_due(&world).await;
        world.eventually_parked(&[("/test#a1", "dead")]).await;
        assert!(next.calls().is_empty());
        running.stop().await.unwrap();
    });
}

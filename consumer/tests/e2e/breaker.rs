//! When everything fails nothing is at fault but what everything needs.

use std::time::Duration;

use tokio::time::Instant;

use crate::fixture::{Probe, Running, Send, World, eventually_logged, in_world, lasting, logged};

/// How long the outage lasts: long against the waits, the budget and the time after which a record is set aside.
fn outage_lasts() -> Duration {
    let is_full = std::env::var("BATON_TIER").is_ok_and(|tier| tier == "full");
    Duration::from_secs(if is_full { 60 } else { 6 })
}

fn start(world: &World, probe: &Probe) -> Running {
    let builder = world.builder().park_after(Duration::from_millis(500));
    Running::start(builder.transactional(probe.clone()).build().unwrap())
}

async fn outage(world: &World, payload: &str, keys: usize) {
    let probe = Probe::new();
    for nr in 0..keys {
        let (id, key) = (nr.to_string(), format!("k{nr}"));
        world.send(Send::new(&id, payload).keyed(&key)).await;
    }
    let begun = Instant::now();
    let running = start(world, &probe);
    eventually_logged(&["ERROR", "everything fails"]).await;
    lasting("the outage has lasted", || async {
        if begun.elapsed() > outage_lasts() { Ok(()) } else { Err(String::new()) }
    })
    .await;
    let during = probe.calls().len();
    assert!(during < keys + 60, "{during} attempts in {:?}: they are probes, not a storm", outage_lasts());
    assert!(world.parked().await.is_empty(), "an outage sets nothing aside");
    assert!(world.rows().await.is_empty());
    assert!(world.read(&world.dlt()).await.is_empty());
    assert_eq!(world.committed(0).await, None);

    probe.heal();
    let healed = Instant::now();
    world.eventually_effects(keys).await;
    let resumed = healed.elapsed();
    println!(
        "{keys} keys, {:?}: {during} attempts during it, all applied {resumed:?} after it",
        outage_lasts()
    );
    // Its probes come within 4 s; the rest is work.
    assert!(resumed < Duration::from_secs(8), "{resumed:?}");
    for nr in 0..keys {
        let last = probe.attempts_on(&format!("/test#{nr}")).pop();
        assert_eq!(last, Some(1), "no attempt was spent on {nr}");
    }
    world.eventually_committed(0, i64::try_from(keys).unwrap()).await;
    running.stop().await.unwrap();
}

#[test]
fn while_everything_fails_reading_pauses_nothing_is_given_up_and_no_attempt_is_spent() {
    in_world(1, |world| async move { outage(&world, "sick", 40).await });
}

#[test]
fn an_outage_that_the_handler_names_pauses_at_its_first_message() {
    in_world(1, |world| async move { outage(&world, "away", 1).await });
}

#[test]
fn one_key_that_fails_is_no_outage_and_few_keys_are_none_either() {
    in_world(1, |world| async move {
        let probe = Probe::new();
        for nr in 0..4 {
            let (id, key) = (nr.to_string(), format!("k{nr}"));
            world.send(Send::new(&id, "sick").keyed(&key)).await;
        }
        let builder = world.builder().park_after(Duration::ZERO);
        let running = Running::start(builder.transactional(probe.clone()).build().unwrap());
        world.eventually_committed(0, 4).await;
        assert_eq!(world.parked().await.len(), 4);
        probe.heal();
        world.eventually_effects(4).await;
        assert!(logged(&["ERROR", "everything fails", &world.name]).is_empty());
        running.stop().await.unwrap();
    });
}

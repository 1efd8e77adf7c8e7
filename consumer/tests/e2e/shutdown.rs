//! Ending.

use std::time::Duration;

use tokio::time::{Instant, timeout};

use crate::fixture::{Probe, Running, Send, eventually, in_world};

#[test]
fn a_shutdown_with_200_in_flight_finishes_what_is_in_hand_and_hands_back_the_rest() {
    in_world(2, |world| async move {
        for partition in 0..2 {
            world.send(Send::new(&format!("gate-{partition}"), "gate").to(partition)).await;
        }
        for nr in 0..200 {
            world.send(Send::new(&nr.to_string(), "pay").to(nr % 2)).await;
        }
        let probe = Probe::new();
        let mut running = Running::start(world.builder().transactional(probe.clone()).build().unwrap());
        probe.entered(2).await;
        running.ask_to_stop();
        probe.open(2);
        running.ended().await.unwrap();
        let (first, second) = (world.committed(0).await.unwrap(), world.committed(1).await.unwrap());
        let done = world.effect_keys().await.len();
        assert_eq!(
            i64::try_from(done).unwrap(),
            first + second,
            "what has an effect is committed, and nothing else"
        );
        assert!(done < 202, "it was to stop half-way");

        let running = Running::start(world.builder().transactional(Probe::new()).build().unwrap());
        for partition in 0..2 {
            world.eventually_committed(partition, 101).await;
        }
        let mut keys = world.effect_keys().await;
        assert_eq!(keys.len(), 202);
        keys.sort();
        keys.dedup();
        assert_eq!(keys.len(), 202, "each once");
        running.stop().await.unwrap();
    });
}

#[test]
fn a_handler_that_never_ends_does_not_hold_up_the_shutdown_and_leaves_no_trace() {
    in_world(1, |world| async move {
        world.send(Send::new("gate", "gate")).await;
        let probe = Probe::new();
        let builder = world.builder().drain_deadline(Duration::from_millis(300));
        let running = Running::start(builder.transactional(probe.clone()).build().unwrap());
        probe.entered(1).await;
        let asked = Instant::now();
        running.stop().await.unwrap();
        assert!(asked.elapsed() < Duration::from_secs(17), "{:?}", asked.elapsed());
        assert!(world.effect_keys().await.is_empty());
        assert_eq!(world.committed(0).await, None);
        eventually("no transaction is left open", || async {
            let open: i64 = sqlx::query_scalar(
                "SELECT count(*) FROM pg_stat_activity
                 WHERE datname = current_database() AND state LIKE 'idle in transaction%'",
            )
            .fetch_one(&world.pool)
            .await
            .unwrap();
            if open == 0 { Ok(()) } else { Err(format!("{open} open")) }
        })
        .await;
    });
}

#[test]
fn a_message_that_waits_for_a_retry_does_not_hold_up_the_shutdown() {
    in_world(1, |world| async move {
        world.send(Send::new("1", "transient")).await;
        let probe = Probe::new();
        let hour = Duration::from_secs(3600);
        let slow = baton_consumer::Policy { base: hour, factor: 1.0, cap: hour };
        let running =
            Running::start(world.builder().retry(slow).transactional(probe.clone()).build().unwrap());
        eventually("it has failed once", || async {
            if probe.calls().is_empty() { Err(String::new()) } else { Ok(()) }
        })
        .await;
        timeout(Duration::from_secs(15), running.stop()).await.expect("it waits on").unwrap();
        assert!(world.effect_keys().await.is_empty());
        assert_eq!(
            world.parked().await,
            [("/test#1".to_owned(), "retrying".to_owned(), 1)],
            "kept for later"
        );
        assert_eq!(world.committed(0).await, Some(1));
    });
}

#[test]
fn a_consumer_without_records_ends_at_once() {
    in_world(3, |world| async move {
        let running = Running::start(world.builder().transactional(Probe::new()).build().unwrap());
        eventually("it has its partitions", || async {
            let assigned = crate::fixture::logged(&[&world.topic, "assigned"]).len();
            if assigned > 0 { Ok(()) } else { Err("not yet".to_owned()) }
        })
        .await;
        timeout(Duration::from_secs(10), running.stop()).await.expect("it hangs").unwrap();
    });
}

//! Partitions that come and go.

use std::num::NonZeroUsize;
use std::time::Duration;

use baton_consumer::Consumer;

use crate::fixture::{Probe, Running, Send, World, eventually, eventually_logged, in_world, logged};

fn member(world: &World, probe: &Probe, strategy: &str, drain: Duration) -> Running {
    let kafka = world.kafka().property("partition.assignment.strategy", strategy);
    let consumer = Consumer::builder("billing", world.pool.clone(), kafka)
        .group(world.group())
        .topics([&world.topic])
        .drain_deadline(drain)
        .transactional(probe.clone())
        .build()
        .unwrap();
    Running::start(consumer)
}

/// Both partitions have a record that waits in the handler when a second member joins, and one behind it.
async fn revoked_while_handling(world: &World, strategy: &str) {
    for partition in 0..2 {
        world.send(Send::new(&format!("gate-{partition}"), "gate").to(partition)).await;
        world.send(Send::new(&format!("behind-{partition}"), "pay").to(partition)).await;
    }
    let (first, second) = (Probe::new(), Probe::new());
    let one = member(world, &first, strategy, Duration::from_secs(30));
    first.entered(2).await;
    let two = member(world, &second, strategy, Duration::from_secs(30));
    // The group waits for the first member, which finishes what it has in hand.
    eventually_logged(&[&format!("{}[", world.topic), "revoking"]).await;
    first.open(100);
    second.open(100);
    for partition in 0..2 {
        world.eventually_committed(partition, 2).await;
    }
    let mut effects = world.effect_keys().await;
    effects.sort();
    assert_eq!(effects, ["/test#behind-0", "/test#behind-1", "/test#gate-0", "/test#gate-1"]);
    assert!(
        logged(&[&world.topic, "met=Duplicate"]).is_empty(),
        "what was finished was committed before the hand-over"
    );
    for partition in 0..2 {
        world.send(Send::new(&format!("after-{partition}"), "pay").to(partition)).await;
        world.eventually_committed(partition, 3).await;
    }
    one.stop().await.unwrap();
    two.stop().await.unwrap();
}

#[test]
fn a_partition_that_is_revoked_while_its_message_is_in_the_handler_has_one_effect() {
    in_world(2, |world| async move { revoked_while_handling(&world, "range,roundrobin").await });
}

#[test]
fn a_partition_that_is_revoked_cooperatively_while_its_message_is_in_the_handler_has_one_effect() {
    in_world(2, |world| async move { revoked_while_handling(&world, "cooperative-sticky").await });
}

#[test]
fn a_handler_that_outlives_its_revocation_has_one_effect_and_commits_no_offset() {
    in_world(2, |world| async move {
        for partition in 0..2 {
            world.send(Send::new(&format!("gate-{partition}"), "gate").to(partition)).await;
        }
        let (first, second) = (Probe::new(), Probe::new());
        let one = member(&world, &first, "range", Duration::from_millis(200));
        first.entered(2).await;
        let two = member(&world, &second, "range", Duration::from_millis(200));
        // The partitions go on to new lanes, here and there, which wait for the transactions of the old ones.
        eventually("both new lanes wait for the old ones", || async {
            let waiting: i64 = sqlx::query_scalar(
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'",
            )
            .fetch_one(&world.pool)
            .await
            .unwrap();
            if waiting == 2 { Ok(()) } else { Err(format!("{waiting} wait")) }
        })
        .await;
        for partition in 0..2 {
            assert_eq!(world.committed(partition).await, None);
        }
        first.open(2);
        for partition in 0..2 {
            world.eventually_committed(partition, 1).await;
        }
        let mut effects = world.effect_keys().await;
        effects.sort();
        assert_eq!(effects, ["/test#gate-0", "/test#gate-1"]);
        assert!(second.calls().is_empty());
        one.stop().await.unwrap();
        two.stop().await.unwrap();
    });
}

#[test]
fn a_partition_that_was_paused_and_revoked_flows_when_it_comes_back() {
    in_world(1, |world| async move {
        world.send(Send::new("gate", "gate")).await;
        for nr in 0..20 {
            world.send(Send::new(&nr.to_string(), "pay")).await;
        }
        let (first, second) = (Probe::new(), Probe::new());
        // So that even the only partition is revoked when somebody joins.
        let kafka = world.kafka().property("partition.assignment.strategy", "range");
        let small = |probe: &Probe| {
            Consumer::builder("billing", world.pool.clone(), kafka.clone())
                .group(world.group())
                .topics([&world.topic])
                .lane_rows(NonZeroUsize::new(2).unwrap())
                .drain_deadline(Duration::from_millis(200))
                .transactional(probe.clone())
                .build()
                .unwrap()
        };
        let one = Running::start(small(&first));
        first.entered(1).await;
        // The lane is full, so its partition is paused when a second member makes the group share anew.
        let two = Running::start(small(&second));
        eventually("the partition was revoked", || async {
            let revoked = logged(&[&format!("{}[0]", world.topic), "revoked"]).len();
            if revoked > 0 { Ok(()) } else { Err("it was not".to_owned()) }
        })
        .await;
        // Whoever does not have it now gets it when the other leaves.
        second.open(1);
        first.open(1);
        two.stop().await.unwrap();
        world.eventually_committed(0, 21).await;
        assert_eq!(world.effect_keys().await.len(), 21);
        one.stop().await.unwrap();
    });
}

#[test]
fn a_new_group_starts_at_the_earliest_record_and_goes_on_where_it_was() {
    in_world(1, |world| async move {
        world.send(Send::new("1", "pay")).await;
        let running = Running::start(world.builder().transactional(Probe::new()).build().unwrap());
        world.eventually_committed(0, 1).await;
        running.stop().await.unwrap();
        world.send(Send::new("2", "pay")).await;
        let probe = Probe::new();
        let running = Running::start(world.builder().transactional(probe.clone()).build().unwrap());
        world.eventually_committed(0, 2).await;
        assert_eq!(probe.calls().len(), 1, "read from the committed offset on");
        running.stop().await.unwrap();
    });
}

#[test]
fn an_offset_that_has_expired_stops_its_partition_and_skips_nothing() {
    in_world(2, |world| async move {
        for partition in 0..2 {
            world.send(Send::new(&format!("read-{partition}"), "pay").to(partition)).await;
        }
        let running = Running::start(world.builder().transactional(Probe::new()).build().unwrap());
        for partition in 0..2 {
            world.eventually_committed(partition, 1).await;
        }
        running.stop().await.unwrap();
        for nr in 0..3 {
            world.send(Send::new(&format!("expired-{nr}"), "pay").to(0)).await;
        }
        world.expire(0, 3).await;
        world.send(Send::new("other", "pay").to(1)).await;

        let running = Running::start(world.builder().transactional(Probe::new()).build().unwrap());
        eventually_logged(&["ERROR", &world.topic, "partition=0", "offset=1", "low=3"]).await;
        world.eventually_committed(1, 2).await;
        assert_eq!(world.committed(0).await, Some(1));
        let effects = world.effect_keys().await;
        assert!(!effects.contains(&"/test#expired-2".to_owned()), "{effects:?}");
        running.stop().await.unwrap();
    });
}

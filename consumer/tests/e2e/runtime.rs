//! Records to effects.

use std::num::NonZeroUsize;
use std::time::Duration;

use baton_consumer::{Raw, Verdict, handler_fn};
use sqlx::{AssertSqlSafe, Connection, Executor, PgConnection};

use crate::fixture::{
    Probe, Running, Send, World, database_url, eventually, eventually_logged, header, in_world, logged,
};
use crate::proxy::Proxy;

fn start(world: &World, probe: &Probe) -> Running {
    Running::start(world.builder().transactional(probe.clone()).build().unwrap())
}

#[test]
fn the_same_record_twice_has_one_effect_and_the_offset_moves_past_both() {
    in_world(1, |world| async move {
        for _ in 0..2 {
            world.send(Send::new("1", "pay")).await;
        }
        world.send(Send::new("2", "pay")).await;
        let running = start(&world, &Probe::new());
        world.eventually_committed(0, 3).await;
        assert_eq!(world.effect_keys().await, ["/test#1", "/test#2"]);
        let stored: Option<String> =
            sqlx::query_scalar("SELECT outcome::text FROM inbox.message WHERE key = '/test#1'")
                .fetch_one(&world.pool)
                .await
                .unwrap();
        assert_eq!(stored.as_deref(), Some("\"pay\""));
        running.stop().await.unwrap();
    });
}

#[test]
fn a_closure_is_a_handler_and_sees_the_record() {
    in_world(1, |world| async move {
        let mut record = Send::new("1", "pay");
        record.headers.push(("idempotency-key", Some(b"placed:7")));
        record.timestamp = Some(1_700_000_000_123);
        world.send(record).await;
        let handler = handler_fn::<Raw, _>(|delivery, tx| {
            Box::pin(async move {
                let seen = format!(
                    "{} {:?} {} {}[{}]@{} {:?} {} {:?}",
                    delivery.idempotency_key(),
                    delivery.message_type(),
                    delivery.attempt(),
                    "topic",
                    delivery.partition(),
                    delivery.offset(),
                    delivery.key(),
                    delivery.record().timestamp_ms().unwrap(),
                    delivery.header("ce_id"),
                );
                let effect = sqlx::query("INSERT INTO effect (key) VALUES ($1)").bind(seen);
                match effect.execute(&mut **tx).await {
                    Ok(_) => Verdict::done(),
                    Err(error) => error.into(),
                }
            })
        });
        let running = Running::start(world.builder().transactional(handler).build().unwrap());
        let seen = world.eventually_effects(1).await;
        assert_eq!(seen, ["placed:7 Some(\"t\") 1 topic[0]@0 Some([107]) 1700000000123 Some([49])"]);
        running.stop().await.unwrap();
    });
}

#[test]
fn a_record_without_key_payload_or_headers_is_handled_and_kills_nothing() {
    in_world(1, |world| async move {
        let mut no_key = Send::new("no-key", "pay");
        no_key.key = None;
        world.send(no_key).await;
        let mut tombstone = Send::new("tombstone", "");
        tombstone.payload = None;
        world.send(tombstone).await;
        let mut no_headers = Send::new("no-headers", "pay");
        no_headers.headers.clear();
        world.send(no_headers).await;
        let mut absurd = Send::new("absurd-time", "pay");
        absurd.timestamp = Some(1);
        world.send(absurd).await;
        let running = start(&world, &Probe::new());
        world.eventually_committed(0, 4).await;
        assert_eq!(world.effect_keys().await, ["/test#no-key", "/test#tombstone", "/test#absurd-time"]);
        let letters = world.eventually_letters(1).await;
        assert_eq!(header(&letters[0], "dlt-cause").as_deref(), Some("no_identity"));
        running.stop().await.unwrap();
    });
}

#[test]
fn a_transient_failure_is_retried_in_its_place() {
    in_world(1, |world| async move {
        world.send(Send::new("1", "flaky:4")).await;
        world.send(Send::new("2", "pay")).await;
        let probe = Probe::new();
        let running = start(&world, &probe);
        world.eventually_committed(0, 2).await;
        assert_eq!(world.effect_keys().await, ["/test#1", "/test#2"]);
        let expected = [("/test#1", 1), ("/test#1", 2), ("/test#1", 3), ("/test#1", 4), ("/test#2", 1)];
        assert_eq!(probe.calls(), expected.map(|(key, attempt)| (key.to_owned(), attempt)));
        assert!(world.read(&world.dlt()).await.is_empty());
        running.stop().await.unwrap();
    });
}

#[test]
fn a_backlog_flows_through_small_lanes_in_order() {
    in_world(2, |world| async move {
        for nr in 0..120 {
            world.send(Send::new(&nr.to_string(), "pay").to(nr % 2)).await;
        }
        let four = NonZeroUsize::new(4).unwrap();
        let consumer = world.builder().lane_rows(four).transactional(Probe::new()).build().unwrap();
        let running = Running::start(consumer);
        let keys = world.eventually_effects(120).await;
        for partition in 0..2 {
            let of_partition: Vec<i32> = keys
                .iter()
                .map(|key| key["/test#".len()..].parse().unwrap())
                .filter(|nr| nr % 2 == partition)
                .collect();
            assert!(of_partition.is_sorted(), "{of_partition:?}");
        }
        running.stop().await.unwrap();
    });
}

#[test]
fn a_connection_that_is_killed_in_the_handler_is_made_anew_and_the_effect_is_single() {
    in_world(1, |world| async move {
        world.send(Send::new("1", "gate")).await;
        let probe = Probe::new();
        let running = start(&world, &probe);
        probe.entered(1).await;
        let killed: i64 = sqlx::query_scalar(
            "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
             WHERE datname = current_database() AND state = 'idle in transaction'",
        )
        .fetch_one(&world.pool)
        .await
        .unwrap();
        assert_eq!(killed, 1);
        probe.open(2);
        world.eventually_committed(0, 1).await;
        assert_eq!(world.effect_keys().await, ["/test#1"]);
        assert_eq!(probe.calls().len(), 2);
        running.stop().await.unwrap();
    });
}

#[test]
fn a_database_that_is_away_is_waited_for_in_order_and_nothing_is_given_up() {
    in_world(1, |world| async move {
        let probe = Probe::new();
        let running = start(&world, &probe);
        world.send(Send::new("before", "pay")).await;
        world.eventually_effects(1).await;

        let mut admin = PgConnection::connect(&database_url()).await.unwrap();
        let name = &world.name;
        admin.execute(AssertSqlSafe(format!("ALTER DATABASE {name} ALLOW_CONNECTIONS false"))).await.unwrap();
        admin
            .execute(AssertSqlSafe(format!(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'"
            )))
            .await
            .unwrap();
        for nr in 0..5 {
            world.send(Send::new(&nr.to_string(), "pay")).await;
        }
        eventually_logged(&[&world.topic, "the inbox database does not answer"]).await;
        admin.execute(AssertSqlSafe(format!("ALTER DATABASE {name} ALLOW_CONNECTIONS true"))).await.unwrap();

        world.eventually_committed(0, 6).await;
        let expected = ["before", "0", "1", "2", "3", "4"].map(|nr| format!("/test#{nr}"));
        assert_eq!(world.effect_keys().await, expected);
        assert!(
            probe.calls().iter().all(|(_, attempt)| *attempt == 1),
            "an outage spends no attempt: {:?}",
            probe.calls()
        );
        assert!(world.read(&world.dlt()).await.is_empty());
        running.stop().await.unwrap();
    });
}

#[test]
fn a_commit_whose_reply_is_lost_has_one_effect() {
    in_world(1, |world| async move {
        let proxy = Proxy::start(&world.options).await;
        let probe = Probe::new();
        let consumer = world.builder_on(proxy.pool(4).await).transactional(probe.clone()).build().unwrap();
        let running = Running::start(consumer);
        world.send(Send::new("1", "pay")).await;
        world.eventually_committed(0, 1).await;
        proxy.lose_reply_to("COMMIT\0");
        world.send(Send::new("2", "pay")).await;
        world.eventually_committed(0, 2).await;
        assert!(proxy.has_lost(), "the test lost nothing");
        assert_eq!(world.effect_keys().await, ["/test#1", "/test#2"]);
        assert_eq!(probe.calls().len(), 2, "the row decides; nothing runs again");
        running.stop().await.unwrap();
    });
}

#[test]
fn two_consumers_that_get_the_same_message_at_once_have_one_effect() {
    in_world(1, |world| async move {
        world.send(Send::new("1", "gate")).await;
        let (first, second) = (Probe::new(), Probe::new());
        // Two groups, so that both read the record; one name, so that both use one inbox.
        let one = Running::start(
            world.builder().group(format!("{}-a", world.name)).transactional(first.clone()).build().unwrap(),
        );
        first.entered(1).await;
        let two = Running::start(world.builder().transactional(second.clone()).build().unwrap());
        eventually("the second one waits for the first", || async {
            let waiting: i64 = sqlx::query_scalar(
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'",
            )
            .fetch_one(&world.pool)
            .await
            .unwrap();
            if waiting == 1 { Ok(()) } else { Err(format!("{waiting} wait")) }
        })
        .await;
        first.open(1);
        world.eventually_committed(0, 1).await;
        assert_eq!(world.effect_keys().await, ["/test#1"]);
        assert!(second.calls().is_empty());
        for running in [one, two] {
            running.stop().await.unwrap();
        }
    });
}

#[test]
fn a_handler_slower_than_the_poll_interval_keeps_its_partition() {
    in_world(1, |world| async move {
        world.send(Send::new("1", "slow")).await;
        world.send(Send::new("2", "pay")).await;
        let handler = handler_fn::<Raw, _>(|delivery, tx| {
            Box::pin(async move {
                let slow = delivery.idempotency_key().ends_with('1');
                let seconds = if slow { 9.0 } else { 0.0 };
                let effect = sqlx::query("INSERT INTO effect (key) SELECT $1 FROM pg_sleep($2)");
                match effect.bind(delivery.idempotency_key()).bind(seconds).execute(&mut **tx).await {
                    Ok(_) => Verdict::done(),
                    Err(error) => error.into(),
                }
            })
        });
        let pool = world.pool.clone();
        let kafka = world.kafka().property("max.poll.interval.ms", "7000");
        let consumer = baton_consumer::Consumer::builder("billing", pool, kafka)
            .group(world.group())
            .topics([&world.topic])
            .drain_deadline(Duration::from_secs(5))
            .transactional(handler)
            .build()
            .unwrap();
        let running = Running::start(consumer);
        world.eventually_committed(0, 2).await;
        assert_eq!(world.effect_keys().await, ["/test#1", "/test#2"]);
        assert_eq!(logged(&[&world.topic, "revoked"]).len(), 0, "the member was evicted");
        running.stop().await.unwrap();
    });
}

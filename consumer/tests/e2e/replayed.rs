//! Records that come by the replay topic: which of them may run work that is dead, and what is written down of each.

use std::num::NonZeroUsize;
use std::time::Duration;

use baton_consumer::{AfterDeadLetter, Inbox};
use rdkafka::Message;
use uuid::Uuid;

use crate::batched::Sheets;
use crate::fixture::{Probe, Running, Send, World, eventually, header, in_world, logged};

fn replays(world: &World) -> String {
    format!("{}.billing.replay", world.topic)
}

/// Writes a plan whose items are these keys, all of them sent.
async fn plan(world: &World, keys: &[&str]) -> Uuid {
    let plan = Uuid::new_v4();
    sqlx::query(
        "INSERT INTO inbox.replay_plan (plan, consumer, topic, dead_letters, target, new_key, again, loop_cap, ends, items)
         VALUES ($1, 'billing', $2, 'd', 'r', false, false, 3, '{}', $3)",
    )
    .bind(plan)
    .bind(&world.topic)
    .bind(i64::try_from(keys.len()).unwrap())
    .execute(&world.pool)
    .await
    .unwrap();
    sqlx::query(
        r#"INSERT INTO inbox.replay_item (plan, item, consumer, "partition", "offset", subject, round, idempotency_key, state, sent_at,
                                          original_topic, original_partition, original_offset, original_time_ms, first_failed_at)
           SELECT $1, nr, 'billing', 0, nr, '', 1, key, 'sent', now(), $3, 0, 1000 + nr, 1769850300250, '2026-01-31T09:05:00Z'
           FROM unnest($2::text[]) WITH ORDINALITY AS item (key, nr)"#,
    )
    .bind(plan)
    .bind(keys)
    .bind(&world.topic)
    .execute(&world.pool)
    .await
    .unwrap();
    plan
}

/// The record of an item, as a run sends it.
async fn replay(world: &World, record: Send<'_>, plan: Uuid, item: i64) {
    let (plan, item) = (plan.to_string(), item.to_string());
    let mut record = record;
    record.headers.push(("replay-plan", Some(plan.as_bytes())));
    record.headers.push(("replay-item", Some(item.as_bytes())));
    record.headers.push(("replay-round", Some(b"1")));
    world.send_to(&replays(world), record).await;
}

async fn items(world: &World, plan: Uuid) -> Vec<String> {
    sqlx::query_scalar("SELECT state FROM inbox.replay_item WHERE plan = $1 ORDER BY item")
        .bind(plan)
        .fetch_all(&world.pool)
        .await
        .unwrap()
}

async fn eventually_items(world: &World, plan: Uuid, expected: &[&str]) {
    eventually(&format!("the items are {expected:?}"), || async {
        let found = items(world, plan).await;
        if found == expected { Ok(()) } else { Err(format!("{found:?}")) }
    })
    .await;
}

/// Waits until so many records of the replay topic were settled.
async fn settled(world: &World, count: i64) {
    eventually("the replay topic is consumed", || async {
        let committed = world.committed_on(&replays(world), &format!("{}.replay", world.group()), 0).await;
        if committed == Some(count) { Ok(()) } else { Err(format!("{committed:?}")) }
    })
    .await;
}

fn start(world: &World, probe: &Probe) -> Running {
    Running::start(world.builder().transactional(probe.clone()).build().unwrap())
}

/// Payloads that fail until the probe is healed.
const SICK: &str = "sick";

async fn dead(world: &World, key: &str) {
    eventually(&format!("{key} is dead"), || async {
        let rows = world.rows().await;
        match rows.get(&format!("/test#{key}")) {
            Some((state, ..)) if state == "dead" => Ok(()),
            other => Err(format!("{other:?}")),
        }
    })
    .await;
}

fn few_attempts(world: &World) -> baton_consumer::Builder {
    world.builder().attempts(2.try_into().unwrap())
}

#[test]
fn a_dead_row_is_run_again_for_an_item_of_a_plan_and_once() {
    in_world(1, |world| async move {
        let probe = Probe::new();
        let running = Running::start(few_attempts(&world).transactional(probe.clone()).build().unwrap());
        world.send(Send::new("1", SICK)).await;
        dead(&world, "1").await;
        let plan = plan(&world, &["/test#1"]).await;
        probe.heal();
        replay(&world, Send::new("1", SICK), plan, 1).await;
        eventually_items(&world, plan, &["applied"]).await;
        assert_eq!(world.effect_keys().await, ["/test#1"]);
        assert_eq!(world.rows().await["/test#1"].0, "done");

        // A second copy, as a run sends it whose acknowledgement was not marked.
        replay(&world, Send::new("1", SICK), plan, 1).await;
        settled(&world, 2).await;
        assert_eq!(items(&world, plan).await, ["applied"], "the first word stands");
        assert_eq!(world.effect_keys().await, ["/test#1"]);
        running.stop().await.unwrap();
    });
}

#[test]
fn nothing_but_an_item_of_this_consumers_plan_and_of_this_key_runs_what_is_dead() {
    in_world(1, |world| async move {
        let probe = Probe::new();
        let running = start(&world, &probe);
        for id in ["1", "2"] {
            world.send(Send::new(id, "permanent").keyed(id)).await;
            dead(&world, id).await;
        }
        let calls = probe.calls().len();
        let plan = plan(&world, &["/test#2"]).await;
        sqlx::query("UPDATE inbox.replay_item SET consumer = 'another' WHERE item = 1")
            .execute(&world.pool)
            .await
            .unwrap();
        // No item, no such plan, another consumer's item; and then another key's.
        world.send_to(&replays(&world), Send::new("1", "permanent")).await;
        replay(&world, Send::new("1", "permanent"), Uuid::new_v4(), 1).await;
        replay(&world, Send::new("2", "permanent"), plan, 1).await;
        settled(&world, 3).await;
        sqlx::query("UPDATE inbox.replay_item SET consumer = 'billing' WHERE item = 1")
            .execute(&world.pool)
            .await
            .unwrap();
        replay(&world, Send::new("1", "permanent"), plan, 1).await;
        settled(&world, 4).await;
        assert_eq!(probe.calls().len(), calls, "nothing ran");
        assert_eq!(world.read(&world.dlt()).await.len(), 2, "and nothing died again");
        running.stop().await.unwrap();
    });
}

#[test]
fn a_replay_with_another_payload_is_a_conflict_and_the_dead_row_stands() {
    in_world(1, |world| async move {
        let probe = Probe::new();
        let running = start(&world, &probe);
        world.send(Send::new("1", "permanent")).await;
        dead(&world, "1").await;
        let plan = plan(&world, &["/test#1"]).await;
        replay(&world, Send::new("1", "pay 900"), plan, 1).await;
        eventually_items(&world, plan, &["conflict"]).await;
        assert_eq!(world.rows().await["/test#1"].1.as_deref(), Some("permanent"));
        assert!(world.effect_keys().await.is_empty());
        running.stop().await.unwrap();
    });
}

#[test]
fn a_replay_that_fails_again_is_a_dead_letter_of_the_original_topic_and_says_where_it_came_from_first() {
    in_world(1, |world| async move {
        let probe = Probe::new();
        let running = start(&world, &probe);
        world.send(Send::new("1", "permanent")).await;
        dead(&world, "1").await;
        let plan = plan(&world, &["/test#1"]).await;
        replay(&world, Send::new("1", "permanent"), plan, 1).await;
        eventually_items(&world, plan, &["dead_again"]).await;
        let letters = world.eventually_letters(2).await;
        let letter = &letters[1];
        for (name, value) in [
            ("dlt-original-topic", world.topic.as_str()),
            ("dlt-original-partition", "0"),
            ("dlt-original-offset", "1001"),
            ("dlt-original-timestamp", "1769850300250"),
            ("dlt-first-failed-at", "2026-01-31T09:05:00.000Z"),
            ("replay-round", "1"),
            ("dlt-cause", "permanent"),
        ] {
            assert_eq!(header(letter, name).as_deref(), Some(value), "{name}");
        }
        assert_eq!(letter.payload(), Some(&b"permanent"[..]));

        // A second copy of that replay dies no third time.
        let calls = probe.calls().len();
        replay(&world, Send::new("1", "permanent"), plan, 1).await;
        settled(&world, 2).await;
        assert_eq!((world.read(&world.dlt()).await.len(), probe.calls().len()), (2, calls));
        running.stop().await.unwrap();
    });
}

#[test]
fn a_replay_that_fails_for_the_time_being_is_set_aside_and_applied_later() {
    in_world(1, |world| async move {
        let probe = Probe::new();
        let running = Running::start(few_attempts(&world).transactional(probe.clone()).build().unwrap());
        world.send(Send::new("1", SICK)).await;
        dead(&world, "1").await;
        running.stop().await.unwrap();
        let plan = plan(&world, &["/test#1"]).await;
        let builder = world.builder().park_after(Duration::from_millis(100));
        let running = Running::start(builder.transactional(probe.clone()).build().unwrap());
        replay(&world, Send::new("1", SICK), plan, 1).await;
        world.eventually_parked(&[("/test#1", "retrying")]).await;
        settled(&world, 1).await;
        assert_eq!(items(&world, plan).await, ["sent"]);
        probe.heal();
        eventually_items(&world, plan, &["applied"]).await;
        world.eventually_parked(&[]).await;
        assert_eq!(world.effect_keys().await, ["/test#1"]);
        running.stop().await.unwrap();
    });
}

#[test]
fn what_a_run_sent_before_it_was_killed_counts_also_where_the_next_run_has_given_the_item_back() {
    in_world(1, |world| async move {
        let probe = Probe::new();
        let running = Running::start(few_attempts(&world).transactional(probe.clone()).build().unwrap());
        world.send(Send::new("1", SICK)).await;
        dead(&world, "1").await;
        let plan = plan(&world, &["/test#1"]).await;
        sqlx::query("UPDATE inbox.replay_item SET state = 'waiting', sent_at = NULL, generation = 2")
            .execute(&world.pool)
            .await
            .unwrap();
        probe.heal();
        replay(&world, Send::new("1", SICK), plan, 1).await;
        eventually_items(&world, plan, &["applied"]).await;
        assert_eq!(world.effect_keys().await, ["/test#1"]);
        running.stop().await.unwrap();
    });
}

#[test]
fn what_is_held_up_behind_a_dead_record_goes_on_when_its_replay_is_applied() {
    for to_original in [false, true] {
        in_world(1, |world| async move {
            let probe = Probe::new();
            let builder = few_attempts(&world).after_dead_letter(AfterDeadLetter::Block);
            let running = Running::start(builder.transactional(probe.clone()).build().unwrap());
            world.send(Send::new("1", SICK)).await;
            world.send(Send::new("2", "pay")).await;
            world.eventually_parked(&[("/test#1", "dead"), ("/test#2", "blocked")]).await;
            // It dies again, which holds up no more than it did.
            let first = plan(&world, &["/test#1"]).await;
            replay_on(&world, first, to_original).await;
            eventually_items(&world, first, &["dead_again"]).await;
            assert!(world.effect_keys().await.is_empty());
            // A second copy of it, and then a message that must not overtake those two.
            if to_original {
                replay_on(&world, first, to_original).await;
                world.send(Send::new("3", "pay")).await;
                // It died again on its own topic, behind what it holds up.
                let rows = [("1", "dead"), ("2", "blocked"), ("1", "dead"), ("3", "blocked")];
                let rows = rows.map(|(id, state)| (format!("/test#{id}"), state));
                let rows: Vec<(&str, &str)> =
                    rows.iter().map(|(key, state)| (key.as_str(), *state)).collect();
                world.eventually_parked(&rows).await;
                assert!(world.effect_keys().await.is_empty());
            }

            probe.heal();
            let second = plan(&world, &["/test#1"]).await;
            replay_on(&world, second, to_original).await;
            eventually_items(&world, second, &["applied"]).await;
            let all = ["/test#1", "/test#2", "/test#3"];
            let expected = if to_original { &all[..] } else { &all[..2] };
            assert_eq!(world.eventually_effects(expected.len()).await, expected);
            world.eventually_parked(&[]).await;
            running.stop().await.unwrap();
        });
    }
}

async fn replay_on(world: &World, plan: Uuid, to_original: bool) {
    if !to_original {
        return replay(world, Send::new("1", SICK), plan, 1).await;
    }
    let plan = plan.to_string();
    let mut record = Send::new("1", SICK);
    record.headers.push(("replay-plan", Some(plan.as_bytes())));
    record.headers.push(("replay-item", Some(b"1")));
    world.send(record).await;
}

#[test]
fn a_batch_handler_gets_each_replay_alone() {
    in_world(1, |world| async move {
        let (ids, sheets) = (["1", "2", "3"], Sheets::default());
        let start = || {
            let builder = few_attempts(&world).batched(NonZeroUsize::new(10).unwrap(), sheets.clone());
            Running::start(builder.build().unwrap())
        };
        let running = start();
        for id in ids {
            world.send(Send::new(id, SICK).keyed(id)).await;
            dead(&world, id).await;
        }
        running.stop().await.unwrap();
        let plan = plan(&world, &["/test#1", "/test#2", "/test#3"]).await;
        for (item, id) in (1..).zip(ids) {
            replay(&world, Send::new(id, SICK).keyed(id), plan, item).await;
        }
        sheets.heal();
        let before = sheets.sizes().len();
        let running = start();
        eventually_items(&world, plan, &["applied", "applied", "applied"]).await;
        assert_eq!(sheets.sizes()[before..], [1, 1, 1]);
        running.stop().await.unwrap();
    });
}

#[test]
fn a_handler_is_told_the_topic_that_a_replayed_message_belongs_to() {
    in_world(1, |world| async move {
        let probe = Probe::new();
        let running = start(&world, &probe);
        eventually("the replay topic is assigned", || async {
            if logged(&[&replays(&world), "assigned"]).is_empty() { Err(String::new()) } else { Ok(()) }
        })
        .await;
        let plan = plan(&world, &["/test#1"]).await;
        replay(&world, Send::new("1", "pay"), plan, 1).await;
        eventually_items(&world, plan, &["applied"]).await;
        let scope: String =
            sqlx::query_scalar("SELECT scope FROM inbox.message").fetch_one(&world.pool).await.unwrap();
        assert_eq!(scope, format!("{}/t", world.topic), "one scope, whichever way it comes");
        running.stop().await.unwrap();
    });
}

#[test]
fn a_row_whose_replay_is_planned_is_not_purged_until_that_is_settled() {
    in_world(1, |world| async move {
        sqlx::query(
            "INSERT INTO inbox.message (consumer, scope, key, fingerprint, state, record_time, created_at, finished_at)
             SELECT 'billing', '', key, 'v1:sha256:00', 'done', now() - '40 d'::interval, now() - '40 d'::interval, now() - '40 d'::interval
             FROM unnest(ARRAY['planned', 'settled']) key",
        )
        .execute(&world.pool)
        .await
        .unwrap();
        let plan = plan(&world, &["planned", "settled"]).await;
        let settle = "UPDATE inbox.replay_item SET state = 'duplicate', settled_at = now() WHERE plan = $1 AND idempotency_key = $2";
        sqlx::query(settle).bind(plan).bind("settled").execute(&world.pool).await.unwrap();
        let inbox = Inbox::new("billing", world.pool.clone()).unwrap();
        let purge = async || inbox.purge(Duration::from_secs(30 * 24 * 3600)).await.unwrap().rows;
        assert_eq!(purge().await, 1);
        assert_eq!(world.rows().await.into_keys().collect::<Vec<_>>(), ["planned"]);
        sqlx::query(settle).bind(plan).bind("planned").execute(&world.pool).await.unwrap();
        assert_eq!(purge().await, 1);
    });
}

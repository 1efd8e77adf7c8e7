//! What becomes of messages that are parked: their order, whoever owns the shard; their budget and their bound; what operators do.

use std::time::Duration;

use baton_tests::{
    Harness, Load, Outcome, OwnStack, Place, Schema, Site, eventually, fail, figure, program, stays, test,
};
use serde_json::{Value, json};
use sqlx::Executor as _;
use tokio::time::Instant;

use crate::refusals::{PATIENCE, arrive, insert, requeue, set_aside};
use crate::retention::slot_period;

/// Of the topic's records, the payloads in order, each once.
async fn firsts(site: &Site, topic: &str) -> Outcome<Vec<String>> {
    let mut seen: Vec<String> = Vec::new();
    for record in site.kafka().records(topic).await? {
        let payload: String = record.payload_text().unwrap_or("null").chars().take(12).collect();
        if !seen.contains(&payload) {
            seen.push(payload);
        }
    }
    Ok(seen)
}

async fn arrive_in_order(site: &Site, topic: &str, expected: &[&str]) -> Outcome {
    eventually(format!("{expected:?}"), PATIENCE, async || {
        let seen = firsts(site, topic).await?;
        if seen == expected { Ok(()) } else { fail!("{seen:?}") }
    })
    .await
}

/// A topic of one partition that takes 1,000 bytes, and a message for it that is larger.
async fn small(site: &Site) -> Outcome<(String, String)> {
    let topic = site.topic_with("small", 1, &[("max.message.bytes", "1000")]).await?;
    Ok((topic, format!("large {}", "x".repeat(2_000))))
}

async fn widen(site: &Site, topic: &str) -> Outcome {
    site.kafka().set_topic(topic, &[("max.message.bytes", "1000000")]).await
}

#[test]
fn late_rows_of_a_parked_key_join_its_queue_behind_it() {
    test(Duration::from_secs(120), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        let (topic, large) = small(&site).await?;
        let mut early = site.pool().begin().await?;
        sqlx::query("INSERT INTO outbox.message (topic, key, payload) VALUES ($1, 'k', 'late')")
            .bind(&topic)
            .execute(&mut *early)
            .await?;
        insert(&site, &topic, Some("k"), &large).await?;
        let _relay = site.relay("relay")?.start()?;
        let first = "large xxxxxx dead too_large";
        eventually("the large one to be dead", PATIENCE, async || set_aside(&site, &[first]).await).await?;
        early.commit().await?;
        insert(&site, &topic, Some("k"), "last").await?;
        let queue = [first, "late blocked -", "last blocked -"];
        eventually("the queue", PATIENCE, async || set_aside(&site, &queue).await).await?;
        let positions: Vec<i64> = sqlx::query_scalar("SELECT position FROM outbox.parked ORDER BY place")
            .fetch_all(site.pool())
            .await?;
        assert!(positions[1] < positions[0], "it is not late: {positions:?}");
        widen(&site, &topic).await?;
        requeue(&site, &["--topic", &topic]).await?;
        arrive_in_order(&site, &topic, &["large xxxxxx", "late", "last"]).await
    });
}

#[test]
fn a_key_stays_parked_across_a_kill_a_takeover_and_a_restart_and_nothing_overtakes() {
    test(Duration::from_secs(120), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        let (topic, large) = small(&site).await?;
        insert(&site, &topic, Some("k"), &large).await?;
        let mut first = site.relay("first")?.start()?;
        let queue = ["large xxxxxx dead too_large", "1 blocked -", "2 blocked -", "3 blocked -"];
        eventually("it to be dead", PATIENCE, async || set_aside(&site, &queue[..1]).await).await?;
        first.kill().await?;
        insert(&site, &topic, Some("k"), "1").await?;
        let second = site.relay("second")?.start()?;
        eventually("the queue of the second", PATIENCE, async || set_aside(&site, &queue[..2]).await).await?;
        insert(&site, &topic, Some("k"), "2").await?;
        eventually("its next", PATIENCE, async || set_aside(&site, &queue[..3]).await).await?;
        drop(second);
        insert(&site, &topic, Some("k"), "3").await?;
        let _third = site.relay("second")?.start()?;
        eventually("the queue of the third", PATIENCE, async || set_aside(&site, &queue).await).await?;
        insert(&site, &topic, Some("other"), "flows").await?;
        arrive_in_order(&site, &topic, &["flows"]).await?;
        widen(&site, &topic).await?;
        requeue(&site, &["--key", "k"]).await?;
        arrive_in_order(&site, &topic, &["flows", "large xxxxxx", "1", "2", "3"]).await
    });
}

#[test]
fn what_may_pass_is_dead_once_its_budget_is_spent_and_a_requeue_gives_it_a_new_one() {
    test(Duration::from_secs(120), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        let missing = site.topic_name("missing");
        insert(&site, &missing, Some("k"), "one").await?;
        let relay = site.relay("relay")?.env("BATON_PARK__ATTEMPTS", "3").env("BATON_PARK__BASE", "10ms");
        let _relay = relay.env("BATON_PARK__CAP", "20ms").start()?;
        let attempts = async |attempts: i32| -> Outcome {
            let dead = ["one dead unknown_topic"];
            eventually("it to be dead", PATIENCE, async || {
                set_aside(&site, &dead).await?;
                let spent: i32 =
                    sqlx::query_scalar("SELECT attempts FROM outbox.parked").fetch_one(site.pool()).await?;
                if spent == attempts { Ok(()) } else { fail!("{spent} attempts") }
            })
            .await
        };
        attempts(3).await?;
        requeue(&site, &["--cause", "unknown_topic"]).await?;
        attempts(6).await?;
        site.topic("missing", 1).await?;
        requeue(&site, &["--key", "k"]).await?;
        arrive(&site, &missing, 1).await
    });
}

#[test]
fn a_shard_with_as_many_parked_as_it_may_have_stops_and_says_so_and_the_others_flow() {
    test(Duration::from_secs(120), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        let topic = site.topic("flows", 1).await?;
        let missing = site.topic_name("missing");
        let keys = site.key_of_each_shard().await?;
        for n in 0..8 {
            insert(&site, &missing, Some(&keys[3]), &n.to_string()).await?;
        }
        let relay = site.relay("relay")?.env("BATON_PARK__ROWS", "5").start()?;
        let status = eventually("the shard to stop", PATIENCE, async || {
            let status = status(&site).await?;
            if status["shards"][3]["stopped"]["position"] == 6 { Ok(status) } else { fail!("{status}") }
        })
        .await?;
        let error = status["shards"][3]["stopped"]["error"].as_str().unwrap_or_default();
        assert!(error.contains("5 messages parked") && error.contains("park.rows"), "{error}");
        assert_eq!(status["parked"]["blocked"], 4);
        assert!(relay.stderr().contains("there is no room for it"), "{}", relay.stderr());
        for key in &keys {
            insert(&site, &topic, Some(key), "x").await?;
        }
        arrive(&site, &topic, 7).await?;
        // --until-empty by another relay ends and names it.
        let ended = site.baton(&["relay", "--until-empty"])?.finish(PATIENCE).await?;
        assert_eq!(ended.status.code(), Some(1), "{ended}");
        assert!(ended.stderr.contains("as many messages parked as they may"), "{ended}");

        // Room is made, and it goes on by itself.
        let args = ["parked", "discard", "--topic", &missing, "--yes"];
        let said = site.baton(&args)?.finish(PATIENCE).await?.success()?;
        assert!(said.contains("discarded 5 messages"), "{said}");
        arrive(&site, &topic, 8).await?;
        let left = ["5 retrying unknown_topic", "6 blocked -", "7 blocked -"];
        eventually("the rest to be parked", PATIENCE, async || set_aside(&site, &left).await).await
    });
}

#[test]
fn a_discarded_message_lets_the_next_of_its_key_go_and_every_change_is_in_the_audit_table() {
    test(Duration::from_secs(120), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        let (topic, large) = small(&site).await?;
        insert(&site, &topic, Some("k"), &large).await?;
        insert(&site, &topic, Some("k"), "next").await?;
        insert(&site, &topic, None, &large).await?;
        insert(&site, &topic, None, "no key").await?;
        let _relay = site.relay("relay")?.start()?;
        arrive_in_order(&site, &topic, &["no key"]).await?;
        let counts = async || -> Outcome<i64> {
            Ok(sqlx::query_scalar("SELECT count(*) FROM outbox.parked WHERE state IN ('dead', 'blocked')")
                .fetch_one(site.pool())
                .await?)
        };
        eventually("three to be parked", PATIENCE, async || {
            let count = counts().await?;
            if count == 3 { Ok(()) } else { fail!("{count}") }
        })
        .await?;
        // Neither without a filter, nor without --yes.
        let all = site.baton(&["parked", "discard", "--yes"])?.finish(PATIENCE).await?;
        assert_eq!(all.status.code(), Some(2), "{all}");
        let asked =
            site.baton(&["parked", "discard", "--state", "dead"])?.finish(PATIENCE).await?.success()?;
        assert!(
            asked.contains("2 dead (too_large)") && asked.contains("nothing has been changed"),
            "{asked}"
        );
        assert_eq!(counts().await?, 3);

        let done = ["parked", "discard", "--state", "dead", "--yes"];
        site.baton(&done)?.finish(PATIENCE).await?.success()?;
        arrive_in_order(&site, &topic, &["no key", "next"]).await?;
        // And the key flows again.
        insert(&site, &topic, Some("k"), "more").await?;
        arrive_in_order(&site, &topic, &["no key", "next", "more"]).await?;
        let audit = site.baton(&["audit", "--json"])?.finish(PATIENCE).await?.success()?;
        let audit: Value = serde_json::from_str(&audit)?;
        assert_eq!(audit[0]["command"], "parked discard");
        assert_eq!(audit[0]["affected"], 2);
        assert_eq!(audit[0]["arguments"], json!({"state": "dead"}));
        Ok(())
    });
}

#[test]
fn of_a_parked_message_one_can_ask_which_transition_stopped_under_which_generation_and_why() {
    test(Duration::from_secs(60), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        let (topic, large) = small(&site).await?;
        insert(&site, &topic, Some("k"), &large).await?;
        insert(&site, &topic, Some("k"), "next").await?;
        let relay = site.relay("relay")?.start()?;
        let queue = ["large xxxxxx dead too_large", "next blocked -"];
        eventually("the queue", PATIENCE, async || set_aside(&site, &queue).await).await?;
        let listed = site.baton(&["parked", "list", "--json"])?.finish(PATIENCE).await?.success()?;
        let listed: Value = serde_json::from_str(&listed)?;
        let (dead, blocked) = (&listed[0], &listed[1]);
        for (member, expected) in [
            ("topic", json!(topic)),
            ("key", json!("k")),
            ("state", json!("dead")),
            ("cause", json!("too_large")),
            ("attempts", json!(1)),
            ("generation", json!(1)),
            ("can_run_again", json!(true)),
            ("transition", json!("retrying → published")),
            ("next_attempt_at", json!(null)),
        ] {
            assert_eq!(dead[member], expected, "{member}: {dead}");
        }
        for member in ["id", "error", "first_failed_at", "last_failed_at"] {
            assert!(dead[member].is_string(), "{member}: {dead}");
        }
        assert!(dead["position"].is_number(), "{dead}");
        assert_eq!(blocked["behind"], dead["id"], "{blocked}");
        assert_eq!((&blocked["can_run_again"], &blocked["cause"]), (&json!(false), &json!(null)));
        let id = dead["id"].as_str().unwrap_or_default();
        let shown = site.baton(&["parked", "show", id])?.finish(PATIENCE).await?.success()?;
        for words in
            [id, "retrying → published, under generation 1", "too_large: ", "can run again: yes", "to do: "]
        {
            assert!(shown.contains(words), "{words:?} is missing: {shown}");
        }
        let words = site.baton(&["status"])?.finish(PATIENCE).await?.success()?;
        assert!(words.contains("parked: 0 retrying, 1 blocked, 1 dead, 0 paused, the oldest for"), "{words}");
        assert!(words.contains("causes: 1 too_large"), "{words}");
        drop(relay);
        // A relay that ends by itself says how many it leaves.
        let ended = site.baton(&["relay", "--until-empty"])?.finish(PATIENCE).await?;
        assert_eq!(ended.status.code(), Some(1), "{ended}");
        assert!(ended.stderr.contains("1 messages are parked and 1 are dead"), "{ended}");
        Ok(())
    });
}

#[test]
fn a_paused_topic_waits_in_order_counts_towards_no_bound_spends_nothing_and_goes_on_when_resumed() {
    test(Duration::from_secs(120), Load::Light, async |harness: &mut Harness| {
        let site = harness.site_at(&Place::shared()?, Schema::Both { shards: 1 }).await?;
        let (paused, open) = (site.topic("paused", 1).await?, site.topic("open", 1).await?);
        let pause = async |command: &str| -> Outcome<String> {
            site.baton(&[command, "--topic", &paused])?.finish(PATIENCE).await?.success()
        };
        assert!(pause("pause").await?.contains("relays notice"));
        assert!(pause("pause").await?.contains("already"));
        let relay = site.relay("relay")?.env("BATON_PARK__ROWS", "3").start()?;
        for n in 0..10 {
            insert(&site, &paused, Some(["a", "b"][n % 2]), &n.to_string()).await?;
            insert(&site, &open, Some("a"), &n.to_string()).await?;
        }
        arrive(&site, &open, 10).await?;
        let waiting: Vec<String> =
            (0..10).map(|n| format!("{n} {} paused", if n < 2 { "paused" } else { "blocked" })).collect();
        let waiting: Vec<&str> = waiting.iter().map(String::as_str).collect();
        eventually("all of it to wait", PATIENCE, async || set_aside(&site, &waiting).await).await?;
        stays("the pause", Duration::from_secs(2), async || {
            let seen = site.kafka().count(&paused).await?;
            if seen == 0 { Ok(()) } else { fail!("{seen} records") }
        })
        .await?;
        let status = status(&site).await?;
        assert_eq!(status["parked"]["paused_topics"], json!([paused]), "{status}");
        // Also across a restart.
        drop(relay);
        let _relay = site.relay("relay")?.env("BATON_PARK__ROWS", "3").start()?;
        insert(&site, &paused, Some("a"), "10").await?;
        insert(&site, &open, Some("a"), "10").await?;
        arrive(&site, &open, 11).await?;
        assert!(pause("resume").await?.contains("1"));
        eventually("everything, in the order of its keys", PATIENCE, async || {
            let records = site.kafka().records(&paused).await?;
            for (key, expected) in
                [("a", ["0", "2", "4", "6", "8", "10"].as_slice()), ("b", &["1", "3", "5", "7", "9"])]
            {
                let of_key = records.iter().filter(|record| record.key_text() == Some(key));
                let seen: Vec<_> = of_key.filter_map(|record| record.payload_text()).collect();
                if seen != expected {
                    fail!("{key}: {seen:?}");
                }
            }
            Ok(())
        })
        .await?;
        assert!(pause("resume").await?.contains("was not paused"));
        insert(&site, &paused, Some("a"), "11").await?;
        arrive(&site, &paused, 12).await
    });
}

/// By default the broker is away for 20 s; `BATON_TIER=full` has 120.
#[test]
fn a_broker_that_is_away_under_load_parks_nothing_spends_nothing_and_makes_no_dead_letter() {
    const KEYS: i32 = 50;
    let full = std::env::var("BATON_TIER").is_ok_and(|tier| tier == "full");
    let away = Duration::from_secs(if full { 120 } else { 20 });
    test(Duration::from_secs(420), Load::Alone, async |harness: &mut Harness| {
        let stack = OwnStack::up().await?;
        let site = harness.site_at(stack.place(), Schema::Both { shards: 8 }).await?;
        let topic = site.topic("away", 3).await?;
        let missing = site.topic_name("missing");
        site.pool()
            .execute(
                "CREATE TABLE effect (n bigint GENERATED ALWAYS AS IDENTITY, key text, content bytea, partition int)",
            )
            .await?;
        let mut filled = 0;
        let mut fill = async |rows: i32| -> Outcome {
            sqlx::query(
                "INSERT INTO outbox.message (topic, key, payload)
                 SELECT $1, 'key-' || i % $4, convert_to(i::text, 'UTF8') FROM generate_series($2, $2 + $3 - 1) i",
            )
            .bind(&topic)
            .bind(filled)
            .bind(rows)
            .bind(KEYS)
            .execute(site.pool())
            .await?;
            filled += rows;
            Ok(())
        };
        fill(1_000).await?;
        insert(&site, &missing, Some("k"), "waits").await?;
        let relay = site.relay("relay")?.env("BATON_PARK__CAP", "1s").env("BATON_PARK__ATTEMPTS", "1000");
        let _relay = relay.start()?;
        let group = site.topic_name("group");
        let _consumer =
            site.launch("consumer", program("effect_consumer")?).args([&topic, &group]).start()?;
        arrive(&site, &topic, 1000).await?;
        let one = ["waits retrying unknown_topic"];
        eventually("one to be parked", PATIENCE, async || set_aside(&site, &one).await).await?;
        stack.kill_broker().await?;
        let spent = async || -> Outcome<i32> {
            Ok(sqlx::query_scalar("SELECT attempts FROM outbox.parked").fetch_one(site.pool()).await?)
        };
        fill(1_000).await?;
        insert(&site, &missing, Some("other"), "comes too").await?;
        // What was under way when the broker went may still be written down.
        baton_tests::lasts("what was under way", Duration::from_secs(3)).await;
        let (before, began) = (spent().await?, Instant::now());
        while began.elapsed() < away {
            fill(100).await?;
            stays("nothing parked and nothing spent", Duration::from_secs(1), async || {
                set_aside(&site, &one).await?;
                let now = spent().await?;
                if now == before { Ok(()) } else { fail!("{before}, now {now}") }
            })
            .await?;
        }
        stack.repair().await?;
        fill(100).await?;
        let all = usize::try_from(filled)?;
        eventually("everything", Duration::from_secs(90), async || {
            let seen = firsts(&site, &topic).await?.len();
            if seen == all { Ok(()) } else { fail!("{seen} of {all}") }
        })
        .await?;
        eventually("every effect", Duration::from_secs(90), async || {
            let count: i64 = sqlx::query_scalar("SELECT count(*) FROM effect").fetch_one(site.pool()).await?;
            if count == i64::from(filled) { Ok(()) } else { fail!("{count} of {filled}") }
        })
        .await?;
        let late: i64 = sqlx::query_scalar(
            "SELECT count(*) FROM (SELECT content, lag(content) OVER (PARTITION BY content % $1 ORDER BY n) AS before
                 FROM (SELECT n, convert_from(content, 'UTF8')::int AS content FROM effect) e) e
             WHERE content <= before",
        )
        .bind(KEYS)
        .fetch_one(site.pool())
        .await?;
        let of_topic: i64 = sqlx::query_scalar("SELECT count(*) FROM outbox.parked WHERE topic = $1")
            .bind(&topic)
            .fetch_one(site.pool())
            .await?;
        let letters = site.kafka().count(&format!("{topic}.effects.dlt")).await?;
        assert_eq!((late, of_topic, letters), (0, 0, 0));
        figure(&format!(
            "must show 3: the broker was away for {} s under load: 0 of {filled} parked, 0 dead, 0 out of order, each in effect once",
            away.as_secs()
        ));
        Ok(())
    });
}

#[test]
fn an_operator_who_discards_and_requeues_while_a_relay_tries_loses_no_order() {
    test(Duration::from_secs(120), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        let missing = site.topic_name("missing");
        for n in 0..200 {
            insert(&site, &missing, Some("k"), &n.to_string()).await?;
        }
        let _relay =
            site.relay("relay")?.env("BATON_PARK__CAP", "50ms").env("BATON_PARK__BASE", "10ms").start()?;
        eventually("all of it to be parked", PATIENCE, async || {
            let parked: i64 =
                sqlx::query_scalar("SELECT count(*) FROM outbox.parked").fetch_one(site.pool()).await?;
            if parked == 200 { Ok(()) } else { fail!("{parked}") }
        })
        .await?;
        for _ in 0..10 {
            requeue(&site, &["--topic", &missing]).await?;
            site.pool()
                .execute(
                    "UPDATE outbox.parked SET state = 'discarded', next_attempt_at = NULL, settled_at = now()
                     WHERE place = (SELECT min(place) FROM outbox.parked WHERE state IN ('retrying', 'dead'))",
                )
                .await?;
        }
        site.topic("missing", 1).await?;
        requeue(&site, &["--topic", &missing]).await.ok();
        eventually("the rest, in order", PATIENCE, async || {
            let seen: Vec<i64> =
                firsts(&site, &missing).await?.iter().filter_map(|payload| payload.parse().ok()).collect();
            if seen.last() == Some(&199) && seen.is_sorted() && seen.len() >= 190 {
                Ok(())
            } else {
                requeue(&site, &["--topic", &missing]).await.ok();
                fail!("{seen:?}")
            }
        })
        .await
    });
}

#[test]
fn an_operator_who_holds_a_parked_message_locked_holds_up_no_cursor_and_costs_no_lease() {
    test(Duration::from_secs(120), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        let (good, missing) = (site.topic("good", 1).await?, site.topic_name("missing"));
        insert(&site, &missing, Some("k"), "waits").await?;
        let relay = site.relay("relay")?.env("BATON_PARK__CAP", "50ms").env("BATON_PARK__BASE", "10ms");
        let relay = relay.env("BATON_PARK__ATTEMPTS", "100000").start()?;
        let one = ["waits retrying unknown_topic"];
        eventually("it to be parked", PATIENCE, async || set_aside(&site, &one).await).await?;
        let generations = async || -> Outcome<Vec<i64>> {
            let asked = sqlx::query_scalar("SELECT generation FROM outbox.fence ORDER BY shard");
            Ok(asked.fetch_all(site.pool()).await?)
        };
        let before = generations().await?;
        let mut operator = site.pool().begin().await?;
        sqlx::query("SELECT FROM outbox.parked FOR UPDATE").execute(&mut *operator).await?;
        let keys = site.key_of_each_shard().await?;
        for round in 0..5 {
            baton_tests::lasts("an attempt to be settled", Duration::from_millis(400)).await;
            for key in &keys {
                insert(&site, &good, Some(key), &round.to_string()).await?;
            }
            eventually("every cursor to move", Duration::from_secs(5), async || {
                match site.pending().await? {
                    0 => Ok(()),
                    pending => fail!("{pending} wait"),
                }
            })
            .await?;
        }
        operator.rollback().await?;
        site.topic("missing", 1).await?;
        arrive_in_order(&site, &missing, &["waits"]).await?;
        assert_eq!(generations().await?, before, "{}", relay.stderr());
        Ok(())
    });
}

#[test]
fn what_is_dead_for_long_is_given_up_where_that_is_set_and_what_is_settled_goes_after_a_while() {
    test(Duration::from_secs(120), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        slot_period(&site, Duration::from_secs(1)).await?;
        let (topic, large) = small(&site).await?;
        insert(&site, &topic, Some("k"), &large).await?;
        insert(&site, &topic, Some("k"), "behind").await?;
        let dead = ["large xxxxxx dead too_large", "behind blocked -"];
        {
            // By default for ever.
            let _relay = site.relay("relay")?.env("BATON_PARK__KEEP", "1s").start()?;
            eventually("it to be dead", PATIENCE, async || set_aside(&site, &dead).await).await?;
            stays("what is dead", Duration::from_secs(3), async || set_aside(&site, &dead).await).await?;
        }
        let kept = site.relay("relay")?.env("BATON_PARK__DEAD_FOR", "1s").start()?;
        arrive_in_order(&site, &topic, &["behind"]).await?;
        let written: Vec<(String, Value, i64)> = sqlx::query_as(
            "SELECT command, arguments, affected FROM outbox.audit WHERE command LIKE 'parked%'",
        )
        .fetch_all(site.pool())
        .await?;
        assert_eq!(written, [("parked expire".to_owned(), json!({"dead_for_seconds": 1}), 1)]);
        let rows = async |many: i64| -> Outcome {
            let found: i64 =
                sqlx::query_scalar("SELECT count(*) FROM outbox.parked").fetch_one(site.pool()).await?;
            if found == many { Ok(()) } else { fail!("{found} rows, not {many}") }
        };
        stays("what is settled, for its seven days", Duration::from_secs(2), async || rows(2).await).await?;
        drop(kept);
        let _relay = site.relay("relay")?.env("BATON_PARK__KEEP", "1s").start()?;
        eventually("what is settled to be gone", PATIENCE, async || rows(0).await).await?;
        if firsts(&site, &topic).await? == ["behind"] { Ok(()) } else { fail!("it was published after all") }
    });
}

async fn status(site: &Site) -> Outcome<Value> {
    let printed = site.baton(&["status", "--json"])?.finish(PATIENCE).await?.success()?;
    Ok(serde_json::from_str(&printed)?)
}

//! `baton status`: the JSON is a public format.

use std::time::Duration;

use baton_tests::{Harness, Load, Outcome, Site, eventually, fail, test};
use serde_json::{Value, json};

const PATIENCE: Duration = Duration::from_secs(30);

#[test]
fn status_json_has_exactly_the_documented_members() {
    test(Duration::from_secs(60), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        let topic = site.topic("status", 1).await?;
        sqlx::query("INSERT INTO outbox.message (topic, key, payload) SELECT $1, i::text, 'x' FROM generate_series(1, 50) i")
            .bind(&topic)
            .execute(site.pool())
            .await?;
        let waiting = status(&site).await?;
        assert_eq!(shape(&waiting), documented("number", "null", "null"));
        assert_eq!(waiting["pending"], json!({"count": 50, "exact": true}));
        assert_eq!(waiting["relays"], json!([]));
        let lag: i64 = shards(&waiting).map(|shard| shard["lag_messages"].as_i64().unwrap_or(0)).sum();
        assert_eq!(lag, 50);

        let relay = site.relay("the-relay")?.start()?;
        let held = eventually("a relay that holds all and nothing that waits", PATIENCE, async || {
            let status = status(&site).await?;
            let all = shards(&status).all(|shard| shard["owner"] == "the-relay");
            if all && status["pending"]["count"] == 0 { Ok(status) } else { fail!("{status}") }
        })
        .await?;
        assert_eq!(shape(&held), documented("null", "string", "number"));
        assert_eq!(held["relays"], json!([{"owner": "the-relay", "shards": [0, 1, 2, 3, 4, 5, 6, 7]}]));
        for shard in shards(&held) {
            assert!(shard["generation"].as_i64() == Some(1) && shard["lag_messages"] == 0, "{shard}");
            let left = shard["lease_left_seconds"].as_f64().unwrap_or(-1.0);
            assert!((0.0..=3.0).contains(&left), "{shard}");
        }

        // Killed, its leases run out: that is seen, apart from released ones.
        drop(relay);
        eventually("expired leases", PATIENCE, async || {
            let status = status(&site).await?;
            if status["expired_leases"] == 8 { Ok(()) } else { fail!("{status}") }
        })
        .await?;
        let words = site.baton(&["status"])?.finish(PATIENCE).await?.success()?;
        let mut lines = words.lines();
        let (first, second) = (lines.next().unwrap_or_default(), lines.next().unwrap_or_default());
        assert!(first.contains("oldest waiting message"), "the oldest age comes first: {words}");
        assert_eq!(second, "expired leases: 8", "{words}");
        // Of an expired lease: who held it, by which generation, and since when it is nobody's.
        let of_last_owner =
            words.lines().filter(|line| line.contains("the-relay") && line.contains("expired ")).count();
        assert_eq!(of_last_owner, 8, "{words}");
        let expired = status(&site).await?;
        for shard in shards(&expired) {
            assert!(shard["owner"] == "the-relay" && shard["generation"] == 1, "{shard}");
            assert!(shard["lease_left_seconds"].as_f64().is_some_and(|left| left < 0.0), "{shard}");
        }
        Ok(())
    });
}

#[test]
fn of_a_stopped_shard_status_says_which_transition_of_which_message_why_and_under_which_generation() {
    test(Duration::from_secs(120), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        let missing = site.topic_name("missing");
        let key = &site.key_of_each_shard().await?[5];
        let id: String = sqlx::query_scalar(
            "WITH parked AS (INSERT INTO outbox.message (topic, key, payload) VALUES ($1, $2, 'parked') RETURNING position)
             INSERT INTO outbox.message (topic, key, payload) SELECT $1, $2, 'x' FROM parked RETURNING id::text",
        )
        .bind(&missing)
        .bind(key)
        .fetch_one(site.pool())
        .await?;
        let mut relay = site.relay("first")?.env("BATON_PARK__ROWS", "1").start()?;
        let stopped = stopped_after(&site, 3).await?;
        // Said at the first, at every doubling, and not each time.
        let said = |attempt: u32| {
            relay
                .stderr()
                .lines()
                .any(|line| line.contains("ERROR") && line.ends_with(&format!("attempts={attempt}")))
        };
        assert_eq!([1, 2, 3].map(said), [true, true, false], "{}", relay.stderr());
        assert_eq!(shape(&stopped), documented_stop());
        for (member, expected) in [
            ("transition", json!("pending → published")),
            ("id", json!(id)),
            ("topic", json!(missing)),
            ("key", json!(key)),
            ("cause", json!("unknown_topic")),
            ("advice", json!("create the topic")),
            ("generation", json!(1)),
            ("can_run_again", json!(true)),
        ] {
            assert_eq!(stopped[member], expected, "{member}");
        }
        let time = |member: &str| stopped[member].as_str().unwrap_or_default().to_owned();
        assert!(time("first_failed_at") < time("last_failed_at"), "{stopped}");
        assert!(time("last_failed_at") < time("next_attempt_at"), "{stopped}");
        assert!(time("first_failed_at").ends_with('Z'), "{stopped}");

        // The relay that stopped is gone, without a farewell: it is still known.
        relay.kill().await?;
        let (first_failed_at, attempts) = (time("first_failed_at"), attempts(&stopped));
        let words = site.baton(&["status"])?.finish(PATIENCE).await?.success()?;
        let first = words.lines().next().unwrap_or_default();
        assert!(first.starts_with("stopped shards: 1 of 8"), "what needs an operator comes first: {words}");
        for word in [&id, &missing, "pending → published", "unknown_topic", "generation 1", "park.rows"] {
            assert!(words.contains(word), "{word:?} is missing: {words}");
        }

        // The next owner goes on counting for the same message, under its own generation.
        let relay = site.relay("second")?.env("BATON_PARK__ROWS", "1").start()?;
        let stopped = stopped_after(&site, attempts + 1).await?;
        assert_eq!(stopped["id"], json!(id));
        assert_eq!(stopped["generation"], json!(2), "{stopped}");
        assert_eq!(stopped["first_failed_at"], json!(first_failed_at));

        // Mended, it flows, and nothing has to be taken away for status to say so.
        assert_eq!(site.topic("missing", 1).await?, missing);
        site.emptied().await?;
        eventually("a line that says that it flows again", PATIENCE, async || {
            let log = relay.stderr();
            if log.contains("the shard flows again") { Ok(()) } else { fail!("{log}") }
        })
        .await?;
        let flowing = status(&site).await?;
        assert!(shards(&flowing).all(|shard| shard["stopped"].is_null()), "{flowing}");
        drop(relay);
        Ok(())
    });
}

#[test]
fn another_message_that_stops_the_same_shard_is_counted_from_one() {
    test(Duration::from_secs(90), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        let key = &site.key_of_each_shard().await?[2];
        for label in ["parked", "one", "other"] {
            sqlx::query("INSERT INTO outbox.message (topic, key, payload) VALUES ($1, $2, 'x')")
                .bind(site.topic_name(label))
                .bind(key)
                .execute(site.pool())
                .await?;
        }
        let _relay = site.relay("relay")?.env("BATON_PARK__ROWS", "1").start()?;
        let stopped = stopped_after(&site, 2).await?;
        assert_eq!(stopped["topic"], json!(site.topic_name("one")));
        // An owner who takes the message away takes its stop away with it.
        sqlx::query("DELETE FROM outbox.message WHERE topic = $1")
            .bind(site.topic_name("one"))
            .execute(site.pool())
            .await?;
        let stopped = eventually("the other message to be the one", PATIENCE, async || {
            let stopped = stop(&site).await?;
            match &stopped {
                Some(stop) if stop["topic"] == json!(site.topic_name("other")) => Ok(stop.clone()),
                _ => fail!("{stopped:?}"),
            }
        })
        .await?;
        assert_eq!(stopped["attempts"], json!(1), "{stopped}");
        assert_eq!(stopped["first_failed_at"], stopped["last_failed_at"], "{stopped}");
        Ok(())
    });
}

#[test]
fn a_stop_is_told_in_the_words_of_how_often_it_was_refused_and_when_it_is_tried_again() {
    test(Duration::from_secs(60), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        sqlx::raw_sql(
            "INSERT INTO outbox.message (topic, key) VALUES ('nowhere', 'k');
             UPDATE outbox.shard SET owner = 'a', lease_until = now() + interval '1 min';
             INSERT INTO outbox.stopped (shard, position, xid, id, topic, key, cause, error, attempts, generation,
                                         first_failed_at, last_failed_at, next_attempt_at)
             SELECT shard, position, xid, id, topic, key, 'unknown_topic', 'e', 1, 1, now(), now(), now() + interval '1 h'
             FROM outbox.message",
        )
        .execute(site.pool())
        .await?;
        let told = async || site.baton(&["status"])?.finish(PATIENCE).await?.success();
        let once = told().await?;
        assert!(once.contains("refused 1 time in") && once.contains("it is tried again at 2"), "{once}");
        sqlx::query("UPDATE outbox.stopped SET attempts = 2, next_attempt_at = now() - interval '1 s'")
            .execute(site.pool())
            .await?;
        let twice = told().await?;
        assert!(twice.contains("refused 2 times in"), "{twice}");
        assert!(twice.contains("another try is due since 2"), "{twice}");
        assert!(!twice.contains("it is tried again at"), "{twice}");
        Ok(())
    });
}

/// What stops the one shard that is stopped.
async fn stop(site: &Site) -> Outcome<Option<Value>> {
    let status = status(site).await?;
    let mut stopped = shards(&status).map(|shard| &shard["stopped"]).filter(|stopped| !stopped.is_null());
    Ok(stopped.next().cloned())
}

/// The same, once it was tried so often.
async fn stopped_after(site: &Site, attempts_at_least: i64) -> Outcome<Value> {
    eventually("a stopped shard in status", PATIENCE, async || match stop(site).await? {
        Some(stopped) if attempts(&stopped) >= attempts_at_least => Ok(stopped),
        other => fail!("{other:?}"),
    })
    .await
}

fn attempts(stopped: &Value) -> i64 {
    stopped["attempts"].as_i64().unwrap_or_default()
}

/// The shape of a stop: a public format.
fn documented_stop() -> Value {
    json!({
        "transition": "string", "id": "string", "position": "number", "topic": "string", "key": "string",
        "cause": "string", "error": "string", "advice": "string", "generation": "number", "attempts": "number",
        "first_failed_at": "string", "last_failed_at": "string", "next_attempt_at": "string",
        "age_seconds": "number", "can_run_again": "bool",
    })
}

async fn status(site: &Site) -> Outcome<Value> {
    let printed = site.baton(&["status", "--json"])?.finish(PATIENCE).await?.success()?;
    Ok(serde_json::from_str(&printed)?)
}

fn shards(status: &Value) -> impl Iterator<Item = &Value> {
    status["shards"].as_array().into_iter().flatten()
}

/// surface.md's shape for an outbox of eight shards; the three kinds of value that depend on its state are given.
fn documented(age: &str, owner: &str, lease: &str) -> Value {
    let shard = json!({
        "shard": "number", "owner": owner, "generation": "number", "lease_left_seconds": lease,
        "cursor": {"position": "number", "snapshot": "string", "ceiling": "string", "late": "null"},
        "lag_messages": "number", "lag_seconds": age, "stopped": "null",
    });
    json!({
        "oldest_pending_age_seconds": age,
        "expired_leases": "number",
        "pending": {"count": "number", "exact": "bool"},
        "parked": {
            "retrying": "number", "blocked": "number", "dead": "number", "paused": "number", "oldest_age_seconds": "null",
            "by_cause": {}, "paused_topics": [],
        },
        "relays": "array",
        "shards": vec![shard; 8],
        "leaves": "array",
        "guards": "array",
    })
}

/// The same document with each value replaced by its kind.
fn shape(value: &Value) -> Value {
    match value {
        Value::Object(members) => members
            .iter()
            .map(|(name, value)| {
                (
                    name.clone(),
                    if ["relays", "leaves", "guards"].contains(&name.as_str()) {
                        json!("array")
                    } else {
                        shape(value)
                    },
                )
            })
            .collect(),
        Value::Array(items) => items.iter().map(shape).collect(),
        Value::Null => json!("null"),
        Value::Bool(_) => json!("bool"),
        Value::Number(_) => json!("number"),
        Value::String(_) => json!("string"),
    }
}

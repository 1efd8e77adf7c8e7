//! What Kafka refuses for its own sake parks its topic and key, in order, and holds up nothing else; once the cause is mended all
//! of it arrives in order. `parking` shows what becomes of it meanwhile.

use std::time::Duration;

use baton_tests::{
    Harness, Load, Outcome, Place, Record, Schema, Site, eventually, fail, kafka_tool, stays, test,
};

pub(crate) const PATIENCE: Duration = Duration::from_secs(40);

#[test]
fn a_topic_that_does_not_exist_parks_its_keys_in_order_and_everything_else_flows() {
    test(Duration::from_secs(120), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        let topic = site.topic("there", 1).await?;
        let missing = site.topic_name("missing");
        let keys = site.key_of_each_shard().await?;
        for round in 0..3 {
            insert(&site, &missing, Some(&keys[3]), &format!("lost {round}")).await?;
            for key in &keys {
                insert(&site, &topic, Some(key), &format!("{key} {round}")).await?;
            }
        }
        let relay = site.relay("relay")?.start()?;
        // The key's messages for another topic flow as well.
        arrive(&site, &topic, 24).await?;
        let waiting = ["lost 0 retrying unknown_topic", "lost 1 blocked -", "lost 2 blocked -"];
        eventually("the three to be parked", PATIENCE, async || set_aside(&site, &waiting).await).await?;
        assert!(
            relay.stderr().contains("does not exist; create the topic"),
            "it is said what to do: {}",
            relay.stderr()
        );
        assert_eq!(site.topic("missing", 1).await?, missing);
        // By itself: the cause may pass.
        eventually("the parked messages", PATIENCE, async || {
            let seen = payloads(&site.kafka().records(&missing).await?);
            if seen == ["lost 0", "lost 1", "lost 2"] { Ok(()) } else { fail!("{seen:?}") }
        })
        .await?;
        eventually("nothing to be parked", PATIENCE, async || set_aside(&site, &[]).await).await?;
        // From then on its messages take the short way.
        insert(&site, &missing, Some(&keys[3]), "found").await?;
        arrive(&site, &missing, 4).await?;
        let all: i64 =
            sqlx::query_scalar("SELECT count(*) FROM outbox.parked").fetch_one(site.pool()).await?;
        assert_eq!(all, 3);
        Ok(())
    });
}

#[test]
fn a_message_larger_than_its_topic_takes_is_dead_and_named_and_what_follows_of_its_key_waits() {
    test(Duration::from_secs(120), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        let topic = site.topic_with("small", 1, &[("max.message.bytes", "10000")]).await?;
        let keys = site.key_of_each_shard().await?;
        let large = "x".repeat(30_000);
        for (key, payload) in [
            (&keys[0], "1"),
            (&keys[1], "2"),
            (&keys[2], large.as_str()),
            (&keys[2], "after the large one"),
            (&keys[4], "4"),
            (&keys[5], "5"),
        ] {
            insert(&site, &topic, Some(key), payload).await?;
        }
        let _relay = site.relay("relay")?.start()?;
        eventually("the others' messages", PATIENCE, async || {
            let seen = payloads(&site.kafka().records(&topic).await?);
            if seen == ["1", "2", "4", "5"] { Ok(()) } else { fail!("{seen:?}") }
        })
        .await?;
        let waiting = ["xxxxxxxxxxxx dead too_large", "after the la blocked -"];
        eventually("the two to be parked", PATIENCE, async || set_aside(&site, &waiting).await).await?;
        let error: String = sqlx::query_scalar("SELECT error FROM outbox.parked WHERE state = 'dead'")
            .fetch_one(site.pool())
            .await?;
        for words in ["the message has 30", "at most 10000 bytes"] {
            assert!(error.contains(words), "{words:?} is missing: {error}");
        }
        site.kafka().set_topic(&topic, &[("max.message.bytes", "100000")]).await?;
        requeue(&site, &["--state", "dead"]).await?;
        eventually("the two, in order", PATIENCE, async || {
            let records = site.kafka().records(&topic).await?;
            let of_key: Vec<_> =
                records.iter().filter(|record| record.key_text() == Some(&keys[2])).map(size).collect();
            if of_key == [30_000, 19] { Ok(()) } else { fail!("{of_key:?}") }
        })
        .await
    });
}

#[test]
fn a_message_larger_than_a_segment_of_its_topic_is_dead_and_named() {
    test(Duration::from_secs(60), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        let limits = [("segment.bytes", "1048576"), ("max.message.bytes", "3000000")];
        let topic = site.topic_with("segments", 1, &limits).await?;
        let key = &site.key_of_each_shard().await?[2];
        insert(&site, &topic, Some(key), &"x".repeat(2_000_000)).await?;
        insert(&site, &topic, Some("of another key"), "of another key").await?;
        let relay = site.relay("relay")?.start()?;
        let waiting = ["xxxxxxxxxxxx dead too_large"];
        eventually("it to be dead", PATIENCE, async || set_aside(&site, &waiting).await).await?;
        for words in ["ERROR", "the message has 2000", "segment.bytes"] {
            assert!(relay.stderr().contains(words), "{words}: {}", relay.stderr());
        }
        arrive(&site, &topic, 1).await
    });
}

#[test]
fn what_is_published_around_a_message_that_is_too_large_for_its_topic_is_a_prefix_then_everything() {
    test(Duration::from_secs(120), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        let topic = site.topic("one", 1).await?;
        sqlx::query(
            "INSERT INTO outbox.message (topic, key, payload)
             SELECT $1, key, convert_to(
                 i || ' ' || repeat('x', CASE WHEN key = 'A' AND i = 1500 THEN 2000000 ELSE i * 97 % 3700 END), 'UTF8')
             FROM generate_series(0, 2999) i, unnest(ARRAY['A', 'B']) key",
        )
        .bind(&topic)
        .execute(site.pool())
        .await?;
        let _relay = site.relay("relay")?.start()?;
        let firsts = async |key: &str| -> Outcome<Vec<i64>> {
            let mut firsts = Vec::new();
            for record in site.kafka().records(&topic).await? {
                let payload = record.payload_text().unwrap_or_default();
                let Some((number, _)) = payload.split_once(' ') else { fail!("{payload:.20}") };
                let number: i64 = number.parse()?;
                if record.key_text() == Some(key) && !firsts.contains(&number) {
                    firsts.push(number);
                }
            }
            Ok(firsts)
        };
        eventually("all of the other key, and all before it of its own", PATIENCE, async || {
            let (of_a, of_b) = (firsts("A").await?, firsts("B").await?);
            if of_a.iter().copied().eq(0..1500) && of_b.iter().copied().eq(0..3000) {
                Ok(())
            } else {
                fail!("{} and {} records", of_a.len(), of_b.len())
            }
        })
        .await?;
        site.emptied().await?;
        stays("nothing behind it", Duration::from_secs(2), async || {
            let seen = firsts("A").await?.len();
            if seen == 1500 { Ok(()) } else { fail!("{seen} records") }
        })
        .await?;
        site.kafka().set_topic(&topic, &[("max.message.bytes", "4000000")]).await?;
        requeue(&site, &["--key", "A"]).await?;
        eventually("everything in order", PATIENCE, async || {
            let seen = firsts("A").await?;
            if seen.iter().copied().eq(0..3000) { Ok(()) } else { fail!("{} records", seen.len()) }
        })
        .await
    });
}

#[test]
fn records_that_a_compacted_topic_refuses_are_told_from_good_ones_of_their_batch() {
    test(Duration::from_secs(120), Load::Light, async |harness: &mut Harness| {
        let site = harness.site_at(&Place::shared()?, Schema::Both { shards: 1 }).await?;
        let topic = site.topic_with("compact", 1, &[("cleanup.policy", "compact")]).await?;
        sqlx::query(
            "INSERT INTO outbox.message (topic, key, payload)
             SELECT $1, CASE WHEN i IN (1, 6) THEN 'A' END, convert_to(i::text, 'UTF8') FROM generate_series(1, 6) i",
        )
        .bind(&topic)
        .execute(site.pool())
        .await?;
        let relay = site.relay("relay")?.start()?;
        // Without a key they block nothing, not even each other.
        let dead = ["2", "3", "4", "5"].map(|payload| format!("{payload} dead invalid_record"));
        let dead: Vec<&str> = dead.iter().map(String::as_str).collect();
        eventually("those without a key to be dead", PATIENCE, async || set_aside(&site, &dead).await)
            .await?;
        arrive(&site, &topic, 2).await?;
        assert_eq!(payloads(&site.kafka().records(&topic).await?), ["1", "6"]);
        assert!(relay.stderr().contains("compact wants a key"), "{}", relay.stderr());
        site.kafka().set_topic(&topic, &[("cleanup.policy", "delete")]).await?;
        requeue(&site, &["--cause", "invalid_record"]).await?;
        eventually("everything", PATIENCE, async || {
            let seen = payloads(&site.kafka().records(&topic).await?);
            if seen == ["1", "2", "3", "4", "5", "6"] { Ok(()) } else { fail!("{seen:?}") }
        })
        .await
    });
}

#[test]
fn a_message_whose_time_its_topic_refuses_parks_its_key_and_no_other_of_its_batch() {
    test(Duration::from_secs(120), Load::Light, async |harness: &mut Harness| {
        let site = harness.site_at(&Place::shared()?, Schema::Both { shards: 1 }).await?;
        let strict = [("message.timestamp.before.max.ms", "3600000")];
        let topic = site.topic_with("timely", 1, &strict).await?;
        sqlx::query(
            "INSERT INTO outbox.message (topic, key, payload, created_at)
             SELECT $1, 'key-' || i % 20, convert_to(i::text, 'UTF8'),
                    CASE WHEN i = 47 THEN now() - interval '2 h' ELSE now() END
             FROM generate_series(0, 199) i",
        )
        .bind(&topic)
        .execute(site.pool())
        .await?;
        let _relay = site.relay("relay")?.start()?;
        let behind = (67..200).step_by(20).map(|i| format!("{i} blocked -"));
        let waiting: Vec<String> =
            std::iter::once("47 dead invalid_record".to_owned()).chain(behind).collect();
        let waiting: Vec<&str> = waiting.iter().map(String::as_str).collect();
        eventually("its key to be parked", PATIENCE, async || set_aside(&site, &waiting).await).await?;
        eventually("the other keys, whole and in order", PATIENCE, async || {
            in_order(&site, &topic, 200, |key| key != "key-7").await
        })
        .await?;
        site.kafka().set_topic(&topic, &[("message.timestamp.before.max.ms", "86400000")]).await?;
        requeue(&site, &["--topic", &topic]).await?;
        eventually("all keys, whole and in order", PATIENCE, async || {
            in_order(&site, &topic, 200, |_| true).await
        })
        .await
    });
}

#[test]
fn a_topic_that_the_relay_may_not_write_parks_its_keys_and_others_flow_then_all_arrive_in_order() {
    test(Duration::from_secs(180), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        let (open, denied) = (site.topic("open", 1).await?, site.topic("denied", 1).await?);
        let acl = async |act: &str| -> Outcome {
            let tool = kafka_tool(&site, "org.apache.kafka.tools.AclCommand").await?;
            let tool = tool.args([act, "--force", "--topic", &denied, "--operation", "Write"]);
            tool.args(["--deny-principal", "User:ANONYMOUS"]).finish(PATIENCE).await?.success().map(drop)
        };
        let read = async |act: &str| -> Outcome {
            let tool = kafka_tool(&site, "org.apache.kafka.tools.AclCommand").await?;
            let tool = tool.args([act, "--force", "--topic", &denied, "--allow-principal", "User:*"]);
            let tool = tool.args(["--operation", "Read", "--operation", "Describe", "--operation", "Delete"]);
            tool.finish(PATIENCE).await?.success().map(drop)
        };
        read("--add").await?;
        acl("--add").await?;
        for topic in [&denied, &open] {
            sqlx::query(
                "INSERT INTO outbox.message (topic, key, payload)
                 SELECT $1, 'key-' || i % 20, convert_to(i::text, 'UTF8') FROM generate_series(0, 199) i",
            )
            .bind(topic)
            .execute(site.pool())
            .await?;
        }
        let relay = site.relay("relay")?.start()?;
        arrive(&site, &open, 200).await?;
        site.emptied().await?;
        let counts: Vec<(String, Option<String>, i64)> = sqlx::query_as(
            "SELECT state, cause, count(*) FROM outbox.parked WHERE state <> 'published' GROUP BY 1, 2 ORDER BY 1, 2",
        )
        .fetch_all(site.pool())
        .await?;
        let causes =
            |state: &str, cause: Option<&str>, count| (state.to_owned(), cause.map(str::to_owned), count);
        assert_eq!(
            counts,
            [causes("blocked", None, 180), causes("retrying", Some("not_authorized"), 20)],
            "{}",
            relay.stderr()
        );
        acl("--remove").await?;
        read("--remove").await?;
        requeue(&site, &["--cause", "not_authorized"]).await?;
        eventually("all keys, whole and in order", PATIENCE, async || {
            in_order(&site, &denied, 200, |_| true).await
        })
        .await
    });
}

#[test]
fn a_thousand_small_messages_pass_a_topic_whose_limit_is_smaller_than_a_batch_and_none_is_parked() {
    test(Duration::from_secs(90), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        let topic = site.topic_with("batches", 1, &[("max.message.bytes", "10000")]).await?;
        sqlx::query(
            "INSERT INTO outbox.message (topic, key, payload)
             SELECT $1, 'k', convert_to(lpad(i::text, 100, '0'), 'UTF8') FROM generate_series(1, 1000) i",
        )
        .bind(&topic)
        .execute(site.pool())
        .await?;
        let launch = site.baton(&["relay", "--until-empty"])?;
        launch.finish(Duration::from_secs(60)).await?.success()?;
        let records = site.kafka().records(&topic).await?;
        let mut seen: Vec<String> = Vec::new();
        for payload in payloads(&records) {
            if !seen.contains(&payload) {
                seen.push(payload);
            }
        }
        let expected: Vec<String> = (1..=1000).map(|i| format!("{i:0100}")).collect();
        assert_eq!(seen, expected, "lost or out of order");
        let parked: i64 =
            sqlx::query_scalar("SELECT count(*) FROM outbox.parked").fetch_one(site.pool()).await?;
        assert_eq!(parked, 0);
        Ok(())
    });
}

/// Whether this is what is set aside and not settled, in order: the payload's beginning, the state, the cause or a dash.
pub(crate) async fn set_aside(site: &Site, expected: &[&str]) -> Outcome {
    let found: Vec<String> = sqlx::query_scalar(
        "SELECT convert_from(substr(payload, 1, 12), 'UTF8') || ' ' || state || ' ' || coalesce(cause, '-')
         FROM outbox.parked WHERE state NOT IN ('published', 'discarded') ORDER BY place",
    )
    .fetch_all(site.pool())
    .await?;
    if found == expected { Ok(()) } else { fail!("{found:?} instead of {expected:?}") }
}

/// Waits until so many records are on the topic.
pub(crate) async fn arrive(site: &Site, topic: &str, many: i64) -> Outcome {
    eventually(format!("{many} records"), PATIENCE, async || {
        let seen = site.kafka().count(topic).await?;
        if seen == many { Ok(()) } else { fail!("{seen} records") }
    })
    .await
}

/// Requeues what is meant, as an operator does.
pub(crate) async fn requeue(site: &Site, which: &[&str]) -> Outcome {
    let args = [&["parked", "requeue", "--yes"], which].concat();
    site.baton(&args)?.finish(PATIENCE).await?.success().map(drop)
}

/// Whether the payloads 0 up to `many`, dealt to 20 keys, are there: of each of these keys all, their first occurrences in order.
async fn in_order(site: &Site, topic: &str, many: usize, of: impl Fn(&str) -> bool) -> Outcome {
    let records = site.kafka().records(topic).await?;
    for key in (0..20).map(|n| format!("key-{n}")).filter(|key| of(key)) {
        let mut seen: Vec<&str> = Vec::new();
        for record in records.iter().filter(|record| record.key_text() == Some(&key)) {
            let payload = record.payload_text().unwrap_or_default();
            if !seen.contains(&payload) {
                seen.push(payload);
            }
        }
        let first: usize = key.trim_start_matches("key-").parse()?;
        let expected: Vec<String> = (first..many).step_by(20).map(|i| i.to_string()).collect();
        if seen != expected {
            fail!("{key}: {seen:?}");
        }
    }
    Ok(())
}

pub(crate) async fn insert(site: &Site, topic: &str, key: Option<&str>, payload: &str) -> Outcome {
    sqlx::query("INSERT INTO outbox.message (topic, key, payload) VALUES ($1, $2, convert_to($3, 'UTF8'))")
        .bind(topic)
        .bind(key)
        .bind(payload)
        .execute(site.pool())
        .await?;
    Ok(())
}

fn size(record: &Record) -> usize {
    record.payload.as_ref().map_or(0, Vec::len)
}

/// Sorted where order between keys is nobody's promise: one partition, but shards race.
fn payloads(records: &[Record]) -> Vec<String> {
    let mut payloads: Vec<String> =
        records.iter().map(|record| record.payload_text().unwrap_or("null").to_owned()).collect();
    if payloads.len() < 10 {
        payloads.sort();
    }
    payloads
}

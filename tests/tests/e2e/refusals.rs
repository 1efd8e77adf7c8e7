//! What Kafka refuses stops its shard, loudly, and nothing else; once the cause is mended it flows, in order.

use std::time::Duration;

use baton_tests::{
    Harness, Load, Outcome, Place, Process, Record, Schema, Site, eventually, fail, stays, test,
};

const PATIENCE: Duration = Duration::from_secs(40);

#[test]
fn a_topic_that_does_not_exist_stops_only_its_shard_and_flows_once_it_is_made() {
    test(Duration::from_secs(120), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        let topic = site.topic("there", 1).await?;
        let missing = site.topic_name("missing");
        let keys = site.key_of_each_shard().await?;
        for round in 0..3 {
            insert(&site, &missing, &keys[3], &format!("lost {round}")).await?;
            for key in &keys {
                insert(&site, &topic, key, &format!("{key} {round}")).await?;
            }
        }
        let relay = site.relay("relay")?.start()?;
        // Seven shards flow; of the eighth nothing overtakes.
        eventually("the other shards' messages", PATIENCE, async || {
            let records = site.kafka().records(&topic).await?;
            if records.len() == 21 { Ok(()) } else { fail!("{} records", records.len()) }
        })
        .await?;
        stays("the stopped shard's silence", Duration::from_secs(1), async || {
            let records = site.kafka().records(&topic).await?;
            let of_stopped = records.iter().filter(|record| record.key_text() == Some(&keys[3])).count();
            if of_stopped == 0 { Ok(()) } else { fail!("{of_stopped} overtook") }
        })
        .await?;
        says_loudly(&relay, &[&missing, "create the topic"]).await?;

        // --until-empty does not wait for it for ever, and names it.
        drop(relay);
        let ended = site.baton(&["relay", "--until-empty"])?.finish(PATIENCE).await?;
        assert_eq!(ended.status.code(), Some(1), "{ended}");
        assert!(ended.stderr.contains(&missing), "{ended}");

        let relay = site.relay("relay")?.start()?;
        assert_eq!(site.topic("missing", 1).await?, missing);
        eventually("the stopped shard's messages", PATIENCE, async || {
            let records = site.kafka().records(&topic).await?;
            if records.len() == 24 { Ok(()) } else { fail!("{} records", records.len()) }
        })
        .await?;
        assert_eq!(payloads(&site.kafka().records(&missing).await?), ["lost 0", "lost 1", "lost 2"]);
        // Where it had been said that the shard stands still, it is said that it does no longer.
        eventually("a line that says so, or none before it", PATIENCE, async || {
            let log = relay.stderr();
            let stood = log.contains("its shard waits and tries again");
            if log.contains("INFO") && log.contains("the shard flows again") == stood {
                Ok(())
            } else {
                fail!("{log}")
            }
        })
        .await?;
        drop(relay);
        Ok(())
    });
}

#[test]
fn a_message_larger_than_its_topic_takes_stops_its_shard_and_is_named() {
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
            insert(&site, &topic, key, payload).await?;
        }
        let relay = site.relay("relay")?.start()?;
        eventually("the others' messages", PATIENCE, async || {
            let seen = payloads(&site.kafka().records(&topic).await?);
            if seen == ["1", "2", "4", "5"] { Ok(()) } else { fail!("{seen:?}") }
        })
        .await?;
        let id: String =
            sqlx::query_scalar("SELECT id::text FROM outbox.message WHERE octet_length(payload) = 30000")
                .fetch_one(site.pool())
                .await?;
        let sizes = ["the message has 30", "at most 10000 bytes", "raise max.message.bytes"];
        says_loudly(&relay, &[&[&id[..], &topic], &sizes[..]].concat()).await?;
        let written = site.baton(&["status"])?.finish(PATIENCE).await?.success()?;
        for words in sizes {
            assert!(written.contains(words), "{words:?} is missing: {written}");
        }
        stays("nothing overtaking it", Duration::from_secs(2), async || {
            let seen = site.kafka().count(&topic).await?;
            if seen == 4 { Ok(()) } else { fail!("{seen} records") }
        })
        .await
    });
}

#[test]
fn a_message_larger_than_a_segment_of_its_topic_stops_its_shard_and_is_named() {
    test(Duration::from_secs(60), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        let limits = [("segment.bytes", "1048576"), ("max.message.bytes", "3000000")];
        let topic = site.topic_with("segments", 1, &limits).await?;
        let keys = site.key_of_each_shard().await?;
        insert(&site, &topic, &keys[2], &"x".repeat(2_000_000)).await?;
        insert(&site, &topic, &keys[3], "of another shard").await?;
        let relay = site.relay("relay")?.start()?;
        says_loudly(&relay, &[&topic, "the message has 2000", "segment.bytes"]).await?;
        assert_eq!(payloads(&site.kafka().records(&topic).await?), ["of another shard"]);
        Ok(())
    });
}

#[test]
fn nothing_of_its_key_overtakes_a_message_that_is_too_large_for_its_topic() {
    test(Duration::from_secs(120), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        let topic = site.topic("one", 1).await?;
        sqlx::query(
            "INSERT INTO outbox.message (topic, key, payload)
             SELECT $1, 'A', convert_to(repeat('x', CASE i WHEN 0 THEN 2000000 ELSE i * 97 % 37000 END), 'UTF8')
             FROM generate_series(0, 800) i",
        )
        .bind(&topic)
        .execute(site.pool())
        .await?;
        let relay = site.relay("relay")?.start()?;
        says_loudly(&relay, &["too_large", "raise max.message.bytes"]).await?;
        stays("nothing overtaking it", Duration::from_secs(4), async || {
            let seen = site.kafka().count(&topic).await?;
            if seen == 0 { Ok(()) } else { fail!("{seen} records") }
        })
        .await
    });
}

#[test]
fn records_that_a_compacted_topic_refuses_among_good_ones_of_their_batch_are_named() {
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
        let id: String = sqlx::query_scalar("SELECT id::text FROM outbox.message WHERE payload = '2'")
            .fetch_one(site.pool())
            .await?;
        says_loudly(&relay, &[&id, &topic, "invalid_record", "compact wants a key"]).await?;
        eventually("the one before it and nothing behind it", PATIENCE, async || {
            let seen = payloads(&site.kafka().records(&topic).await?);
            if seen == ["1"] { Ok(()) } else { fail!("{seen:?}") }
        })
        .await?;
        site.kafka().set_topic(&topic, &[("cleanup.policy", "delete")]).await?;
        eventually("everything", PATIENCE, async || {
            let seen = payloads(&site.kafka().records(&topic).await?);
            if seen == ["1", "2", "3", "4", "5", "6"] { Ok(()) } else { fail!("{seen:?}") }
        })
        .await
    });
}

#[test]
fn what_is_published_around_a_message_that_is_too_large_for_its_topic_is_a_prefix_then_everything() {
    test(Duration::from_secs(120), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        let topic = site.topic("one", 1).await?;
        sqlx::query(
            "INSERT INTO outbox.message (topic, key, payload)
             SELECT $1, 'A', convert_to(
                 i || ' ' || repeat('x', CASE i WHEN 1500 THEN 2000000 ELSE i * 97 % 3700 END), 'UTF8')
             FROM generate_series(0, 2999) i",
        )
        .bind(&topic)
        .execute(site.pool())
        .await?;
        let relay = site.relay("relay")?.start()?;
        says_loudly(&relay, &["too_large", "raise max.message.bytes"]).await?;
        let firsts = async || -> Outcome<Vec<i64>> {
            let mut firsts = Vec::new();
            for record in site.kafka().records(&topic).await? {
                let payload = record.payload_text().unwrap_or_default();
                let Some((number, _)) = payload.split_once(' ') else { fail!("{payload:.20}") };
                let number: i64 = number.parse()?;
                if !firsts.contains(&number) {
                    firsts.push(number);
                }
            }
            Ok(firsts)
        };
        stays("all before it and nothing behind it", Duration::from_secs(4), async || {
            let seen = firsts().await?;
            if seen.iter().copied().eq(0..1500) { Ok(()) } else { fail!("{} records, {seen:?}", seen.len()) }
        })
        .await?;
        site.kafka().set_topic(&topic, &[("max.message.bytes", "4000000")]).await?;
        eventually("everything in order", PATIENCE, async || {
            let seen = firsts().await?;
            if seen.iter().copied().eq(0..3000) { Ok(()) } else { fail!("{} records, {seen:?}", seen.len()) }
        })
        .await
    });
}

#[test]
fn a_thousand_small_messages_pass_a_topic_whose_limit_is_smaller_than_a_batch() {
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
        Ok(())
    });
}

async fn says_loudly(relay: &Process, words: &[&str]) -> Outcome {
    eventually("an ERROR that says what and what to do", PATIENCE, async || {
        let log = relay.stderr();
        let error = log.lines().find(|line| line.contains("ERROR"));
        let Some(error) = error else { fail!("no ERROR in the log") };
        match words.iter().find(|word| !error.contains(**word)) {
            None => Ok(()),
            Some(word) => fail!("{word:?} is missing in: {error}"),
        }
    })
    .await
}

async fn insert(site: &Site, topic: &str, key: &str, payload: &str) -> Outcome {
    sqlx::query("INSERT INTO outbox.message (topic, key, payload) VALUES ($1, $2, convert_to($3, 'UTF8'))")
        .bind(topic)
        .bind(key)
        .bind(payload)
        .execute(site.pool())
        .await?;
    Ok(())
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

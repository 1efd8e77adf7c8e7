//! `baton republish`: a range that was published goes once more as it went the first time, and nothing else does or changes.

use std::collections::BTreeSet;
use std::time::Duration;

use baton_tests::{
    Finished, Harness, Load, Outcome, OwnStack, Place, Process, Record, Schema, Site, eventually, fail, test,
};
use serde_json::Value;
use sqlx::{Connection as _, Executor as _, PgConnection};

use crate::endurance::Role;
use crate::refusals::{PATIENCE, arrive, insert, set_aside};

const TO_THE_END: [&str; 4] = ["--from", "2020-01-01T00:00:00Z", "--to", "2999-01-01T00:00:00Z"];

/// `baton republish` of this topic, not started.
async fn republish(site: &Site, topic: &str, more: &[&str]) -> Outcome<Finished> {
    site.baton(&[&["republish", "--topic", topic], more].concat())?.finish(PATIENCE * 2).await
}

/// The topic's records that are not among the first ones, partition by partition, and where each of them lay.
async fn since(site: &Site, topic: &str, first: &[Record]) -> Outcome<Vec<Record>> {
    let mut records = site.kafka().records(topic).await?;
    for record in first {
        if !records.contains(record) {
            fail!("gone: {record:?}");
        }
    }
    records.retain(|record| !first.contains(record));
    Ok(records)
}

fn ids<'r>(records: impl IntoIterator<Item = &'r Record>) -> Vec<&'r str> {
    records.into_iter().map(|record| record.header("ce_id").unwrap_or_default()).collect()
}

/// A record but for where it lies.
fn content(record: &Record) -> Record {
    Record { offset: 0, partition: if record.key.is_some() { record.partition } else { 0 }, ..record.clone() }
}

/// Everything of the outbox that a command could change, but for the audit table.
async fn state(site: &Site) -> Outcome<String> {
    Ok(sqlx::query_scalar(
        "SELECT concat_ws(E'\\n',
            (SELECT string_agg(t::text, E'\\n' ORDER BY t::text) FROM outbox.advance t),
            (SELECT string_agg(t::text, E'\\n' ORDER BY t::text) FROM outbox.shard t),
            (SELECT string_agg(t::text, E'\\n' ORDER BY t::text) FROM outbox.fence t),
            (SELECT string_agg(t::text, E'\\n' ORDER BY t::text) FROM outbox.parked t),
            (SELECT string_agg(t::text, E'\\n' ORDER BY t::text) FROM outbox.relay t),
            (SELECT count(*)::text || md5(string_agg(t::text, E'\\n' ORDER BY t.position)) FROM outbox.message t))",
    )
    .fetch_one(site.pool())
    .await?)
}

/// What the audit table has of republishing, the oldest first: how each entry calls itself, how many, and of which run.
async fn audited(site: &Site) -> Outcome<Vec<(String, i64, Value)>> {
    let rows: Vec<(i64, String)> = sqlx::query_as(
        "SELECT affected, arguments::text FROM outbox.audit WHERE command = 'republish' ORDER BY id",
    )
    .fetch_all(site.pool())
    .await?;
    let entry = |(affected, arguments): (i64, String)| -> Outcome<_> {
        let arguments: Value = serde_json::from_str(&arguments)?;
        Ok((arguments["event"].as_str().unwrap_or_default().to_owned(), affected, arguments))
    };
    rows.into_iter().map(entry).collect()
}

/// When a message was enqueued, as the command line takes it.
async fn created_at(site: &Site, id: &str) -> Outcome<String> {
    let sql = r#"SELECT to_char(created_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"') FROM outbox.message WHERE id = $1::uuid"#;
    Ok(sqlx::query_scalar(sql).bind(id).fetch_one(site.pool()).await?)
}

#[test]
fn a_range_goes_once_more_as_it_went_and_what_waits_or_is_parked_does_not() {
    test(Duration::from_secs(180), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        let topic = site.topic_with("again", 3, &[("max.message.bytes", "50000")]).await?;
        let other = site.topic("other", 1).await?;
        let (mut late, mut later) = (site.connect().await?, site.connect().await?);
        for late in [&mut late, &mut later] {
            late.execute("BEGIN").await?;
            enqueue(late, &topic, 1).await?;
        }
        let mut relay = site.relay("relay")?.start()?;
        for number in 2..42 {
            enqueue(&mut *site.pool().acquire().await?, &topic, number).await?;
        }
        insert(&site, &other, Some("key-1"), "of another topic").await?;
        arrive(&site, &topic, 40).await?;
        late.execute("COMMIT").await?;
        arrive(&site, &topic, 41).await?;
        let large = format!("large {}", "x".repeat(100_000));
        insert(&site, &topic, Some("key-1"), &large).await?;
        insert(&site, &topic, Some("given up"), &large).await?;
        insert(&site, &topic, Some("key-1"), "behind it").await?;
        let dead = "large xxxxxx dead too_large";
        let parked = [dead, dead, "behind it blocked -"];
        eventually("three to be parked", PATIENCE, async || {
            set_aside(&site, &parked).await.or(set_aside(&site, &[dead, parked[2], dead]).await)
        })
        .await?;
        let args = ["parked", "discard", "--key", "given up", "--yes"];
        site.baton(&args)?.finish(PATIENCE).await?.success()?;
        site.emptied().await?;
        assert!(relay.terminate(PATIENCE).await?.success(), "{}", relay.stderr());
        // Late and fresh, and by nobody published.
        later.execute("COMMIT").await?;
        insert(&site, &topic, Some("key-2"), "fresh").await?;
        assert_eq!(site.pending().await?, 2);
        let before = state(&site).await?;
        let first = site.kafka().records(&topic).await?;

        let said = republish(&site, &topic, &[&TO_THE_END[..], &["--dry-run"]].concat()).await?.success()?;
        for words in
            ["41 messages for", "left out: 2 wait", "left out: 2 are parked", "left out: 1 were discarded"]
        {
            assert!(said.contains(words), "{words}: {said}");
        }
        assert!(said.contains("nothing has been published") && !said.contains("is gone"), "{said}");
        assert_eq!((site.kafka().count(&topic).await?, audited(&site).await?.len()), (41, 0));

        // All of it, by an operator's role.
        Role::with(&site, "IN ROLE baton_operator", async |role| {
            let launch = site.baton(&[&["republish", "--topic", &topic], &TO_THE_END[..]].concat())?;
            let said = launch.env("DATABASE_URL", &role.url).finish(PATIENCE).await?.success()?;
            assert!(said.contains("published 41 messages again"), "{said}");
            let who: Vec<String> =
                sqlx::query_scalar("SELECT DISTINCT who FROM outbox.audit WHERE command = 'republish'")
                    .fetch_all(site.pool())
                    .await?;
            assert_eq!(who, std::slice::from_ref(&role.name));
            Ok(())
        })
        .await?;
        let again = since(&site, &topic, &first).await?;
        same(&site, &first, &again).await?;
        let of_first: BTreeSet<&str> = ids(&first).into_iter().collect();
        assert_eq!(ids(&again).into_iter().collect::<BTreeSet<_>>(), of_first);

        // From one message's time to before another's, and of one key.
        let all = in_order(&site, &topic).await?;
        let (from, to) = (created_at(&site, &all[10]).await?, created_at(&site, &all[30]).await?);
        let range = ["--from", &from, "--to", &to];
        let known = site.kafka().records(&topic).await?;
        let said = republish(&site, &topic, &range).await?.success()?;
        assert!(said.contains("published 20 messages again"), "{said}");
        let again = since(&site, &topic, &known).await?;
        same(&site, &first, &again).await?;
        let expected: BTreeSet<&str> = all[10..30].iter().map(String::as_str).collect();
        assert_eq!(ids(&again).into_iter().collect::<BTreeSet<_>>(), expected);
        let known = site.kafka().records(&topic).await?;
        republish(&site, &topic, &[&range[..], &["--key", "key-3"]].concat()).await?.success()?;
        let again = since(&site, &topic, &known).await?;
        same(&site, &first, &again).await?;
        let of_key =
            first.iter().filter(|r| r.key_text() == Some("key-3") && expected.contains(ids([*r])[0]));
        assert_eq!(ids(&again), ids(of_key));

        let told = audited(&site).await?;
        let events: Vec<(&str, i64)> =
            told.iter().map(|(event, affected, _)| (event.as_str(), *affected)).collect();
        let of_key = i64::try_from(again.len())?;
        assert_eq!(
            events,
            [
                ("begun", 0),
                ("finished", 41),
                ("begun", 0),
                ("finished", 20),
                ("begun", 0),
                ("finished", of_key)
            ]
        );
        let (_, _, last) = &told[5];
        assert_eq!((last["run"] == told[4].2["run"], last["run"] == told[3].2["run"]), (true, false));
        let asked = (&last["topic"], &last["key"], &last["messages"]);
        assert_eq!(asked, (&topic.clone().into(), &"key-3".into(), &of_key.into()));

        // A batch of what is taken one by one is refused now (case 19a); what went beside it may come twice.
        site.kafka().set_topic(&topic, &[("max.message.bytes", "450")]).await?;
        eventually("a batch to be refused", PATIENCE, async || {
            let known = site.kafka().records(&topic).await?;
            let ended = republish(&site, &topic, &TO_THE_END).await?;
            if !ended.stderr.contains("refused a batch") {
                fail!("{ended}");
            }
            ended.success()?;
            let mut again: Vec<Record> = Vec::new();
            for record in since(&site, &topic, &known).await? {
                if !ids(&again).contains(&ids([&record])[0]) {
                    again.push(record);
                }
            }
            same(&site, &first, &again).await?;
            assert_eq!(ids(&again).into_iter().collect::<BTreeSet<_>>(), of_first);
            Ok(())
        })
        .await?;
        assert_eq!(state(&site).await?, before);
        Ok(())
    });
}

/// A message of one of five keys, or of none: with and without payload, type, idempotency key and headers of every kind.
async fn enqueue(connection: &mut PgConnection, topic: &str, number: i32) -> Outcome {
    sqlx::query(
        r#"INSERT INTO outbox.message (topic, key, payload, headers, type, idempotency_key)
           SELECT $1, CASE WHEN i % 7 > 0 THEN 'key-' || i % 5 END, CASE WHEN i % 11 > 0 THEN convert_to('payload ' || i, 'UTF8') END,
                  (ARRAY[NULL, '[["a", "1"], ["a", null]]', '{"b": {"base64": "/wA="}, "content-type": "text/plain"}'])[i % 3 + 1]::jsonb,
                  CASE WHEN i % 4 = 0 THEN 'order.placed' END, CASE WHEN i % 2 = 0 THEN 'again-' || i END
           FROM (SELECT $2 AS i) n"#,
    )
    .bind(topic)
    .bind(number)
    .execute(connection)
    .await?;
    Ok(())
}

/// The ids of what was published of a topic, in order of position: whatever the first pass had of it.
async fn in_order(site: &Site, topic: &str) -> Outcome<Vec<String>> {
    let all: Vec<String> =
        sqlx::query_scalar("SELECT id::text FROM outbox.message WHERE topic = $1 ORDER BY position")
            .bind(topic)
            .fetch_all(site.pool())
            .await?;
    let records = site.kafka().records(topic).await?;
    let published: BTreeSet<&str> = ids(&records).into_iter().collect();
    Ok(all.into_iter().filter(|id| published.contains(id.as_str())).collect())
}

/// Each record is as it was the first time, and each key's are in order of position.
async fn same(site: &Site, first: &[Record], again: &[Record]) -> Outcome {
    for record in again {
        let was = first.iter().find(|was| ids([*was]) == ids([record]));
        assert_eq!(was.map(content), Some(content(record)));
    }
    let keys: BTreeSet<&str> = again.iter().filter_map(Record::key_text).collect();
    for key in keys {
        let of_key = ids(again.iter().filter(|record| record.key_text() == Some(key)));
        let sql = "SELECT id::text FROM outbox.message WHERE id::text = ANY ($1) ORDER BY position";
        let positions: Vec<String> =
            sqlx::query_scalar(sql).bind(of_key.clone()).fetch_all(site.pool()).await?;
        assert_eq!(of_key, positions, "of {key}");
    }
    Ok(())
}

#[test]
fn what_the_cursor_covers_is_what_does_not_wait_whatever_it_works_off() {
    test(Duration::from_secs(60), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        let topic = site.topic("covered", 1).await?;
        let mut admin = site.connect().await?;
        let mut late = site.connect().await?;
        late.execute("BEGIN").await?;
        let xid: i64 =
            sqlx::query_scalar("SELECT pg_current_xact_id()::text::bigint").fetch_one(&mut late).await?;
        for _ in 0..4 {
            enqueue(&mut late, &topic, 1).await?;
        }
        for number in 0..20 {
            enqueue(&mut admin, &topic, number).await?;
        }
        let counts = async |consumed: i64| -> Outcome {
            let waiting = site.pending().await?;
            let said =
                republish(&site, &topic, &[&TO_THE_END[..], &["--dry-run"]].concat()).await?.success()?;
            let told = format!("{consumed} messages for");
            let left = format!("left out: {waiting} wait");
            assert!(said.starts_with(&told), "{told}: {said}");
            assert_eq!(said.contains(&left), waiting > 0, "{left}: {said}");
            Ok(())
        };
        counts(0).await?;
        let advance = async |cursor: &str| -> Outcome {
            let sql = format!(
                "INSERT INTO outbox.advance (shard, number, generation, position, snapshot, ceiling, late_snapshot, late_position)
                 SELECT shard, number + 1, generation, {cursor} FROM outbox.cursor"
            );
            site.pool().execute(sqlx::AssertSqlSafe(sql)).await?;
            Ok(())
        };
        let here = "pg_current_snapshot(), pg_current_xact_id()";
        advance(&format!("10, {here}, NULL::pg_snapshot, NULL::bigint")).await?;
        counts(6).await?;
        advance(&format!("22, {here}, NULL::pg_snapshot, NULL::bigint")).await?;
        counts(18).await?;
        late.execute("COMMIT").await?;
        // It names the late transaction as one that runs, or ends below it.
        for snapshot in ["snapshot".to_owned(), format!("'{xid}:{xid}:'::pg_snapshot")] {
            let named = snapshot == "snapshot";
            advance(&format!("position, {snapshot}, ceiling, NULL::pg_snapshot, NULL::bigint")).await?;
            counts(if named { 18 } else { 0 }).await?;
            // Of the late ones the first two.
            advance("position, snapshot, ceiling, pg_current_snapshot(), 2::bigint").await?;
            counts(if named { 20 } else { 2 }).await?;
        }
        advance(&format!("24, {here}, NULL::pg_snapshot, NULL::bigint")).await?;
        counts(24).await
    });
}

#[test]
fn of_a_range_whose_beginning_was_truncated_it_is_said_from_when_on_it_is_kept() {
    test(Duration::from_secs(120), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        let topic = site.topic("turned", 1).await?;
        let mut admin = site.connect().await?;
        baton_migrations::migrate_outbox(&mut admin, None, Some(Duration::from_secs(1))).await?;
        let mut relay = site.relay("relay")?.start()?;
        for number in 0..10 {
            enqueue(&mut admin, &topic, number).await?;
        }
        let times = async || -> Outcome<(String, i64)> {
            let sql = r#"SELECT to_char(coalesce(min(created_at), clock_timestamp()) AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'), count(*) FROM outbox.message"#;
            Ok(sqlx::query_as(sql).fetch_one(site.pool()).await?)
        };
        let (oldest, _) = times().await?;
        eventually("all of them to be gone", PATIENCE, async || {
            let (_, left) = times().await?;
            if left == 0 { Ok(()) } else { fail!("{left} are there") }
        })
        .await?;
        assert!(relay.terminate(PATIENCE).await?.success(), "{}", relay.stderr());
        for number in 10..15 {
            enqueue(&mut admin, &topic, number).await?;
        }
        site.baton(&["relay", "--until-empty"])?.finish(PATIENCE).await?.success()?;
        let (kept, left) = times().await?;
        assert_eq!(left, 5);
        let end: String = sqlx::query_scalar(
            r#"SELECT to_char((max(created_at) + interval '1us') AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"') FROM outbox.message"#,
        )
        .fetch_one(&mut admin)
        .await?;
        let said = republish(&site, &topic, &["--from", &oldest, "--to", &end]).await?.success()?;
        let told = said.lines().find(|line| line.contains("part of the range is gone")).unwrap_or_default();
        let from =
            told.split_once("before ").and_then(|(_, rest)| rest.split(' ').next()).unwrap_or_default();
        // By the second: how a fraction is written differs.
        assert!(from > &oldest[..19] && from <= &format!("{}Z", &kept[..19])[..], "{oldest} {kept}: {said}");
        assert!(said.contains("published 5 messages again"), "{said}");
        assert_eq!(site.kafka().count(&topic).await?, 20);
        // All that is kept is all there is of it.
        let said =
            republish(&site, &topic, &["--from", &kept, "--to", &end, "--dry-run"]).await?.success()?;
        assert!(said.starts_with("5 messages for") && !said.contains("is gone"), "{said}");
        Ok(())
    });
}

/// Messages on a topic of one partition, published, and no relay any more.
async fn published(site: &Site, messages: i64) -> Outcome<String> {
    let topic = site.topic("many", 1).await?;
    let sql = "INSERT INTO outbox.message (topic, key, payload)
               SELECT $1, 'key-' || i % 20, convert_to(i::text, 'UTF8') FROM generate_series(0, $2 - 1) i";
    sqlx::query(sql).bind(&topic).bind(messages).execute(site.pool()).await?;
    site.baton(&["relay", "--until-empty"])?.finish(PATIENCE).await?.success()?;
    assert_eq!(site.kafka().count(&topic).await?, messages);
    Ok(topic)
}

/// One that takes its time, as soon as it has sent a part of them.
async fn half_way(site: &Site, topic: &str) -> Outcome<Process> {
    let before = site.kafka().count(topic).await?;
    let launch = site.baton(&[&["republish", "--topic", topic], &TO_THE_END[..]].concat())?;
    let republishing = launch.env("BATON_KAFKA__PROPERTIES__linger.ms", "400").start()?;
    eventually("a part to be on the topic", PATIENCE, async || {
        let there = site.kafka().count(topic).await?;
        if there > before { Ok(()) } else { fail!("{there}") }
    })
    .await?;
    Ok(republishing)
}

const MANY: i64 = 6_000;

#[test]
fn one_that_is_killed_half_way_has_changed_nothing_but_the_topic_and_left_its_beginning_in_the_audit_table() {
    test(Duration::from_secs(180), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        let topic = published(&site, MANY).await?;
        let before = state(&site).await?;
        let mut republishing = half_way(&site, &topic).await?;
        let locked = "SELECT count(DISTINCT l.relation) FROM pg_locks l
                      WHERE l.relation IN (SELECT inhrelid FROM pg_inherits WHERE inhparent = 'outbox.message'::regclass)
                        AND l.mode = 'AccessShareLock' AND l.granted AND l.pid <> pg_backend_pid()";
        let locks = async || {
            Ok::<i64, baton_tests::Failure>(sqlx::query_scalar(locked).fetch_one(site.pool()).await?)
        };
        assert_eq!(locks().await?, 4, "the leaves that must not be truncated now");
        republishing.kill().await?;
        let there = site.kafka().count(&topic).await?;
        assert!((MANY + 1..2 * MANY).contains(&there), "{there}");
        eventually("its transaction to end", PATIENCE, async || {
            let held = locks().await?;
            if held == 0 { Ok(()) } else { fail!("{held} leaves are locked") }
        })
        .await?;
        assert_eq!(state(&site).await?, before);
        let told = audited(&site).await?;
        let [(event, 0, arguments)] = told.as_slice() else { fail!("{told:?}") };
        assert_eq!((event.as_str(), &arguments["messages"]), ("begun", &MANY.into()));

        // What was cut off may still have come in; then all of it goes, and a relay finds nothing to do.
        let there = site.kafka().count(&topic).await?;
        let said = republish(&site, &topic, &TO_THE_END).await?.success()?;
        assert!(said.contains("published 6000 messages again"), "{said}");
        site.baton(&["relay", "--until-empty"])?.finish(PATIENCE).await?.success()?;
        assert_eq!(site.kafka().count(&topic).await?, there + MANY);
        let records = site.kafka().records(&topic).await?;
        let last: Vec<&str> =
            records[records.len() - 6_000..].iter().filter_map(Record::payload_text).collect();
        for key in 0..20 {
            let of_key: Vec<i64> =
                last.iter().filter_map(|n| n.parse().ok()).filter(|n| n % 20 == key).collect();
            assert_eq!(of_key, (key..MANY).step_by(20).collect::<Vec<_>>());
        }
        Ok(())
    });
}

#[test]
fn one_that_is_told_to_end_waits_for_what_it_sent_and_says_how_far_it_came() {
    test(Duration::from_secs(180), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        let topic = published(&site, MANY).await?;
        let mut republishing = half_way(&site, &topic).await?;
        let ended = republishing.terminate(PATIENCE).await?;
        let said = republishing.stderr();
        assert_eq!(ended.code(), Some(1), "{said}");
        let sent = site.kafka().count(&topic).await? - MANY;
        // Of the first page one row had opened the partition; the others were on their way. A key has 300.
        assert!((300..MANY).contains(&sent), "{sent}");
        assert!(
            said.contains(&format!("told to end: {sent} of {MANY} messages were published again")),
            "{said}"
        );
        let told = audited(&site).await?;
        let events: Vec<(&str, i64)> =
            told.iter().map(|(event, affected, _)| (event.as_str(), *affected)).collect();
        assert_eq!(events, [("begun", 0), ("stopped", sent)]);
        Ok(())
    });
}

#[test]
fn a_broker_that_goes_away_half_way_is_not_waited_for_for_ever_and_the_range_goes_once_it_is_back() {
    test(Duration::from_secs(240), Load::Alone, async |harness: &mut Harness| {
        let stack = OwnStack::up().await?;
        let site = harness.site_at(stack.place(), Schema::Both { shards: 8 }).await?;
        let topic = published(&site, MANY).await?;
        let mut republishing = half_way(&site, &topic).await?;
        stack.kill_broker().await?;
        let ended = republishing.exited(2 * PATIENCE).await?;
        let said = republishing.stderr();
        assert_eq!(ended.code(), Some(1), "{said}");
        let told = audited(&site).await?;
        let Some((event, sent, _)) = told.last() else { fail!("{told:?}") };
        assert!(event == "failed" && (0..MANY).contains(sent), "{told:?}");
        for words in
            ["kafka does not acknowledge", "nothing is lost", &format!("{sent} of {MANY} messages were")]
        {
            assert!(said.contains(words), "{words}: {said}");
        }
        stack.repair().await?;
        let there = site.kafka().count(&topic).await?;
        assert!(there >= MANY + sent, "{there}");
        republish(&site, &topic, &TO_THE_END).await?.success()?;
        assert_eq!(site.kafka().count(&topic).await?, there + MANY);
        Ok(())
    });
}

#[test]
fn what_cannot_be_republished_is_said_in_clear_words_and_a_compacted_topic_is_warned_of() {
    test(Duration::from_secs(180), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        let compacted = site.topic_with("compacted", 1, &[("cleanup.policy", "compact")]).await?;
        insert(&site, &compacted, Some("k"), &"x".repeat(2_000)).await?;
        site.baton(&["relay", "--until-empty"])?.finish(PATIENCE).await?.success()?;
        let said = republish(&site, &compacted, &TO_THE_END).await?.success()?;
        assert!(said.contains("warning") && said.contains("is compacted"), "{said}");
        assert_eq!(site.kafka().count(&compacted).await?, 2);

        let of = ["republish", "--topic", &compacted];
        let refused = async |args: &[&str], env: &[(&str, &str)], code: i32, words: &[&str]| -> Outcome {
            let launch = env.iter().fold(site.baton(args)?, |launch, (name, value)| launch.env(name, *value));
            let ended = launch.finish(PATIENCE).await?;
            assert_eq!(ended.status.code(), Some(code), "{args:?}: {ended}");
            assert!(words.iter().all(|word| ended.stderr.contains(word)), "{words:?} of {args:?}: {ended}");
            Ok(())
        };
        let to = ["--to", "2026-01-01T00:00:00Z"];
        refused(&[&of[..], &to, &["--from", "yesterday"]].concat(), &[], 2, &["RFC 3339"]).await?;
        for from in ["2026-01-01T00:00:00Z", "2026-01-01T00:00:00-00:30"] {
            refused(&[&of[..], &to, &["--from", from]].concat(), &[], 2, &["is not before --to"]).await?;
        }
        refused(&of, &[], 2, &["--from"]).await?;
        let all = [&of[..], &TO_THE_END].concat();
        let missing = site.topic_name("missing");
        let of_missing = [&["republish", "--topic", &missing], &TO_THE_END[..]].concat();
        refused(&of_missing, &[], 1, &["there is no topic", "nothing has been published"]).await?;
        let away = [("KAFKA_BROKERS", "127.0.0.1:1")];
        refused(&all, &away, 1, &["127.0.0.1:1: nobody listens", "nothing has been published"]).await?;

        // One that has become too large for its topic.
        site.kafka()
            .set_topic(&compacted, &[("max.message.bytes", "1000"), ("cleanup.policy", "compact")])
            .await?;
        let id: String =
            sqlx::query_scalar("SELECT id::text FROM outbox.message").fetch_one(site.pool()).await?;
        eventually("the broker to refuse it", PATIENCE, async || {
            let words = [&id, "too_large", "raise max.message.bytes", "0 of 1 messages"];
            let ended = site.baton(&all)?.finish(PATIENCE).await?;
            let is_said = words.iter().all(|word| ended.stderr.contains(word));
            if is_said && ended.status.code() == Some(1) { Ok(()) } else { fail!("{ended}") }
        })
        .await?;
        assert_eq!(
            audited(&site).await?.last().map(|(event, affected, _)| (event.clone(), *affected)),
            Some(("failed".to_owned(), 0))
        );

        // Who may look may count, and no more.
        Role::with(&site, "IN ROLE baton_readonly", async |role| {
            let env = [("DATABASE_URL", role.url.as_str())];
            let launch = site.baton(&[&all[..], &["--dry-run"]].concat())?.env("DATABASE_URL", &role.url);
            launch.finish(PATIENCE).await?.success()?;
            refused(&all, &env, 1, &["needs baton_operator"]).await
        })
        .await?;
        let mut holder = site.connect().await?;
        holder.execute("BEGIN; LOCK TABLE outbox.message_2 IN ACCESS EXCLUSIVE MODE").await?;
        refused(&all, &[], 1, &["is locked by somebody"]).await?;
        holder.close().await?;
        let empty = harness.site_at(&Place::shared()?, Schema::Empty).await?;
        let ended = republish(&empty, &compacted, &TO_THE_END).await?;
        assert!(ended.status.code() == Some(1) && ended.stderr.contains("baton migrate outbox"), "{ended}");
        Ok(())
    });
}

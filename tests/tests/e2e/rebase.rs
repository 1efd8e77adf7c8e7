//! An outbox that moves to another cluster, by dump and restore or by logical replication, is accepted by `baton rebase`.
//!
//! ```text
//! old cluster   ═ published ═ a hole that commits late ═ waiting ═▶ copy ═▶ new cluster ═ more is enqueued ═ rebase ═ relay
//! ```
//!
//! So is one in which positions were given out again, or in another order than that of their transactions.
//!
//! The new cluster is a real one: another system identifier, and transaction ids far below or far above. What counts is on the
//! topic in the end: nothing skipped, first sights in order, and exactly so many repeats as the command foretold.

use std::collections::HashSet;
use std::time::Duration;

use baton_tests::{
    Cluster, Finished, Harness, Launch, Load, Outcome, Place, Schema, Site, eventually, fail, figure,
    postgres_program, test, workload,
};
use serde_json::Value;
use sqlx::postgres::PgConnection;
use sqlx::{Connection, Executor};

use crate::leases::fill;

const PATIENCE: Duration = Duration::from_secs(30);

/// `baton` to its end. Runs of one site write their outputs side by side.
async fn run(site: &Site, args: &[&str]) -> Outcome<Finished> {
    site.baton(args)?.finish(PATIENCE).await
}

/// What `baton rebase` foretold, from what it printed.
fn foretold(text: &str) -> Outcome<usize> {
    let line = text.lines().find(|line| line.contains("may go twice, with the same ids"));
    let number = line.and_then(|line| line.split(' ').next()?.parse().ok());
    number.ok_or_else(|| baton_tests::Failure::new(format!("no number in:\n{text}")))
}

/// One message of a key, with its place in it.
async fn enqueue(connection: &mut PgConnection, topic: &str, key: &str, from: i64, to: i64) -> Outcome {
    sqlx::query(
        r#"INSERT INTO outbox.message (topic, key, payload)
           SELECT $1, $2, convert_to(format('{"seq":%s}', i), 'UTF8') FROM generate_series($3::bigint, $4) i"#,
    )
    .bind(topic)
    .bind(key)
    .bind(from)
    .bind(to)
    .execute(connection)
    .await?;
    Ok(())
}

/// Publishes, and stops in the middle: a message that was passed over commits, a transaction of many is published half, and
/// some wait. Comes back with the transaction of the many.
async fn publish_in_part(harness: &Harness, site: &Site, topic: &str) -> Outcome<i64> {
    let unhurried = harness.directory().join("unhurried.toml");
    std::fs::write(
        &unhurried,
        "[kafka.properties]\n\"linger.ms\" = 50\n[publish]\npage_rows = 100\nin_flight_rows = 200\n",
    )?;
    let mut relay = site.relay("old")?.args(["--config", &unhurried.display().to_string()]).start()?;
    fill(site, topic, 400).await?;
    let (mut hole, mut many) = (site.connect().await?, site.connect().await?);
    for open in [&mut hole, &mut many] {
        open.execute("BEGIN").await?;
    }
    enqueue(&mut hole, topic, "hole", 1, 3).await?;
    enqueue(&mut many, topic, "many", 1, 2_000).await?;
    let xid: String = sqlx::query_scalar("SELECT pg_current_xact_id()::text").fetch_one(&mut many).await?;
    fill(site, topic, 400).await?;
    site.emptied().await?;
    many.execute("COMMIT").await?;
    eventually("late messages to be half published", PATIENCE, async || {
        let amid: i64 =
            sqlx::query_scalar("SELECT count(*) FROM outbox.cursor WHERE late_position IS NOT NULL")
                .fetch_one(site.pool())
                .await?;
        if amid > 0 { Ok(()) } else { fail!("no cursor is amid late messages") }
    })
    .await?;
    let status = relay.terminate(PATIENCE).await?;
    assert!(status.success(), "{status}");
    hole.execute("COMMIT").await?;
    fill(site, topic, 300).await?;
    let waiting = site.pending().await?;
    assert!(waiting > 303, "the many were published to the end: {waiting} wait");
    Ok(xid.parse()?)
}

/// The records of the topic, none of which is a repeat yet.
async fn published_once(site: &Site, topic: &str) -> Outcome<usize> {
    let records = site.kafka().records(topic).await?;
    let (findings, _) = workload::judge(&workload::truth(site, topic).await?, &records);
    assert_eq!(findings.repeated.len(), 0, "{findings}");
    Ok(records.len())
}

/// A relay publishes what waits; then the topic is held against the table. Comes back with the number of repeats.
async fn publish_the_rest(site: &Site, topic: &str) -> Outcome<usize> {
    site.relay("new")?.arg("--until-empty").finish(PATIENCE).await?.success()?;
    let records = site.kafka().records(topic).await?;
    let (findings, _) = workload::judge(&workload::truth(site, topic).await?, &records);
    assert!(findings.wire_is_right(), "{findings}");
    Ok(findings.repeated.len())
}

async fn dump(harness: &Harness, site: &Site, args: &[&str]) -> Outcome<String> {
    let file = harness.directory().join("copy.dump").display().to_string();
    let url = &site.place().database_url;
    Launch::new("pg_dump", harness.directory(), postgres_program("pg_dump")?)
        .args(["-Fc", "-n", "outbox", "-f", &file])
        .args(args)
        .args(["-d", url])
        .finish(PATIENCE)
        .await?
        .success()?;
    Ok(file)
}

async fn restore(harness: &Harness, site: &Site, file: &str) -> Outcome {
    let url = &site.place().database_url;
    let launch = Launch::new("pg_restore", harness.directory(), postgres_program("pg_restore")?);
    launch
        .args(["--no-owner", "--no-privileges", "-d", url, file])
        .finish(PATIENCE)
        .await?
        .success()
        .map(drop)
}

async fn text(site: &Site, sql: &'static str) -> Outcome<String> {
    Ok(sqlx::query_scalar(sql).fetch_one(site.pool()).await?)
}

const CLUSTER: &str = "SELECT system_identifier::text FROM outbox.settings";
const OUTBOX_ID: &str = "SELECT outbox_id::text FROM outbox.settings";

#[test]
fn a_dump_restored_into_a_younger_cluster_is_refused_until_a_rebase_that_skips_nothing_and_foretells_each_repeat()
 {
    test(Duration::from_secs(150), Load::Light, async |harness: &mut Harness| {
        let (old_cluster, new_cluster) =
            (Cluster::start(harness.directory()).await?, Cluster::start(harness.directory()).await?);
        old_cluster.reach(12_000).await?;
        let old = harness.site_at(old_cluster.place(), Schema::Both { shards: 8 }).await?;
        let topic = old.topic("restored", 3).await?;
        let many = publish_in_part(harness, &old, &topic).await?;
        let published = published_once(&old, &topic).await?;
        let waited = old.pending().await?;

        let file = dump(harness, &old, &[]).await?;
        let new = harness.site_at(new_cluster.place(), Schema::Empty).await?;
        restore(harness, &new, &file).await?;
        let outbox_id = text(&new, OUTBOX_ID).await?;
        let migrated = run(&new, &["migrate", "outbox"]).await?.success()?;
        assert!(migrated.contains("made or mended the roles"), "{migrated}");
        assert_eq!(text(&new, CLUSTER).await?, text(&old, CLUSTER).await?, "migrate took the outbox over");
        // Producers do not wait for anybody.
        fill(&new, &topic, 100).await?;
        let refused = new.relay("refused")?.arg("--until-empty").finish(PATIENCE).await?;
        assert_eq!(refused.status.code(), Some(1), "{refused}");
        assert!(refused.stderr.contains("baton rebase"), "{refused}");

        let planned = run(&new, &["rebase", "--dry-run"]).await?.success()?;
        assert_eq!(text(&new, CLUSTER).await?, text(&old, CLUSTER).await?, "a dry run wrote");
        let done = run(&new, &["rebase"]).await?.success()?;
        let expected = foretold(&done)?;
        assert_eq!(foretold(&planned)?, expected, "{planned}\n{done}");
        assert!(expected > 0, "no hole, nothing shown:\n{done}");
        assert!(done.contains(&format!("{} messages wait to be published", waited + 100)), "{done}");
        assert_ne!(text(&new, OUTBOX_ID).await?, outbox_id, "two outboxes share an id");
        let repeated = publish_the_rest(&new, &topic).await?;
        assert_eq!(repeated, expected, "{done}");
        assert!(run(&new, &["rebase"]).await?.success()?.starts_with("nothing to do"));

        no_restored_message_is_late_when_its_number_comes(&new_cluster, &new, &topic, many).await?;
        let audit: Value = serde_json::from_str(&run(&new, &["audit", "--json"]).await?.success()?)?;
        assert_eq!(audit[0]["command"], "rebase", "{audit}");
        assert_eq!(audit[0]["arguments"]["may_go_twice"], expected, "{audit}");
        assert_eq!(audit[1]["command"], "guard", "{audit}");
        assert_eq!(audit[2]["command"], "migrate outbox", "{audit}");
        figure(&format!(
            "must show 3: restored into a younger cluster, {published} published before: rebase foretold {expected} repeats, {repeated} \
             were repeated; {} waited, 0 skipped, 0 out of order",
            waited + 100
        ));
        harness.leave(&new).await;
        harness.leave(&old).await;
        Ok(())
    });
}

/// Transactions of this cluster take the very ids that restored messages came with, stay open while cursors move, and
/// commit: to a relay that believed those ids the restored messages would be late now.
async fn no_restored_message_is_late_when_its_number_comes(
    cluster: &Cluster,
    site: &Site,
    topic: &str,
    xid: i64,
) -> Outcome {
    let before = site.kafka().count(topic).await?;
    cluster.reach(xid - 5).await?;
    let mut open = Vec::new();
    let mut met = false;
    for _ in 0..20 {
        let mut session = site.connect().await?;
        session.execute("BEGIN").await?;
        let own: String =
            sqlx::query_scalar("SELECT pg_current_xact_id()::text").fetch_one(&mut session).await?;
        met |= own.parse::<i64>()? == xid;
        open.push(session);
    }
    assert!(met, "no transaction got the id {xid}");
    let mut relay = site.relay("later")?.start()?;
    fill(site, topic, 100).await?;
    site.emptied().await?;
    for mut session in open {
        session.execute("COMMIT").await?;
        session.close().await?;
    }
    fill(site, topic, 100).await?;
    site.emptied().await?;
    relay.terminate(PATIENCE).await?;
    assert_eq!(site.kafka().count(topic).await? - before, 200, "restored messages went once more");
    Ok(())
}

#[test]
fn an_outbox_replicated_into_an_older_cluster_skips_nothing_though_producers_wrote_at_positions_that_were_taken()
 {
    test(Duration::from_secs(150), Load::Light, async |harness: &mut Harness| {
        let (old_cluster, new_cluster) =
            (Cluster::start(harness.directory()).await?, Cluster::start(harness.directory()).await?);
        new_cluster.reach(12_000).await?;
        let old = harness.site_at(old_cluster.place(), Schema::Both { shards: 8 }).await?;
        let new = harness.site_at(new_cluster.place(), Schema::Empty).await?;
        let topic = old.topic("replicated", 3).await?;
        let schema = dump(harness, &old, &["--schema-only"]).await?;
        restore(harness, &new, &schema).await?;
        old.pool().execute("CREATE PUBLICATION moving FOR TABLES IN SCHEMA outbox").await?;
        // What is there now is copied, what comes then is followed.
        fill(&old, &topic, 100).await?;
        let subscribe = format!(
            "CREATE SUBSCRIPTION moving CONNECTION '{}' PUBLICATION moving",
            old.place().database_url
        );
        new.pool().execute(sqlx::AssertSqlSafe(subscribe)).await?;
        publish_in_part(harness, &old, &topic).await?;
        published_once(&old, &topic).await?;
        let waited = old.pending().await?;
        same_rows(&old, &new).await?;

        let refused = run(&new, &["rebase"]).await?;
        assert_eq!(refused.status.code(), Some(1), "{refused}");
        assert!(refused.stderr.contains("the subscription moving still writes"), "{refused}");
        new.pool().execute("DROP SUBSCRIPTION moving").await?;
        // The sequence was not replicated: these get positions from 1 on, of keys whose earlier messages wait.
        let rank: i64 =
            sqlx::query_scalar("SELECT count(*) FROM outbox.message").fetch_one(new.pool()).await?;
        let mut producer = new.connect().await?;
        enqueue(&mut producer, &topic, "many", 2_001, 2_100).await?;
        producer.execute("BEGIN; SAVEPOINT part").await?;
        enqueue(&mut producer, &topic, "key-7", rank + 1_000, rank + 1_019).await?;
        producer.execute("RELEASE part; COMMIT").await?;
        let lowest: i64 = sqlx::query_scalar(
            "SELECT min(position) FROM outbox.message WHERE key = 'key-7' OR key = 'many'",
        )
        .fetch_one(&mut producer)
        .await?;
        assert!(lowest <= 100, "the sequence was replicated, nothing shown");

        let done = run(&new, &["rebase"]).await?.success()?;
        let expected = foretold(&done)?;
        assert!(done.contains("120 messages that were written here get another position"), "{done}");
        assert!(done.contains(&format!("{} messages wait to be published", waited + 120)), "{done}");
        let migrated = run(&new, &["migrate", "outbox"]).await?.success()?;
        assert!(migrated.contains("made or mended the roles"), "{migrated}");
        let repeated = publish_the_rest(&new, &topic).await?;
        assert_eq!(repeated, expected, "{done}");
        figure(&format!(
            "must show 3: replicated into an older cluster, 120 written at taken positions: rebase foretold {expected} repeats, \
             {repeated} were repeated; {} waited, 0 skipped, 0 out of order",
            waited + 120
        ));
        harness.leave(&new).await;
        old.pool().execute("DROP PUBLICATION moving").await?;
        harness.leave(&old).await;
        Ok(())
    });
}

/// Waits until the new cluster has what the old one has.
async fn same_rows(old: &Site, new: &Site) -> Outcome {
    const ROWS: &str = "SELECT (SELECT count(*) FROM outbox.message) || ' ' || (SELECT string_agg(c::text, ' ' ORDER BY shard) FROM outbox.cursor c)
                     || (SELECT string_agg(s::text, ' ' ORDER BY shard) FROM outbox.shard s) || (SELECT count(*) FROM outbox.relay)";
    eventually("the new cluster to follow", PATIENCE, async || {
        let (there, here) = (text(old, ROWS).await?, text(new, ROWS).await.unwrap_or_default());
        if there == here { Ok(()) } else { fail!("{here} instead of {there}") }
    })
    .await
}

/// What is done to the sequence of positions while messages wait.
#[derive(Debug, Clone, Copy)]
enum Change {
    /// Positions of messages that wait are given out again.
    BackAmongWaiting,
    /// Those of published ones too, and so many come then that it is ahead of all again.
    BackBelowCursors,
    /// Sessions take numbers in reserve and use them in another order than that of their commits.
    Cache,
}

#[test]
fn after_positions_were_given_out_again_a_rebase_loses_nothing_keeps_the_order_of_each_key_and_foretells_each_repeat()
 {
    // In one shard everything meets; of a page of one row the second at its position is not seen.
    test(Duration::from_secs(60), Load::Light, async |harness: &mut Harness| {
        positions_are_given_out_again(harness, Change::BackAmongWaiting, 1, 1).await
    });
}

#[test]
fn so_does_a_rebase_once_the_sequence_is_ahead_of_all_positions_again() {
    test(Duration::from_secs(60), Load::Light, async |harness: &mut Harness| {
        positions_are_given_out_again(harness, Change::BackBelowCursors, 1, 1).await
    });
}

#[test]
fn so_does_a_rebase_of_many_shards_and_messages_without_a_key_change_theirs() {
    test(Duration::from_secs(60), Load::Light, async |harness: &mut Harness| {
        positions_are_given_out_again(harness, Change::BackBelowCursors, 2_000, 8).await
    });
}

#[test]
fn so_does_a_rebase_where_sessions_used_positions_that_they_had_in_reserve() {
    test(Duration::from_secs(60), Load::Light, async |harness: &mut Harness| {
        positions_are_given_out_again(harness, Change::Cache, 1, 8).await
    });
}

async fn positions_are_given_out_again(
    harness: &mut Harness,
    change: Change,
    page_rows: i64,
    shards: u16,
) -> Outcome {
    let site = harness.site_at(&Place::shared()?, Schema::Both { shards }).await?;
    let topics = [site.topic("keyed", 1).await?, site.topic("unkeyed", 1).await?];
    let (mut one, mut other) = (site.connect().await?, site.connect().await?);
    let (mut early, mut astride) = (site.connect().await?, site.connect().await?);
    let (mut hole, mut again) = (site.connect().await?, site.connect().await?);
    for open in [&mut hole, &mut again] {
        open.execute("BEGIN; SELECT pg_current_xact_id()").await?;
    }
    // It commits once its shard's cursor has passed it, so what is published above it goes again.
    enqueue(&mut hole, &topics[0], "hole", 1, 3).await?;
    let mut next = 1;
    number(&mut one, &topics, &mut next, 140).await?;
    site.relay("before")?.arg("--until-empty").finish(PATIENCE).await?.success()?;
    // Published, at positions of published ones: a cursor saw its transaction running.
    set_back(&site, 60).await?;
    enqueue(&mut again, &topics[0], "again", 1, 5).await?;
    again.execute("COMMIT").await?;
    set_back(&site, 144).await?;
    site.relay("before")?.arg("--until-empty").finish(PATIENCE).await?.success()?;
    hole.execute("COMMIT").await?;
    assert_eq!(site.kafka().count(&topics[0]).await?, 125, "of 140 each seventh has no key");
    number(&mut one, &topics, &mut next, 140).await?;
    // Transactions that began before the change: one enqueues after it only, one on both sides of it.
    for open in [&mut early, &mut astride] {
        open.execute("BEGIN; SELECT pg_current_xact_id()").await?;
    }
    enqueue(&mut astride, &topics[0], "astride", 1, 5).await?;
    let taken: i64 = sqlx::query_scalar("SELECT last_value FROM outbox.message_position_seq")
        .fetch_one(site.pool())
        .await?;
    let mut come = 28;
    match change {
        Change::BackAmongWaiting => set_back(&site, taken - 60).await?,
        Change::BackBelowCursors => {
            set_back(&site, 60).await?;
            come = 350;
        }
        Change::Cache => {
            astride.execute("COMMIT; BEGIN; SELECT pg_current_xact_id()").await?;
            one.execute("ALTER SEQUENCE outbox.message_position_seq CACHE 100").await?;
            come = 140;
        }
    }
    for _ in 0..come / 14 {
        number(&mut one, &topics, &mut next, 7).await?;
        number(&mut other, &topics, &mut next, 7).await?;
    }
    enqueue(&mut early, &topics[0], "early", 1, 5).await?;
    enqueue(&mut astride, &topics[0], "astride", 6, 10).await?;
    for open in [&mut early, &mut astride] {
        open.execute("COMMIT").await?;
    }

    let planned = run(&site, &["rebase", "--dry-run"]).await?.success()?;
    let done = run(&site, &["rebase"]).await?.success()?;
    let expected = foretold(&done)?;
    assert_eq!(foretold(&planned)?, expected, "{planned}\n{done}");
    let once_more = run(&site, &["rebase"]).await?.success()?;
    let configuration = harness.directory().join("pages.toml");
    std::fs::write(&configuration, format!("[publish]\npage_rows = {page_rows}\n"))?;
    let relay = site.relay("after")?.arg("--until-empty").arg("--config").arg(&configuration);
    relay.finish(PATIENCE).await?.success()?;

    let (keyed, unkeyed) = (site.kafka().records(&topics[0]).await?, site.kafka().records(&topics[1]).await?);
    let (findings, _) = workload::judge(&workload::truth(&site, &topics[0]).await?, &keyed);
    assert!(findings.wire_is_right(), "{change:?}, pages of {page_rows}: {findings}\n{done}");
    let committed: Vec<String> = sqlx::query_scalar("SELECT id::text FROM outbox.message WHERE topic = $1")
        .bind(&topics[1])
        .fetch_all(site.pool())
        .await?;
    let seen: HashSet<&str> = unkeyed.iter().filter_map(|record| record.header("ce_id")).collect();
    let lost = committed.iter().filter(|id| !seen.contains(id.as_str())).count();
    assert_eq!(
        lost,
        0,
        "{change:?}, pages of {page_rows}: lost of {} without a key\n{done}",
        committed.len()
    );
    let repeated = findings.repeated.len() + unkeyed.len() - seen.len();
    assert_eq!(repeated, expected, "{change:?}, pages of {page_rows}\n{done}");
    assert!(repeated > 0, "no hole, nothing shown:\n{done}");
    assert!(done.contains(" messages get another position, behind all others"), "{done}");
    assert!(once_more.starts_with("nothing to do"), "{once_more}");
    figure(&format!(
        "must show 3: {change:?}, pages of {page_rows}: {} committed, 0 lost, 0 out of order, {repeated} repeats as foretold",
        findings.committed + committed.len()
    ));
    Ok(())
}

/// Messages of forty keys, numbered in the order in which they are enqueued, seven a transaction, one in seven without a key.
async fn number(
    connection: &mut PgConnection,
    topics: &[String; 2],
    next: &mut i64,
    messages: i64,
) -> Outcome {
    for _ in 0..messages / 7 {
        sqlx::query(
            r#"INSERT INTO outbox.message (topic, key, payload)
               SELECT CASE WHEN i % 7 = 0 THEN $2 ELSE $1 END, CASE WHEN i % 7 > 0 THEN 'key-' || i % 40 END,
                      convert_to(format('{"seq":%s}', i), 'UTF8')
               FROM generate_series($3::bigint, $3 + 6) i"#,
        )
        .bind(&topics[0])
        .bind(&topics[1])
        .bind(*next)
        .execute(&mut *connection)
        .await?;
        *next += 7;
    }
    Ok(())
}

async fn set_back(site: &Site, to: i64) -> Outcome {
    sqlx::query("SELECT setval('outbox.message_position_seq', $1, false)")
        .bind(to)
        .execute(site.pool())
        .await?;
    Ok(())
}

#[test]
fn a_rebase_is_refused_while_a_relay_lives_a_lease_runs_or_somebody_writes_and_to_all_but_the_owner() {
    test(Duration::from_secs(60), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        let topic = site.topic("living", 1).await?;
        let nothing = run(&site, &["rebase"]).await?.success()?;
        assert!(nothing.starts_with("nothing to do"), "{nothing}");
        let mut relay = site.relay("alive")?.start()?;
        fill(&site, &topic, 10).await?;
        site.emptied().await?;
        // From here on it would be needed.
        site.pool().execute("UPDATE outbox.settings SET system_identifier = 1").await?;
        let refuses = async |words: &str| -> Outcome {
            let refused = run(&site, &["rebase"]).await?;
            assert_eq!(refused.status.code(), Some(1), "{refused}");
            if refused.stderr.contains(words) { Ok(()) } else { fail!("{refused}") }
        };
        refuses("relay alive holds 8 shards until ").await?;
        relay.kill().await?;
        refuses("relay alive holds 8 shards until ").await?;
        // Released, and alive all the same.
        site.pool().execute("UPDATE outbox.shard SET owner = NULL, lease_until = NULL").await?;
        site.pool()
            .execute("UPDATE outbox.relay SET live_until = clock_timestamp() + interval '1 hour'")
            .await?;
        refuses("relay alive lives until ").await?;
        site.pool().execute("UPDATE outbox.relay SET live_until = clock_timestamp()").await?;

        let mut writer = site.connect().await?;
        writer.execute("BEGIN").await?;
        enqueue(&mut writer, &topic, "k", 1, 1).await?;
        refuses("a transaction that writes to the outbox did not end within 3 seconds").await?;
        writer.execute("ROLLBACK").await?;
        let operator = format!("{}?options=-c%20role%3Dbaton_operator", site.place().database_url);
        let refused = run(&site, &["rebase", "--database-url", &operator]).await?;
        assert_eq!(refused.status.code(), Some(1), "{refused}");
        assert!(refused.stderr.contains("use the role that owns it"), "{refused}");
        assert_eq!(text(&site, CLUSTER).await?, "1", "a refused rebase wrote");
        run(&site, &["rebase"]).await?.success()?;
        assert_ne!(text(&site, CLUSTER).await?, "1");
        Ok(())
    });
}

#[test]
fn a_rebase_that_is_killed_in_the_middle_has_changed_nothing_and_keeps_nobody_waiting() {
    test(Duration::from_secs(60), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        let topic = site.topic("killed", 1).await?;
        fill(&site, &topic, 100).await?;
        site.relay("before")?.arg("--until-empty").finish(PATIENCE).await?.success()?;
        // As after an upgrade into a cluster of another identity; one message as if from a later one; the sequence behind.
        site.pool().execute("UPDATE outbox.settings SET system_identifier = 1").await?;
        site.pool().execute("UPDATE outbox.message SET xid = '9000000000000' WHERE position = 7").await?;
        site.pool().execute("ALTER SEQUENCE outbox.message_position_seq RESTART WITH 50").await?;
        // The last thing it writes takes for ever.
        site.pool()
            .execute(
                "CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(600); RETURN new; END $$;
                 CREATE TRIGGER wait BEFORE INSERT ON outbox.audit FOR EACH ROW EXECUTE FUNCTION wait()",
            )
            .await?;
        let before = text(&site, EVERYTHING).await?;
        let mut process = site.baton(&["rebase"])?.start()?;
        sleeping(&site, true).await?;
        process.kill().await?;
        sleeping(&site, false).await?;
        assert_eq!(text(&site, EVERYTHING).await?, before, "a killed rebase left something behind");

        let mut process = site.baton(&["rebase"])?.start()?;
        sleeping(&site, true).await?;
        site.pool()
            .execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'PgSleep'")
            .await?;
        assert_eq!(process.exited(PATIENCE).await?.code(), Some(1), "{}", process.stderr());
        assert_eq!(text(&site, EVERYTHING).await?, before, "a cut rebase left something behind");

        site.pool().execute("DROP TRIGGER wait ON outbox.audit").await?;
        let done = run(&site, &["rebase"]).await?.success()?;
        assert!(done.contains("\n1 messages get another transaction id\n"), "{done}");
        assert!(done.contains("\nthe next position is 101 instead of 50\n"), "{done}");
        // The one that no cursor of here covers waits, and what was published above it in its shard goes again.
        assert!(done.contains("\n1 messages wait to be published\n"), "{done}");
        fill(&site, &topic, 10).await?;
        let sent = publish_the_rest(&site, &topic).await?;
        assert_eq!(sent, foretold(&done)? + 1, "{done}");
        figure(
            "a rebase killed before its last write changed nothing, and neither did one whose connection was cut",
        );
        Ok(())
    });
}

/// All that a rebase may change.
const EVERYTHING: &str = r#"
    SELECT concat_ws(E'\n',
        (SELECT s::text FROM outbox.settings s),
        (SELECT string_agg(s::text, ' ' ORDER BY shard) FROM outbox.shard s),
        (SELECT string_agg(f::text, ' ' ORDER BY shard) FROM outbox.fence f),
        (SELECT string_agg(a::text, ' ' ORDER BY shard, number) FROM outbox.advance a),
        (SELECT string_agg(m.xid || '@' || m."position", ' ' ORDER BY id) FROM outbox.message m),
        (SELECT string_agg(r::text, ' ' ORDER BY owner) FROM outbox.relay r),
        (SELECT t::text FROM outbox.token t),
        (SELECT last_value || ' ' || is_called FROM outbox.message_position_seq),
        (SELECT count(*) FROM outbox.audit))"#;

async fn sleeping(site: &Site, is_expected: bool) -> Outcome {
    eventually(format!("a rebase in the middle: {is_expected}"), PATIENCE, async || {
        let sleeps: bool = sqlx::query_scalar(
            "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'PgSleep')",
        )
        .fetch_one(site.pool())
        .await?;
        if sleeps == is_expected { Ok(()) } else { fail!("it is not so") }
    })
    .await
}

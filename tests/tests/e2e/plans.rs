//! What a poll touches depends on the page it brings, not on what else waits, is consumed or stays open.
//!
//! The unit is the buffer (a page of 8 KiB that Postgres looked at), as `EXPLAIN (ANALYZE, BUFFERS)` counts it for the
//! relay's own statement: on a busy machine it is the one figure that does not shake.

use std::time::Duration;

use baton_relay::cursor::{Cursor, Late, ReadAt};
use baton_relay::read::{Ask, explain};
use baton_tests::{Harness, Load, Outcome, Place, Schema, Site, fail, figure, test};
use futures_util::future::try_join_all;
use serde_json::Value;
use sqlx::{AssertSqlSafe, Connection, Executor, PgConnection};

use crate::memory::full;

const SHARDS: i64 = 8;
/// Rows of one page, the relay's default.
const PAGE: usize = 2_000;
const BYTES: usize = 64 << 20;
const OPEN: usize = 500;
/// What waits where the bar is measured, and what is consumed beside it elsewhere.
const FEW: i64 = 100_000;
const CONSUMED: i64 = 300_000;

#[test]
fn a_poll_that_returns_a_full_page_touches_as_much_whatever_else_waits_is_consumed_or_stays_open() {
    let waiting: i64 = if full() { 10_000_000 } else { 1_000_000 };
    test(
        Duration::from_secs(if full() { 1_500 } else { 240 }),
        Load::Alone,
        async |harness: &mut Harness| {
            let elsewhere = harness.site_at(&Place::shared()?, Schema::Empty).await?;
            let site = harness.site().await?;
            // Planned while all tables were empty; a relay's plan may be as old.
            let mut early = site.connect().await?;
            let start = cursors(&mut early).await?;
            cost(&mut early, &start).await?;

            let one_page = SHARDS * i64::try_from(PAGE)?;
            insert(&site, 1, FEW).await?;
            let (bar, rows) = cost(&mut early, &start).await?;
            assert_eq!(rows, one_page, "a page a shard and no more");

            let mut idle = elsewhere.connect().await?;
            idle.execute("CREATE TABLE t (n int); BEGIN; INSERT INTO t VALUES (1)").await?;
            let mut orphan = site.connect().await?;
            orphan
                .execute("BEGIN; INSERT INTO outbox.message (topic, key) VALUES ('topic', 'orphan')")
                .await?;
            let name = site.topic_name("orphan");
            orphan.execute(AssertSqlSafe(format!("PREPARE TRANSACTION '{name}'"))).await?;
            insert(&site, FEW + 1, CONSUMED).await?;
            let open = open_transactions(&site).await?;
            // Written while they were open, and after none that began later: each of them may still turn up late.
            let among_open = cursors_now(&mut early, &start).await?;
            insert(&site, CONSUMED + 1, CONSUMED + waiting).await?;

            let mut fresh = site.connect().await?;
            let mut costs = vec![
                ("planned when empty", cost(&mut early, &among_open).await?),
                ("planned now", cost(&mut fresh, &among_open).await?),
                ("from the very first cursor", cost(&mut fresh, &start).await?),
            ];
            early.execute("ANALYZE outbox.message").await?;
            costs.push(("after ANALYZE", cost(&mut fresh, &among_open).await?));
            drop(open);
            idle.execute("ROLLBACK").await?;

            let shown: Vec<String> =
                costs.iter().map(|(what, (buffers, _))| format!("{buffers} {what}")).collect();
            figure(&format!(
                "must show 4: buffers of a poll that returns a full page of each shard: {bar} with {FEW} waiting and nothing else; with an \
             idle transaction in another database, an orphaned prepared one, {OPEN} open ones, {CONSUMED} consumed rows and {waiting} \
             waiting: {}",
                shown.join(", ")
            ));
            for (what, (buffers, rows)) in costs {
                assert_eq!(rows, one_page, "{what}");
                assert!(5 * buffers <= 6 * bar, "{what}: {buffers} buffers, {bar} without");
            }
            Ok(())
        },
    );
}

#[test]
fn a_page_of_late_messages_touches_as_much_however_many_are_late() {
    let late: i64 = if full() { 1_000_000 } else { 200_000 };
    test(Duration::from_secs(240), Load::Alone, async |harness: &mut Harness| {
        let site = harness.site().await?;
        let mut connection = site.connect().await?;
        let start = cursors(&mut connection).await?;
        let one_page = SHARDS * i64::try_from(PAGE)?;
        insert(&site, 1, one_page).await?;
        let (bar, rows) = cost(&mut connection, &start).await?;
        assert_eq!(rows, one_page);

        let (mut bulk, mut undone) = (site.connect().await?, site.connect().await?);
        bulk.execute("BEGIN").await?;
        undone.execute("BEGIN").await?;
        enqueue(&site, &mut undone, 1, late).await?;
        enqueue(&site, &mut bulk, 1, late).await?;
        let xid: i64 =
            sqlx::query_scalar("SELECT pg_current_xact_id()::text::bigint").fetch_one(&mut bulk).await?;
        // A later one completes, so the cursor's snapshot names the two as running; and one in which it does not.
        insert(&site, 1, SHARDS).await?;
        let named = cursors_now(&mut connection, &start).await?;
        let mut unnamed = named.clone();
        for (_, cursor) in &mut unnamed {
            (cursor.snapshot, cursor.ceiling) = (format!("{xid}:{xid}:"), (xid + 1).to_string());
        }
        undone.execute("ROLLBACK").await?;
        bulk.execute("COMMIT").await?;
        insert(&site, 1, one_page).await?;

        let (first, rows) = cost(&mut connection, &named).await?;
        assert_eq!(rows, one_page, "a page a shard and no more");
        let (from_unnamed, rows) = cost(&mut connection, &unnamed).await?;
        assert_eq!(rows, one_page);
        // In the middle of the bulk, whose positions begin after those of the one that was rolled back.
        let read = read_at(&mut connection).await?;
        let mut amid = named.clone();
        for (_, cursor) in &mut amid {
            *cursor = cursor.after(&read, one_page + late + late / 2);
        }
        let (in_the_middle, rows) = cost(&mut connection, &amid).await?;
        assert_eq!(rows, one_page);
        figure(&format!(
            "buffers of a page of each shard: {bar} fresh; {first} of {late} late ones, {in_the_middle} in the middle of them, \
             {from_unnamed} where the cursor's snapshot does not name their transaction"
        ));
        for (what, buffers) in [("first", first), ("in the middle", in_the_middle), ("unnamed", from_unnamed)]
        {
            assert!(2 * buffers <= 3 * bar, "{what}: {buffers} buffers, {bar} for fresh ones");
        }
        Ok(())
    });
}

#[test]
fn late_messages_are_found_across_a_multiple_of_2_to_the_31_transactions_and_not_taken_for_others() {
    const PASSES: i64 = 1 << 31;
    test(Duration::from_secs(60), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        let mut connection = site.connect().await?;
        let key = site.key_of_each_shard().await?.swap_remove(0);
        // Ids that this cluster has not come to: positions, snapshots and ids of a story two billion transactions long. The
        // last two have the low bits of two that are looked for.
        let ids = (PASSES - 3..PASSES + 3).chain([PASSES - 4, PASSES + 3, 2 * PASSES - 2, 2 * PASSES + 1]);
        for xid in ids.chain([0]) {
            sqlx::query("INSERT INTO outbox.message (xid, topic, key) VALUES ($1::text::xid8, 'topic', $2)")
                .bind(xid.to_string())
                .bind(&key)
                .execute(&mut connection)
                .await?;
        }
        let snapshot = format!("{0}:{0}:", PASSES - 3);
        let shown = format!("{0}:{0}:", 4 * PASSES + 9);
        let cursor = Cursor {
            position: 1_000,
            snapshot,
            ceiling: (PASSES + 3).to_string(),
            late: Some(Late { snapshot: shown, position: 0 }),
        };
        let (_, rows) = measure(&mut connection, &[ask(0, &cursor)]).await?;
        assert_eq!(rows, 6, "those from xmax to the ceiling");
        Ok(())
    });
}

#[test]
fn an_idle_poll_does_not_touch_the_table() {
    test(Duration::from_secs(60), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        let mut connection = site.connect().await?;
        insert(&site, 1, 10_000).await?;
        let start = cursors(&mut connection).await?;
        // Nothing is running in this database but this; other databases' transactions may move the snapshot on.
        for _ in 0..50 {
            let now = cursors_now(&mut connection, &start).await?;
            let asks: Vec<Ask<'_>> = now.iter().map(|(s, c)| Ask::new(*s, c, true, PAGE, BYTES)).collect();
            let (buffers, rows) = measure(&mut connection, &asks).await?;
            if buffers == 0 {
                assert_eq!(rows, 0);
                return Ok(());
            }
        }
        fail!("fifty idle polls, and each touched the table")
    });
}

#[test]
fn a_look_at_the_status_and_one_at_what_is_left_touch_little_however_much_is_consumed() {
    const LOOKS: [&str; 2] = [
        include_str!("../../../relay/queries/status_shards.sql"),
        include_str!("../../../relay/queries/outbox_pending_shards.sql"),
    ];
    test(Duration::from_secs(60), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        let mut connection = site.connect().await?;
        insert(&site, 1, 40_000).await?;
        // Everything is consumed, at a snapshot that leaves ids up to the ceiling to look for.
        sqlx::query(
            "INSERT INTO outbox.advance (shard, number, generation, position, snapshot, ceiling)
             SELECT shard, number + 1, generation, 40000, pg_current_snapshot(),
                    (pg_snapshot_xmax(pg_current_snapshot())::text::bigint + 100)::text::xid8 FROM outbox.cursor",
        )
        .execute(&mut connection)
        .await?;
        connection.execute("VACUUM ANALYZE outbox.message").await?;
        for look in LOOKS {
            let asked = look.replace("$1::pg_snapshot", "pg_current_snapshot()").replace("$2", "40000");
            let plan: Value =
                sqlx::query_scalar(AssertSqlSafe(format!("EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {asked}")))
                    .fetch_one(&mut connection)
                    .await?;
            let plan = &plan[0]["Plan"];
            let buffers =
                ["Shared Hit Blocks", "Shared Read Blocks"].map(|kind| plan[kind].as_i64().unwrap_or(0));
            let touched: i64 = buffers.iter().sum();
            assert!((1..500).contains(&touched), "{touched} buffers: {plan:#}");
        }
        Ok(())
    });
}

/// Messages `first..=last`, spread evenly over the shards, a thousand a transaction at first and more later on.
async fn insert(site: &Site, first: i64, last: i64) -> Outcome {
    let mut connection = site.connect().await?;
    let chunk = ((last - first) / 16).max(1_000);
    for from in (first..=last).step_by(usize::try_from(chunk)?) {
        enqueue(site, &mut connection, from, (from + chunk - 1).min(last)).await?;
    }
    connection.close().await?;
    Ok(())
}

/// The same in one statement of this connection's.
async fn enqueue(site: &Site, connection: &mut PgConnection, first: i64, last: i64) -> Outcome {
    let keys = site.key_of_each_shard().await?;
    sqlx::query(
        "INSERT INTO outbox.message (topic, key, payload)
         SELECT 'topic', ($1::text[])[1 + i % $2], convert_to(lpad(i::text, 100, '0'), 'UTF8')
         FROM generate_series($3::bigint, $4) i",
    )
    .bind(&keys)
    .bind(SHARDS)
    .bind(first)
    .bind(last)
    .execute(connection)
    .await?;
    Ok(())
}

/// Transactions that have enqueued a message each and stay open, until they are dropped.
async fn open_transactions(site: &Site) -> Outcome<Vec<PgConnection>> {
    let (room, used): (i64, i64) = sqlx::query_as(
        "SELECT current_setting('max_connections')::bigint, (SELECT count(*) FROM pg_stat_activity)",
    )
    .fetch_one(site.pool())
    .await?;
    if room - used < i64::try_from(OPEN)? + 20 {
        fail!(
            "this test needs {OPEN} connections, Postgres has {room} and {used} are taken: raise max_connections"
        );
    }
    let mut all = Vec::with_capacity(OPEN);
    while all.len() < OPEN {
        let some = (all.len()..OPEN.min(all.len() + 20)).map(async |number| {
            let mut connection = site.connect().await?;
            connection.execute("BEGIN").await?;
            sqlx::query("INSERT INTO outbox.message (topic, key, payload) VALUES ('topic', $1, 'open')")
                .bind(number.to_string())
                .execute(&mut connection)
                .await?;
            Outcome::Ok(connection)
        });
        all.extend(try_join_all(some).await?);
    }
    Ok(all)
}

type Cursors = Vec<(i16, Cursor)>;

/// As the migration left them.
async fn cursors(connection: &mut PgConnection) -> Outcome<Cursors> {
    let rows: Vec<(i16, i64, String, String)> = sqlx::query_as(
        r#"SELECT shard, "position", snapshot::text, ceiling::text FROM outbox.cursor ORDER BY shard"#,
    )
    .fetch_all(connection)
    .await?;
    let cursor =
        |(shard, position, snapshot, ceiling)| (shard, Cursor { position, snapshot, ceiling, late: None });
    Ok(rows.into_iter().map(cursor).collect())
}

/// As a relay that has consumed all that is visible now would write them.
async fn cursors_now(connection: &mut PgConnection, shards: &Cursors) -> Outcome<Cursors> {
    let position: i64 = sqlx::query_scalar(r#"SELECT max("position") FROM outbox.message"#)
        .fetch_one(&mut *connection)
        .await?;
    cursors_at(connection, shards, position).await
}

async fn cursors_at(connection: &mut PgConnection, shards: &Cursors, position: i64) -> Outcome<Cursors> {
    let ReadAt { snapshot, ceiling } = read_at(connection).await?;
    Ok(shards
        .iter()
        .map(|(shard, _)| {
            let (snapshot, ceiling) = (snapshot.clone(), ceiling.clone());
            (*shard, Cursor { position, snapshot, ceiling, late: None })
        })
        .collect())
}

async fn read_at(connection: &mut PgConnection) -> Outcome<ReadAt> {
    let (snapshot, ceiling) = sqlx::query_as(
        "SELECT s::text, (pg_snapshot_xmax(s)::text::bigint + age(pg_snapshot_xmax(s)::xid))::text
         FROM pg_current_snapshot() s",
    )
    .fetch_one(connection)
    .await?;
    Ok(ReadAt { snapshot, ceiling })
}

fn ask(shard: i16, cursor: &Cursor) -> Ask<'_> {
    Ask::new(shard, cursor, false, PAGE, BYTES)
}

/// Buffers touched and rows found by one poll of all shards. The second of two, so that hint bits are set.
async fn cost(connection: &mut PgConnection, cursors: &Cursors) -> Outcome<(i64, i64)> {
    let asks: Vec<Ask<'_>> = cursors.iter().map(|(shard, cursor)| ask(*shard, cursor)).collect();
    measure(connection, &asks).await?;
    measure(connection, &asks).await
}

async fn measure(connection: &mut PgConnection, asks: &[Ask<'_>]) -> Outcome<(i64, i64)> {
    let plan = explain(connection, asks).await?;
    let plan = &plan[0]["Plan"];
    Ok((number(plan, "Shared Hit Blocks") + number(plan, "Shared Read Blocks"), paged(plan)))
}

fn number(node: &Value, name: &str) -> i64 {
    node[name].as_f64().map_or(0, round)
}

/// The rows of all pages: what goes into the aggregate that makes a value of a page.
fn paged(node: &Value) -> i64 {
    let below = || node["Plans"].as_array().into_iter().flatten();
    if node["Node Type"] == "Aggregate" && node["Parent Relationship"] == "Inner" {
        return below().map(|rows| number(rows, "Actual Rows") * number(rows, "Actual Loops")).sum();
    }
    below().map(paged).sum()
}

#[expect(clippy::cast_possible_truncation, reason = "counts of a plan, printed as 123.00 by newer servers")]
fn round(number: f64) -> i64 {
    number.round() as i64
}

#[test]
fn counts_are_read_from_old_and_new_plans() {
    for plan in [r#"{"Actual Rows": 12}"#, r#"{"Actual Rows": 12.00}"#] {
        let plan: Value = serde_json::from_str(plan).unwrap();
        assert_eq!(number(&plan, "Actual Rows"), 12);
    }
}

//! What a poll touches depends on the page it brings, not on what else waits, is consumed or stays open.
//!
//! The unit is the buffer (a page of 8 KiB that Postgres looked at), as `EXPLAIN (ANALYZE, BUFFERS)` counts it for the
//! relay's own statement: on a busy machine it is the one figure that does not shake.

use std::time::Duration;

use baton_relay::cursor::Cursor;
use baton_relay::read::{Ask, explain};
use baton_tests::{Harness, Load, Outcome, Site, fail, figure, test};
use futures_util::future::try_join_all;
use serde_json::Value;
use sqlx::{Executor, PgConnection};

const SHARDS: i64 = 8;
/// Rows of one page, the relay's default.
const PAGE: usize = 2_000;
const OPEN: usize = 500;
const WAITING: i64 = 2_000_000;

#[test]
fn a_poll_touches_no_more_with_2_million_messages_waiting_or_500_transactions_open() {
    test(Duration::from_secs(240), Load::Alone, async |harness: &mut Harness| {
        let site = harness.site().await?;
        let mut connection = site.connect().await?;
        // As on the relay's own connections.
        connection.execute("SET jit = off").await?;
        let start = cursors(&mut connection).await?;

        let one_page = SHARDS * i64::try_from(PAGE)?;
        insert(&site, 1, one_page).await?;
        let (bar, rows) = cost(&mut connection, &start).await?;
        assert_eq!(rows, one_page, "exactly one page a shard waits");

        let open = open_transactions(&site).await?;
        let (with_open, rows) = cost(&mut connection, &start).await?;
        assert_eq!(rows, one_page);
        // And from a cursor written while they were open: each of them may still turn up late.
        let among_open = cursors_now(&mut connection, &start).await?;
        insert(&site, one_page + 1, 2 * one_page).await?;
        let (after_open, rows) = cost(&mut connection, &among_open).await?;
        assert_eq!(rows, one_page);
        drop(open);

        insert(&site, 2 * one_page + 1, WAITING).await?;
        let (unanalyzed, rows) = cost(&mut connection, &start).await?;
        assert_eq!(rows, one_page, "a page a shard and no more");
        connection.execute("ANALYZE outbox.message").await?;
        let (analyzed, _) = cost(&mut connection, &start).await?;
        // All but the last page consumed.
        let near_the_end =
            cursors_at(&mut connection, &start, WAITING + i64::try_from(OPEN)? - one_page).await?;
        let (consumed, rows) = cost(&mut connection, &near_the_end).await?;
        assert!(rows > one_page / 2, "{rows} rows");

        figure(&format!(
            "must show 7: buffers of a first poll: {bar} with one page a shard waiting; {unanalyzed} with 2,000,000 \
             waiting ({analyzed} after ANALYZE); {with_open} with {OPEN} transactions open, {after_open} from a cursor \
             written among them; {consumed} with all but the last page consumed"
        ));
        for (what, buffers) in [
            ("2,000,000 waiting", unanalyzed),
            ("2,000,000 waiting, analyzed", analyzed),
            ("500 open transactions", with_open),
            ("500 open transactions, begun before the cursor", after_open),
            ("2,000,000 consumed", consumed),
        ] {
            assert!(buffers <= 2 * bar, "{what}: {buffers} buffers, {bar} without");
        }
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
            let asks: Vec<Ask<'_>> = now.iter().map(|(s, c)| Ask { caught_up: true, ..ask(*s, c) }).collect();
            let (buffers, rows) = measure(&mut connection, &asks).await?;
            if buffers == 0 {
                assert_eq!(rows, 0);
                return Ok(());
            }
        }
        fail!("fifty idle polls, and each touched the table")
    });
}

/// Messages `first..=last`, spread evenly over the shards, a thousand a transaction at first and more later on.
async fn insert(site: &Site, first: i64, last: i64) -> Outcome {
    let keys = site.key_of_each_shard().await?;
    let chunk = ((last - first) / 16).max(1_000);
    for from in (first..=last).step_by(usize::try_from(chunk)?) {
        sqlx::query(
            "INSERT INTO outbox.message (topic, key, payload)
             SELECT 'topic', ($1::text[])[1 + i % $2], convert_to(lpad(i::text, 100, '0'), 'UTF8')
             FROM generate_series($3::bigint, $4) i",
        )
        .bind(&keys)
        .bind(SHARDS)
        .bind(from)
        .bind((from + chunk - 1).min(last))
        .execute(site.pool())
        .await?;
    }
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
    let (snapshot, ceiling): (String, String) = sqlx::query_as(
        "SELECT s::text, (pg_snapshot_xmax(s)::text::bigint + age(pg_snapshot_xmax(s)::xid))::text
         FROM pg_current_snapshot() s",
    )
    .fetch_one(connection)
    .await?;
    Ok(shards
        .iter()
        .map(|(shard, _)| {
            let (snapshot, ceiling) = (snapshot.clone(), ceiling.clone());
            (*shard, Cursor { position, snapshot, ceiling, late: None })
        })
        .collect())
}

fn ask(shard: i16, cursor: &Cursor) -> Ask<'_> {
    Ask { shard, cursor, caught_up: false, rows: PAGE, bytes: 64 << 20 }
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
    let number = |name: &str| plan[name].as_f64().map_or(0, round);
    // One row says when the page was read.
    Ok((number("Shared Hit Blocks") + number("Shared Read Blocks"), number("Actual Rows") - 1))
}

#[expect(clippy::cast_possible_truncation, reason = "counts of a plan, printed as 123.00 by newer servers")]
fn round(number: f64) -> i64 {
    number.round() as i64
}

#[test]
fn counts_are_read_from_old_and_new_plans() {
    for plan in [r#"{"Actual Rows": 12}"#, r#"{"Actual Rows": 12.00}"#] {
        let plan: Value = serde_json::from_str(plan).unwrap();
        assert_eq!(plan["Actual Rows"].as_f64().map(round), Some(12));
    }
}

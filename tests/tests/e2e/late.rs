//! What commits late is published, soon and in the order of its key, in each of the ways a transaction can be late.
//!
//! The storm of [`crate::under_fire`] mixes these; here each stands alone, so that a failure says which.

use std::time::Duration;

use baton_tests::{Harness, Load, Outcome, Place, Process, Schema, Site, eventually, fail, lasts, test};
use sqlx::{Connection, Executor, PgConnection};

const PATIENCE: Duration = Duration::from_secs(20);
/// A message that waits for nobody is published within this, on a busy machine.
const SOON: Duration = Duration::from_secs(5);

struct Scene {
    site: Site,
    topic: String,
    _relay: Process,
}

/// A relay at work, and one key's partition to look at.
async fn scene(harness: &mut Harness) -> Outcome<Scene> {
    let site = harness.site().await?;
    let topic = site.topic("late", 1).await?;
    let relay = site.relay("relay")?.start()?;
    let scene = Scene { site, topic, _relay: relay };
    let mut first = scene.site.connect().await?;
    scene.enqueue(&mut first, "k", "first").await?;
    scene.sees(&["first"]).await?;
    Ok(scene)
}

impl Scene {
    async fn enqueue(&self, connection: &mut PgConnection, key: &str, payload: &str) -> Outcome {
        sqlx::query(
            "INSERT INTO outbox.message (topic, key, payload) VALUES ($1, $2, convert_to($3, 'UTF8'))",
        )
        .bind(&self.topic)
        .bind(key)
        .bind(payload)
        .execute(connection)
        .await?;
        Ok(())
    }

    /// Waits until the topic holds exactly this, in this order.
    async fn sees(&self, expected: &[&str]) -> Outcome {
        eventually(format!("{expected:?} on the topic"), SOON, async || {
            let records = self.site.kafka().records(&self.topic).await?;
            let seen: Vec<&str> = records.iter().map(|r| r.payload_text().unwrap_or("null")).collect();
            if seen == expected { Ok(()) } else { fail!("{seen:?}") }
        })
        .await
    }
}

#[test]
fn a_message_that_commits_after_a_later_position_was_published_is_published_soon() {
    test(Duration::from_secs(60), Load::Light, async |harness: &mut Harness| {
        let scene = scene(harness).await?;
        let (mut slow, mut quick) = (scene.site.connect().await?, scene.site.connect().await?);
        slow.execute("BEGIN").await?;
        scene.enqueue(&mut slow, "k", "slow").await?;
        scene.enqueue(&mut quick, "k", "quick").await?;
        scene.sees(&["first", "quick"]).await?;
        slow.execute("COMMIT").await?;
        scene.sees(&["first", "quick", "slow"]).await
    });
}

#[test]
fn an_early_transaction_id_does_not_put_a_message_before_one_its_key_committed_earlier() {
    test(Duration::from_secs(60), Load::Light, async |harness: &mut Harness| {
        let scene = scene(harness).await?;
        let (mut early, mut quick) = (scene.site.connect().await?, scene.site.connect().await?);
        quick.execute("CREATE TABLE aggregate (n int); CREATE TABLE elsewhere (n int); INSERT INTO aggregate VALUES (0)").await?;
        early.execute("BEGIN; INSERT INTO elsewhere VALUES (1)").await?;
        quick.execute("BEGIN; UPDATE aggregate SET n = n + 1").await?;
        scene.enqueue(&mut quick, "k", "second").await?;
        quick.execute("COMMIT").await?;
        early.execute("UPDATE aggregate SET n = n + 1").await?;
        scene.enqueue(&mut early, "k", "third").await?;
        lasts("a moment in which the later one could be published alone", Duration::from_millis(300)).await;
        early.execute("COMMIT").await?;
        scene.sees(&["first", "second", "third"]).await
    });
}

#[test]
fn what_a_savepoint_took_back_is_not_published_and_what_it_kept_is() {
    test(Duration::from_secs(60), Load::Light, async |harness: &mut Harness| {
        let scene = scene(harness).await?;
        let (mut slow, mut quick) = (scene.site.connect().await?, scene.site.connect().await?);
        slow.execute("BEGIN; SAVEPOINT kept").await?;
        scene.enqueue(&mut slow, "k", "kept").await?;
        slow.execute("RELEASE kept; SAVEPOINT undone").await?;
        scene.enqueue(&mut slow, "k", "undone").await?;
        slow.execute("ROLLBACK TO undone").await?;
        scene.enqueue(&mut slow, "k", "after").await?;
        scene.enqueue(&mut quick, "other", "quick").await?;
        scene.sees(&["first", "quick"]).await?;
        slow.execute("COMMIT").await?;
        scene.sees(&["first", "quick", "kept", "after"]).await
    });
}

#[test]
fn a_prepared_transaction_that_is_committed_late_is_published() {
    test(Duration::from_secs(60), Load::Light, async |harness: &mut Harness| {
        let scene = scene(harness).await?;
        let mut connection = scene.site.connect().await?;
        let allowed: i64 = sqlx::query_scalar("SELECT current_setting('max_prepared_transactions')::bigint")
            .fetch_one(&mut connection)
            .await?;
        if allowed == 0 {
            fail!("max_prepared_transactions is 0: the stack of `cargo xtask up` has 10");
        }
        connection.execute("BEGIN").await?;
        scene.enqueue(&mut connection, "k", "prepared").await?;
        // Its name is the whole cluster's.
        let gid = &scene.topic;
        connection.execute(sqlx::AssertSqlSafe(format!("PREPARE TRANSACTION '{gid}'"))).await?;
        scene.enqueue(&mut connection, "k", "quick").await?;
        scene.sees(&["first", "quick"]).await?;
        connection.execute(sqlx::AssertSqlSafe(format!("COMMIT PREPARED '{gid}'"))).await?;
        scene.sees(&["first", "quick", "prepared"]).await
    });
}

#[test]
fn a_producer_with_an_old_snapshot_is_published_like_any_other() {
    test(Duration::from_secs(60), Load::Light, async |harness: &mut Harness| {
        let scene = scene(harness).await?;
        let (mut old, mut quick) = (scene.site.connect().await?, scene.site.connect().await?);
        old.execute("BEGIN ISOLATION LEVEL SERIALIZABLE; SELECT count(*) FROM outbox.settings").await?;
        scene.enqueue(&mut quick, "k", "quick").await?;
        scene.sees(&["first", "quick"]).await?;
        scene.enqueue(&mut old, "k", "old").await?;
        scene.enqueue(&mut quick, "other", "quick again").await?;
        scene.sees(&["first", "quick", "quick again"]).await?;
        old.execute("COMMIT").await?;
        scene.sees(&["first", "quick", "quick again", "old"]).await
    });
}

#[test]
fn a_bulk_transaction_of_many_pages_that_commits_last_is_published_whole_and_in_order() {
    const BULK: usize = 50_000;
    test(Duration::from_secs(120), Load::Light, async |harness: &mut Harness| {
        let scene = scene(harness).await?;
        let (mut bulk, mut quick) = (scene.site.connect().await?, scene.site.connect().await?);
        bulk.execute("BEGIN").await?;
        sqlx::query(
            "INSERT INTO outbox.message (topic, key, payload)
             SELECT $1, 'bulk', convert_to(i::text, 'UTF8') FROM generate_series(1, $2::bigint) i",
        )
        .bind(&scene.topic)
        .bind(i64::try_from(BULK)?)
        .execute(&mut bulk)
        .await?;
        // Of the same shard, so that the bulk is late there and is worked off page by page.
        scene.enqueue(&mut quick, "bulk", "quick").await?;
        scene.sees(&["first", "quick"]).await?;
        bulk.execute("COMMIT").await?;
        scene.enqueue(&mut quick, "bulk", "last").await?;
        eventually("all of it", Duration::from_secs(60), async || {
            let count = scene.site.kafka().count(&scene.topic).await?;
            if count >= 3 + i64::try_from(BULK)? { Ok(()) } else { fail!("{count} records") }
        })
        .await?;
        let records = scene.site.kafka().records(&scene.topic).await?;
        let seen: Vec<&str> = records.iter().filter_map(|record| record.payload_text()).collect();
        let numbers: Vec<String> = (1..=BULK).map(|i| i.to_string()).collect();
        let expected: Vec<&str> = ["first", "quick"]
            .into_iter()
            .chain(numbers.iter().map(String::as_str))
            .chain(["last"])
            .collect();
        assert_eq!(seen.len(), expected.len());
        assert!(seen == expected, "out of order");
        Ok(())
    });
}

#[test]
fn a_transaction_that_stays_open_in_another_database_holds_nothing_up() {
    test(Duration::from_secs(60), Load::Light, async |harness: &mut Harness| {
        let elsewhere = harness.site_at(&Place::shared()?, Schema::Empty).await?;
        let mut idle = elsewhere.connect().await?;
        idle.execute("CREATE TABLE t (n int)").await?;
        idle.execute("BEGIN; INSERT INTO t VALUES (1)").await?;
        let scene = scene(harness).await?;
        let mut quick = scene.site.connect().await?;
        // One of ours stays open as well, with a message of another key.
        let mut open = scene.site.connect().await?;
        open.execute("BEGIN").await?;
        scene.enqueue(&mut open, "open", "open").await?;
        for _ in 0..20 {
            scene.enqueue(&mut quick, "k", "quick").await?;
        }
        eventually("the others", PATIENCE, async || {
            let count = scene.site.kafka().count(&scene.topic).await?;
            if count == 21 { Ok(()) } else { fail!("{count} records") }
        })
        .await?;
        open.execute("ROLLBACK").await?;
        idle.execute("ROLLBACK").await?;
        idle.close().await?;
        assert_eq!(scene.site.kafka().count(&scene.topic).await?, 21);
        Ok(())
    });
}

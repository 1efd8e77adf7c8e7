//! A transaction that has enqueued stays open all the time, and another is prepared and forgotten.
//!
//! Both hold a transaction id, and so everything that waits for the oldest one. The messages of other keys must not:
//! their delay, from the row's `created_at` to the broker's own time of appending, is measured before, while the
//! transaction is open, and while the prepared one is left behind.

use std::time::Duration;

use baton_tests::{Harness, Load, Outcome, Site, figure, test};
use sqlx::{Connection, Executor};
use tokio::time::{MissedTickBehavior, interval};

use super::{ends_well, tier, verdict};
use crate::leases::fill;

#[test]
fn open_and_orphaned_transactions_leave_the_delay_of_other_keys_as_it_was_and_lose_nothing_when_they_end() {
    let long = tier(Duration::from_secs(2), Duration::from_secs(600));
    test(Duration::from_secs(120) + 2 * long, Load::Alone, async |harness: &mut Harness| {
        let site = harness.site().await?;
        let topic = site.topic_with("held", 3, &[("message.timestamp.type", "LogAppendTime")]).await?;
        let mut relay = site.relay("relay")?.start()?;
        fill(&site, &topic, 200).await?;
        site.emptied().await?;

        let mut sent = 0;
        measure(&site, &topic, "warm", Duration::from_secs(1), &mut sent).await?;
        let before = measure(&site, &topic, "before", Duration::from_secs(2), &mut sent).await?;
        let mut open = site.connect().await?;
        open.execute("BEGIN").await?;
        enqueue(&mut open, &topic, "open", 1).await?;
        let beside_open = measure(&site, &topic, "open", long, &mut sent).await?;
        let mut prepared = site.connect().await?;
        prepared.execute("BEGIN").await?;
        enqueue(&mut prepared, &topic, "orphan", 1).await?;
        prepared.execute(sqlx::AssertSqlSafe(format!("PREPARE TRANSACTION '{topic}'"))).await?;
        prepared.close().await?;
        open.execute("COMMIT").await?;
        let beside_orphan = measure(&site, &topic, "orphan", long, &mut sent).await?;

        let mut ends = site.connect().await?;
        ends.execute(sqlx::AssertSqlSafe(format!("COMMIT PREPARED '{topic}'"))).await?;
        site.emptied().await?;
        ends_well(&mut relay).await?;
        let findings = verdict(&site, &topic).await?;
        assert!(findings.wire_is_right(), "{findings}");
        assert_eq!(findings.committed, 202 + sent);
        figure(&format!(
            "delay of other keys, median: {before:.2} ms before, {beside_open:.2} ms beside an open transaction, \
             {beside_orphan:.2} ms beside an orphaned prepared one (at most 1.5 times as long); {findings}"
        ));
        // What is held up waits for the transaction's end. In the small tier the machine does other things as well.
        let slack = if super::is_full() { 0.0 } else { 50.0 };
        for (held, what) in [(beside_open, "an open transaction"), (beside_orphan, "a prepared one")] {
            assert!(held <= 1.5 * before + slack, "{held} ms beside {what}, {before} ms before");
        }
        Ok(())
    });
}

async fn enqueue(connection: &mut sqlx::PgConnection, topic: &str, key: &str, seq: i64) -> Outcome {
    sqlx::query(
        r#"INSERT INTO outbox.message (topic, key, payload) VALUES ($1, $2, convert_to(format('{"seq":%s}', $3::bigint), 'UTF8'))"#,
    )
    .bind(topic)
    .bind(key)
    .bind(seq)
    .execute(connection)
    .await?;
    Ok(())
}

/// Enqueues a message every 10 ms, of eight keys in turn, and gives the median of their delays in milliseconds.
async fn measure(site: &Site, topic: &str, phase: &str, period: Duration, sent: &mut usize) -> Outcome<f64> {
    let first: i64 = sqlx::query_scalar(r#"SELECT coalesce(max("position"), 0) FROM outbox.message"#)
        .fetch_one(site.pool())
        .await?;
    let mut producer = site.connect().await?;
    let mut tick = interval(Duration::from_millis(10));
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let messages = i64::try_from(period.as_millis() / 10)?;
    for seq in 0..messages {
        tick.tick().await;
        enqueue(&mut producer, topic, &format!("{phase}-{}", seq % 8), seq).await?;
        *sent += 1;
    }
    site.emptied().await?;
    let created: std::collections::HashMap<String, f64> = sqlx::query_as(
        r#"SELECT id::text, (extract(epoch FROM created_at) * 1000)::float8 FROM outbox.message WHERE "position" > $1 AND key LIKE $2 || '-%'"#,
    )
    .bind(first)
    .bind(phase)
    .fetch_all(&mut producer)
    .await?
    .into_iter()
    .collect();
    let records = site.kafka().records(topic).await?;
    let mut delays: Vec<f64> = records
        .iter()
        .filter_map(|record| Some(record.timestamp_ms? as f64 - created.get(record.header("ce_id")?)?))
        .collect();
    assert_eq!(delays.len(), created.len(), "some of {phase} are not published");
    delays.sort_by(f64::total_cmp);
    // The broker's milliseconds are whole ones, cut off.
    Ok(delays[delays.len() / 2] + 0.5)
}

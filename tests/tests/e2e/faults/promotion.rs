//! The primary dies, and a standby that lacks its last commits takes its place at the same address.
//!
//! ```text
//! primary   ═ first ═ followed ═ tail (published, acknowledged, covered by the cursor) ═ in flight ╳
//! standby   ═ first ═ followed ╳ stopped                                     its address, promoted ═ anew ═▶
//! ```
//!
//! Positions and transaction ids of the tail are given out again. What a relay remembers of them would make it skip what
//! is written under them now. The tail itself is on the topic and in no table: nobody can take it back, it must be told.

use std::collections::HashSet;
use std::time::Duration;

use baton_tests::{Harness, Load, Outcome, OwnStack, Schema, Site, Standby, eventually, fail, figure, test};
use sqlx::Executor;
use tokio::time::Instant;

use super::{PATIENCE, ends_well, said, verdict};
use crate::leases::fill;

#[test]
fn what_is_committed_after_a_promotion_that_lost_the_tail_is_published_under_the_positions_of_the_tail() {
    test(Duration::from_secs(150), Load::Alone, async |harness: &mut Harness| {
        let stack = OwnStack::up().await?;
        let site = harness.site_at(stack.place(), Schema::Both { shards: 8 }).await?;
        let topic = site.topic("promoted", 3).await?;
        let mut relay = site.relay("relay")?.start()?;
        fill(&site, &topic, 500).await?;
        site.emptied().await?;
        let mut standby = Standby::of(&stack, harness.directory()).await?;
        fill(&site, &topic, 500).await?;
        site.emptied().await?;
        standby.follows().await?;
        standby.stop().await?;

        // The tail: published, and the cursors have moved over it.
        fill(&site, &topic, 1_000).await?;
        site.emptied().await?;
        let tail: HashSet<String> =
            sqlx::query_scalar(r#"SELECT id::text FROM outbox.message ORDER BY "position" OFFSET 1000"#)
                .fetch_all(site.pool())
                .await?
                .into_iter()
                .collect();
        let last: i64 = sqlx::query_scalar(r#"SELECT max("position") FROM outbox.message"#)
            .fetch_one(site.pool())
            .await?;
        // And more of which some is in flight.
        fill(&site, &topic, 5_000).await?;
        stack.kill_postgres().await?;
        standby.take_over().await?;
        let promoted = Instant::now();

        let rows: i64 = eventually("the new primary", PATIENCE, async || {
            Ok(sqlx::query_scalar("SELECT count(*) FROM outbox.message").fetch_one(site.pool()).await?)
        })
        .await?;
        assert_eq!(rows, 1_000, "the tail must be lost, or nothing is shown");
        fill(&site, &topic, 400).await?;
        let reused: i64 = sqlx::query_scalar(
            r#"SELECT count(*) FROM outbox.message WHERE "position" > $1 - 1000 AND "position" <= $1"#,
        )
        .bind(last)
        .fetch_one(site.pool())
        .await?;
        assert!(reused >= 300, "only {reused} positions of the tail were given out again");
        site.emptied().await?;
        let published_after = promoted.elapsed();
        let sets = verdict(&site, &topic).await?;
        let still: HashSet<&String> = sets.phantom.iter().collect();
        assert!(sets.lost.is_empty() && sets.out_of_order.is_empty() && sets.split.is_empty(), "{sets}");
        assert!(tail.iter().all(|id| still.contains(id)), "the tail was not published before the promotion");
        eventually("the relay to tell of the tail", PATIENCE, async || {
            match said(&relay, "lost what it had confirmed") {
                0 => fail!("it has not told"),
                _ => Ok(()),
            }
        })
        .await?;
        assert_eq!(relay.try_exited()?, None, "the relay ended: {}", relay.stderr());
        ends_well(&mut relay).await?;
        figure(&format!(
            "promotion: {} records of the lost tail are on the topic, {reused} of its positions were given out again and \
             published {published_after:.1?} after the promotion; {} committed, 0 lost, 0 out of order",
            still.len(),
            sets.committed
        ));
        drop(standby);
        stack.repair().await
    });
}

#[test]
fn an_advance_under_the_token_of_an_earlier_life_of_the_server_is_fenced_and_told_once_a_shard() {
    test(Duration::from_secs(60), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        let topic = site.topic("token", 3).await?;
        let mut relay = site.relay("relay")?.start()?;
        fill(&site, &topic, 500).await?;
        site.emptied().await?;
        // What a crash does to the token, behind connections that stay: as behind a pooler.
        site.pool().execute("UPDATE outbox.token SET token = gen_random_uuid()").await?;
        let durable = cursors(&site).await?;
        fill(&site, &topic, 500).await?;
        eventually("every shard to be fenced", PATIENCE, async || match said(&relay, "fenced: ") {
            8 => Ok(()),
            times => fail!("told {times} times"),
        })
        .await?;
        assert_eq!(cursors(&site).await?, durable, "a cursor moved by a stale token");
        // Then they are claimed anew, with the token that is.
        site.emptied().await?;
        assert_eq!(said(&relay, "fenced: "), 8, "told more than once");
        ends_well(&mut relay).await?;
        let findings = verdict(&site, &topic).await?;
        assert!(findings.wire_is_right() && findings.repeated.len() <= 500, "{findings}");
        figure(&format!("8 advances under a stale token were fenced: {findings}"));
        Ok(())
    });
}

async fn cursors(site: &Site) -> Outcome<Vec<i64>> {
    Ok(sqlx::query_scalar(r#"SELECT "position" FROM outbox.cursor ORDER BY shard"#)
        .fetch_all(site.pool())
        .await?)
}

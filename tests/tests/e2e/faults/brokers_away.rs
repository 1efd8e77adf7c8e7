//! The broker is killed under load: once it comes back at once, once it stays away.
//!
//! ```text
//! broker  ═ load ╳ started at once ═ load ╳ ───────── away ───────── started ═▶ drained
//!                                              cursors still, leases kept, memory bounded
//! ```

use std::time::Duration;

use baton_tests::workload::Workload;
use baton_tests::{
    Harness, Load, Outcome, OwnStack, Schema, Site, eventually, fail, figure, lasts, stays, test,
};

use super::{ends_well, resident, tier, verdict};

/// What the relay may hold in flight, all of its eight shards together.
const IN_FLIGHT: u64 = 8 * (1 << 20);

/// What waits while the broker is away: much more than that.
const WAITING: i64 = 20_000;

#[test]
fn a_broker_that_is_killed_moves_no_cursor_and_costs_no_lease_and_no_memory_and_all_arrives_in_order() {
    let away = tier(Duration::from_secs(15), Duration::from_secs(600));
    test(Duration::from_secs(180) + away, Load::Alone, async |harness: &mut Harness| {
        let stack = OwnStack::up().await?;
        let site = harness.site_at(stack.place(), Schema::Both { shards: 8 }).await?;
        let topic = site.topic("away", 3).await?;
        let mut relay = site
            .relay("relay")?
            .env("BATON_PUBLISH__IN_FLIGHT_BYTES", "1048576")
            .env("BATON_PUBLISH__IN_FLIGHT_BYTES_TOTAL", IN_FLIGHT.to_string())
            .start()?;
        let seed = fastrand::u64(..1_000_000);
        let mut writers = Workload { writers: 6, ..Workload::new(seed, &topic) }.start(&site).await?;
        lasts("load", Duration::from_secs(2)).await;

        stack.kill_broker().await?;
        stack.repair().await?;
        let count = site.kafka().count(&topic).await?;
        eventually("publishing to go on after a short absence", Duration::from_secs(20), async || {
            let now = site.kafka().count(&topic).await?;
            if now > count + 200 { Ok(()) } else { fail!("{now} records, {count} before") }
        })
        .await?;

        let before = resident(&relay)?;
        stack.kill_broker().await?;
        // What was acknowledged before may still be written.
        lasts("the last cursor writes", Duration::from_secs(1)).await;
        let (held, mut most) = (standing(&site).await?, before);
        bulk(&site, &topic).await?;
        stays("the broker is away", away, async || {
            most = most.max(resident(&relay)?);
            let now = standing(&site).await?;
            if now == held { Ok(()) } else { fail!("cursors and generations were {held:?} and are {now:?}") }
        })
        .await?;
        let waiting = site.pending().await?;
        stack.repair().await?;
        let done = writers.stop().await?;
        site.emptied().await?;
        assert_eq!(
            standing(&site).await?.iter().map(|s| s.1).collect::<Vec<_>>(),
            generations(&held),
            "a lease was lost"
        );
        assert_eq!(relay.try_exited()?, None, "the relay ended: {}", relay.stderr());
        ends_well(&mut relay).await?;
        let findings = verdict(&site, &topic).await?;
        figure(&format!(
            "broker away {away:?} (seed {seed}): {waiting} messages waited, {} more commits; the relay had {} MiB before and at \
             most {} MiB; {findings}",
            done.commits,
            before >> 20,
            most >> 20
        ));
        assert!(findings.wire_is_right(), "{findings}");
        assert!(waiting >= WAITING);
        // Each row is held once as it was read and once more by the producer.
        assert!(most - before < 4 * IN_FLIGHT + (16 << 20), "memory grew from {before} to {most}");
        Ok(())
    });
}

/// Rows of two kilobytes, in the order of keys that nobody else writes.
async fn bulk(site: &Site, topic: &str) -> Outcome {
    sqlx::query(
        r#"INSERT INTO outbox.message (topic, key, payload)
           SELECT $1, 'bulk-' || i % 40, convert_to(format('{"seq":%s,"pad":"%s"}', i, repeat('x', 2000)), 'UTF8')
           FROM generate_series(1, $2) i"#,
    )
    .bind(topic)
    .bind(WAITING)
    .execute(site.pool())
    .await?;
    Ok(())
}

/// Where each shard stands: its cursor and its generation.
async fn standing(site: &Site) -> Outcome<Vec<(i64, i64)>> {
    let mut connection = site.connect().await?;
    let status = baton_relay::status::read(&mut connection).await?;
    Ok(status.shards.iter().map(|shard| (shard.cursor.position, shard.generation)).collect())
}

fn generations(standing: &[(i64, i64)]) -> Vec<i64> {
    standing.iter().map(|(_, generation)| *generation).collect()
}

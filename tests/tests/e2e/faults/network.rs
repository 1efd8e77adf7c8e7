//! The network between relay and servers: silent, slow, cut. Each relay under test talks through a proxy.
//!
//! Whoever holds a lease by the database is judged against whoever appended by the broker's own time: a record that a relay
//! appends must lie between a claim of its shard by that relay and the end of the last lease it was granted.

use std::num::NonZeroU32;
use std::time::Duration;

use baton_tests::{
    Harness, Load, Outcome, OwnStack, Proxy, Schema, Site, Way, eventually, fail, figure, lasts, stays, test,
};
use tokio::time::Instant;

use super::{PATIENCE, ends_well, resident, verdict};
use crate::leases::{claims, fill, shares, watch_leases};

const TTL: Duration = Duration::from_secs(2);
/// Also what a busy broker may take to append what it was sent in time.
const MARGIN: Duration = Duration::from_millis(500);

#[test]
fn a_relay_whose_database_falls_silent_is_taken_over_in_time_publishes_nothing_without_a_lease_and_recovers()
{
    test(Duration::from_secs(120), Load::Light, async |harness: &mut Harness| {
        let silence = super::tier(Duration::from_secs(6), Duration::from_secs(30));
        let mut two = Two::begin(harness, "silent", TTL).await?;
        two.proxy.swallow(Way::Both);
        let fell = Instant::now();
        // Fed all the time, so that both would publish.
        fill(&two.site, &two.topic, 2_000).await?;
        eventually("the other relay to hold all shards", TTL + Duration::from_secs(4), async || {
            shares(&two.site, &[8]).await
        })
        .await?;
        let taken_over = fell.elapsed();
        fill(&two.site, &two.topic, 1_000).await?;
        let before = claims(&two.site, "first").await?;
        stays("the database is silent", silence.saturating_sub(fell.elapsed()), async || {
            shares(&two.site, &[8]).await
        })
        .await?;
        assert_eq!(claims(&two.site, "first").await?, before, "claimed through a silent network");
        two.proxy.heal();
        eventually("the first relay to take part again", PATIENCE, async || shares(&two.site, &[4, 4]).await)
            .await?;
        fill(&two.site, &two.topic, 1_000).await?;
        two.end(&format!("silent database: taken over {taken_over:.1?} after it with a lease of {TTL:?}"))
            .await?;
        // A lease lives that long, a look for free shards comes twice a second, and two seconds are the machine's.
        assert!(
            taken_over < TTL + Duration::from_secs(1) + Duration::from_secs(1),
            "taken over after {taken_over:?}"
        );
        Ok(())
    });
}

#[test]
fn renewals_slower_than_the_margin_keep_the_lease_and_slower_than_the_trust_end_publishing_before_the_lease_ends()
 {
    test(Duration::from_secs(120), Load::Light, async |harness: &mut Harness| {
        // Three times as long as elsewhere here: a machine that stands still for a second must not look like a lost lease.
        const LONG: Duration = TTL.saturating_mul(3);
        let mut two = Two::begin(harness, "late", LONG).await?;
        // More than the margin, and well within what an answer may take. A renewal waits for two.
        two.proxy.only("baton renewal");
        two.proxy.delay(Way::Back, MARGIN + Duration::from_millis(200));
        fill(&two.site, &two.topic, 2_000).await?;
        let before = (claims(&two.site, "first").await?, claims(&two.site, "second").await?);
        stays("slow renewals", 2 * LONG, async || shares(&two.site, &[4, 4]).await).await?;
        assert_eq!(
            (claims(&two.site, "first").await?, claims(&two.site, "second").await?),
            before,
            "a lease was lost to a renewal that came"
        );
        // The database grants, the answers come after the trust has ended.
        two.proxy.delay(Way::Back, 2 * LONG);
        fill(&two.site, &two.topic, 4_000).await?;
        eventually("the first relay to let go or to claim anew", PATIENCE, async || {
            let now = claims(&two.site, "first").await? + claims(&two.site, "second").await?;
            if now > before.0 + before.1 { Ok(()) } else { fail!("{now} claims") }
        })
        .await?;
        two.site.emptied().await?;
        two.proxy.heal();
        eventually("both to share again", PATIENCE, async || shares(&two.site, &[4, 4]).await).await?;
        fill(&two.site, &two.topic, 1_000).await?;
        two.end("slow renewals").await
    });
}

#[test]
fn database_connections_that_are_reset_again_and_again_cost_no_lease_and_no_message() {
    test(Duration::from_secs(120), Load::Light, async |harness: &mut Harness| {
        let mut two = Two::begin(harness, "reset", TTL).await?;
        let others = claims(&two.site, "second").await?;
        for _ in 0..4 {
            fill(&two.site, &two.topic, 1_000).await?;
            two.proxy.reset_all();
            lasts("work between two resets", Duration::from_millis(700)).await;
        }
        // Its own leases it claims anew at once, so nobody else gets them.
        eventually("both to share still", PATIENCE, async || shares(&two.site, &[4, 4]).await).await?;
        assert_eq!(claims(&two.site, "second").await?, others, "the other relay got a shard");
        two.end("4 resets of all database connections").await
    });
}

#[test]
fn database_connections_that_are_cut_three_times_a_second_leave_time_for_progress() {
    test(Duration::from_secs(120), Load::Light, async |harness: &mut Harness| {
        const WAITING: i64 = 60_000;
        let site = harness.site().await?;
        let topic = site.topic("cut", 3).await?;
        let (proxy, behind) = Proxy::before_postgres(site.place()).await?;
        fill(&site, &topic, WAITING).await?;
        let mut relay = site
            .relay("relay")?
            .env("DATABASE_URL", &behind.database_url)
            .env("BATON_LEASE__TTL", "2s")
            .start()?;
        let until = Instant::now() + Duration::from_secs(30);
        let mut cuts = 0;
        loop {
            lasts("work between two cuts", Duration::from_millis(300)).await;
            let waiting = site.pending().await?;
            if waiting == 0 {
                break;
            }
            assert!(Instant::now() < until, "{waiting} wait after {cuts} cuts");
            proxy.reset_all();
            cuts += 1;
        }
        ends_well(&mut relay).await?;
        let findings = verdict(&site, &topic).await?;
        assert!(findings.wire_is_right(), "{findings}");
        figure(&format!(
            "{WAITING} messages through {cuts} cuts of all database connections, 0.3 s apart: {findings}"
        ));
        Ok(())
    });
}

#[test]
fn a_slow_broker_slows_the_relay_without_costing_memory_or_leases() {
    test(Duration::from_secs(150), Load::Alone, async |harness: &mut Harness| {
        const WAITING: i64 = 20_000;
        const IN_FLIGHT: u64 = 8 << 20;
        let slow = super::tier(Duration::from_secs(5), Duration::from_secs(60));
        let stack = OwnStack::up().await?;
        let site = harness.site_at(stack.place(), Schema::Both { shards: 8 }).await?;
        let topic = site.topic("narrow", 3).await?;
        let proxy = stack.kafka_proxy().await?;
        let mut relay = site
            .relay("relay")?
            .env("KAFKA_BROKERS", proxy.address())
            .env("BATON_LEASE__TTL", "2s")
            .env("BATON_PUBLISH__IN_FLIGHT_BYTES_TOTAL", IN_FLIGHT.to_string())
            .start()?;
        fill(&site, &topic, 500).await?;
        site.emptied().await?;
        let before = resident(&relay)?;
        proxy.bandwidth(Way::Both, NonZeroU32::new(64 << 10).unwrap_or(NonZeroU32::MIN));
        sqlx::query(
            r#"INSERT INTO outbox.message (topic, key, payload)
               SELECT $1, 'bulk-' || i % 40, convert_to(format('{"seq":%s,"pad":"%s"}', i, repeat(md5(i::text), 30)), 'UTF8')
               FROM generate_series(1, $2) i"#,
        )
        .bind(&topic)
        .bind(WAITING)
        .execute(site.pool())
        .await?;
        let mut most = before;
        stays("leases while the broker is slow", slow, async || {
            most = most.max(resident(&relay)?);
            let (held, claims): (i64, i64) = sqlx::query_as(
                "SELECT count(*) FILTER (WHERE lease_until > clock_timestamp()), sum(generation)::bigint FROM outbox.shard",
            )
            .fetch_one(site.pool())
            .await?;
            if (held, claims) == (8, 8) { Ok(()) } else { fail!("{held} leases are valid, {claims} claims in all") }
        })
        .await?;
        let through = site.kafka().count(&topic).await? - 500;
        proxy.heal();
        site.emptied().await?;
        assert_eq!(relay.try_exited()?, None, "the relay ended: {}", relay.stderr());
        ends_well(&mut relay).await?;
        let findings = verdict(&site, &topic).await?;
        figure(&format!(
            "a broker of 64 KB/s for {slow:?}: {through} of {WAITING} messages of a kilobyte went through, no lease was lost; the \
             relay had {} MiB before and at most {} MiB; {findings}",
            before >> 20,
            most >> 20
        ));
        assert!(findings.wire_is_right(), "{findings}");
        assert!(through < WAITING / 2, "the broker was not slow: {through} went through");
        assert!(most - before < 4 * IN_FLIGHT + (16 << 20), "memory grew from {before} to {most}");
        Ok(())
    });
}

/// Two relays, the first behind a proxy before the database, and what the database saw of their leases.
struct Two {
    site: Site,
    topic: String,
    proxy: Proxy,
    relays: [baton_tests::Process; 2],
}

impl Two {
    async fn begin(harness: &mut Harness, label: &str, ttl: Duration) -> Outcome<Self> {
        let site = harness.site().await?;
        let topic = site.topic_with(label, 3, &[("message.timestamp.type", "LogAppendTime")]).await?;
        watch_leases(&site).await?;
        let (proxy, behind) = Proxy::before_postgres(site.place()).await?;
        let relay = |owner: &str, url: &str| {
            site.relay(owner)?
                .env("DATABASE_URL", url)
                .env("BATON_LEASE__TTL", format!("{}ms", ttl.as_millis()))
                .env("BATON_LEASE__MARGIN", format!("{}ms", MARGIN.as_millis()))
                .env("BATON_RELAY__SOURCE", format!("/{owner}"))
                .start()
        };
        let relays = [relay("first", &behind.database_url)?, relay("second", &site.place().database_url)?];
        eventually("both to share", PATIENCE, async || shares(&site, &[4, 4]).await).await?;
        fill(&site, &topic, 500).await?;
        site.emptied().await?;
        Ok(Self { site, topic, proxy, relays })
    }

    async fn end(&mut self, what: &str) -> Outcome {
        self.site.emptied().await?;
        for relay in &mut self.relays {
            assert_eq!(relay.try_exited()?, None, "a relay ended: {}", relay.stderr());
            ends_well(relay).await?;
        }
        let findings = verdict(&self.site, &self.topic).await?;
        let (records, without) = self.without_a_lease().await?;
        figure(&format!("{what}: {findings}; {without} of {records} records appended without a lease"));
        assert!(findings.wire_is_right(), "{findings}");
        assert_eq!(without, 0, "records appended by a relay that held no lease on their shard");
        Ok(())
    }

    /// How many records there are, and how many of them were appended outside every lease that their relay was granted.
    async fn without_a_lease(&self) -> Outcome<(usize, i64)> {
        let records = self.site.kafka().records(&self.topic).await?;
        let ids: Vec<&str> = records.iter().filter_map(|record| record.header("ce_id")).collect();
        let owners: Vec<&str> =
            records.iter().filter_map(|record| record.header("ce_source")?.strip_prefix('/')).collect();
        let times: Vec<f64> = records.iter().filter_map(|record| Some(record.timestamp_ms? as f64)).collect();
        let without = sqlx::query_scalar(
            "SELECT count(*) FROM unnest($1::text[], $2::text[], $3::float8[]) AS r(id, owner, at)
             JOIN outbox.message m ON m.id = r.id::uuid
             WHERE NOT EXISTS (
                 -- The broker cuts its milliseconds off.
                 SELECT FROM lease_change c
                 WHERE c.shard = m.shard AND c.owner = r.owner
                   AND to_timestamp((r.at + 1) / 1000) >= c.at AND to_timestamp(r.at / 1000) <= c.lease_until)",
        )
        .bind(ids)
        .bind(owners)
        .bind(times)
        .fetch_one(self.site.pool())
        .await?;
        Ok((records.len(), without))
    }
}

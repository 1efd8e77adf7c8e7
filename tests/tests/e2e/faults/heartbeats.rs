//! What a relay works on is slow, for longer than its lease lasts: page reads and cursor writes wait for locks, and a cursor
//! write hangs in the middle of its statement. Leases are renewed all the same, on a connection that does nothing else.

use std::time::Duration;

use baton_tests::{Harness, Load, Outcome, Site, eventually, fail, figure, stays, test};
use sqlx::{Connection, Executor};

use super::{PATIENCE, ends_well, verdict};
use crate::leases::fill;

/// Longer than the lease, let alone the trust in it.
const SLOW: Duration = Duration::from_millis(3_500);

#[test]
fn leases_are_renewed_while_reads_and_cursor_writes_hang_for_longer_than_a_lease() {
    test(Duration::from_secs(90), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        let topic = site.topic("slow", 3).await?;
        let mut relay = site.relay("relay")?.env("BATON_LEASE__TTL", "2s").start()?;
        eventually("the relay to hold every shard", PATIENCE, async || held(&site).await).await?;

        // Reads and cursor writes wait for a lock.
        let mut other = site.connect().await?;
        fill(&site, &topic, 500).await?;
        other.execute("BEGIN; LOCK TABLE outbox.cursor IN EXCLUSIVE MODE").await?;
        fill(&site, &topic, 500).await?;
        stays("leases while cursor writes wait", SLOW, async || held(&site).await).await?;
        other.execute("COMMIT; BEGIN; LOCK TABLE outbox.message IN ACCESS EXCLUSIVE MODE").await?;
        stays("leases while page reads wait", SLOW, async || held(&site).await).await?;
        other.execute("COMMIT").await?;
        site.emptied().await?;

        // A cursor write hangs after it has locked what it locks, in the one shard that has something to publish.
        other
            .execute(
                "CREATE TABLE hanging AS SELECT true AS wanted;
                 CREATE FUNCTION hang() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
                     IF (SELECT wanted FROM hanging) THEN PERFORM pg_sleep(3.7); END IF;
                     RETURN new;
                 END $$;
                 CREATE TRIGGER hang BEFORE INSERT ON outbox.advance FOR EACH ROW EXECUTE FUNCTION hang()",
            )
            .await?;
        sqlx::query("INSERT INTO outbox.message (topic, key, payload) VALUES ($1, 'one', '{\"seq\":1}')")
            .bind(&topic)
            .execute(&mut other)
            .await?;
        eventually("a cursor write to hang", PATIENCE, async || {
            let hangs: i64 = sqlx::query_scalar(
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'PgSleep'",
            )
            .fetch_one(site.pool())
            .await?;
            if hangs > 0 { Ok(()) } else { fail!("none hangs") }
        })
        .await?;
        stays("leases while a cursor write hangs", SLOW, async || held(&site).await).await?;
        other.execute("UPDATE hanging SET wanted = false").await?;
        other.close().await?;

        site.emptied().await?;
        held(&site).await?;
        assert_eq!(relay.try_exited()?, None, "the relay ended: {}", relay.stderr());
        ends_well(&mut relay).await?;
        let findings = verdict(&site, &topic).await?;
        // Not even repeats: nothing had to be done anew.
        assert!(findings.effects_are_right(), "{findings}");
        figure(&format!(
            "reads and cursor writes hung for {SLOW:?} each with a lease of 2 s, no lease was lost: {findings}"
        ));
        Ok(())
    });
}

/// Ok when all leases are valid and none was ever claimed again.
async fn held(site: &Site) -> Outcome {
    let (held, claims): (i64, i64) = sqlx::query_as(
        "SELECT count(*) FILTER (WHERE lease_until > clock_timestamp()), sum(generation)::bigint FROM outbox.shard",
    )
    .fetch_one(site.pool())
    .await?;
    if (held, claims) == (8, 8) { Ok(()) } else { fail!("{held} leases are valid, {claims} claims in all") }
}

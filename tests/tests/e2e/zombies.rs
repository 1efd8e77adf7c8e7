//! A relay that was stopped past its lease and continued: it may repeat what it had handed over, and nothing else.

use std::time::Duration;

use baton_tests::{Harness, Load, Outcome, Process, Site, eventually, fail, figure, stays, test, workload};

use crate::leases::{claims, fill, shares, watch_leases};

const PATIENCE: Duration = Duration::from_secs(30);

#[test]
fn a_relay_that_wakes_after_its_lease_moves_no_cursor_and_publishes_nothing_it_had_not_handed_over() {
    test(Duration::from_secs(150), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        let topic = site.topic("zombie", 3).await?;
        let Succession { mut zombie, mut heir, before } = succession(harness, &site, &topic, "heir").await?;
        let claims_before = claims(&site, "zombie").await?;

        zombie.go_on()?;
        eventually("the first relay to take part again, as a healthy one", PATIENCE, async || {
            shares(&site, &[4, 4]).await
        })
        .await?;
        assert!(claims(&site, "zombie").await? > claims_before);
        // Late duplicates: what its producers had of it when it was stopped. All the rest the other has published.
        let late = by_source(&site, &topic, "/first").await? - before;
        assert!(late <= 8 * IN_FLIGHT, "{late} records after its lease had run out");
        // What it owns now it owns by new generations, and it publishes by them.
        fill(&site, &topic, 1_000).await?;
        site.emptied().await?;
        assert_eq!(zombie.try_exited()?, None, "{}", zombie.stderr());
        for relay in [&mut zombie, &mut heir] {
            assert!(relay.terminate(PATIENCE).await?.success());
        }
        let stale: i64 =
            sqlx::query_scalar("SELECT count(*) FROM cursor_change WHERE by <> 'baton cursor ' || owner")
                .fetch_one(site.pool())
                .await?;
        assert_eq!(stale, 0, "the stale owner moved a cursor");
        no_cursor_went_back(&site).await?;
        let (findings, _) =
            workload::judge(&workload::truth(&site, &topic).await?, &site.kafka().records(&topic).await?);
        assert!(findings.wire_is_right(), "{findings}");
        figure(&format!(
            "a relay stopped past its lease and continued: {late} late duplicates of it; {findings}"
        ));
        Ok(())
    });
}

#[test]
fn a_relay_that_wakes_beside_a_namesake_can_do_nothing_by_its_earlier_generations() {
    test(Duration::from_secs(150), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        let topic = site.topic("namesake", 3).await?;
        let Succession { mut zombie, mut heir, before } =
            succession(harness, &site, &topic, "zombie").await?;
        zombie.go_on()?;
        stays("the namesake's leases and cursors", Duration::from_secs(4), async || {
            shares(&site, &[8]).await?;
            no_cursor_went_back(&site).await
        })
        .await?;
        let late = by_source(&site, &topic, "/first").await? - before;
        assert!(late <= 8 * IN_FLIGHT, "{late} records after its lease had run out");
        // Its farewell gives back nothing that is another's.
        let claims_before = claims(&site, "zombie").await?;
        assert!(zombie.terminate(PATIENCE).await?.success(), "{}", zombie.stderr());
        fill(&site, &topic, 1_000).await?;
        site.emptied().await?;
        shares(&site, &[8]).await?;
        assert_eq!(claims(&site, "zombie").await?, claims_before);
        assert!(heir.terminate(PATIENCE).await?.success());
        let (findings, _) =
            workload::judge(&workload::truth(&site, &topic).await?, &site.kafka().records(&topic).await?);
        assert!(findings.wire_is_right(), "{findings}");
        Ok(())
    });
}

/// Rows in flight a shard, in the tests of a relay that is stopped in the middle of its work.
const IN_FLIGHT: i64 = 500;

/// A relay that was stopped in the middle of its work, and another that has taken over and finished it.
struct Succession {
    zombie: Process,
    heir: Process,
    /// How many records the first had put on the topic by then.
    before: i64,
}

async fn succession(harness: &Harness, site: &Site, topic: &str, heir: &str) -> Outcome<Succession> {
    const MESSAGES: i64 = 60_000;
    // Batches wait, so that a page takes long enough to be caught in the middle of it on any machine.
    let file = harness.directory().join("slow.toml");
    std::fs::write(&file, "[kafka.properties]\n\"linger.ms\" = 200\n")?;
    watch_leases(site).await?;
    fill(site, topic, MESSAGES).await?;
    let relay = |owner: &str, source: &str| {
        site.relay(owner)?
            .args(["--config", &file.display().to_string()])
            .env("BATON_RELAY__SOURCE", source)
            .env("BATON_PUBLISH__PAGE_ROWS", IN_FLIGHT.to_string())
            .env("BATON_PUBLISH__IN_FLIGHT_ROWS", IN_FLIGHT.to_string())
            .start()
    };
    let zombie = relay("zombie", "/first")?;
    eventually("the first relay to be in the middle of it", PATIENCE, async || {
        let count = site.kafka().count(topic).await?;
        if count > 1_000 { Ok(()) } else { fail!("{count} published") }
    })
    .await?;
    zombie.stop()?;
    let before = by_source(site, topic, "/first").await?;
    assert!(before < MESSAGES, "it had published everything before it was stopped");
    let heir = relay(heir, "/second")?;
    eventually("the second relay to hold all shards", Duration::from_secs(8), async || {
        shares(site, &[8]).await?;
        let claimed: i64 = sqlx::query_scalar("SELECT count(*) FROM outbox.shard WHERE generation > 1")
            .fetch_one(site.pool())
            .await?;
        if claimed == 8 { Ok(()) } else { fail!("it has claimed {claimed}") }
    })
    .await?;
    site.emptied().await?;
    Ok(Succession { zombie, heir, before })
}

pub(crate) async fn no_cursor_went_back(site: &Site) -> Outcome {
    let back: i64 = sqlx::query_scalar("SELECT count(*) FROM cursor_change WHERE position < position_before")
        .fetch_one(site.pool())
        .await?;
    if back == 0 { Ok(()) } else { fail!("a cursor went back {back} times") }
}

async fn by_source(site: &Site, topic: &str, source: &str) -> Outcome<i64> {
    let records = site.kafka().records(topic).await?;
    Ok(i64::try_from(records.iter().filter(|record| record.header("ce_source") == Some(source)).count())?)
}

//! The recovery story on the real database, with a stopped and a killed process: the lease parts of R19, in order.
//!
//! `worker-a` stops in the middle of its work. What it does is done by real processes; what nobody could make a process do
//! at the right moment (claim too early, beat for one that is stopped, act at the very end of a lease) is done by the
//! relay's own statements.

use std::collections::BTreeSet;
use std::time::Duration;

use baton_tests::{Harness, Load, Outcome, Process, Site, eventually, fail, figure, test, workload};

use crate::claims::{Act, Grip, Hand};
use crate::leases::{fill, shares, watch_leases};

const PATIENCE: Duration = Duration::from_secs(30);
const MESSAGES: i64 = 30_000;

#[test]
fn a_stopped_owner_is_succeeded_after_its_lease_and_can_do_nothing_more_and_a_killed_one_is_succeeded_too() {
    test(Duration::from_secs(180), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        let topic = site.topic("story", 3).await?;
        watch_leases(&site).await?;
        fill(&site, &topic, MESSAGES).await?;
        let mut a = worker(harness, &site, "worker-a")?;
        eventually("worker-a to be in the middle of it", PATIENCE, async || {
            let count = site.kafka().count(&topic).await?;
            if count > 1_000 { Ok(()) } else { fail!("{count} published") }
        })
        .await?;
        a.stop()?;
        let mut hand_of_a = Hand::awake(&site, "worker-a").await?;
        let mut hand_of_b = Hand::awake(&site, "worker-b").await?;
        let (grips, ends) = leases(&site).await?;
        assert!(grips.iter().all(|grip| grip.generation == 1), "{grips:?}");

        for grip in &grips {
            assert!(
                hand_of_b.claim(grip.shard, None).await?.is_none(),
                "claimed before its expiry: {grip:?}"
            );
        }
        says("claim before expiry", "refused");

        // Its heart beats once more, in time: past the end it had, the shards still are its own.
        for grip in &grips {
            assert!(hand_of_a.renew(*grip).await?, "{grip:?}");
        }
        eventually("the end that the leases had", PATIENCE, async || passed(&site, &ends).await).await?;
        for grip in &grips {
            assert!(hand_of_b.claim(grip.shard, None).await?.is_none(), "{grip:?}");
        }
        says("heartbeat in time", "keeps ownership");

        let (_, ends) = leases(&site).await?;
        let mut at_the_end = Hand::frozen(&site, "worker-a", &ends[0]).await?;
        for act in [Act::Renew, Act::Advance, Act::Release] {
            assert!(!at_the_end.may(act, grips[0], 0).await?, "{act:?} at exactly the expiry");
        }
        says("advance at exactly the expiry", "refused");

        let mut b = worker(harness, &site, "worker-b")?;
        eventually("worker-b to hold all", Duration::from_secs(20), async || {
            let (taken, _) = leases(&site).await?;
            shares(&site, &[8]).await?;
            if taken.iter().all(|grip| grip.generation == 2) { Ok(()) } else { fail!("{taken:?}") }
        })
        .await?;
        says("takeover after expiry, generation", "2");

        for grip in &grips {
            assert!(!hand_of_a.advance(*grip).await?, "a late advance: {grip:?}");
        }
        says("late advance", "refused");
        for grip in &grips {
            assert!(!hand_of_a.renew(*grip).await?, "an old heartbeat: {grip:?}");
        }
        says("old heartbeat", "refused");
        let (still, _) = leases(&site).await?;
        assert!(still.iter().all(|grip| grip.generation == 2), "{still:?}");

        a.go_on()?;
        eventually("worker-a to take part again, as a healthy one", PATIENCE, async || {
            shares(&site, &[4, 4]).await
        })
        .await?;
        let fenced = fenced(&a);
        let lost: Vec<(i64, i64)> =
            fenced.iter().map(|(shard, generation, _)| (*shard, *generation)).collect();
        let each_once: BTreeSet<(i64, i64)> = (0..8).map(|shard| (shard, 1)).collect();
        assert!(lost.len() == 8 && lost.iter().copied().eq(each_once), "logged as fenced: {fenced:?}");
        let operations: BTreeSet<&str> = fenced.iter().map(|(_, _, operation)| operation.as_str()).collect();
        assert!(
            operations.iter().all(|operation| ["claim", "renew", "advance", "release"].contains(operation)),
            "{operations:?}"
        );
        says("fenced, logged once for each of", "8 shards");

        fill(&site, &topic, 1_000).await?;
        b.kill().await?;
        eventually("worker-a to hold all", PATIENCE, async || shares(&site, &[8]).await).await?;
        let late: f64 = sqlx::query_scalar(
            "SELECT max(extract(epoch FROM at - lease_until_before))::float8 FROM lease_change
             WHERE owner = 'worker-a' AND owner_before = 'worker-b' AND generation > generation_before",
        )
        .fetch_one(site.pool())
        .await?;
        assert!((0.0..1.0).contains(&late), "taken over {late} s after the lease had run out");
        let (last, _) = leases(&site).await?;
        assert!(last.iter().all(|grip| grip.generation >= 3), "{last:?}");
        says("takeover of a killed one after its lease's end, seconds", &format!("{late:.3}"));

        site.emptied().await?;
        assert!(a.terminate(PATIENCE).await?.success(), "{}", a.stderr());
        let (findings, _) =
            workload::judge(&workload::truth(&site, &topic).await?, &site.kafka().records(&topic).await?);
        assert!(findings.wire_is_right(), "{findings}");
        says("on the topic", &findings.to_string());
        Ok(())
    });
}

/// A relay that is slow enough to be caught in the middle of a page on any machine.
fn worker(harness: &Harness, site: &Site, owner: &str) -> Outcome<Process> {
    let file = harness.directory().join("slow.toml");
    std::fs::write(&file, "[kafka.properties]\n\"linger.ms\" = 200\n")?;
    site.relay(owner)?
        .args(["--config", &file.display().to_string()])
        .env("BATON_PUBLISH__PAGE_ROWS", "500")
        .env("BATON_PUBLISH__IN_FLIGHT_ROWS", "500")
        .start()
}

/// What each shard is held by, and until when.
async fn leases(site: &Site) -> Outcome<(Vec<Grip>, Vec<String>)> {
    type Row = (i16, i64, uuid::Uuid, String);
    let rows: Vec<Row> = sqlx::query_as(
        "SELECT shard, generation, token, lease_until::text FROM outbox.shard, outbox.token
         WHERE lease_until IS NOT NULL ORDER BY shard",
    )
    .fetch_all(site.pool())
    .await?;
    if rows.len() != 8 {
        fail!("{} shards are leased", rows.len());
    }
    Ok(rows
        .into_iter()
        .map(|(shard, generation, token, end)| (Grip { shard, generation, token }, end))
        .unzip())
}

/// Ok when all of these moments lie behind, by the database's clock.
async fn passed(site: &Site, moments: &[String]) -> Outcome {
    let passed: bool =
        sqlx::query_scalar("SELECT max(m::timestamptz) < clock_timestamp() FROM unnest($1::text[]) m")
            .bind(moments)
            .fetch_one(site.pool())
            .await?;
    if passed { Ok(()) } else { fail!("not yet") }
}

/// What a relay logged as fenced: shard, generation, operation, in the order of the shards.
pub(crate) fn fenced(relay: &Process) -> Vec<(i64, i64, String)> {
    let value = |line: &str, name: &str| {
        let (_, rest) = line.split_once(&format!("{name}="))?;
        Some(rest.split_whitespace().next()?.trim_matches('"').to_owned())
    };
    let mut fenced: Vec<(i64, i64, String)> = relay
        .stderr()
        .lines()
        .filter(|line| line.contains("fenced: "))
        .map(|line| {
            let number = |name| value(line, name).and_then(|text| text.parse().ok()).unwrap_or(-1);
            (number("shard"), number("generation"), value(line, "operation").unwrap_or_default())
        })
        .collect();
    fenced.sort();
    fenced
}

fn says(check: &str, outcome: &str) {
    figure(&format!("recovery story: {check}: {outcome}"));
}

//! SIGKILL of a relay at each point around parking and retrying: nothing is lost and no key is reordered.
//!
//! ```text
//! K1 messages are to be set aside, nothing written · K2 written · K3 a parked one acknowledged, not settled · K4 settled
//! ```

use std::time::Duration;

use baton_tests::{Harness, Load, Outcome, Site, eventually, fail, program, test};

use crate::refusals::{PATIENCE, requeue};

const KEYS: usize = 24;
const OF_A_KEY: usize = 12;

#[test]
fn a_relay_killed_while_it_parks_or_tries_what_is_parked_loses_and_reorders_nothing() {
    test(Duration::from_secs(300), Load::Light, async |harness: &mut Harness| {
        for point in ["K1", "K2", "K3", "K4"] {
            let site = harness.site().await?;
            kill_at(harness, &site, point).await.map_err(|failure| failure.during(point))?;
            harness.leave(&site).await;
        }
        Ok(())
    });
}

/// A third of the keys has a message that is too large for its topic, in the middle.
async fn kill_at(harness: &Harness, site: &Site, point: &str) -> Outcome {
    let topic = site.topic_with("small", 3, &[("max.message.bytes", "5000")]).await?;
    fill(site, &topic, 0).await?;
    let release = harness.directory().join(format!("release-{point}"));
    let launch = |name: &str| -> Outcome<_> {
        Ok(site
            .launch(name, program("planted_relay")?)
            .args(["hold", point, &release.display().to_string()])
            .env("BATON_RELAY__OWNER", name))
    };
    let is_trying = ["K3", "K4"].contains(&point);
    if is_trying {
        // What is to be tried is parked by a relay that nothing holds.
        site.baton(&["relay", "--until-empty"])?.finish(PATIENCE).await?;
        site.kafka().set_topic(&topic, &[("max.message.bytes", "1000000")]).await?;
        requeue(site, &["--topic", &topic]).await?;
    }
    let mut relay = launch("held")?.start()?;
    eventually("it to be held", PATIENCE, async || {
        let line = format!("held at {point} shard ");
        let held = relay.stderr().lines().filter(|found| found.starts_with(&line)).count();
        if held >= 1 { Ok(()) } else { fail!("none: {}", relay.stderr()) }
    })
    .await?;
    // More of the same keys comes while it stands still.
    fill(site, &topic, OF_A_KEY).await?;
    relay.kill().await?;
    std::fs::write(&release, "")?;

    let heir = site.relay("heir")?.start()?;
    if !is_trying {
        site.emptied().await?;
        let dead: i64 = sqlx::query_scalar("SELECT count(*) FROM outbox.parked WHERE state = 'dead'")
            .fetch_one(site.pool())
            .await?;
        assert_eq!(dead, 8, "{}", heir.stderr());
        in_order(site, &topic, |key| key % 3 != 0).await?;
        site.kafka().set_topic(&topic, &[("max.message.bytes", "1000000")]).await?;
    }
    // What was filled in while it stood still has large ones, too: some may be dead by the old limit.
    eventually("everything, in order", Duration::from_secs(60), async || {
        requeue(site, &["--topic", &topic]).await?;
        in_order(site, &topic, |_| true).await
    })
    .await?;
    site.emptied().await?;
    // Each is settled once, and nothing is left.
    let left: i64 = sqlx::query_scalar("SELECT count(*) FROM outbox.parked WHERE state <> 'published'")
        .fetch_one(site.pool())
        .await?;
    assert_eq!(left, 0, "{}", heir.stderr());
    Ok(())
}

/// Messages of all keys from this number on; the seventh of all of each third key is large.
async fn fill(site: &Site, topic: &str, from: usize) -> Outcome {
    sqlx::query(
        "INSERT INTO outbox.message (topic, key, payload)
         SELECT $1, 'key-' || key, convert_to(
             n || CASE WHEN key % 3 = 0 AND n = 6 THEN repeat(' ', 10000) ELSE '' END, 'UTF8')
         FROM generate_series($2, $2 + $3 - 1) n, generate_series(0, $4 - 1) key ORDER BY n, key",
    )
    .bind(topic)
    .bind(i32::try_from(from)?)
    .bind(i32::try_from(OF_A_KEY)?)
    .bind(i32::try_from(KEYS)?)
    .execute(site.pool())
    .await?;
    Ok(())
}

/// Whether all of these keys' messages are there, their first occurrences in order.
async fn in_order(site: &Site, topic: &str, of: impl Fn(usize) -> bool) -> Outcome {
    let records = site.kafka().records(topic).await?;
    for number in (0..KEYS).filter(|key| of(*key)) {
        let key = format!("key-{number}");
        let mut seen: Vec<usize> = Vec::new();
        for record in records.iter().filter(|record| record.key_text() == Some(&key)) {
            let n = record.payload_text().unwrap_or_default().trim().parse()?;
            if !seen.contains(&n) {
                seen.push(n);
            }
        }
        if !seen.iter().copied().eq(0..2 * OF_A_KEY) {
            fail!("{key}: {seen:?}");
        }
    }
    Ok(())
}

//! Faults of the machine that a process meets at any point: the disk of its log is full.
//!
//! Memory that cannot be had ends a process as SIGKILL does, which [`crate::held`] and [`crate::consumer_held`] do at every
//! point of its work.

use std::time::Duration;

use baton_tests::{Harness, Load, eventually, fail, test};

const PATIENCE: Duration = Duration::from_secs(30);

#[test]
fn a_relay_whose_log_cannot_be_written_publishes_on_and_stops_in_order() {
    test(Duration::from_secs(90), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        let topic = site.topic("full", 1).await?;
        let mut relay = site.relay("relay")?.env("RUST_LOG", "debug").full_log().start()?;
        sqlx::query("INSERT INTO outbox.message (topic, key, payload) SELECT $1, 'key-' || i % 50, '\\x00' FROM generate_series(1, 500) i")
            .bind(&topic)
            .execute(site.pool())
            .await?;
        site.emptied().await?;
        eventually("all to be published", PATIENCE, async || {
            let count = site.kafka().count(&topic).await?;
            if count == 500 { Ok(()) } else { fail!("{count} published") }
        })
        .await?;
        let status = relay.terminate(PATIENCE).await?;
        assert!(status.success(), "it ended with {status}");
        Ok(())
    });
}

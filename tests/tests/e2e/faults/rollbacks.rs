//! Half of all transactions are rolled back, and half of all savepoints: positions have more gaps than rows.

use std::time::Duration;

use baton_tests::workload::Workload;
use baton_tests::{Harness, Load, figure, lasts, test};

use super::{ends_well, verdict};

#[test]
fn nothing_of_a_storm_of_rollbacks_is_published_and_all_that_was_kept_is() {
    test(Duration::from_secs(90), Load::Alone, async |harness: &mut Harness| {
        let site = harness.site().await?;
        let topic = site.topic("storm", 3).await?;
        let mut relays = [site.relay("one")?.start()?, site.relay("two")?.start()?];
        let storm =
            Workload { rollbacks: 0.5, undone: 0.5, ..Workload::new(fastrand::u64(..1_000_000), &topic) };
        let seed = storm.seed;
        let mut writers = storm.start(&site).await?;
        lasts("the storm", Duration::from_secs(4)).await;
        let done = writers.stop().await?;
        site.emptied().await?;
        for relay in &mut relays {
            ends_well(relay).await?;
        }
        let findings = verdict(&site, &topic).await?;
        let given: i64 =
            sqlx::query_scalar(r#"SELECT last_value FROM pg_sequences WHERE schemaname = 'outbox' AND sequencename LIKE 'message%'"#)
                .fetch_one(site.pool())
                .await?;
        let gaps = given - i64::try_from(findings.committed)?;
        assert!(findings.wire_is_right(), "seed {seed}: {findings}");
        assert!(findings.committed >= 500 && gaps >= 500, "{findings}; {gaps} positions of nothing");
        figure(&format!(
            "a storm of rollbacks (seed {seed}): {} commits, {} rollbacks, {gaps} positions of rows that were taken back; \
             {findings}",
            done.commits, done.rollbacks
        ));
        Ok(())
    });
}

//! Producers commit with `synchronous_commit = off`, and the server is killed: what it had confirmed and not put on its
//! disk is gone, and its positions and transaction ids are given out again.

use std::time::Duration;

use baton_tests::workload::Workload;
use baton_tests::{Flush, Harness, Load, OwnStack, Schema, eventually, fail, figure, lasts, test};

use super::{ends_well, is_full, verdict};

#[test]
fn nothing_is_published_that_a_crash_takes_back_and_what_reuses_its_positions_is() {
    test(Duration::from_secs(240), Load::Alone, async |harness: &mut Harness| {
        let stack = OwnStack::up().await?;
        let site = harness.site_at(stack.place(), Schema::Both { shards: 8 }).await?;
        let topic = site.topic("unflushed", 3).await?;
        stack.flush(Flush::Late).await?;
        let mut relay = site.relay("relay")?.start()?;
        let seed = fastrand::u64(..1_000_000);
        let mut writers = Workload { asynchronous: true, ..Workload::new(seed, &topic) }.start(&site).await?;
        let crashes = if is_full() { 10 } else { 1 };
        for crash in 0..crashes {
            lasts(format!("load before crash {crash}"), Duration::from_secs(1)).await;
            // A relay at the end of the table sees commits that are not on the disk, and must not believe them.
            eventually("the relay to catch up with the writers", Duration::from_secs(40), async || {
                let pending = site.pending().await?;
                if pending < 300 { Ok(()) } else { fail!("{pending} messages wait") }
            })
            .await?;
            stack.crash_postgres().await?;
        }
        stack.flush(Flush::Soon).await?;
        lasts("load after the crashes", Duration::from_secs(1)).await;
        let done = writers.stop().await?;
        site.emptied().await?;
        assert_eq!(relay.try_exited()?, None, "the relay ended: {}", relay.stderr());
        ends_well(&mut relay).await?;
        let findings = verdict(&site, &topic).await?;
        let taken_back = done.messages - i64::try_from(findings.committed)?;
        assert!(findings.wire_is_right(), "seed {seed}: {findings}");
        assert!(taken_back > 0, "the crashes took nothing back, so nothing was shown");
        figure(&format!(
            "{crashes} crashes (seed {seed}) took {taken_back} confirmed messages back: {findings}"
        ));
        Ok(())
    });
}

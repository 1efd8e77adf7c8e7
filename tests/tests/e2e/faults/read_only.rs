//! Postgres takes no more writes for a while, as when it is switched to read only under a running relay, or its disk is
//! full: leases are neither renewed nor cursors written, although every connection is there and every read is answered.

use std::time::Duration;

use baton_tests::{Harness, Load, Outcome, OwnStack, Schema, Site, eventually, fail, figure, lasts, test};
use sqlx::{Connection, Executor};

use super::{PATIENCE, ends_well, processor_seconds, said, unhurried, verdict};
use crate::leases::fill;

#[test]
fn a_read_only_database_stops_the_relay_which_neither_spins_nor_is_silent_and_goes_on_when_it_is_mended() {
    test(Duration::from_secs(120), Load::Alone, async |harness: &mut Harness| {
        const MESSAGES: i64 = 8_000;
        const SETTLED: Duration = Duration::from_secs(11);
        const OBSERVED: Duration = Duration::from_secs(5);
        let fault = SETTLED + OBSERVED;
        let stack = OwnStack::up().await?;
        let site = harness.site_at(stack.place(), Schema::Both { shards: 8 }).await?;
        let topic = site.topic("frozen", 3).await?;
        fill(&site, &topic, MESSAGES).await?;
        let mut relay = site.relay("relay")?.args(unhurried(harness)?).start()?;
        eventually("the relay to be in the middle of it", PATIENCE, async || {
            let count = site.kafka().count(&topic).await?;
            if count > 1_000 { Ok(()) } else { fail!("{count} published") }
        })
        .await?;

        writable(&site, false).await?;
        eventually("the relay to raise the alarm", Duration::from_secs(5), async || {
            match said(&relay, "read-only transaction") {
                0 => fail!("it is silent"),
                _ => Ok(()),
            }
        })
        .await?;
        lasts("what it had handed over", Duration::from_millis(500)).await;
        let published = site.kafka().count(&topic).await?;
        assert!(published < MESSAGES, "it was done before the fault");
        let (processor, alarms) = (processor_seconds(&relay)?, said(&relay, "WARN"));
        // A session of the server tells what it did at most once a second, or 10 s after it did it: what was done before the
        // fault is counted by then.
        lasts("what was done before to be counted", SETTLED).await;
        let (transactions, since) = (transactions(&site).await?, said(&relay, "WARN"));
        lasts("the fault", OBSERVED).await;
        let transactions = self::transactions(&site).await? - transactions;
        let processor = processor_seconds(&relay)? - processor;
        let attempts = said(&relay, "WARN") - since;
        let alarms = said(&relay, "WARN") - alarms;
        assert_eq!(site.kafka().count(&topic).await?, published, "published without a lease");

        writable(&site, true).await?;
        fill(&site, &topic, 1_000).await?;
        site.emptied().await?;
        assert_eq!(relay.try_exited()?, None, "the relay ended: {}", relay.stderr());
        ends_well(&mut relay).await?;
        let findings = verdict(&site, &topic).await?;
        assert!(findings.wire_is_right(), "{findings}");
        figure(&format!(
            "read-only Postgres: {transactions} transactions of {attempts} attempts in {OBSERVED:?}; {processor:.2} s of processor \
             and {alarms} more warnings in {fault:?}; {findings}"
        ));
        // One that began before, and those of this test.
        let most = 20 * i64::try_from(attempts + 1)?;
        assert!(
            transactions <= most,
            "{transactions} transactions of {attempts} attempts while it can do nothing"
        );
        let seconds = fault.as_secs_f64();
        assert!(processor < 0.2 * seconds, "{processor} s of processor while it can do nothing");
        // The delays are drawn from nothing to a second.
        assert!(alarms > 0 && (alarms as f64) < 3.0 * seconds, "{alarms} warnings");
        Ok(())
    });
}

/// For the whole server, sessions that are there included. A read-only server still takes this very command.
async fn writable(site: &Site, writable: bool) -> Outcome {
    let mut admin = site.connect().await?;
    let statement = match writable {
        true => "ALTER SYSTEM RESET default_transaction_read_only",
        false => "ALTER SYSTEM SET default_transaction_read_only = on",
    };
    admin.execute(statement).await?;
    admin.execute("SELECT pg_reload_conf()").await?;
    admin.close().await?;
    eventually("the server to have heard", PATIENCE, async || {
        let mut session = site.connect().await?;
        let frozen: bool =
            sqlx::query_scalar("SELECT current_setting('default_transaction_read_only')::bool")
                .fetch_one(&mut session)
                .await?;
        session.close().await?;
        if frozen == writable { fail!("read only: {frozen}") } else { Ok(()) }
    })
    .await
}

/// How many transactions there were in this database, those of a few test sessions included.
async fn transactions(site: &Site) -> Outcome<i64> {
    Ok(sqlx::query_scalar(
        "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = current_database()",
    )
    .fetch_one(site.pool())
    .await?)
}

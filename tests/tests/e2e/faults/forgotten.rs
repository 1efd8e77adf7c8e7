//! The broker comes back and says for a while that a topic does not exist which it has.
//!
//! The broker is the real one. The relay reaches it through a proxy that asks it for a topic of another name, so that it is
//! the broker's own answer to metadata and produce requests that the relay reads. A producer that goes on after this by
//! itself might number its records anew, and the broker would drop them as repeated ones.

use std::time::Duration;

use baton_tests::{Harness, Load, OwnStack, Schema, eventually, fail, figure, lasts, test};

use super::{PATIENCE, ends_well, is_full, said, tier, unhurried, verdict};
use crate::leases::fill;

#[test]
fn a_topic_that_a_restarted_broker_does_not_know_for_a_while_loses_no_message_and_no_order() {
    let missing = tier(Duration::from_secs(3), Duration::from_secs(10));
    test(Duration::from_secs(150), Load::Alone, async |harness: &mut Harness| {
        const MESSAGES: i64 = 10_000;
        let stack = OwnStack::up().await?;
        let site = harness.site_at(stack.place(), Schema::Both { shards: 8 }).await?;
        let (topic, other) = (site.topic("known", 3).await?, site.topic_name("gone_"));
        let proxy = stack.kafka_proxy().await?;
        fill(&site, &topic, MESSAGES).await?;
        let mut relay =
            site.relay("relay")?.args(unhurried(harness)?).env("KAFKA_BROKERS", proxy.address()).start()?;
        eventually("the relay to be in the middle of it", PATIENCE, async || {
            let count = site.kafka().count(&topic).await?;
            if count > 1_000 { Ok(()) } else { fail!("{count} published") }
        })
        .await?;
        proxy.rename(&topic, &other);
        if is_full() {
            stack.kill_broker().await?;
            stack.repair().await?;
            // librdkafka waits half a minute for a topic to come back; from then on the relay asks by itself.
            eventually("the relay to say what it was told", 2 * PATIENCE, async || {
                match said(&relay, "create the topic") {
                    0 => fail!("it is silent"),
                    _ => Ok(()),
                }
            })
            .await?;
        } else {
            // To its clients that is the same: every connection ends, and the next ones meet the answer.
            proxy.reset_all();
        }
        let count = eventually("nothing more to arrive", PATIENCE, async || {
            let before = site.kafka().count(&topic).await?;
            lasts("what is on its way", Duration::from_millis(300)).await;
            let now = site.kafka().count(&topic).await?;
            if now == before { Ok(now) } else { fail!("{before} and then {now} records") }
        })
        .await?;
        lasts("the broker does not know the topic", missing).await;
        assert_eq!(site.kafka().count(&topic).await?, count, "the broker knows the topic");
        assert!(count < MESSAGES, "it was done before the fault");
        fill(&site, &topic, 500).await?;
        proxy.heal();
        site.emptied().await?;
        assert_eq!(relay.try_exited()?, None, "the relay ended: {}", relay.stderr());
        ends_well(&mut relay).await?;
        let findings = verdict(&site, &topic).await?;
        figure(&format!("a topic was missing for {missing:?} when the broker was back: {findings}"));
        assert!(findings.wire_is_right(), "{findings}");
        Ok(())
    });
}

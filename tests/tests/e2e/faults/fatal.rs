//! The broker answers so that a producer cannot go on: its sequence numbers do not follow, or it is a stranger.
//!
//! A broker of today answers like that only after it has lost what it had acknowledged, and no real one can be brought to
//! it without losing that too. So the broker here is librdkafka's mock, which gives the answer and keeps what it has; it does not look
//! at sequence numbers itself. Order and completeness are still the ledger's to judge.

use std::time::Duration;

use baton_tests::{Harness, Kafka, Load, eventually, fail, figure, lasts, test, workload};
use rdkafka::mocking::MockCluster;
use rdkafka::types::{RDKafkaApiKey, RDKafkaRespErr};

use super::{PATIENCE, ends_well, said};
use crate::leases::fill;

#[test]
fn a_producer_that_cannot_go_on_is_replaced_and_its_rows_go_again_from_the_first_unacknowledged_one() {
    test(Duration::from_secs(90), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        let broker = MockCluster::new(1)?;
        let topic = site.topic_name("fatal");
        broker.create_topic(&topic, 3, 1)?;
        let kafka = Kafka::new(&broker.bootstrap_servers());
        let mut relay = site
            .relay("relay")?
            .env("KAFKA_BROKERS", broker.bootstrap_servers())
            .env("BATON_PUBLISH__PAGE_ROWS", "100")
            .env("BATON_PUBLISH__IN_FLIGHT_ROWS", "400")
            .start()?;
        let mut replaced = 0;
        for error in [
            RDKafkaRespErr::RD_KAFKA_RESP_ERR_OUT_OF_ORDER_SEQUENCE_NUMBER,
            RDKafkaRespErr::RD_KAFKA_RESP_ERR_UNKNOWN_PRODUCER_ID,
            RDKafkaRespErr::RD_KAFKA_RESP_ERR_INVALID_PRODUCER_EPOCH,
        ] {
            // In the middle of its work: what is in flight behind the refused batch is refused with it or purged.
            let before = kafka.count(&topic).await?;
            fill(&site, &topic, 3_000).await?;
            eventually("the relay to be at work", PATIENCE, async || {
                let count = kafka.count(&topic).await?;
                if count > before { Ok(()) } else { fail!("{count} published") }
            })
            .await?;
            broker.request_errors(RDKafkaApiKey::Produce, &[error; 3]);
            site.emptied().await?;
            // And after it has had nothing to do.
            lasts("idling", Duration::from_millis(500)).await;
            broker.request_errors(RDKafkaApiKey::Produce, &[error]);
            fill(&site, &topic, 40).await?;
            site.emptied().await?;
            let now = said(&relay, "the kafka producer failed and is replaced");
            println!("{error:?}: {} producers replaced", now - replaced);
            if error == RDKafkaRespErr::RD_KAFKA_RESP_ERR_OUT_OF_ORDER_SEQUENCE_NUMBER {
                assert!(now >= 2, "the error was not fatal: {now} producers replaced");
            }
            replaced = now;
        }
        assert_eq!(relay.try_exited()?, None, "the relay ended: {}", relay.stderr());
        ends_well(&mut relay).await?;
        let records = kafka.records(&topic).await?;
        let (findings, _) = workload::judge(&workload::truth(&site, &topic).await?, &records);
        assert!(findings.wire_is_right(), "{findings}");
        figure(&format!("{replaced} producers that could not go on were replaced: {findings}"));
        Ok(())
    });
}

//! Brokers that go away while a consumer runs. A mock of them, because the real ones are shared.

use std::time::Duration;

use baton_consumer::{Consumer, DeadLetterTopics, Kafka};
use rdkafka::ClientConfig;
use rdkafka::message::{Header, OwnedHeaders};
use rdkafka::mocking::MockCluster;
use rdkafka::producer::{FutureProducer, FutureRecord};
use tokio::time::timeout;

use crate::fixture::{Probe, Running, eventually_logged, in_world, logged};

const BROKER: i32 = 1;

async fn send(producer: &FutureProducer, topic: &str, id: &str) {
    let headers = OwnedHeaders::new()
        .insert(Header { key: "idempotency-key", value: Some(id) })
        .insert(Header { key: "ce_type", value: Some("t") });
    let record = FutureRecord::<[u8], str>::to(topic).partition(0).payload("pay").headers(headers);
    producer.send(record, Duration::from_secs(30)).await.unwrap();
}

#[test]
fn brokers_that_go_away_are_waited_for_and_do_not_hold_up_a_shutdown() {
    in_world(1, |world| async move {
        let brokers = MockCluster::new(1).unwrap();
        brokers.create_topic(&world.topic, 1, 1).unwrap();
        let producer: FutureProducer =
            ClientConfig::new().set("bootstrap.servers", brokers.bootstrap_servers()).create().unwrap();
        send(&producer, &world.topic, "before").await;
        let kafka = Kafka::new(brokers.bootstrap_servers()).property("reconnect.backoff.max.ms", "500");
        let consumer = Consumer::builder("billing", world.pool.clone(), kafka)
            .topics([&world.topic])
            .dead_letter_topics(DeadLetterTopics::Expect)
            .transactional(Probe::new())
            .build()
            .unwrap();
        let mut running = Running::start(consumer);
        world.eventually_effects(1).await;

        brokers.broker_down(BROKER).unwrap();
        eventually_logged(&["WARN", "Kafka does not answer", &brokers.bootstrap_servers()]).await;
        brokers.broker_up(BROKER).unwrap();
        send(&producer, &world.topic, "after").await;
        assert_eq!(world.eventually_effects(2).await, ["before", "after"]);
        assert!(logged(&["ERROR", &world.topic]).is_empty());

        brokers.broker_down(BROKER).unwrap();
        running.ask_to_stop();
        timeout(Duration::from_secs(30), running.ended()).await.expect("it hangs").unwrap();
    });
}

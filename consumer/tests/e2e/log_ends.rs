//! What a topic's log may look like: transaction markers at its end, and a topic that was deleted and made again.

use std::time::Duration;

use rdkafka::config::ClientConfig;
use rdkafka::producer::{BaseProducer, BaseRecord, Producer};

use crate::fixture::{Probe, Running, Send, brokers, ce_headers, in_world};

const SECONDS: Duration = Duration::from_secs(10);

/// A transaction of one message, and one that is aborted. Each leaves a marker behind it.
fn in_transactions(topic: &str) {
    let producer: BaseProducer = ClientConfig::new()
        .set("bootstrap.servers", brokers())
        .set("transactional.id", topic)
        .create()
        .unwrap();
    producer.init_transactions(SECONDS).unwrap();
    for (id, is_kept) in [("kept", true), ("aborted", false)] {
        producer.begin_transaction().unwrap();
        let record = BaseRecord::to(topic).partition(0).key("k").payload("pay").headers(ce_headers(id));
        producer.send(record).map_err(|(error, _)| error).unwrap();
        producer.flush(SECONDS).unwrap();
        if is_kept {
            producer.commit_transaction(SECONDS).unwrap();
        } else {
            producer.abort_transaction(SECONDS).unwrap();
        }
    }
}

#[test]
fn a_partition_that_ends_in_transaction_markers_is_consumed_to_its_end_and_nothing_aborted_is_applied() {
    in_world(1, |world| async move {
        let topic = world.topic.clone();
        tokio::task::spawn_blocking(move || in_transactions(&topic)).await.unwrap();
        let start = || Running::start(world.builder().transactional(Probe::new()).build().unwrap());
        let running = start();
        assert_eq!(world.eventually_effects(1).await, ["/test#kept"]);
        // Behind the message; the markers have no offset of their own to commit.
        world.eventually_committed(0, 1).await;
        running.stop().await.unwrap();

        // From between the markers it goes on with what comes next.
        let running = start();
        world.send(Send::new("after", "pay")).await;
        assert_eq!(world.eventually_effects(2).await, ["/test#kept", "/test#after"]);
        world.eventually_committed(0, 5).await;
        running.stop().await.unwrap();
    });
}

#[test]
fn of_a_topic_that_was_made_again_no_record_is_taken_for_a_duplicate() {
    in_world(1, |world| async move {
        let start = || Running::start(world.builder().transactional(Probe::new()).build().unwrap());
        let running = start();
        for id in ["1", "2", "3"] {
            world.send(Send::new(id, "pay")).await;
        }
        world.eventually_committed(0, 3).await;
        running.stop().await.unwrap();

        world.delete_topic(&world.topic).await;
        world.create_topic(&world.topic, 1).await;
        // Offsets 0 to 2 once more, the bytes of the payload too; other identities.
        for id in ["4", "5", "6"] {
            world.send(Send::new(id, "pay")).await;
        }
        let running = start();
        let all = ["/test#1", "/test#2", "/test#3", "/test#4", "/test#5", "/test#6"];
        assert_eq!(world.eventually_effects(6).await, all);
        world.eventually_committed(0, 3).await;
        running.stop().await.unwrap();
    });
}

//! What a dead letter says, and that it does not grow.

use baton_consumer::DeadLetterFormat;

use crate::fixture::{Probe, Running, Send, World, eventually, headers, in_world};

/// Names and values of the headers whose name begins so.
fn named(message: &rdkafka::message::OwnedMessage, prefix: &str) -> Vec<(String, Vec<u8>)> {
    let found = headers(message).into_iter().filter(|(name, _)| name.starts_with(prefix));
    found.map(|(name, value)| (name, value.unwrap_or_default())).collect()
}

async fn eventually_in(world: &World, topic: &str, count: usize) -> Vec<rdkafka::message::OwnedMessage> {
    eventually(&format!("{count} records are in {topic}"), || async {
        let found = world.read(topic).await;
        if found.len() == count { Ok(found) } else { Err(format!("{}", found.len())) }
    })
    .await
}

#[test]
fn springs_dead_letter_keeps_the_record_and_goes_to_springs_topic_which_is_made() {
    use rdkafka::Message as _;
    in_world(3, |world| async move {
        let mut record = Send::new("1", "permanent").to(2);
        record.timestamp = Some(1_700_000_000_123);
        record.headers.push(("null", None));
        let sent: Vec<(String, Option<Vec<u8>>)> = record
            .headers
            .iter()
            .map(|(name, value)| ((*name).to_owned(), value.map(<[u8]>::to_vec)))
            .collect();
        world.send(record).await;
        let spring = world.builder().dead_letter_format(DeadLetterFormat::Spring);
        let running = Running::start(spring.transactional(Probe::new()).build().unwrap());
        let topic = format!("{}-dlt", world.topic);
        world.eventually_committed(2, 1).await;
        assert_eq!(world.partitions(&topic).await, 3);
        let letters = eventually_in(&world, &topic, 1).await;
        let letter = &letters[0];
        assert_eq!(letter.key(), Some(&b"k"[..]));
        assert_eq!(letter.payload(), Some(&b"permanent"[..]));
        assert_eq!(letter.timestamp().to_millis(), Some(1_700_000_000_123));
        assert_eq!(headers(letter)[..sent.len()], sent);
        let value = |name: &str| {
            named(letter, "kafka_dlt-").into_iter().find(|(found, _)| found == name).map(|(_, value)| value)
        };
        assert_eq!(value("kafka_dlt-original-partition"), Some(2_i32.to_be_bytes().to_vec()));
        assert_eq!(value("kafka_dlt-original-offset"), Some(0_i64.to_be_bytes().to_vec()));
        assert_eq!(value("kafka_dlt-original-timestamp"), Some(1_700_000_000_123_i64.to_be_bytes().to_vec()));
        assert_eq!(value("kafka_dlt-original-timestamp-type"), Some(b"CreateTime".to_vec()));
        assert_eq!(value("kafka_dlt-original-consumer-group"), Some(world.group().into_bytes()));
        assert_eq!(named(letter, "kafka_dlt-").len(), 10);
        assert!(named(letter, "dlt-").is_empty());
        running.stop().await.unwrap();
    });
}

#[test]
fn a_record_that_dies_ten_times_in_either_format_tells_of_its_last_death_only() {
    in_world(1, |world| async move {
        let mut sizes = Vec::new();
        let mut carried: Vec<(String, Option<Vec<u8>>)> = Vec::new();
        for round in 0..10 {
            let id = round.to_string();
            let mut record = Send::new(&id, "permanent");
            // As a replay brings it: with everything that its last dead letter said.
            record.headers.extend(carried.iter().map(|(name, value)| (name.as_str(), value.as_deref())));
            world.send(record).await;
            let (format, topic) = if round % 2 == 0 {
                (DeadLetterFormat::Own, world.dlt())
            } else {
                (DeadLetterFormat::Spring, format!("{}-dlt", world.topic))
            };
            let builder = world.builder().dead_letter_format(format);
            let running = Running::start(builder.transactional(Probe::new()).build().unwrap());
            world.eventually_committed(0, round + 1).await;
            running.stop().await.unwrap();
            let letter =
                eventually_in(&world, &topic, usize::try_from(round / 2 + 1).unwrap()).await.pop().unwrap();
            let told = |prefix: &str| named(&letter, prefix).len();
            assert_eq!((told("dlt-"), told("kafka_dlt-")), if round % 2 == 0 { (10, 0) } else { (0, 10) });
            carried = headers(&letter).into_iter().filter(|(name, _)| !name.starts_with("ce_")).collect();
            let bytes: usize = headers(&letter)
                .iter()
                .map(|(name, value)| name.len() + value.as_ref().map_or(0, Vec::len))
                .sum();
            sizes.push(bytes);
        }
        assert!(sizes.iter().all(|bytes| *bytes < sizes[0].max(sizes[1]) + 16), "{sizes:?}");
    });
}

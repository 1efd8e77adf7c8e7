//! Keys land on the partitions where Java's own producer puts them, or streams of the two would never meet.

use std::collections::HashMap;
use std::time::Duration;

use baton_tests::{Harness, Load, Outcome, Site, eventually, fail, figure, kafka_tool, test};

const KEYS: usize = 10_000;
/// Not a power of two, so that no bit of the hash is left out of the comparison.
const PARTITIONS: usize = 12;
const PATIENCE: Duration = Duration::from_secs(90);

#[test]
fn ten_thousand_keys_land_where_the_java_producer_puts_them() {
    test(Duration::from_secs(180), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        let (ours, javas) = (site.topic("ours", PARTITIONS).await?, site.topic("java", PARTITIONS).await?);
        let keys = keys();
        assert_eq!(keys.len(), KEYS);

        sqlx::query(
            "INSERT INTO outbox.message (topic, key, payload) SELECT $1, key, 'x' FROM unnest($2::text[]) AS key",
        )
        .bind(&ours)
        .bind(&keys)
        .execute(site.pool())
        .await?;
        site.baton(&["relay", "--until-empty"])?.finish(PATIENCE).await?.success()?;

        let lines: String = keys.iter().map(|key| format!("{key}\tx\n")).collect();
        kafka_tool(&site, "org.apache.kafka.tools.ConsoleProducer")
            .await?
            .args(["--topic", &javas, "--reader-property", "parse.key=true"])
            .args(["--reader-property", "key.separator=\t"])
            .input(lines)
            .finish(PATIENCE)
            .await?
            .success()?;

        let (ours, javas) = (by_key(&site, &ours).await?, by_key(&site, &javas).await?);
        assert_eq!((ours.len(), javas.len()), (KEYS, KEYS));
        let strays: Vec<&String> = keys.iter().filter(|key| ours[*key] != javas[*key]).collect();
        assert!(strays.is_empty(), "{} keys stray, such as {:?}", strays.len(), strays.first());
        figure(&format!(
            "must show 5: {} of {KEYS} keys on the same of {PARTITIONS} partitions as by Kafka's Java producer",
            KEYS - strays.len()
        ));
        Ok(())
    });
}

#[test]
fn a_raised_number_of_partitions_is_used_and_said_once_everything_in_flight_is_acknowledged() {
    test(Duration::from_secs(120), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        let topic = site.topic("grows", 1).await?;
        let insert = async |from: i32| -> Outcome {
            sqlx::query(
                "INSERT INTO outbox.message (topic, key, payload)
                 SELECT $1, i::text, 'x' FROM generate_series($2, $2 + 99) AS i",
            )
            .bind(&topic)
            .bind(from)
            .execute(site.pool())
            .await?;
            Ok(())
        };
        let relay = site
            .relay("relay")?
            .env("BATON_KAFKA__PROPERTIES__topic.metadata.refresh.interval.ms", "200")
            .start()?;
        insert(0).await?;
        let wait = async |count: i64| {
            eventually("the messages", PATIENCE, async || {
                let seen = site.kafka().count(&topic).await?;
                if seen == count { Ok(()) } else { fail!("{seen} records") }
            })
            .await
        };
        wait(100).await?;
        site.kafka().raise_partitions(&topic, 4).await?;
        let mut from = 100;
        eventually("the new partitions in use, and a warning that names both counts", PATIENCE, async || {
            insert(from).await?;
            from += 100;
            wait(i64::from(from)).await?;
            let warned = relay.stderr().lines().any(|line| {
                ["WARN", &topic, "had 1 partitions and has 4"].iter().all(|word| line.contains(*word))
            });
            let used = site.kafka().records(&topic).await?.iter().any(|record| record.partition == 3);
            if warned && used { Ok(()) } else { fail!("warned: {warned}, used: {used}") }
        })
        .await
    });
}

async fn by_key(site: &Site, topic: &str) -> Outcome<HashMap<String, i32>> {
    let records = site.kafka().records(topic).await?;
    let mut partitions = HashMap::new();
    for record in &records {
        let Some(key) = record.key_text() else { fail!("a record without a key in {topic}") };
        if partitions.insert(key.to_owned(), record.partition).is_some() {
            fail!("{key:?} twice in {topic}");
        }
    }
    Ok(partitions)
}

/// Different ones of every length up to 300 bytes, and in several scripts; one is empty.
fn keys() -> Vec<String> {
    const LETTERS: [&str; 8] = ["a", "7", "Z", "-", "ß", "鍵", "🔑", " "];
    let mut random = fastrand::Rng::with_seed(5);
    let mut keys = vec![String::new()];
    for number in 1..KEYS {
        keys.push(match number % 4 {
            0 => number.to_string(),
            1 => format!("customer-{number:08}"),
            2 => uuid::Uuid::from_u128(random.u128(..)).to_string(),
            _ => {
                let letters = (0..random.usize(0..75)).map(|_| LETTERS[random.usize(..LETTERS.len())]);
                letters.collect::<String>() + &format!("_{number}")
            }
        });
    }
    keys
}

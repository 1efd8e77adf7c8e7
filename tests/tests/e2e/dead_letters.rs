//! Dead letters, read by what is not ours: Kafka's console consumer, and a Java program over Kafka's own client.

use std::collections::BTreeMap;
use std::time::Duration;

use baton_tests::{
    Draft, Harness, Load, Outcome, Record, Site, eventually, fail, figure, kafka_program, kafka_tool,
    program, test,
};
use sqlx::Executor;

const PATIENCE: Duration = Duration::from_secs(60);

/// Runs a consumer, with these variables, until the topic's second record is a dead letter in `letters`; which it is.
async fn dead_letter(site: &Site, topic: &str, letters: &str, variables: &[(&str, &str)]) -> Outcome<Record> {
    site.pool()
        .execute("CREATE TABLE effect (n bigint GENERATED ALWAYS AS IDENTITY, key text, content bytea, partition int)")
        .await?;
    let poison =
        Draft::new("k", r#"{"behave":"poison"}"#).header("idempotency-key", "2").header("tenant", "blue");
    let drafts = vec![Draft::new("k", "{}").header("idempotency-key", "1"), poison];
    site.kafka().produce(topic, drafts).await?;
    let consumer = site.launch("effects", program("effect_consumer")?);
    let group = site.topic_name("group");
    let consumer = consumer.args([topic, &group]);
    let mut consumer =
        variables.iter().fold(consumer, |consumer, (name, value)| consumer.env(name, *value)).start()?;
    let letter =
        eventually("the dead letter", PATIENCE, async || match site.kafka().records(letters).await?.pop() {
            Some(letter) => Ok(letter),
            None => fail!("none: {}", consumer.stderr()),
        })
        .await?;
    let status = consumer.terminate(PATIENCE).await?;
    if !status.success() {
        fail!("{status}: {}", consumer.stderr());
    }
    Ok(letter)
}

#[test]
fn kafkas_console_consumer_shows_the_headers_of_a_dead_letter() {
    test(Duration::from_secs(120), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        let topic = site.topic("work", 1).await?;
        let letters = format!("{topic}.effects.dlt");
        let letter = dead_letter(&site, &topic, &letters, &[]).await?;
        let printed = kafka_tool(&site, "org.apache.kafka.tools.consumer.ConsoleConsumer")
            .await?
            .args(["--topic", &letters, "--from-beginning", "--max-messages", "1", "--timeout-ms", "30000"])
            .args(
                ["timestamp", "headers", "key", "value"]
                    .iter()
                    .flat_map(|part| ["--formatter-property".to_owned(), format!("print.{part}=true")]),
            )
            .finish(PATIENCE)
            .await?
            .success()?;
        let timestamp = letter.timestamp_ms.unwrap_or_default();
        let of = |name: &str| letter.header(name).unwrap_or_default().to_owned();
        let expected = format!(
            "CreateTime:{timestamp}\tidempotency-key:2,tenant:blue,dlt-cause:permanent,dlt-error:poison,dlt-attempts:1,\
             dlt-original-topic:{topic},dlt-original-partition:0,dlt-original-offset:1,dlt-original-timestamp:{timestamp},\
             dlt-consumer:effects,dlt-first-failed-at:{},dlt-failed-at:{}\tk\t{{\"behave\":\"poison\"}}\n",
            of("dlt-first-failed-at"),
            of("dlt-failed-at"),
        );
        assert_eq!(printed, expected);
        figure(&format!("must show 7: kafka-console-consumer printed {printed:?}"));
        Ok(())
    });
}

#[test]
fn a_java_program_with_kafkas_own_client_reads_springs_integers() {
    test(Duration::from_secs(150), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        let topic = site.topic("work", 1).await?;
        let letters = format!("{topic}-dlt");
        let letter = dead_letter(&site, &topic, &letters, &[("EFFECTS_SPRING", "yes")]).await?;
        assert!(letter.headers.iter().all(|(name, _)| !name.starts_with("dlt-")), "{:?}", letter.headers);
        let printed = kafka_program(&site, "SpringHeaders", include_str!("../../java/SpringHeaders.java"))
            .await?
            .args([&site.place().brokers, &letters])
            .finish(PATIENCE)
            .await?
            .success()?;
        let read: BTreeMap<&str, &str> = printed.lines().filter_map(|line| line.split_once('=')).collect();
        let timestamp = letter.timestamp_ms.unwrap_or_default().to_string();
        let group = site.topic_name("group");
        let expected = BTreeMap::from([
            ("idempotency-key", "2"),
            ("tenant", "blue"),
            ("kafka_dlt-original-topic", topic.as_str()),
            ("kafka_dlt-original-partition", "0"),
            ("kafka_dlt-original-offset", "1"),
            ("kafka_dlt-original-timestamp", timestamp.as_str()),
            ("kafka_dlt-original-timestamp-type", "CreateTime"),
            ("kafka_dlt-original-consumer-group", group.as_str()),
            ("kafka_dlt-exception-fqcn", "baton.DeadLetter"),
            ("kafka_dlt-exception-cause-fqcn", "baton.permanent"),
            ("kafka_dlt-exception-message", "poison"),
            (
                "kafka_dlt-exception-stacktrace",
                "baton.DeadLetter: permanent after 1 attempt by consumer effects|Caused by: baton.permanent: poison|",
            ),
        ]);
        assert_eq!(read, expected);
        figure(&format!("must show 7: Java read {:?}", printed.lines().collect::<Vec<_>>()));
        Ok(())
    });
}

//! The harness on the real servers: what it makes, it takes away.

use sqlx::Executor;

use super::*;
use crate::fail;
use crate::run::{Load, test};

async fn databases(place: &Place, name: &str) -> Outcome<i64> {
    let mut admin = database::connect(&place.database_url).await?;
    let count = sqlx::query_scalar("SELECT count(*) FROM pg_database WHERE datname = $1")
        .bind(name)
        .fetch_one(&mut admin)
        .await?;
    admin.close().await?;
    Ok(count)
}

async fn topics(kafka: &Kafka, prefix: &str) -> Outcome<usize> {
    Ok(kafka.topics().await?.iter().filter(|name| name.starts_with(prefix)).count())
}

#[test]
fn databases_and_topics_of_a_test_that_panics_are_gone_after_it() {
    let (mut database, mut prefix) = (String::new(), String::new());
    let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        test(Duration::from_secs(60), Load::Light, async |harness: &mut Harness| {
            let site = harness.site().await?;
            site.topic("one", 2).await?;
            database = sqlx::query_scalar("SELECT current_database()::text").fetch_one(site.pool()).await?;
            prefix = site.topic_prefix();
            assert_eq!(databases(&Place::shared()?, &database).await?, 1);
            assert_eq!(topics(site.kafka(), &prefix).await?, 1);
            panic!("on purpose")
        });
    }));
    assert_eq!(panic.unwrap_err().downcast_ref(), Some(&"on purpose"));
    test(Duration::from_secs(30), Load::Light, async |_: &mut Harness| {
        let place = Place::shared()?;
        assert_eq!(databases(&place, &database).await?, 0);
        eventually("the topics to be gone", Duration::from_secs(10), async || {
            let count = topics(&Kafka::new(&place.brokers), &prefix).await?;
            if count == 0 { Ok(()) } else { fail!("{count} are there") }
        })
        .await
    });
}

#[test]
fn what_a_run_left_long_ago_is_swept_and_what_is_recent_stays() {
    test(Duration::from_secs(60), Load::Light, async |_: &mut Harness| {
        let place = Place::shared()?;
        let random = database::stamp(&place).await?.random;
        let (old, recent) = (format!("baton_test_1000_{random}"), format!("baton_test_9999_{random}"));
        let mut admin = database::connect(&place.database_url).await?;
        for name in [&old, &recent] {
            admin.execute(sqlx::raw_sql(sqlx::AssertSqlSafe(format!("CREATE DATABASE {name}")))).await?;
        }
        let kafka = Kafka::new(&place.brokers);
        let (old_topic, recent_topic) = (topic_prefix(1000, &random), topic_prefix(9999, &random));
        for prefix in [&old_topic, &recent_topic] {
            kafka.create_topic(&format!("{prefix}t"), 1, &[]).await?;
        }
        // As if it were 10,000 s after 1970, so that no other test's belongings look old.
        database::sweep(&place, 10_000).await?;
        kafka.sweep(10_000).await?;
        let counts = (databases(&place, &old).await?, databases(&place, &recent).await?);
        let left = topics(&kafka, &recent_topic).await?;
        eventually("the old topic to be gone", Duration::from_secs(10), async || {
            let count = topics(&kafka, &old_topic).await?;
            if count == 0 { Ok(()) } else { fail!("it is there") }
        })
        .await?;
        admin.execute(sqlx::raw_sql(sqlx::AssertSqlSafe(format!("DROP DATABASE {recent}")))).await?;
        kafka.delete_topics_of(&recent_topic).await?;
        assert_eq!((counts, left), ((0, 1), 1));
        Ok(())
    });
}

#[test]
fn a_topic_is_read_to_its_end_although_its_last_offsets_are_markers_of_transactions() {
    test(Duration::from_secs(60), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        let topic = site.topic("marked", 2).await?;
        let draft = |n: i32| crate::Draft::new("k", n.to_string()).header("n", "x");
        site.kafka().produce(&topic, vec![draft(0)]).await?;
        site.kafka().produce_in_transaction(&topic, vec![draft(1), draft(2)]).await?;
        // The broker writes the marker after it has confirmed the commit.
        eventually("three records and a marker", Duration::from_secs(10), async || {
            let count = site.kafka().count(&topic).await?;
            if count == 4 { Ok(()) } else { fail!("{count} offsets") }
        })
        .await?;
        let records = site.kafka().records(&topic).await?;
        let seen: Vec<Option<&str>> = records.iter().map(crate::Record::payload_text).collect();
        assert_eq!(seen, [Some("0"), Some("1"), Some("2")]);
        Ok(())
    });
}

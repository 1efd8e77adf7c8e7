//! What must be there at start, and how its absence is told.

use std::error::Error as _;

use baton_consumer::{Consumer, Kafka, run};
use sqlx::Executor;
use sqlx::postgres::PgPoolOptions;

use crate::fixture::{Probe, Running, Send, eventually, in_world, logged};

async fn refused(consumer: Consumer) -> (run::Error, String) {
    let error = Running::start(consumer).ended().await.expect_err("it started");
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text.push_str(": ");
        text.push_str(&error.to_string());
        source = error.source();
    }
    (error, text)
}

#[test]
fn a_topic_that_does_not_exist_is_named() {
    in_world(1, |world| async move {
        let consumer =
            world.builder().topics(["no-such-topic-here"]).transactional(Probe::new()).build().unwrap();
        let (error, text) = refused(consumer).await;
        assert!(matches!(error, run::Error::MissingTopics { topics } if topics == ["no-such-topic-here"]));
        assert!(text.contains("no-such-topic-here") && text.contains("create it"), "{text}");
    });
}

#[test]
fn missing_inbox_tables_are_told_with_the_command_that_makes_them() {
    in_world(1, |world| async move {
        world.pool.execute("DROP SCHEMA inbox CASCADE").await.unwrap();
        let (error, text) = refused(world.builder().transactional(Probe::new()).build().unwrap()).await;
        assert!(matches!(error, run::Error::NotMigrated));
        assert!(text.contains("baton migrate inbox"), "{text}");
    });
}

#[test]
fn a_database_that_is_not_there_is_told_without_its_password() {
    in_world(1, |world| async move {
        for options in [
            world.options.clone().port(1).password("hunter2"),
            world.options.clone().database("no_such_database").password("hunter2"),
        ] {
            let pool = PgPoolOptions::new().connect_lazy_with(options);
            let (error, text) =
                refused(world.builder_on(pool).transactional(Probe::new()).build().unwrap()).await;
            assert!(matches!(error, run::Error::Database(_)), "{text}");
            assert!(!text.contains("hunter2") && !format!("{error:?}").contains("hunter2"), "{text}");
        }
    });
}

#[test]
fn brokers_that_are_not_there_are_named() {
    in_world(1, |world| async move {
        let kafka = Kafka::new("127.0.0.1:1").property("sasl.password", "hunter2");
        let consumer = Consumer::builder("billing", world.pool.clone(), kafka)
            .topics([&world.topic])
            .transactional(Probe::new())
            .build()
            .unwrap();
        let (error, text) = refused(consumer).await;
        assert!(matches!(error, run::Error::Brokers { .. }), "{text}");
        assert!(text.contains("127.0.0.1:1") && !text.contains("hunter2"), "{text}");
    });
}

#[test]
fn the_topics_of_dead_letters_and_replays_have_as_many_partitions_as_the_original() {
    in_world(5, |world| async move {
        let running = Running::start(world.builder().transactional(Probe::new()).build().unwrap());
        eventually("the consumer has its partitions", || async {
            if logged(&[&world.topic, "assigned"]).is_empty() { Err(String::new()) } else { Ok(()) }
        })
        .await;
        assert_eq!(world.partitions(&world.dlt()).await, 5);
        assert_eq!(world.partitions(&format!("{}.billing.replay", world.topic)).await, 5);
        running.stop().await.unwrap();
    });
}

#[test]
fn a_shutdown_that_comes_before_the_start_ends_it() {
    in_world(1, |world| async move {
        let consumer = world.builder().transactional(Probe::new()).build().unwrap();
        consumer.run(async {}).await.unwrap();
    });
}

#[test]
fn membership_in_baton_consumer_is_all_that_the_inbox_asks_of_a_role() {
    in_world(1, |world| async move {
        let role = format!("role_{}", world.name);
        let sql = format!(
            "CREATE ROLE {role} LOGIN PASSWORD 'secret'; GRANT INSERT ON effect TO {role}; GRANT USAGE ON effect_nr_seq TO {role}"
        );
        sqlx::raw_sql(sqlx::AssertSqlSafe(sql)).execute(&world.pool).await.unwrap();
        let options = world.options.clone().username(&role).password("secret");
        let pool = PgPoolOptions::new().connect_lazy_with(options);

        let (error, text) =
            refused(world.builder_on(pool.clone()).transactional(Probe::new()).build().unwrap()).await;
        assert!(matches!(error, run::Error::Check(_)) && text.contains("baton_consumer"), "{text}");

        let grant = format!("GRANT baton_consumer TO {role}");
        world.pool.execute(sqlx::AssertSqlSafe(grant)).await.unwrap();
        world.send(Send::new("1", "pay")).await;
        world.send(Send::new("2", "permanent")).await;
        let running = Running::start(world.builder_on(pool).transactional(Probe::new()).build().unwrap());
        world.eventually_committed(0, 2).await;
        assert_eq!(world.effect_keys().await, ["/test#1"]);
        assert_eq!(world.rows().await["/test#2"].0, "dead");
        running.stop().await.unwrap();
        let drop = format!("DROP OWNED BY {role}; DROP ROLE {role}");
        sqlx::raw_sql(sqlx::AssertSqlSafe(drop)).execute(&world.pool).await.unwrap();
    });
}

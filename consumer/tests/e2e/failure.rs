//! What cannot be applied.

use baton_consumer::{DeadLetterTopics, Json};
use rdkafka::Message;
use sqlx::{Postgres, Transaction};

use crate::fixture::{Probe, Running, Send, World, eventually_logged, header, headers, in_world, logged};
use crate::wire;

fn start(world: &World, probe: &Probe) -> Running {
    Running::start(world.builder().transactional(probe.clone()).build().unwrap())
}

struct Strict;

#[derive(serde::Deserialize)]
struct Order {
    id: i64,
}

impl baton_consumer::Handler for Strict {
    type Payload = Json<Order>;

    async fn handle(
        &self,
        delivery: &baton_consumer::Delivery<Json<Order>>,
        tx: &mut Transaction<'_, Postgres>,
    ) -> baton_consumer::Verdict {
        let effect =
            sqlx::query("INSERT INTO effect (key) VALUES ($1)").bind(delivery.payload().0.id.to_string());
        effect.execute(&mut **tx).await.map(|_| ()).into()
    }
}

#[test]
fn an_undecodable_record_is_dead_lettered_byte_for_byte_and_the_next_one_is_applied() {
    in_world(3, |world| async move {
        let payload = b"{\"id\": \xff\x00";
        let mut record = Send::new("1", "");
        record.key = Some(b"\x00key\xfe");
        record.payload = Some(payload);
        record.timestamp = Some(1_700_000_000_123);
        record.headers.extend([
            ("repeated", Some(&b"one"[..])),
            ("null", None),
            ("repeated", Some(b"\xff\x00two")),
            ("empty", Some(b"")),
            ("", Some(b"no name")),
        ]);
        let expected: Vec<_> = record
            .headers
            .iter()
            .map(|(name, value)| ((*name).to_owned(), value.map(<[u8]>::to_vec)))
            .collect();
        let record = record.to(2);
        world.send(record).await;
        world.send(Send::new("2", "{\"id\": 7}").to(2)).await;
        let running = Running::start(world.builder().transactional(Strict).build().unwrap());
        world.eventually_committed(2, 2).await;
        assert_eq!(world.effect_keys().await, ["7"]);

        let letters = world.eventually_letters(1).await;
        let letter = &letters[0];
        assert_eq!(letter.key(), Some(&b"\x00key\xfe"[..]));
        assert_eq!(letter.payload(), Some(&payload[..]));
        assert_eq!(letter.timestamp().to_millis(), Some(1_700_000_000_123));
        let found = headers(letter);
        assert_eq!(found[..expected.len()], expected);
        let added: Vec<&str> = found[expected.len()..].iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(
            added,
            [
                "dlt-cause",
                "dlt-error",
                "dlt-attempts",
                "dlt-original-topic",
                "dlt-original-partition",
                "dlt-original-offset",
                "dlt-original-timestamp",
                "dlt-consumer",
                "dlt-first-failed-at",
                "dlt-failed-at"
            ]
        );
        for (name, value) in [
            ("dlt-cause", "undecodable"),
            ("dlt-attempts", "1"),
            ("dlt-original-topic", world.topic.as_str()),
            ("dlt-original-partition", "2"),
            ("dlt-original-offset", "0"),
            ("dlt-original-timestamp", "1700000000123"),
            ("dlt-consumer", "billing"),
        ] {
            assert_eq!(header(letter, name).as_deref(), Some(value), "{name}");
        }
        let rows = world.rows().await;
        assert_eq!(rows["/test#1"].0, "dead");
        assert_eq!(rows["/test#1"].1.as_deref(), Some("undecodable"));
        running.stop().await.unwrap();
    });
}

#[test]
fn an_empty_payload_and_a_tombstone_stay_what_they_are_in_the_dead_letter() {
    in_world(1, |world| async move {
        let mut empty = Send::new("empty", "");
        empty.key = Some(b"");
        world.send(empty).await;
        let mut tombstone = Send::new("tombstone", "");
        tombstone.payload = None;
        tombstone.key = None;
        world.send(tombstone).await;
        let running = Running::start(world.builder().transactional(Strict).build().unwrap());
        world.eventually_committed(0, 2).await;
        // Of different keys, so in any order.
        let mut letters = world.eventually_letters(2).await;
        letters.sort_by_key(|letter| letter.key().is_none());
        assert_eq!((letters[0].key(), letters[0].payload()), (Some(&b""[..]), Some(&b""[..])));
        assert_eq!((letters[1].key(), letters[1].payload()), (None, None));
        running.stop().await.unwrap();
    });
}

#[test]
fn a_permanent_failure_is_dead_lettered_once_and_skipped_when_it_comes_again() {
    in_world(1, |world| async move {
        world.send(Send::new("1", "permanent")).await;
        world.send(Send::new("1", "permanent")).await;
        world.send(Send::new("2", "pay")).await;
        let probe = Probe::new();
        let running = start(&world, &probe);
        world.eventually_committed(0, 3).await;
        let letters = world.eventually_letters(1).await;
        assert_eq!(header(&letters[0], "dlt-cause").as_deref(), Some("permanent"));
        assert_eq!(header(&letters[0], "dlt-error").as_deref(), Some("the handler says no"));
        assert_eq!(probe.calls().len(), 2, "{:?}", probe.calls());
        assert_eq!(world.effect_keys().await, ["/test#2"]);
        let row = &world.rows().await["/test#1"];
        assert_eq!(
            (row.0.as_str(), row.1.as_deref(), row.2.as_deref()),
            ("dead", Some("permanent"), Some("the handler says no"))
        );
        running.stop().await.unwrap();
    });
}

#[test]
fn a_panic_is_dead_lettered_and_the_worker_lives_on() {
    in_world(1, |world| async move {
        world.send(Send::new("1", "panic")).await;
        world.send(Send::new("2", "pay")).await;
        let running = start(&world, &Probe::new());
        world.eventually_committed(0, 2).await;
        let letters = world.eventually_letters(1).await;
        assert_eq!(header(&letters[0], "dlt-cause").as_deref(), Some("panic"));
        assert_eq!(header(&letters[0], "dlt-error").as_deref(), Some("the handler fell over"));
        assert_eq!(world.effect_keys().await, ["/test#2"]);
        running.stop().await.unwrap();
    });
}

#[test]
fn one_changed_byte_under_the_same_key_is_a_conflict_without_effect() {
    in_world(1, |world| async move {
        world.send(Send::new("1", "pay 100")).await;
        world.send(Send::new("1", "pay 900")).await;
        world.send(Send::new("1", "pay 100")).await;
        let probe = Probe::new();
        let running = start(&world, &probe);
        world.eventually_committed(0, 3).await;
        assert_eq!(world.effects().await, [("/test#1".to_owned(), "pay 100".to_owned())]);
        assert_eq!(probe.calls().len(), 1);
        let letters = world.eventually_letters(1).await;
        assert_eq!(header(&letters[0], "dlt-cause").as_deref(), Some("conflict"));
        assert_eq!(letters[0].payload(), Some(&b"pay 900"[..]));
        assert_eq!(world.rows().await["/test#1"].0, "done", "the first payload's row stands");
        running.stop().await.unwrap();
    });
}

#[test]
fn one_key_under_two_types_is_no_conflict() {
    in_world(1, |world| async move {
        for kind in [&b"order.placed"[..], b"order.cancelled"] {
            let mut record = Send::new("order-7", "pay");
            record.payload = Some(kind);
            record.headers.retain(|(name, _)| *name != "ce_type");
            record.headers.push(("ce_type", Some(kind)));
            world.send(record).await;
        }
        let running = start(&world, &Probe::new());
        world.eventually_committed(0, 2).await;
        assert_eq!(world.effects().await.len(), 2);
        running.stop().await.unwrap();
    });
}

#[test]
fn a_dead_letter_that_cannot_be_written_holds_the_offset_until_it_can() {
    in_world(1, |world| async move {
        world.send(Send::new("1", "permanent")).await;
        world.send(Send::new("2", "pay")).await;
        let builder = world.builder().dead_letter_topics(DeadLetterTopics::Expect);
        let running = Running::start(builder.transactional(Probe::new()).build().unwrap());
        eventually_logged(&["ERROR", &world.dlt(), "create it"]).await;
        assert_eq!(world.committed(0).await, None);
        assert!(world.rows().await.is_empty(), "no mark before the dead letter");
        assert!(world.effect_keys().await.is_empty(), "nothing overtakes");

        world.create_topic(&world.dlt(), 1).await;
        world.eventually_committed(0, 2).await;
        assert!(!world.eventually_letters(1).await.is_empty());
        assert_eq!(world.effect_keys().await, ["/test#2"]);
        assert_eq!(logged(&["ERROR", &world.dlt()]).len(), 1, "said once");
        running.stop().await.unwrap();
    });
}

#[test]
fn a_dead_letter_that_was_written_before_a_crash_is_written_again_with_the_same_identity() {
    in_world(1, |world| async move {
        // The mark cannot be written: as if the process ended between the acknowledgement and the mark.
        sqlx::raw_sql(
            "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'crash' USING ERRCODE = '57P01'; END $$;
             CREATE TRIGGER refuse BEFORE INSERT ON inbox.message FOR EACH ROW WHEN (NEW.state = 'dead') EXECUTE FUNCTION refuse();",
        )
        .execute(&world.pool)
        .await
        .unwrap();
        world.send(Send::new("1", "permanent")).await;
        let running = start(&world, &Probe::new());
        eventually_logged(&[&world.topic, "dead letter written"]).await;
        running.stop().await.unwrap();
        assert_eq!(world.committed(0).await, None, "the offset waits for the mark");

        sqlx::raw_sql("DROP TRIGGER refuse ON inbox.message").execute(&world.pool).await.unwrap();
        let running = start(&world, &Probe::new());
        world.eventually_committed(0, 1).await;
        let letters = world.eventually_letters(2).await;
        for letter in &letters {
            assert_eq!(header(letter, "ce_id").as_deref(), Some("1"));
        }
        running.stop().await.unwrap();
    });
}

#[test]
fn a_record_whose_header_names_are_not_text_is_dead_lettered_and_kills_nothing() {
    in_world(1, |world| async move {
        wire::produce(&world.topic, b"payload", &[(b"ce_id", b"1"), (b"bad \xff\xfe name", b"value")]).await;
        world.send(Send::new("2", "pay")).await;
        let running = start(&world, &Probe::new());
        world.eventually_committed(0, 2).await;
        assert_eq!(world.effect_keys().await, ["/test#2"]);
        let found = wire::fetch(&world.dlt()).await;
        assert!(
            found.windows(b"bad \xff\xfe name".len()).any(|window| window == b"bad \xff\xfe name"),
            "kept as it came"
        );
        assert!(found.windows(11).any(|window| window == b"no_identity"));
        running.stop().await.unwrap();
    });
}

#[test]
fn what_does_not_fit_the_inbox_is_dead_lettered() {
    in_world(1, |world| async move {
        let long = "t".repeat(2000);
        let mut record = Send::new("1", "pay");
        record.headers.retain(|(name, _)| *name != "ce_type");
        record.headers.push(("ce_type", Some(long.as_bytes())));
        world.send(record).await;
        let mut record = Send::new("1", "pay");
        record.headers.push(("idempotency-key", Some(long.as_bytes())));
        world.send(record).await;
        let running = start(&world, &Probe::new());
        world.eventually_committed(0, 2).await;
        for letter in world.eventually_letters(2).await {
            assert_eq!(header(&letter, "dlt-cause").as_deref(), Some("no_identity"));
        }
        running.stop().await.unwrap();
    });
}

//! What is compared under one idempotency key, as set.

use std::future::ready;

use baton_consumer::inbox::{Error, Lease, Reconciled};
use baton_consumer::{Compare, Fingerprints, Inbox, Once, Verdict};
use rdkafka::Message;

use crate::fixture::{Probe, Running, Send, World, header, in_world};

async fn pay(inbox: &Inbox, key: &str, payload: &str) -> Result<Once, Error> {
    inbox
        .run_once("payments", key, payload.as_bytes(), async |tx| {
            let effect = sqlx::query("INSERT INTO effect (key) VALUES ($1)").bind(key);
            effect.execute(&mut **tx).await.map(|_| ()).into()
        })
        .await
}

async fn pay_outside(inbox: &Inbox, key: &str, payload: &str) -> Result<Once, Error> {
    let nothing = |_: String| ready(Reconciled::NotApplied);
    inbox
        .run_leased("charges", key, payload.as_bytes(), &nothing, async |_: &mut Lease<'_>| Verdict::done())
        .await
}

async fn fingerprint_of(world: &World, key: &str) -> String {
    sqlx::query_scalar("SELECT fingerprint FROM inbox.message WHERE key = $1")
        .bind(key)
        .fetch_one(&world.pool)
        .await
        .unwrap()
}

/// Case 21.
#[test]
fn by_value_the_same_json_written_otherwise_is_a_duplicate_and_another_number_is_a_conflict() {
    in_world(1, |world| async move {
        let exact = Inbox::new("billing", world.pool.clone()).unwrap();
        let by_value = exact.clone().fingerprint(Compare::CanonicalJson);
        for (key, first, again, other) in [
            ("order", r#"{"a":1,"b":"é"}"#, r#"{ "b": "\u00e9", "a": 1 }"#, r#"{"a":1,"b":"e"}"#),
            ("decimal", "1.0", "1", "1.00000000000000000001"),
            ("large", "9007199254740993", "9007199254740993.0", "9007199254740992"),
            ("huge", "1e999999999", "10e999999998", "1e999999998"),
        ] {
            assert!(matches!(pay(&by_value, key, first).await.unwrap(), Once::Fresh(_)), "{key}");
            assert!(matches!(pay(&by_value, key, again).await.unwrap(), Once::Duplicate(_)), "{key}");
            assert!(matches!(pay(&by_value, key, other).await.unwrap(), Once::Conflict), "{key}");
            assert!(matches!(pay_outside(&by_value, key, first).await.unwrap(), Once::Fresh(_)), "{key}");
            assert!(matches!(pay_outside(&by_value, key, again).await.unwrap(), Once::Duplicate(_)), "{key}");
            assert!(matches!(pay_outside(&by_value, key, other).await.unwrap(), Once::Conflict), "{key}");
        }
        assert_eq!(world.effect_keys().await, ["order", "decimal", "large", "huge"]);
        assert!(fingerprint_of(&world, "order").await.starts_with("v1:jsonsha256:"));

        assert!(matches!(pay(&exact, "order", r#"{"a":1,"b":"é"}"#).await.unwrap(), Once::Conflict));
        assert!(matches!(pay(&exact, "exact", "1.0").await.unwrap(), Once::Fresh(_)));
        assert!(matches!(pay(&exact, "exact", "1").await.unwrap(), Once::Conflict));
    });
}

#[test]
fn what_cannot_be_compared_by_value_is_refused_before_anything_runs() {
    in_world(1, |world| async move {
        let by_value = Inbox::new("billing", world.pool.clone()).unwrap().fingerprint(Compare::CanonicalJson);
        for payload in ["", "{", "{\"a\":1,\"a\":1}", "\"\\ud800\"", "1 2"] {
            for refused in [pay(&by_value, "1", payload).await, pay_outside(&by_value, "1", payload).await] {
                assert!(matches!(refused, Err(Error::Payload { key, .. }) if key == "1"), "{payload}");
            }
        }
        assert!(world.effect_keys().await.is_empty());
        assert!(world.rows().await.is_empty());
    });
}

#[test]
fn records_are_compared_by_value_if_so_set_and_what_is_no_json_is_dead_lettered_once_as_undecodable() {
    in_world(1, |world| async move {
        let consumer = world.builder().fingerprint(Compare::CanonicalJson).transactional(Probe::new());
        let running = Running::start(consumer.build().unwrap());
        for (id, payload) in [
            ("1", r#"{"cents":1,"id":7}"#),
            ("1", r#"{"id":7.0,"cents":1}"#),
            ("1", r#"{"cents":2,"id":7}"#),
            ("2", "{"),
            ("2", "{"),
            ("1", "{"),
            ("3", "null"),
        ] {
            world.send(Send::new(id, payload)).await;
        }
        let mut tombstone = Send::new("3", "");
        tombstone.payload = None;
        world.send(tombstone).await;
        world.eventually_committed(0, 8).await;
        assert_eq!(
            world.effects().await,
            [
                ("/test#1".to_owned(), r#"{"cents":1,"id":7}"#.to_owned()),
                ("/test#3".to_owned(), "null".to_owned())
            ]
        );
        let letters = world.eventually_letters(4).await;
        let told: Vec<_> =
            letters.iter().map(|letter| (letter.offset(), header(letter, "dlt-cause"))).collect();
        let causes: Vec<_> = told.iter().map(|(_, cause)| cause.as_deref().unwrap()).collect();
        assert_eq!(causes, ["conflict", "undecodable", "conflict", "conflict"], "{told:?}");
        assert_eq!(letters[1].payload(), Some(&b"{"[..]));
        assert!(header(&letters[1], "dlt-error").unwrap().contains("payload is no JSON"));
        let rows = world.rows().await;
        assert_eq!(rows["/test#1"].0, "done", "the first payload's row stands");
        assert_eq!((rows["/test#2"].0.as_str(), rows["/test#2"].1.as_deref()), ("dead", Some("undecodable")));
        running.stop().await.unwrap();
    });
}

#[test]
fn a_chosen_header_that_differs_is_a_conflict_and_any_other_header_is_not() {
    in_world(1, |world| async move {
        let by_tenant = Fingerprints::of(Compare::ExactBytes).with_headers(["tenant"]);
        let consumer = world.builder().fingerprint(by_tenant).transactional(Probe::new());
        let running = Running::start(consumer.build().unwrap());
        for headers in [
            &[("tenant", Some(&b"eu"[..])), ("trace", Some(b"1"))][..],
            &[("trace", Some(b"2")), ("tenant", Some(b"eu"))],
            &[("tenant", Some(b"us"))],
            &[("tenant", Some(b"eu")), ("tenant", Some(b"us"))],
            &[("tenant", None)],
            &[("Tenant", Some(b"eu"))],
        ] {
            let mut record = Send::new("1", "pay");
            record.headers.extend(headers.iter().copied());
            world.send(record).await;
        }
        world.eventually_committed(0, 6).await;
        assert_eq!(world.effect_keys().await, ["/test#1"]);
        let letters = world.eventually_letters(4).await;
        assert!(letters.iter().all(|letter| header(letter, "dlt-cause").as_deref() == Some("conflict")));
        assert!(fingerprint_of(&world, "/test#1").await.starts_with("v1:sha256headers:"));
        running.stop().await.unwrap();
    });
}

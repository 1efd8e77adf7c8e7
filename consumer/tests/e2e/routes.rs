//! Handlers by topic and type.

use std::fmt::Debug;
use std::marker::PhantomData;
use std::sync::Arc;

use baton_consumer::route::Unknown;
use baton_consumer::{BoxError, Decode, Delivery, Handler, Json, Raw, Record, Routes, Verdict, handler_fn};
use rdkafka::Message;
use rdkafka::message::OwnedMessage;
use serde::Deserialize;
use sqlx::{Postgres, Transaction};

use crate::fixture::{Running, Send, World, eventually_logged, header, in_world, logged};

#[derive(Debug, Deserialize)]
#[expect(dead_code, reason = "what was decoded is told by Debug")]
struct Placed {
    cents: i64,
}

#[derive(Debug, Deserialize)]
#[expect(dead_code, reason = "what was decoded is told by Debug")]
struct Cancelled {
    reason: Option<String>,
}

#[derive(Debug)]
struct Bad;

impl Decode for Bad {
    fn decode(_: &Record) -> Result<Self, BoxError> {
        panic!("the decoder fell over")
    }
}

/// Writes as its effect which handler it is and what it was given.
struct Note<P>(&'static str, PhantomData<fn(P)>);

fn note<P: Decode + Debug>(name: &'static str) -> Note<P> {
    Note(name, PhantomData)
}

impl<P: Decode + Debug> Handler for Note<P> {
    type Payload = P;

    async fn handle(&self, delivery: &Delivery<P>, tx: &mut Transaction<'_, Postgres>) -> Verdict {
        let effect = sqlx::query("INSERT INTO effect (key, payload, at_offset) VALUES ($1, $2, $3)")
            .bind(delivery.idempotency_key())
            .bind(format!("{} {:?} {}", self.0, delivery.payload(), delivery.attempt()).into_bytes())
            .bind(delivery.offset());
        effect.execute(&mut **tx).await.map(|_| ()).into()
    }
}

fn start(world: &World, routes: impl Handler) -> Running {
    Running::start(world.builder().transactional(routes).build().unwrap())
}

/// A record of one type, of the order `id`.
fn of_type<'a>(message_type: &'a str, id: &'a str, payload: &'a str) -> Send<'a> {
    let headers = vec![("idempotency-key", Some(id.as_bytes())), ("ce_type", Some(message_type.as_bytes()))];
    Send { headers, ..Send::new(id, payload) }
}

/// A record without a type.
fn of_no_type<'a>(id: &'a str, payload: &'a str) -> Send<'a> {
    Send { headers: vec![("idempotency-key", Some(id.as_bytes()))], ..Send::new(id, payload) }
}

async fn noted(world: &World) -> Vec<String> {
    world.effects().await.into_iter().map(|(key, note)| format!("{key}: {note}")).collect()
}

fn cause(letter: &OwnedMessage) -> String {
    header(letter, "dlt-cause").unwrap()
}

/// Case 36.
#[test]
fn placed_and_cancelled_of_one_order_under_one_key_are_no_conflict_and_reach_their_handlers() {
    in_world(1, |world| async move {
        let routes = Routes::new().on(&world.topic, "order.placed", note::<Json<Placed>>("placed")).unwrap();
        let routes =
            routes.on(&world.topic, "order.cancelled", note::<Json<Cancelled>>("cancelled")).unwrap();
        world.send(of_type("order.placed", "order-7", r#"{"cents": 100}"#)).await;
        world.send(of_type("order.cancelled", "order-7", r#"{"reason": "late"}"#)).await;
        world.send(of_type("order.placed", "order-7", r#"{"cents": 100}"#)).await;
        let running = start(&world, routes);
        world.eventually_committed(0, 3).await;
        assert_eq!(
            noted(&world).await,
            [
                "order-7: placed Json(Placed { cents: 100 }) 1",
                "order-7: cancelled Json(Cancelled { reason: Some(\"late\") }) 1"
            ]
        );
        assert!(world.read(&world.dlt()).await.is_empty());

        world.send(of_type("order.placed", "order-7", r#"{"cents": 900}"#)).await;
        let letters = world.eventually_letters(1).await;
        assert_eq!(cause(&letters[0]), "conflict", "the same type is compared");
        running.stop().await.unwrap();
    });
}

#[test]
fn what_no_route_takes_is_dead_lettered_once_as_of_an_unknown_type_and_the_rest_flows() {
    in_world(1, |world| async move {
        let routes = Routes::new().on(&world.topic, "order.placed", note::<Json<Placed>>("placed")).unwrap();
        let running = start(&world, routes);
        world.send(of_type("order.lost", "1", "not even JSON")).await;
        world.send(of_no_type("2", r#"{"cents": 1}"#)).await;
        world.send(of_type("order.lost", "1", "not even JSON")).await;
        world.send(of_type("order.placed", "3", r#"{"cents": 1}"#)).await;
        world.eventually_committed(0, 4).await;
        assert_eq!(noted(&world).await, ["3: placed Json(Placed { cents: 1 }) 1"]);
        let letters = world.eventually_letters(2).await;
        for (letter, payload, said) in [
            (
                &letters[0],
                &b"not even JSON"[..],
                format!("no handler takes type \"order.lost\" of topic {:?}", world.topic),
            ),
            (
                &letters[1],
                br#"{"cents": 1}"#,
                format!("no handler takes messages without a type of topic {:?}", world.topic),
            ),
        ] {
            assert_eq!(cause(letter), "unknown_type");
            assert_eq!(letter.payload(), Some(payload));
            assert_eq!(header(letter, "dlt-error"), Some(said));
        }
        let rows = world.rows().await;
        for key in ["1", "2"] {
            assert_eq!((rows[key].0.as_str(), rows[key].1.as_deref()), ("dead", Some("unknown_type")));
        }
        running.stop().await.unwrap();
    });
}

#[test]
fn unknown_types_are_skipped_if_so_set_settled_counted_and_said_once_a_type() {
    in_world(1, |world| async move {
        let routes = Routes::new().on(&world.topic, "order.placed", note::<Json<Placed>>("placed")).unwrap();
        let routes = Arc::new(routes.unknown(Unknown::Skip));
        let running = start(&world, Arc::clone(&routes));
        for (id, message_type) in [("1", "order.lost"), ("2", "order.lost"), ("3", "order.found")] {
            world.send(of_type(message_type, id, "{")).await;
        }
        world.send(of_no_type("4", "")).await;
        world.send(of_type("order.lost", "1", "{")).await;
        world.send(of_type("order.placed", "5", r#"{"cents": 1}"#)).await;
        world.eventually_committed(0, 6).await;
        assert_eq!(noted(&world).await, ["5: placed Json(Placed { cents: 1 }) 1"]);
        assert!(world.read(&world.dlt()).await.is_empty());
        assert_eq!(routes.skipped(), 4, "the fifth was a duplicate");
        let skipped: i64 = sqlx::query_scalar(
            "SELECT count(*) FROM inbox.message WHERE state = 'done' AND outcome ->> 'skipped' = 'unknown_type'",
        )
        .fetch_one(&world.pool)
        .await
        .unwrap();
        assert_eq!(skipped, 4);
        let said = |texts: &[&str]| {
            let texts: Vec<&str> = texts.iter().copied().chain([&*world.topic, "they are skipped"]).collect();
            logged(&texts).len()
        };
        assert_eq!((said(&["INFO", "order.lost"]), said(&["order.found"]), said(&[])), (1, 1, 3));
        running.stop().await.unwrap();
    });
}

#[test]
fn a_handler_for_unknown_types_gets_what_no_route_takes_with_its_record() {
    in_world(1, |world| async move {
        let routes = Routes::new().on(&world.topic, "order.placed", note::<Json<Placed>>("placed")).unwrap();
        let unknown = handler_fn::<Raw, _>(|delivery, tx| {
            Box::pin(async move {
                let what = format!("{:?} at {}", delivery.message_type(), delivery.record().offset());
                let effect = sqlx::query("INSERT INTO effect (key, payload) VALUES ($1, $2)")
                    .bind(delivery.idempotency_key())
                    .bind(what.into_bytes());
                effect.execute(&mut **tx).await.map(|_| ()).into()
            })
        });
        let running = start(&world, routes.unknown(Unknown::handled_by(unknown)));
        world.send(of_type("order.lost", "1", "{")).await;
        world.send(of_no_type("2", "{")).await;
        world.send(of_type("order.placed", "3", r#"{"cents": 1}"#)).await;
        world.eventually_committed(0, 3).await;
        assert_eq!(
            noted(&world).await,
            ["1: Some(\"order.lost\") at 0", "2: None at 1", "3: placed Json(Placed { cents: 1 }) 1"]
        );
        running.stop().await.unwrap();
    });
}

#[test]
fn what_the_chosen_route_cannot_decode_is_undecodable_and_a_panic_in_decoding_is_a_panic() {
    in_world(1, |world| async move {
        let routes = Routes::new().on(&world.topic, "order.placed", note::<Json<Placed>>("placed")).unwrap();
        let routes = routes.on(&world.topic, "order.bad", note::<Bad>("bad")).unwrap();
        let routes = routes.on_topic(&world.topic, note::<Json<Cancelled>>("any")).unwrap();
        let running = start(&world, routes);
        world.send(of_type("order.placed", "1", r#"{"reason": "what the other handler takes"}"#)).await;
        world.send(of_type("order.bad", "2", "{}")).await;
        world.send(of_type("order.other", "3", r#"{"reason": null}"#)).await;
        world.eventually_committed(0, 3).await;
        assert_eq!(noted(&world).await, ["3: any Json(Cancelled { reason: None }) 1"]);
        let letters = world.eventually_letters(2).await;
        assert_eq!(cause(&letters[0]), "undecodable");
        assert!(header(&letters[0], "dlt-error").unwrap().contains("missing field `cents`"));
        assert_eq!(cause(&letters[1]), "panic");
        assert_eq!(header(&letters[1], "dlt-error").as_deref(), Some("the decoder fell over"));
        running.stop().await.unwrap();
    });
}

/// Case 25.
#[test]
fn records_without_a_type_a_key_a_payload_or_headers_are_routed_and_none_ends_the_consumer() {
    in_world(1, |world| async move {
        let routes = Routes::new().on(&world.topic, "order.placed", note::<Json<Placed>>("placed")).unwrap();
        let routes = routes.on(&world.topic, "order.gone", note::<Json<Option<Placed>>>("gone")).unwrap();
        let routes = routes.on_topic(&world.topic, note::<Raw>("any")).unwrap();
        let running = start(&world, routes);
        world.send(of_no_type("no type", "")).await;
        let mut no_key = of_type("order.placed", "no key", r#"{"cents": 2}"#);
        no_key.key = None;
        world.send(no_key).await;
        let mut tombstone = of_type("order.gone", "tombstone", "");
        tombstone.payload = None;
        world.send(tombstone).await;
        let mut tombstone = of_type("order.placed", "refused tombstone", "");
        tombstone.payload = None;
        world.send(tombstone).await;
        let mut nothing = Send::new("", "");
        (nothing.key, nothing.payload, nothing.headers) = (None, None, Vec::new());
        world.send(nothing).await;
        let mut null_type = of_no_type("null type", "x");
        null_type.headers.push(("ce_type", None));
        world.send(null_type).await;
        world.eventually_committed(0, 6).await;
        assert_eq!(
            noted(&world).await,
            [
                "no type: any Raw(Some(b\"\")) 1",
                "no key: placed Json(Placed { cents: 2 }) 1",
                "tombstone: gone Json(None) 1",
                "null type: any Raw(Some(b\"x\")) 1"
            ]
        );
        // Of different keys, so in no order.
        let mut causes: Vec<_> = world.eventually_letters(2).await.iter().map(cause).collect();
        causes.sort();
        assert_eq!(causes, ["no_identity", "undecodable"]);
        running.stop().await.unwrap();
    });
}

#[test]
fn a_routed_handler_that_fails_for_the_time_being_is_tried_again_and_told_which_attempt_it_is() {
    in_world(1, |world| async move {
        let flaky = handler_fn::<Json<Placed>, _>(|delivery, tx| {
            Box::pin(async move {
                if delivery.attempt() < 3 {
                    return Verdict::transient("not yet");
                }
                note::<Json<Placed>>("placed").handle(delivery, tx).await
            })
        });
        let routes = Routes::new().on(&world.topic, "order.placed", flaky).unwrap();
        let running = start(&world, routes);
        world.send(of_type("order.placed", "1", r#"{"cents": 1}"#)).await;
        world.eventually_committed(0, 1).await;
        assert_eq!(noted(&world).await, ["1: placed Json(Placed { cents: 1 }) 3"]);
        eventually_logged(&[&world.topic, "not yet"]).await;
        running.stop().await.unwrap();
    });
}

//! The producer crate on the real table.

use baton_outbox::{Error, Field, HeaderValue, Message, Refusal, enqueue, enqueue_all};
use sqlx::types::Uuid;
use sqlx::{Connection as _, Executor as _};

use crate::fixture::{self, value};

#[tokio::test]
async fn a_message_is_stored_as_it_was_built() {
    fixture::outbox(async |db| {
        let mut c = db.connect().await;
        let id = Uuid::from_u128(7);
        let message = Message::builder("orders")
            .id(id)
            .key("alice")
            .r#type("order.placed")
            .idempotency_key("placed:7")
            .header("text", "Grüße")
            .header("bytes", &[0xff, 0x00])
            .header("text", "again")
            .header("nul", "a\0b")
            .header("none", HeaderValue::Null)
            .json(&serde_json::json!({ "amount": 3 }))
            .unwrap();
        let mut tx = c.begin().await.unwrap();
        assert_eq!(enqueue(&mut tx, &message).await.unwrap(), id);
        tx.commit().await.unwrap();

        let stored: (Uuid, String, String, String, String, Vec<u8>, String) = sqlx::query_as(
            "SELECT id, topic, key, type, idempotency_key, payload, headers::text FROM outbox.message",
        )
        .fetch_one(&mut c)
        .await
        .unwrap();
        let headers = r#"[["text", "Grüße"], ["bytes", {"base64": "/wA="}], ["text", "again"], ["nul", {"base64": "YQBi"}], ["none", null]]"#;
        let text = str::to_owned;
        assert_eq!(
            stored,
            (id, text("orders"), text("alice"), text("order.placed"), text("placed:7"), br#"{"amount":3}"#.to_vec(), text(headers))
        );
    })
    .await;
}

#[tokio::test]
async fn what_is_left_out_is_null_and_every_enqueue_has_an_id_of_its_own() {
    fixture::outbox(async |db| {
        let mut c = db.connect().await;
        let message = Message::builder("t").tombstone();
        let first = enqueue(&mut c, &message).await.unwrap();
        let ids = enqueue_all(&mut c, &[message.clone(), message]).await.unwrap();
        assert!(first != ids[0] && ids[0] != ids[1]);
        let bare: i64 = value(
            &mut c,
            "SELECT count(*) FROM outbox.message
             WHERE payload IS NULL AND headers IS NULL AND key IS NULL AND type IS NULL AND idempotency_key IS NULL",
        )
        .await;
        assert_eq!(bare, 3);
        enqueue(&mut c, &Message::builder("t").key("").bytes([])).await.unwrap();
        let empty: i64 = value(&mut c, "SELECT count(*) FROM outbox.message WHERE payload = '' AND key = ''").await;
        assert_eq!(empty, 1);
    })
    .await;
}

#[tokio::test]
async fn a_transaction_that_rolls_back_leaves_no_message() {
    fixture::outbox(async |db| {
        let mut c = db.connect().await;
        let message = Message::builder("t").tombstone();
        let mut tx = c.begin().await.unwrap();
        enqueue(&mut tx, &message).await.unwrap();
        enqueue_all(&mut tx, &vec![message.clone(); 10]).await.unwrap();
        tx.rollback().await.unwrap();

        let mut tx = c.begin().await.unwrap();
        let mut savepoint = tx.begin().await.unwrap();
        enqueue(&mut savepoint, &message).await.unwrap();
        savepoint.rollback().await.unwrap();
        enqueue(&mut tx, &message).await.unwrap();
        tx.commit().await.unwrap();
        let kept: i64 = value(&mut c, "SELECT count(*) FROM outbox.message").await;
        assert_eq!(kept, 1);
    })
    .await;
}

#[tokio::test]
async fn a_hundred_thousand_messages_go_in_one_statement_and_in_order() {
    fixture::outbox(async |db| {
        let mut c = db.connect().await;
        let messages: Vec<Message> = (0..100_000_u32)
            .map(|n| {
                let builder =
                    Message::builder("t").key(format!("k{}", n % 97)).idempotency_key(format!("{n:06}"));
                let builder = if n % 3 == 0 { builder.header("n", n.to_string()) } else { builder };
                if n % 5 == 0 { builder.tombstone() } else { builder.bytes(n.to_be_bytes()) }
            })
            .collect();
        let mut tx = c.begin().await.unwrap();
        let ids = enqueue_all(&mut tx, &messages).await.unwrap();
        tx.commit().await.unwrap();

        // One statement is one command id.
        let (statements, transactions): (i64, i64) =
            sqlx::query_as("SELECT count(DISTINCT cmin::text), count(DISTINCT xid) FROM outbox.message")
                .fetch_one(&mut c)
                .await
                .unwrap();
        assert_eq!((statements, transactions), (1, 1));
        type Stored = (Uuid, String, Option<Vec<u8>>, Option<String>);
        let rows: Vec<Stored> = sqlx::query_as(
            "SELECT id, idempotency_key, payload, headers::text FROM outbox.message ORDER BY position",
        )
        .fetch_all(&mut c)
        .await
        .unwrap();
        assert_eq!(rows.len(), messages.len());
        for ((n, id), row) in (0_u32..).zip(ids).zip(rows) {
            let payload = (n % 5 != 0).then(|| n.to_be_bytes().to_vec());
            let headers = (n % 3 == 0).then(|| format!(r#"[["n", "{n}"]]"#));
            assert_eq!(row, (id, format!("{n:06}"), payload, headers));
        }
    })
    .await;
}

#[tokio::test]
async fn the_order_of_many_costs_no_sort() {
    fixture::outbox(async |db| {
        let mut c = db.connect().await;
        let statement = include_str!("../../../outbox/queries/messages_insert.sql");
        let prepare = format!("PREPARE many AS {statement}");
        c.execute(sqlx::AssertSqlSafe(prepare)).await.unwrap();
        let plan: Vec<String> =
            sqlx::query_scalar("EXPLAIN (COSTS OFF) EXECUTE many ('{}', '{}', '{}', '{}', '{}', '{}', '{}')")
                .fetch_all(&mut c)
                .await
                .unwrap();
        assert!(!plan.join("\n").contains("Sort"), "{}", plan.join("\n"));
    })
    .await;
}

#[tokio::test]
async fn enqueueing_nothing_asks_nothing() {
    fixture::empty(async |db| {
        // There is no outbox: a statement would fail.
        assert!(enqueue_all(&mut db.connect().await, &[]).await.unwrap().is_empty());
    })
    .await;
}

#[tokio::test]
async fn a_refused_message_says_what_is_wrong_with_it() {
    fixture::outbox(async |db| {
        let mut c = db.connect().await;
        let with = || Message::builder("t");
        for (message, expected) in [
            (Message::builder("no topic").tombstone(), Refusal::Topic),
            (with().key("k".repeat(65537)).tombstone(), Refusal::Key),
            (with().r#type("").tombstone(), Refusal::Type),
            (with().idempotency_key("").tombstone(), Refusal::IdempotencyKey),
            (with().bytes(vec![0; (64 << 20) + 1]), Refusal::Payload),
            (with().header("h", "v".repeat(256 << 10)).tombstone(), Refusal::HeadersSize),
            (with().header("ce_id", "x").tombstone(), Refusal::HeaderName),
        ] {
            for many in [false, true] {
                let mut tx = c.begin().await.unwrap();
                let outcome = if many {
                    enqueue_all(&mut tx, &[with().tombstone(), message.clone()]).await.map(drop)
                } else {
                    enqueue(&mut tx, &message).await.map(drop)
                };
                let error = outcome.unwrap_err();
                assert!(
                    matches!(&error, Error::Refused { refusal, .. } if *refusal == expected),
                    "{error:?}"
                );
                tx.rollback().await.unwrap();
            }
        }
        c.execute("ALTER TABLE outbox.message ADD CONSTRAINT ours CHECK (key <> 'forbidden')").await.unwrap();
        let error = enqueue(&mut c, &with().key("forbidden").tombstone()).await.unwrap_err();
        let ours = Refusal::Other { constraint: "ours".to_owned() };
        assert!(matches!(&error, Error::Refused { refusal, .. } if *refusal == ours), "{error:?}");
    })
    .await;
}

#[tokio::test]
async fn a_nul_is_refused_before_it_is_sent_and_the_transaction_lives_on() {
    fixture::outbox(async |db| {
        let mut c = db.connect().await;
        let mut tx = c.begin().await.unwrap();
        let with = || Message::builder("t");
        for (message, field) in [
            (Message::builder("\0").tombstone(), Field::Topic),
            (with().key("a\0").tombstone(), Field::Key),
            (with().r#type("\0").tombstone(), Field::Type),
            (with().idempotency_key("\0").tombstone(), Field::IdempotencyKey),
            (with().header("\0", "v").tombstone(), Field::HeaderName),
        ] {
            let error = enqueue(&mut tx, &message).await.unwrap_err();
            assert!(matches!(error, Error::NulCharacter { field: named } if named == field), "{error}");
        }
        enqueue(&mut tx, &with().tombstone()).await.unwrap();
        tx.commit().await.unwrap();
    })
    .await;
}

#[tokio::test]
async fn a_missing_outbox_and_a_missing_privilege_say_what_to_do() {
    let message = Message::builder("t").tombstone();
    fixture::empty(async |db| {
        let error = enqueue(&mut db.connect().await, &message).await.unwrap_err();
        assert!(matches!(error, Error::NotMigrated { .. }), "{error}");
    })
    .await;
    fixture::outbox(async |db| {
        let mut stranger = db.login("").await;
        let error = enqueue(&mut stranger.connection, &message).await.unwrap_err();
        assert!(matches!(error, Error::Denied { .. }), "{error}");
    })
    .await;
}

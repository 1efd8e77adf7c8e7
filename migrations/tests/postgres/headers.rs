//! The `headers` column: what the database takes is exactly what the relay can publish.

use baton_protocol::envelope::{Envelope, Outgoing};
use proptest::prelude::*;
use proptest::strategy::ValueTree as _;
use proptest::test_runner::TestRunner;
use serde_json::{Value, json};
use sqlx::PgConnection;
use sqlx::types::Uuid;

use crate::fixture::{self, refusal};

#[tokio::test]
async fn headers_of_another_shape_are_refused() {
    fixture::outbox(async |db| {
        let mut c = db.connect().await;
        for headers in [
            r#"1"#,
            r#""text""#,
            r#"true"#,
            r#"{"a": 1}"#,
            r#"{"a": true}"#,
            r#"{"a": ["b"]}"#,
            r#"{"a": {}}"#,
            r#"{"a": {"base64": null}}"#,
            r#"{"a": {"base64": 1}}"#,
            r#"{"a": {"base64": "QQ==", "b": 1}}"#,
            r#"{"a": {"base64": "QQ"}}"#,
            r#"{"a": {"base64": "QQ=A"}}"#,
            r#"{"a": {"base64": "QQ==QQ=="}}"#,
            r#"{"a": {"base64": "====" }}"#,
            r#"{"a": {"base64": "Q!=="}}"#,
            r#"{"a": {"base64": "QQ-_"}}"#,
            r#"["a"]"#,
            r#"[[]]"#,
            r#"[["a"]]"#,
            r#"[["a", "b", "c"]]"#,
            r#"[[1, "b"]]"#,
            r#"[[null, "b"]]"#,
            r#"[["a", 1]]"#,
            r#"[["a", ["b"]]]"#,
            r#"[[["a"], "b"]]"#,
            r#"[["a", "b"], ["a"]]"#,
            r#"[["a", "b"], ["a", true]]"#,
            r#"{"a": "b", "c": [null]}"#,
            r#"[{"a": "b"}]"#,
            r#"[["a", "b"], null]"#,
        ] {
            let sql = format!("INSERT INTO outbox.message (topic, headers) VALUES ('t', '{headers}')");
            let named = "headers_must_be_an_object_or_an_array_of_pairs";
            assert_eq!(refusal(&mut c, &sql).await.1.as_deref(), Some(named), "{headers}");
        }
        for name in ["ce_id", "ce_type", "ce_specversion", "idempotency-key"] {
            let bytes = json!({ "base64": "QQ==" });
            for headers in [
                json!({ name: "x" }),
                json!({ "a": bytes, name: bytes }),
                json!([["a", "b"], [name, null]]),
                json!([[name, bytes], ["a", "b"]]),
            ] {
                let sql = format!("INSERT INTO outbox.message (topic, headers) VALUES ('t', '{headers}')");
                let named = "headers_must_not_name_what_has_a_column";
                assert_eq!(refusal(&mut c, &sql).await.1.as_deref(), Some(named), "{headers}");
            }
        }
    })
    .await;
}

#[tokio::test]
async fn headers_come_back_byte_for_byte_in_order() {
    fixture::outbox(async |db| {
        let mut c = db.connect().await;
        let crab = Some("🦀".as_bytes().to_vec());
        for (headers, expected) in [
            ("null", vec![]),
            ("{}", vec![]),
            ("[]", vec![]),
            // A value may say what a name may not.
            (r#"{"a": "ce_id"}"#, vec![("a", Some(b"ce_id".to_vec()))]),
            (r#"[["a", "ce_id"], ["CE_ID", null]]"#, vec![("a", Some(b"ce_id".to_vec())), ("CE_ID", None)]),
            (r#"{"b": "2", "a": null}"#, vec![("a", None), ("b", Some(b"2".to_vec()))]),
            (
                r#"[["z", "1"], ["a", ""], ["z", null], ["", "🦀"]]"#,
                vec![("z", Some(b"1".to_vec())), ("a", Some(vec![])), ("z", None), ("", crab)],
            ),
            (r#"{"a": {"base64": "AP8\n=\t "}}"#, vec![("a", Some(vec![0, 255]))]),
            (r#"{"a": {"base64": ""}}"#, vec![("a", Some(vec![]))]),
            (r#"{"a": {"base64": "QR=="}}"#, vec![("a", Some(b"A".to_vec()))]),
            (r#"{"a": "\"\\\n\u00e9"}"#, vec![("a", Some("\"\\\né".as_bytes().to_vec()))]),
        ] {
            let text = store(&mut c, headers).await.expect(headers).expect("not null");
            let expected: Vec<_> = expected.into_iter().map(|(n, v)| (n.to_owned(), v)).collect();
            assert_eq!(written(&text).expect(headers), expected, "{headers}");
        }
    })
    .await;
}

#[tokio::test]
async fn what_postgres_breaks_into_lines_is_taken() {
    fixture::outbox(async |db| {
        let mut c = db.connect().await;
        let bytes: Vec<u8> = (0..=255).cycle().take(1000).collect();
        let text: String = sqlx::query_scalar(
            "INSERT INTO outbox.message (topic, headers)
             VALUES ('t', jsonb_build_object('b', jsonb_build_object('base64', encode($1, 'base64')))) RETURNING headers::text",
        )
        .bind(&bytes)
        .fetch_one(&mut c)
        .await
        .unwrap();
        assert_eq!(written(&text).unwrap(), [("b".to_owned(), Some(bytes))]);
    })
    .await;
}

#[tokio::test]
async fn two_hundred_headers_are_taken() {
    fixture::outbox(async |db| {
        let many: Vec<Value> = (0..200).map(|n| json!([format!("h{n}"), "v".repeat(100)])).collect();
        let text = store(&mut db.connect().await, &Value::from(many).to_string()).await.unwrap().unwrap();
        assert_eq!(written(&text).unwrap().len(), 200);
    })
    .await;
}

/// Anything that resembles headers, well-formed or nearly so.
fn nearly_headers() -> impl Strategy<Value = Value> {
    let base64 = prop_oneof![
        "[A-D+/ \n]{0,8}={0,3}",
        Just("QQ==".to_owned()),
        "[A-D]{4}?[A-D]{2,3}[=A-D ]{0,3}",
        "[A-D=]{0,9}"
    ];
    let value = prop_oneof![
        4 => "[a-z\"\\\\é🦀]{0,5}".prop_map(Value::from),
        1 => Just(Value::Null),
        1 => Just(json!(1)),
        4 => base64.prop_map(|text| json!({ "base64": text })),
        1 => Just(json!({ "base64": "", "a": "" })),
        1 => Just(json!([])),
    ];
    let name =
        prop_oneof![8 => "[a-c]{0,2}".prop_map(Value::from), 1 => Just(Value::Null), 1 => Just(json!(1))];
    let pair = prop_oneof![
        8 => (name, value.clone()).prop_map(|(n, v)| json!([n, v])),
        1 => Just(json!(["a"])),
        1 => Just(json!({})),
        1 => Just(json!("a")),
    ];
    prop_oneof![
        4 => proptest::collection::vec(pair, 0..3).prop_map(Value::from),
        4 => proptest::collection::btree_map("[a-c]{0,2}", value, 0..3)
                 .prop_map(|m| Value::Object(m.into_iter().collect())),
        1 => Just(Value::Null),
        1 => Just(json!("a")),
    ]
}

#[tokio::test]
async fn the_database_takes_exactly_the_headers_that_the_relay_can_publish() {
    fixture::outbox(async |db| {
        let mut c = db.connect().await;
        let mut runner = TestRunner::default();
        let strategy = nearly_headers();
        let tried: Vec<String> =
            (0..5000).map(|_| strategy.new_tree(&mut runner).unwrap().current().to_string()).collect();
        let rows: Vec<(String, bool)> = sqlx::query_as(
            "SELECT h::jsonb::text, outbox.headers_are_valid(h::jsonb) FROM unnest($1::text[]) h",
        )
        .bind(&tried)
        .fetch_all(&mut c)
        .await
        .unwrap();
        let taken = rows.iter().filter(|(_, valid)| *valid).count();
        assert!(
            (500..4500).contains(&taken),
            "{taken} of 5000 are well-formed: too few of one kind to mean anything"
        );
        for (text, valid) in rows {
            assert_eq!(written(&text).is_ok(), valid, "{text}");
        }
    })
    .await;
}

async fn store(c: &mut PgConnection, headers: &str) -> Result<Option<String>, sqlx::Error> {
    sqlx::query_scalar(
        "INSERT INTO outbox.message (topic, headers) VALUES ('t', $1::jsonb) RETURNING headers::text",
    )
    .bind(headers)
    .fetch_one(c)
    .await
}

type Headers = Vec<(String, Option<Vec<u8>>)>;

/// The row's headers on the record, without those of the envelope.
fn written(headers: &str) -> Result<Headers, baton_protocol::envelope::Error> {
    let message = Outgoing {
        id: Uuid::nil(),
        idempotency_key: None,
        topic: "t",
        r#type: None,
        has_payload: false,
        created_ms: 0,
        headers: Some(headers),
    };
    let mut all = Vec::new();
    Envelope::cloud_events("/test", "application/json", false)
        .write(&message, &mut |name, value| all.push((name.to_owned(), value.map(<[u8]>::to_vec))))?;
    Ok(all.split_off(4))
}

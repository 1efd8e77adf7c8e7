//! Golden tests of the headers of a record, and of the identity that consumers read from them.

use proptest::prelude::*;
use uuid::Uuid;

use super::*;

const ID_TEXT: &str = "00112233-4455-6677-8899-aabbccddeeff";

fn envelope() -> Envelope {
    Envelope::cloud_events("/shop", "application/json", false)
}

fn message() -> Outgoing<'static> {
    Outgoing {
        id: Uuid::parse_str(ID_TEXT).unwrap(),
        idempotency_key: None,
        topic: "orders",
        r#type: None,
        has_payload: true,
        created_ms: 1_769_850_300_250,
        headers: None,
    }
}

type Headers = Vec<(String, Option<Vec<u8>>)>;

fn written(envelope: &Envelope, message: &Outgoing<'_>) -> Result<Headers, Error> {
    let mut headers = Headers::new();
    envelope.write(message, &mut |name, value| headers.push((name.to_owned(), value.map(<[u8]>::to_vec))))?;
    Ok(headers)
}

/// As text, one header a line; `∅` is a null value.
fn shown(envelope: &Envelope, message: &Outgoing<'_>) -> String {
    let headers = written(envelope, message).unwrap().into_iter();
    let lines = headers.map(|(name, value)| {
        let value = value.map_or_else(|| "∅".to_owned(), |bytes| String::from_utf8(bytes).unwrap());
        format!("{name}: {value}\n")
    });
    lines.collect()
}

#[test]
fn a_message_has_the_headers_it_always_had() {
    assert_eq!(
        shown(&envelope(), &message()),
        "ce_specversion: 1.0\n\
         ce_id: 00112233-4455-6677-8899-aabbccddeeff\n\
         ce_source: /shop\n\
         ce_type: orders\n\
         content-type: application/json\n"
    );
}

#[test]
fn a_message_that_says_everything_has_every_header_in_its_place() {
    let message = Outgoing {
        idempotency_key: Some("placed:17"),
        r#type: Some("order.placed"),
        headers: Some(r#"[["b", "1"], ["a", null], ["b", {"base64": "Mg=="}], ["traceparent", "00-…"]]"#),
        ..message()
    };
    assert_eq!(
        shown(&Envelope::cloud_events("/shop", "application/json", true), &message),
        "ce_specversion: 1.0\n\
         ce_id: 00112233-4455-6677-8899-aabbccddeeff\n\
         ce_source: /shop\n\
         ce_type: order.placed\n\
         ce_time: 2026-01-31T09:05:00.250Z\n\
         content-type: application/json\n\
         idempotency-key: placed:17\n\
         b: 1\n\
         a: ∅\n\
         b: 2\n\
         traceparent: 00-…\n"
    );
}

#[test]
fn a_tombstone_has_no_content_type_but_its_own() {
    let tombstone = Outgoing { has_payload: false, ..message() };
    assert!(!shown(&envelope(), &tombstone).contains("content-type"));
    let own = Outgoing { headers: Some(r#"{"content-type": "text/plain"}"#), ..tombstone };
    assert!(shown(&envelope(), &own).ends_with("ce_type: orders\ncontent-type: text/plain\n"));
}

#[test]
fn an_idempotency_key_that_is_the_id_is_not_repeated() {
    let same = Outgoing { idempotency_key: Some(ID_TEXT), ..message() };
    assert_eq!(shown(&envelope(), &same), shown(&envelope(), &message()));
    let upper = ID_TEXT.to_uppercase();
    let other = Outgoing { idempotency_key: Some(&upper), ..message() };
    assert!(shown(&envelope(), &other).contains(&format!("idempotency-key: {upper}")));
}

#[test]
fn a_header_of_the_row_takes_the_place_of_the_envelopes() {
    let envelope = Envelope::cloud_events("/shop", "application/json", true);
    let headers =
        r#"[["content-type", "a/b"], ["ce_source", "/other"], ["ce_time", "now"], ["ce_subject", "s"]]"#;
    assert_eq!(
        shown(&envelope, &Outgoing { headers: Some(headers), ..message() }),
        "ce_specversion: 1.0\n\
         ce_id: 00112233-4455-6677-8899-aabbccddeeff\n\
         ce_type: orders\n\
         content-type: a/b\n\
         ce_source: /other\n\
         ce_time: now\n\
         ce_subject: s\n"
    );
    // Even by a null, and not by a name that only resembles.
    let null = Outgoing { headers: Some(r#"{"content-type": null, "Ce_source": "x"}"#), ..message() };
    let null = shown(&envelope, &null);
    assert!(
        null.contains("content-type: ∅")
            && null.contains("ce_source: /shop")
            && null.contains("Ce_source: x")
    );
    assert_eq!(null.matches("content-type").count(), 1);
}

#[test]
fn headers_that_are_null_or_empty_are_none() {
    for headers in ["null", "{}", "[]"] {
        let none = Outgoing { headers: Some(headers), ..message() };
        assert_eq!(shown(&envelope(), &none), shown(&envelope(), &message()));
    }
}

#[test]
fn header_values_are_kept_byte_for_byte() {
    for (value, bytes) in [
        (r#""""#, Some(b"".to_vec())),
        (r#""a\"\\\n\u00e9🦀""#, Some("a\"\\\né🦀".into())),
        ("null", None),
        (r#"{"base64": ""}"#, Some(b"".to_vec())),
        (r#"{"base64": "AP8="}"#, Some(vec![0, 255])),
        (r#"{"base64": " A P\n8\t=\r"}"#, Some(vec![0, 255])),
        (r#"{"base64": "QR=="}"#, Some(b"A".to_vec())),
    ] {
        for headers in [format!(r#"{{"h": {value}}}"#), format!(r#"[["h", {value}]]"#)] {
            let message = Outgoing { headers: Some(&headers), ..message() };
            let last = written(&envelope(), &message).unwrap().pop().unwrap();
            assert_eq!(last, ("h".to_owned(), bytes.clone()), "{headers}");
        }
    }
}

#[test]
fn a_malformed_row_is_an_error_and_writes_nothing() {
    let refused = |headers: &str, created_ms| {
        let message = Outgoing { headers: Some(headers), created_ms, ..message() };
        let envelope = Envelope::cloud_events("/shop", "application/json", true);
        envelope.write(&message, &mut |name, _| panic!("{name} was written")).unwrap_err()
    };
    for headers in [
        "",
        "1",
        r#""a""#,
        "true",
        r#"{"a": 1}"#,
        r#"{"a": ["b"]}"#,
        r#"{"a": {}}"#,
        r#"{"a": {"base64": 1}}"#,
        r#"{"a": {"base64": "QQ"}}"#,
        r#"{"a": {"base64": "QQ=A"}}"#,
        r#"{"a": {"base64": "Q_=="}}"#,
        r#"{"a": {"base64": "", "b": ""}}"#,
        r#"{"a": {"b": ""}}"#,
        r#"["a"]"#,
        r#"[["a"]]"#,
        r#"[["a", "b", "c"]]"#,
        r#"[[1, "b"]]"#,
        r#"[{"a": "b"}]"#,
        r#"{"a": "b"} x"#,
    ] {
        let error = refused(headers, 0);
        assert!(matches!(error, Error::Headers { .. }), "{headers}: {error}");
        assert!(error.to_string().contains(ID_TEXT), "{error}");
    }
    for name in ["ce_id", "ce_type", "ce_specversion", "idempotency-key"] {
        let error = refused(&format!(r#"[["a", "b"], ["{name}", "forged"]]"#), 0);
        assert!(matches!(&error, Error::Reserved { name: named, .. } if named == name), "{error}");
        assert!(!error.to_string().contains("forged"), "a value may be a secret: {error}");
    }
    assert!(matches!(refused("null", i64::MAX), Error::Time { created_ms: i64::MAX, .. }));
}

#[test]
fn constant_headers_are_those_that_every_record_has_alike() {
    let envelope = envelope();
    let headers = written(&envelope, &message()).unwrap();
    for (name, value) in envelope.constant_headers() {
        assert!(headers.contains(&(name.to_owned(), Some(value.to_vec()))), "{name}");
    }
}

fn identity_of(headers: &[(&'static str, Option<&'static [u8]>)]) -> Option<Identity> {
    identity(headers.iter().copied())
}

fn key_of(headers: &[(&'static str, Option<&'static [u8]>)]) -> Option<String> {
    identity_of(headers).map(|identity| identity.key)
}

#[test]
fn the_idempotency_key_comes_before_the_cloud_event_and_that_before_debezium() {
    let (key, id) = (("idempotency-key", Some(b"placed:17".as_slice())), ("ce_id", Some(b"e1".as_slice())));
    let (source, debezium) = (("ce_source", Some(b"/shop".as_slice())), ("id", Some(b"d1".as_slice())));
    assert_eq!(key_of(&[debezium, id, source, key]).as_deref(), Some("placed:17"));
    assert_eq!(key_of(&[debezium, id, source]).as_deref(), Some("/shop#e1"));
    assert_eq!(key_of(&[debezium, id]).as_deref(), Some("d1"));
    assert_eq!(key_of(&[debezium, source]).as_deref(), Some("d1"));
    assert_eq!(key_of(&[id]), None);
    assert_eq!(key_of(&[]), None);
    assert_eq!(key_of(&[("ID", Some(b"d1")), ("other", None)]), None);
}

#[test]
fn the_type_is_the_cloud_events_or_debeziums() {
    let id = ("id", Some(b"d1".as_slice()));
    let (ce, debezium) =
        (("ce_type", Some(b"order.placed".as_slice())), ("eventType", Some(b"Placed".as_slice())));
    let r#type = |headers: &[_]| identity_of(headers).unwrap().r#type;
    assert_eq!(r#type(&[id, debezium, ce]).as_deref(), Some("order.placed"));
    assert_eq!(r#type(&[id, debezium]).as_deref(), Some("Placed"));
    assert_eq!(r#type(&[id]), None);
    assert_eq!(r#type(&[id, ("ce_type", None)]), None);
}

#[test]
fn a_decisive_header_that_cannot_be_a_key_is_no_identity_rather_than_a_weaker_one() {
    static LONG: [u8; 1025] = [b'k'; 1025];
    let weaker = [
        ("ce_source", Some(b"/shop".as_slice())),
        ("ce_id", Some(b"e1".as_slice())),
        ("id", Some(b"d1".as_slice())),
    ];
    for broken in [None, Some(b"".as_slice()), Some(b"\xff"), Some(b"a\0b"), Some(&LONG)] {
        assert_eq!(key_of(&[&[("idempotency-key", broken)], weaker.as_slice()].concat()), None);
        assert_eq!(key_of(&[("ce_source", broken), weaker[1], weaker[2]]), None);
        assert_eq!(key_of(&[weaker[0], ("ce_id", broken), weaker[2]]), None);
        assert_eq!(key_of(&[("id", broken)]), None);
    }
    assert_eq!(key_of(&[("idempotency-key", Some(&LONG[..1024]))]).map(|key| key.len()), Some(1024));
}

proptest! {
    #[test]
    fn two_cloud_events_have_one_key_only_if_source_and_id_are_equal(
        a in ("[a#%235]{1,6}", "[a#%235]{1,6}"), b in ("[a#%235]{1,6}", "[a#%235]{1,6}"),
    ) {
        let key = |(source, id): &(String, String)| {
            identity([("ce_source", Some(source.as_bytes())), ("ce_id", Some(id.as_bytes()))]).unwrap().key
        };
        prop_assert_eq!(key(&a) == key(&b), a == b);
    }

    #[test]
    fn the_identity_of_a_message_survives_every_header_that_is_added_on_the_way(
        idempotency_key in proptest::option::of("[a-z:]{1,10}"),
        r#type in proptest::option::of("[a-z.]{1,10}"),
        id in any::<u128>(),
        has_payload in any::<bool>(),
        row in proptest::collection::vec(("[a-z]{3,5}", "[a-z]{0,5}"), 0..4),
        added in proptest::collection::vec((
            prop_oneof!["dlt-cause", "replay-plan", "ce_id", "ce_source", "ce_type", "idempotency-key", "[a-z]{1,4}"],
            proptest::option::of("[a-z]{0,5}"),
        ), 0..4),
    ) {
        let headers = serde_json::to_string(&row).unwrap();
        let message = Outgoing {
            id: Uuid::from_u128(id),
            idempotency_key: idempotency_key.as_deref(),
            topic: "orders",
            r#type: r#type.as_deref(),
            has_payload,
            created_ms: 0,
            headers: Some(&headers),
        };
        let mut record = written(&envelope(), &message).unwrap();
        let expected = Identity {
            key: idempotency_key.clone().unwrap_or_else(|| format!("/shop#{}", message.id)),
            r#type: Some(r#type.clone().unwrap_or_else(|| "orders".to_owned())),
        };
        let read = |record: &Headers| identity(record.iter().map(|(n, v)| (n.as_str(), v.as_deref())));
        prop_assert_eq!(read(&record), Some(expected.clone()));
        // A key that the producer did not give is the one thing that must not be added on the way.
        let added = added.into_iter().filter(|(name, _)| name != "idempotency-key" || idempotency_key.is_some());
        record.extend(added.map(|(name, value)| (name, value.map(String::into_bytes))));
        prop_assert_eq!(read(&record), Some(expected));
    }
}

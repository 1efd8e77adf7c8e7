use proptest::prelude::*;

use super::*;

type Headers = Vec<(String, Option<Vec<u8>>)>;

fn owned(headers: &[(&str, &[u8])]) -> Headers {
    headers.iter().map(|(name, value)| ((*name).to_owned(), Some(value.to_vec()))).collect()
}

fn lent(headers: &Headers) -> impl Iterator<Item = (&str, Option<&[u8]>)> {
    headers.iter().map(|(name, value)| (name.as_str(), value.as_deref()))
}

fn plan() -> Uuid {
    Uuid::from_u128(0x0123_4567_89ab_cdef_0123_4567_89ab_cdef)
}

fn stamp(round: u32) -> Stamp<'static> {
    let item = Item { plan: plan(), number: 7 };
    Stamp { item, round, original_timestamp_ms: Some(1_769_850_300_250), new_key: None }
}

fn replayed(stamp: Stamp<'_>, letter: &Headers) -> Headers {
    let mut headers = Vec::new();
    stamp.write(lent(letter), &mut |name, value| {
        headers.push((name.to_owned(), value.map(<[u8]>::to_vec)));
    });
    headers
}

fn own_letter() -> Headers {
    owned(&[
        ("ce_id", b"1"),
        ("dlt-cause", b"exhausted"),
        ("dlt-error", b"card declined"),
        ("dlt-attempts", b"10"),
        ("dlt-original-topic", b"orders"),
        ("dlt-original-partition", b"3"),
        ("dlt-original-offset", b"9007199254740993"),
        ("dlt-original-timestamp", b"1769850300250"),
        ("dlt-consumer", b"billing"),
        ("dlt-first-failed-at", b"2026-01-31T09:05:00.000Z"),
        ("dlt-failed-at", b"2026-01-31T09:06:00.250Z"),
    ])
}

fn spring_letter() -> Headers {
    owned(&[
        ("id", b"1"),
        ("kafka_dlt-exception-fqcn", b"org.springframework.kafka.listener.ListenerExecutionFailedException"),
        ("kafka_dlt-exception-cause-fqcn", b"java.lang.IllegalStateException"),
        ("kafka_dlt-exception-stacktrace", b"at ..."),
        ("kafka_dlt-original-topic", b"orders"),
        ("kafka_dlt-original-partition", &3_i32.to_be_bytes()),
        ("kafka_dlt-original-offset", &9_007_199_254_740_993_i64.to_be_bytes()),
        ("kafka_dlt-original-timestamp", &1_769_850_300_250_i64.to_be_bytes()),
        ("kafka_dlt-original-timestamp-type", b"CreateTime"),
        ("kafka_dlt-original-consumer-group", b"billing"),
    ])
}

#[test]
fn the_headers_of_a_replay_are_what_they_always_were() {
    assert_eq!(
        replayed(stamp(2), &own_letter()),
        owned(&[
            ("ce_id", b"1"),
            ("replay-plan", b"01234567-89ab-cdef-0123-456789abcdef"),
            ("replay-item", b"7"),
            ("replay-round", b"2"),
            ("replay-original-timestamp", b"1769850300250"),
        ])
    );
}

#[test]
fn what_a_replay_carries_is_read_as_it_is_written() {
    let headers = replayed(stamp(2), &own_letter());
    assert_eq!(item(lent(&headers)), Some(Item { plan: plan(), number: 7 }));
    assert_eq!(Letter::read(lent(&headers)).round, 2);
    assert!(headers.iter().skip(1).all(|(name, _)| is_own(name)));
}

#[test]
fn what_is_no_item_is_none() {
    let plan = b"01234567-89ab-cdef-0123-456789abcdef";
    for headers in [
        owned(&[("replay-plan", plan)]),
        owned(&[("replay-item", b"7")]),
        owned(&[("replay-plan", plan), ("replay-item", b"0")]),
        owned(&[("replay-plan", plan), ("replay-item", b"seven")]),
        owned(&[("replay-plan", b"7"), ("replay-item", b"7")]),
        owned(&[("Replay-Plan", plan), ("replay-item", b"7")]),
    ] {
        assert_eq!(item(lent(&headers)), None, "{headers:?}");
    }
}

#[test]
fn a_letter_of_either_kind_tells_why_and_where_from() {
    let own = Letter::read(lent(&own_letter()));
    assert_eq!(own.cause.as_deref(), Some("exhausted"));
    assert_eq!(own.failed_at.unwrap().unix_timestamp(), 1_769_850_360);
    let spring = Letter::read(lent(&spring_letter()));
    assert_eq!(spring.cause.as_deref(), Some("java.lang.IllegalStateException"));
    assert_eq!(own.giver, Some(Giver::Consumer("billing".to_owned())));
    assert_eq!(spring.giver, Some(Giver::Group("billing".to_owned())));
    for letter in [own, spring] {
        assert_eq!(letter.topic.as_deref(), Some("orders"));
        assert_eq!((letter.partition, letter.offset), (Some(3), Some(9_007_199_254_740_993)));
        assert_eq!((letter.timestamp_ms, letter.round), (Some(1_769_850_300_250), 0));
    }
}

#[test]
fn integers_of_another_length_are_not_guessed() {
    let letter = Letter::read(lent(&owned(&[
        ("kafka_dlt-original-partition", b"3"),
        ("kafka_dlt-original-offset", &3_i32.to_be_bytes()),
        ("kafka_dlt-exception-fqcn", b"java.lang.Exception"),
    ])));
    assert_eq!((letter.partition, letter.offset), (None, None));
    assert_eq!(letter.cause.as_deref(), Some("java.lang.Exception"));
}

#[test]
fn nothing_of_springs_and_nothing_of_a_death_is_carried_into_a_replay() {
    let names: Vec<String> = replayed(stamp(1), &spring_letter()).into_iter().map(|(name, _)| name).collect();
    assert_eq!(names, ["id", PLAN, ITEM, ROUND, ORIGINAL_TIMESTAMP]);
}

#[test]
fn a_new_key_takes_the_place_of_whatever_key_there_was() {
    let mut letter = own_letter();
    letter.push(("idempotency-key".to_owned(), Some(b"old".to_vec())));
    let headers = replayed(Stamp { new_key: Some("new"), ..stamp(1) }, &letter);
    assert_eq!(crate::envelope::identity(lent(&headers)).unwrap().key, "new");
    assert_eq!(headers.iter().filter(|(name, _)| name == "idempotency-key").count(), 1);
}

#[test]
fn letters_about_one_record_have_one_subject_and_others_have_others() {
    let letter = Letter::read(lent(&own_letter()));
    let again = Letter { round: 1, cause: Some("panic".to_owned()), ..letter.clone() };
    assert_eq!(letter.subject(("d", 0, 1)), again.subject(("d", 0, 2)));
    for other in [
        Letter { offset: Some(1), ..letter.clone() },
        Letter { partition: Some(1), ..letter.clone() },
        Letter { topic: Some("other".to_owned()), ..letter.clone() },
        Letter { timestamp_ms: Some(1), ..letter.clone() },
    ] {
        assert_ne!(letter.subject(("d", 0, 1)), other.subject(("d", 0, 1)));
    }
    let silent = Letter::default();
    assert_eq!(silent.subject(("d", 0, 1)), silent.subject(("d", 0, 1)));
    assert_ne!(silent.subject(("d", 0, 1)), silent.subject(("d", 0, 2)));
}

#[test]
fn rounds_end_at_the_cap() {
    assert_eq!(
        (0..5).map(|round| next_round(round, 3)).collect::<Vec<_>>(),
        [Some(1), Some(2), Some(3), None, None]
    );
    assert_eq!(next_round(u32::MAX - 1, u32::MAX), Some(u32::MAX));
    assert_eq!(next_round(0, 0), None);
}

#[test]
fn a_replay_topic_names_its_original() {
    assert_eq!(original_topic("orders.billing.replay", "billing"), Some("orders"));
    assert_eq!(original_topic(&dead_letter::replay_topic("a.b", "c.d"), "c.d"), Some("a.b"));
    for (topic, consumer) in [
        ("orders", "billing"),
        ("orders.billing.replay", "shipping"),
        ("ordersbilling.replay", "billing"),
        (".billing.replay", "billing"),
        ("orders.billing.dlt", "billing"),
    ] {
        assert_eq!(original_topic(topic, consumer), None, "{topic} {consumer}");
    }
}

proptest! {
    #[test]
    fn ten_rounds_of_dying_and_replaying_keep_what_is_the_records_and_add_each_header_once(
        own in proptest::collection::vec(("[a-z_]{1,8}", proptest::option::of(proptest::collection::vec(any::<u8>(), 0..20))), 0..8),
        rounds in 1_u32..12,
    ) {
        let own: Headers = own.into_iter().filter(|(name, _)| name != "id").collect();
        let mut record = own.clone();
        for round in 1..=rounds {
            // It dies: the consumer puts its letter's headers on, in the place of earlier ones.
            let mut letter: Headers = record.into_iter().filter(|(name, _)| !dead_letter::is_own(name)).collect();
            letter.extend(own_letter().into_iter().skip(1));
            letter.extend(spring_letter().into_iter().skip(1));
            record = replayed(stamp(round), &letter);
        }
        prop_assert_eq!(&record[..own.len()], &own[..]);
        let names: Vec<&str> = record[own.len()..].iter().map(|(name, _)| name.as_str()).collect();
        prop_assert_eq!(names, OWN);
        prop_assert_eq!(Letter::read(lent(&record)).round, rounds);
    }
}

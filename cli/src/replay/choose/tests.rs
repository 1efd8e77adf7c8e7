use clap::Parser;

use super::*;

#[derive(Parser)]
struct Line {
    #[command(flatten)]
    wish: Wish,
}

fn wish(arguments: &[&str]) -> Wish {
    let line = ["plan", "--consumer", "billing", "--topic", "orders"].iter().chain(arguments);
    Line::try_parse_from(line).unwrap_or_else(|error| panic!("{error}")).wish
}

/// A letter at this offset of partition 0, about the record at `original`.
struct Dead {
    offset: i64,
    original: i64,
    headers: Vec<(&'static str, String)>,
    key: &'static str,
}

fn dead(offset: i64, original: i64, cause: &str, round: u32) -> Dead {
    let mut headers = vec![
        ("ce_source", "/s".to_owned()),
        ("ce_id", original.to_string()),
        ("dlt-cause", cause.to_owned()),
        ("dlt-original-topic", "orders".to_owned()),
        ("dlt-original-partition", "0".to_owned()),
        ("dlt-original-offset", original.to_string()),
        ("dlt-failed-at", format!("2026-01-31T09:05:{original:02}.000Z")),
    ];
    if round > 0 {
        headers.push(("replay-round", round.to_string()));
    }
    Dead { offset, original, headers, key: "k" }
}

impl Dead {
    fn with(mut self, name: &'static str, value: &str) -> Self {
        self.headers.push((name, value.to_owned()));
        self
    }
}

fn choose(wish: &Wish, letters: &[Dead]) -> (Vec<i64>, Skipped) {
    let mut choice = Choice::new(wish, "orders.billing.dlt");
    for letter in letters {
        assert!(letter.original < 60);
        choice.see(&Seen {
            partition: 0,
            offset: letter.offset,
            timestamp_ms: Some(1_769_850_300_000),
            key: Some(letter.key.as_bytes()),
            headers: Some(
                letter.headers.iter().map(|(name, value)| (*name, Some(value.as_bytes()))).collect(),
            ),
        });
    }
    let (chosen, skipped) = choice.fitting();
    (chosen.into_iter().map(|letter| letter.offset).collect(), skipped)
}

#[test]
fn a_letter_that_stands_there_twice_is_one_item() {
    let letters = [dead(0, 7, "permanent", 0), dead(1, 7, "permanent", 0), dead(2, 8, "permanent", 0)];
    assert_eq!(choose(&wish(&[]), &letters).0, [1, 2]);
}

#[test]
fn the_latest_death_of_a_record_speaks_for_it_whatever_the_order() {
    let mut letters = [dead(0, 7, "permanent", 0), dead(3, 7, "exhausted", 1), dead(5, 7, "panic", 2)];
    for _ in 0..2 {
        assert_eq!(choose(&wish(&[]), &letters).0, [5]);
        assert_eq!(choose(&wish(&["--cause", "panic"]), &letters).0, [5]);
        assert!(choose(&wish(&["--cause", "permanent"]), &letters).0.is_empty());
        letters.reverse();
    }
}

#[test]
fn filters_hold_together() {
    let letters = [
        dead(0, 1, "permanent", 0).with("tenant", "eu"),
        dead(1, 2, "permanent", 0).with("tenant", "us"),
        dead(2, 3, "panic", 0).with("tenant", "eu"),
        Dead { key: "other", ..dead(3, 4, "permanent", 0).with("tenant", "eu") },
    ];
    for (arguments, expected) in [
        (&[][..], &[0, 1, 2, 3][..]),
        (&["--cause", "permanent"], &[0, 1, 3]),
        (&["--key", "k"], &[0, 1, 2]),
        (&["--header", "tenant=eu"], &[0, 2, 3]),
        (&["--header", "tenant=eu", "--header", "ce_id=1"], &[0]),
        (&["--cause", "permanent", "--key", "k", "--header", "tenant=eu"], &[0]),
        (&["--from", "2026-01-31T09:05:03Z"], &[2, 3]),
        (&["--to", "2026-01-31T09:05:03Z"], &[0, 1]),
        (&["--from", "2026-01-31T09:05:02Z", "--to", "2026-01-31T10:05:04+01:00"], &[1, 2]),
    ] {
        assert_eq!(choose(&wish(arguments), &letters).0, expected, "{arguments:?}");
    }
}

#[test]
fn what_has_been_replayed_as_often_as_it_may_be_is_counted_and_left_out() {
    let letters = [dead(0, 1, "permanent", 2), dead(1, 2, "permanent", 3), dead(2, 3, "permanent", 4)];
    let (chosen, skipped) = choose(&wish(&[]), &letters);
    assert_eq!((chosen.as_slice(), skipped.loop_cap), (&[0][..], 2));
    assert_eq!(choose(&wish(&["--loop-cap", "20"]), &letters).0, [0, 1, 2]);
}

#[test]
fn letters_of_other_topics_and_unreadable_ones_are_counted_and_left_out() {
    let wish = wish(&[]);
    let mut other = dead(0, 1, "permanent", 0);
    other.headers[3].1 = "refunds".to_owned();
    assert_eq!(choose(&wish, &[other]).1.other_topic, 1);
    // Any record of any topic.
    let mut silent = dead(0, 1, "permanent", 1);
    silent.headers.retain(|(name, _)| !name.starts_with("dlt-"));
    let (chosen, skipped) = choose(&wish, &[silent]);
    assert_eq!((chosen.len(), skipped.no_letter), (0, 1));
    let mut choice = Choice::new(&wish, "d");
    choice.see(&Seen { partition: 0, offset: 0, timestamp_ms: None, key: None, headers: None });
    assert_eq!(choice.fitting().1.unreadable, 1);
}

#[test]
fn letters_that_another_consumer_wrote_to_a_shared_topic_are_left_out_and_told() {
    let spring = |offset, original, group: &str| {
        dead(offset, original, "permanent", 0).with("kafka_dlt-original-consumer-group", group)
    };
    // All about the same record but the last, which names nobody.
    let letters = [
        spring(0, 7, "billing"),
        spring(1, 7, "shipping"),
        spring(2, 7, "billing-service"),
        dead(3, 7, "panic", 0).with("dlt-consumer", "shipping"),
        dead(4, 8, "permanent", 0),
    ];
    let others = |pairs: &[(&str, u64)]| -> BTreeMap<String, u64> {
        pairs.iter().map(|(name, count)| ((*name).to_owned(), *count)).collect()
    };
    let (chosen, skipped) = choose(&wish(&[]), &letters);
    assert_eq!(chosen, [0, 4]);
    assert_eq!(skipped.other_consumers, others(&[("billing-service", 1), ("shipping", 2)]));
    let (chosen, skipped) = choose(&wish(&["--group", "billing-service"]), &letters);
    assert_eq!(chosen, [2, 4]);
    assert_eq!(skipped.other_consumers, others(&[("billing", 1), ("shipping", 2)]));
    // A letter of Baton's names its consumer, whatever its group.
    let own = [dead(0, 7, "permanent", 0).with("dlt-consumer", "billing")];
    assert_eq!(choose(&wish(&["--group", "g"]), &own).0, [0]);
}

#[test]
fn what_another_plan_has_sent_is_left_out_unless_it_is_wanted_and_does_not_count_for_the_limit() {
    let chosen = |wish: &Wish| {
        let mut choice = Choice::new(wish, "d");
        for offset in 0..4 {
            let letter = dead(offset, offset + 1, "permanent", 1);
            choice.see(&Seen {
                partition: 0,
                offset,
                timestamp_ms: None,
                key: None,
                headers: Some(letter.headers.iter().map(|(n, v)| (*n, Some(v.as_bytes()))).collect()),
            });
        }
        choice.fitting()
    };
    let offsets = |letters: Vec<Chosen>| letters.into_iter().map(|letter| letter.offset).collect::<Vec<_>>();
    let (all, _) = chosen(&wish(&[]));
    // The first was sent in its second round, the second one only in its first, before it died again.
    let sent = HashMap::from([(all[0].subject.to_vec(), 2), (all[1].subject.to_vec(), 1)]);
    for (arguments, expected, left_out) in [
        (&[][..], &[1, 2, 3][..], 1),
        (&["--limit", "2"], &[1, 2], 1),
        (&["--again"], &[0, 1, 2, 3], 0),
        (&["--again", "--limit", "1"], &[0], 0),
    ] {
        let wish = wish(arguments);
        let (letters, mut skipped) = chosen(&wish);
        assert_eq!(offsets(keep(&wish, letters, &sent, &mut skipped)), expected, "{arguments:?}");
        assert_eq!(skipped.already_replayed, left_out, "{arguments:?}");
    }
}

#[test]
fn causes_are_counted() {
    let (chosen, _) = {
        let wish = wish(&[]);
        let mut choice = Choice::new(&wish, "d");
        for (offset, headers) in [
            vec![("dlt-cause", "panic")],
            vec![("dlt-cause", "panic")],
            vec![("dlt-original-topic", "orders")],
        ]
        .into_iter()
        .enumerate()
        {
            choice.see(&Seen {
                partition: 0,
                offset: i64::try_from(offset).unwrap(),
                timestamp_ms: None,
                key: None,
                headers: Some(
                    headers.into_iter().map(|(n, v): (&str, &str)| (n, Some(v.as_bytes()))).collect(),
                ),
            });
        }
        choice.fitting()
    };
    assert_eq!(by_cause(&chosen), BTreeMap::from([("panic".to_owned(), 2), ("unknown".to_owned(), 1)]));
}

#[test]
fn a_misspelt_cause_is_refused_unless_the_letters_are_somebody_elses() {
    assert!(wish(&["--cause", "permanant"]).unknown_cause().is_some());
    assert!(wish(&["--cause", "permanent"]).unknown_cause().is_none());
    assert!(wish(&["--cause", "java.lang.Exception", "--dlt", "orders-dlt"]).unknown_cause().is_none());
}

use proptest::prelude::*;

use super::*;

fn exact(payload: &str) -> String {
    Fingerprint::exact(Some(payload.as_bytes())).to_string()
}

fn json(payload: &str) -> String {
    Fingerprint::canonical_json(Some(payload.as_bytes())).unwrap().to_string()
}

#[test]
fn a_fingerprint_is_what_it_always_was() {
    for (payload, text) in [
        (None, "v1:sha256:6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d"),
        (Some(b"".as_slice()), "v1:sha256:4bf5122f344554c53bde2ebb8cd2b7e3d1600ad631c385a5d7cce23c7785459a"),
        (
            Some(br#"{"order_id":17}"#.as_slice()),
            "v1:sha256:4c3dcc64bc1cb861db6a283dfce0c27edaad36301999fc087d084e1a0e487bab",
        ),
    ] {
        assert_eq!(Fingerprint::exact(payload).as_str(), text);
        assert_eq!(Fingerprint::exact(payload).to_string(), text);
        assert_eq!(Compare::default().fingerprint(payload).unwrap().as_str(), text);
    }
}

/// Computed by Python:
///
/// ```python
/// import hashlib, json
/// from decimal import Decimal
/// def number(d):
///     sign, digits, exponent = d.as_tuple()
///     digits = ''.join(map(str, digits)).lstrip('0')
///     if not digits: return '0'
///     kept = digits.rstrip('0'); exponent += len(digits) - len(kept)
///     return '-' * sign + kept + (f'e{exponent}' if exponent else '')
/// def canonical(v):
///     if isinstance(v, dict): return '{' + ','.join(canonical(k) + ':' + canonical(v[k]) for k in sorted(v)) + '}'
///     if isinstance(v, list): return '[' + ','.join(map(canonical, v)) + ']'
///     return number(v) if isinstance(v, Decimal) else json.dumps(v, ensure_ascii=False)
/// def fingerprint(text):
///     v = json.loads(text, parse_int=Decimal, parse_float=Decimal)
///     return 'v1:jsonsha256:' + hashlib.sha256(b'\1' + canonical(v).encode()).hexdigest()
/// ```
#[test]
fn a_fingerprint_of_canonical_json_is_what_it_always_was() {
    let tricky = r#"{"b":[1.50,-0.0,1e999999999,true,null],"a":"\u00e9\ud83e\udd80\/\u0001\"\\\n\u007f",
        "":{"z":9007199254740993,"\ud83e\udd80":[],"\uffff":0.001}}"#;
    for (payload, text) in [
        (None, "v1:jsonsha256:6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d"),
        (
            Some(r#" { "order_id" : 1.70e1 } "#),
            "v1:jsonsha256:4c3dcc64bc1cb861db6a283dfce0c27edaad36301999fc087d084e1a0e487bab",
        ),
        (Some("null"), "v1:jsonsha256:c58dcb77cee9027d1f4b3207bd876d232e61f79ee9f9dbd4e6d834778da78b16"),
        (Some("{}"), "v1:jsonsha256:e6a9d8dbd2b2941a6b6c47bf7910f0a6ee0b08d47c3462ab727ae2d73bc005da"),
        (Some(tricky), "v1:jsonsha256:0be619d9a7f3565d7c0b840a2cc0148b55c61e896c9e8a72ff87cb4ab7ae69c8"),
    ] {
        let fingerprint = Fingerprint::canonical_json(payload.map(str::as_bytes)).unwrap();
        assert_eq!(fingerprint.as_str(), text);
        assert_eq!(Compare::CanonicalJson.fingerprint(payload.map(str::as_bytes)).unwrap(), fingerprint);
    }
}

/// Computed by Python, from the payload's fingerprint, the chosen names and the record's headers:
///
/// ```python
/// def headers(payload, chosen, given):
///     count = lambda x: len(x).to_bytes(8, 'big')
///     b = payload.encode()
///     for name in chosen:
///         values = [v for g, v in given if g == name]
///         b += count(name.encode()) + name.encode() + count(values)
///         for v in values: b += b'\0' if v is None else b'\1' + count(v) + v
///     return payload.rsplit(':', 1)[0] + 'headers:' + hashlib.sha256(b).hexdigest()
/// ```
#[test]
fn a_fingerprint_with_headers_is_what_it_always_was() {
    let given = [("tenant", Some(&b"eu"[..])), ("other", Some(b"x")), ("tenant", None), ("empty", Some(b""))];
    let payload = Some(&br#"{"order_id":17}"#[..]);
    for (compare, text) in [
        (
            Compare::ExactBytes,
            "v1:sha256headers:47e9520752a1fb3ce5114cac226b135a48880bf72f143932697ba5df44fcae1c",
        ),
        (
            Compare::CanonicalJson,
            "v1:jsonsha256headers:5e2697403715df8338fa9b3171f1e3fa1cac3ad11f7aa80b3152b08ca4036c05",
        ),
    ] {
        let fingerprint = compare.fingerprint(payload).unwrap();
        assert_eq!(fingerprint.with_headers(&["tenant", "empty", "absent"], &given).as_str(), text);
    }
}

/// Case 21.
#[test]
fn order_of_members_and_spelling_of_numbers_do_not_count_and_their_values_do() {
    assert_eq!(json(r#"{"a":1,"b":2}"#), json(r#"{"b":2,"a":1}"#));
    for one in ["1.0", "1e0", "10e-1", "1E+0", "0.1e1", "1000e-3", "1.0000000000000000000000000"] {
        assert_eq!(json(one), json("1"), "{one}");
    }
    assert_ne!(json("9007199254740993"), json("9007199254740992"));
    assert_ne!(exact(r#"{"a":1,"b":2}"#), exact(r#"{"b":2,"a":1}"#));
    assert_ne!(exact("1.0"), exact("1"));
}

#[test]
fn one_value_has_one_spelling_and_a_huge_number_takes_no_more_space_than_it_was_given() {
    for (given, canonical) in [
        ("-0", "0"),
        ("-0.00e-17", "0"),
        ("0e99999999999999999999999999", "0"),
        ("1e999999999", "1e999999999"),
        ("-12.50e-999999999", "-125e-1000000000"),
        ("100e9223372036854775805", "1e9223372036854775807"),
        ("0.01e9223372036854775809", "1e9223372036854775807"),
        ("0.1e-9223372036854775807", "1e-9223372036854775808"),
        ("100e-9223372036854775810", "1e-9223372036854775808"),
        ("1e+000000000000000000000000000000002", "1e2"),
        ("120", "12e1"),
        (" [ 1 , [ ] , { } ] ", "[1,[],{}]"),
        (r#""\u0041\/\u00E9\b\f\n\r\t\u000B\u001F\"\\""#, r#""A/é\b\f\n\r\t\u000b\u001f\"\\""#),
        (
            r#"{"\uFFFF":1,"\uD83E\uDD80":2,"a":3,"B":4,"":5,"aa":6}"#,
            "{\"\":5,\"B\":4,\"a\":3,\"aa\":6,\"\u{ffff}\":1,\"🦀\":2}",
        ),
    ] {
        assert_eq!(canonical_json(given.as_bytes()).unwrap(), canonical, "{given}");
        assert_eq!(canonical_json(canonical.as_bytes()).unwrap(), canonical, "{canonical}");
    }
}

#[test]
fn what_readers_may_understand_differently_is_refused() {
    let refused = |payload: &[u8]| Fingerprint::canonical_json(Some(payload)).unwrap_err();
    for repeated in [r#"{"a":1,"a":1}"#, r#"[{"b":{"a":1,"c":0,"\u0061":2}}]"#] {
        assert!(
            matches!(refused(repeated.as_bytes()), Error::Repeated { name } if name == "a"),
            "{repeated}"
        );
    }
    for payload in [
        "",
        " ",
        "{",
        "nul",
        "NaN",
        "Infinity",
        "01",
        "1.",
        ".5",
        "+1",
        "1e",
        "-",
        "'a'",
        "{}{}",
        "{} x",
        "[1,]",
        r#"{"a":1,}"#,
        r#"{"a" 1}"#,
        r#"{a:1}"#,
        r#""\x""#,
        r#""\ud800""#,
        r#""\udc00\ud800""#,
        r#"{"\ud800":1}"#,
        "\"\n\"",
        "\u{feff}1",
        "// a\n1",
    ] {
        assert!(matches!(refused(payload.as_bytes()), Error::NotJson(_)), "{payload:?}");
    }
    for payload in [&b"\"\xff\""[..], b"\"\xed\xa0\x80\"", b"{\"\xc0\xaf\":1}", b"1\0"] {
        assert!(matches!(refused(payload), Error::NotJson(_)), "{payload:?}");
    }
    for exponent in [
        "1e9223372036854775808",
        "10e9223372036854775807",
        "0.1e9223372036854775809",
        "1e-9223372036854775809",
        "0.1e-9223372036854775808",
        "10e170141183460469231731687303715884105727",
        &format!("[-1e{}]", "9".repeat(1000)),
    ] {
        assert!(matches!(refused(exponent.as_bytes()), Error::Exponent), "{exponent}");
    }
}

#[test]
fn as_deep_as_serde_json_reads_is_compared_and_deeper_is_refused_without_using_up_the_stack() {
    for (open, close) in [("[", "]"), (r#"{"a":["#, "]}")] {
        let nested = |levels: usize| {
            let times = levels / open.replace(['"', 'a', ':'], "").len();
            format!("{}{}", open.repeat(times), close.repeat(times))
        };
        let deepest = nested(126);
        assert!(canonical_json(deepest.as_bytes()).is_ok());
        assert!(serde_json::from_str::<serde_json::Value>(&deepest).is_ok());
        for levels in [128, 100_000] {
            assert!(matches!(canonical_json(nested(levels).as_bytes()), Err(Error::Deep)), "{levels}");
        }
    }
    let levels = |levels| format!("{}1{}", "[".repeat(levels), "]".repeat(levels));
    assert!(canonical_json(levels(DEEPEST).as_bytes()).is_ok());
    assert!(serde_json::from_str::<serde_json::Value>(&levels(DEEPEST)).is_ok());
    assert!(matches!(canonical_json(levels(DEEPEST + 1).as_bytes()), Err(Error::Deep)));
    assert!(serde_json::from_str::<serde_json::Value>(&levels(DEEPEST + 1)).is_err());
}

#[test]
fn a_tombstone_an_empty_payload_and_null_are_three_things() {
    assert_ne!(Fingerprint::exact(None), Fingerprint::exact(Some(b"")));
    let tombstone = Fingerprint::canonical_json(None).unwrap();
    assert_ne!(tombstone.as_str(), json("null"));
    assert_ne!(tombstone.as_str(), json(r#""""#));
    assert!(Fingerprint::canonical_json(Some(b"")).is_err());
}

#[test]
fn no_two_algorithms_have_a_digest_in_common() {
    let payload = r#"{"order_id":17}"#;
    assert_eq!(canonical_json(payload.as_bytes()).unwrap(), payload);
    assert_ne!(exact(payload), json(payload));
    let plain = Fingerprint::exact(Some(payload.as_bytes()));
    assert_ne!(plain.clone().with_headers(&["absent"], &[]), plain);
    assert_eq!(plain.clone().with_headers(&[] as &[&str], &[("a", None)]), plain);
}

#[test]
fn of_a_header_presence_null_value_repeats_order_and_case_count_and_other_headers_do_not() {
    let of = |headers: &[(&str, Option<&[u8]>)]| {
        Fingerprint::exact(None).with_headers(&["a", "b"], headers).to_string()
    };
    let different = [
        of(&[]),
        of(&[("a", None)]),
        of(&[("a", Some(b""))]),
        of(&[("b", Some(b""))]),
        of(&[("a", Some(b"1"))]),
        of(&[("A", Some(b"1")), ("a", Some(b""))]).replace(&of(&[("a", Some(b""))]), "as without A"),
        of(&[("a", Some(b"1")), ("a", Some(b"1"))]),
        of(&[("a", Some(b"1")), ("a", Some(b"2"))]),
        of(&[("a", Some(b"2")), ("a", Some(b"1"))]),
        of(&[("a", Some(b"11"))]),
        of(&[("a", Some(b"\x01")), ("a", Some(b""))]),
        of(&[("a", Some(b"")), ("a", Some(b"\x01"))]),
        of(&[("a", Some(b"1")), ("b", Some(b"1"))]),
    ];
    for (place, one) in different.iter().enumerate() {
        assert!(!different[..place].contains(one), "{place}");
    }
    assert!(different.contains(&"as without A".to_owned()));
    assert_eq!(
        of(&[("x", Some(b"9")), ("b", Some(b"2")), ("a", Some(b"1")), ("y", None)]),
        of(&[("a", Some(b"1")), ("b", Some(b"2"))]),
        "the setting's order counts, not the record's between two names"
    );
}

/// A JSON value, with numbers by their value: equal when the values are.
#[derive(Debug, Clone, PartialEq)]
enum Tree {
    Word(&'static str),
    Number { negative: bool, digits: String, exponent: i64 },
    Text(String),
    Array(Vec<Tree>),
    Object(Vec<(String, Tree)>),
}

fn number(mantissa: i64, exponent: i64) -> Tree {
    let digits = mantissa.unsigned_abs().to_string();
    let kept = digits.trim_end_matches('0').to_owned();
    if kept.is_empty() {
        return Tree::Number { negative: false, digits: "0".to_owned(), exponent: 0 };
    }
    let exponent = exponent + i64::try_from(digits.len() - kept.len()).unwrap();
    Tree::Number { negative: mantissa < 0, digits: kept, exponent }
}

fn tree() -> BoxedStrategy<Tree> {
    let text = "[a-c\"\\\\/\u{0}-\u{20}\u{7f}é\u{ffff}🦀]{0,6}";
    let leaf = prop_oneof![
        prop::sample::select(vec!["null", "true", "false"]).prop_map(Tree::Word),
        (any::<i64>(), -30..=30_i64).prop_map(|(mantissa, exponent)| number(mantissa, exponent)),
        (-2..=2_i64, 0..=1_i64).prop_map(|(mantissa, exponent)| number(mantissa, exponent)),
        text.prop_map(Tree::Text),
    ];
    leaf.prop_recursive(3, 12, 3, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Tree::Array),
            prop::collection::btree_map(text, inner, 0..4)
                .prop_map(|members| Tree::Object(members.into_iter().collect())),
        ]
    })
    .boxed()
}

/// Choices of a spelling, used up one by one and then from the start.
struct Choices<'a>(std::iter::Cycle<std::slice::Iter<'a, u8>>);

impl Choices<'_> {
    fn of(&mut self, count: u8) -> u8 {
        self.0.next().unwrap() % count
    }

    fn space(&mut self) -> &'static str {
        ["", "", " ", "\n\t ", "\r"][usize::from(self.of(5))]
    }
}

/// Another value, with one thing changed somewhere.
fn changed(tree: &Tree, choices: &mut Choices<'_>) -> Tree {
    let place =
        |count: usize, choices: &mut Choices<'_>| usize::from(choices.of(u8::try_from(count).unwrap()));
    match tree {
        Tree::Word(word) => Tree::Word(if *word == "null" { "false" } else { "null" }),
        Tree::Number { digits, .. } if digits == "0" => number(1, 0),
        Tree::Number { negative, digits, exponent } => {
            let (mut negative, mut digits, mut exponent) = (*negative, digits.clone(), *exponent);
            match choices.of(4) {
                0 => negative = !negative,
                1 => exponent += 1,
                2 => digits.push('1'),
                _ => digits.insert(0, '1'),
            }
            Tree::Number { negative, digits, exponent }
        }
        Tree::Text(text) => Tree::Text(text.clone() + ["a", "\"", "\\", "\0", " "][place(5, choices)]),
        Tree::Array(values) if values.is_empty() => Tree::Object(Vec::new()),
        Tree::Array(values) => {
            let (mut values, at) = (values.clone(), place(values.len(), choices));
            match choices.of(4) {
                0 => drop(values.remove(at)),
                1 => values.insert(at, Tree::Word("null")),
                2 => values[at] = Tree::Array(vec![values[at].clone()]),
                _ => values[at] = changed(&values[at], choices),
            }
            Tree::Array(values)
        }
        Tree::Object(members) if members.is_empty() => Tree::Array(Vec::new()),
        Tree::Object(members) => {
            let (mut members, at) = (members.clone(), place(members.len(), choices));
            match choices.of(4) {
                0 => drop(members.remove(at)),
                1 => members.push(("new".to_owned(), Tree::Word("null"))),
                2 => members[at].0.push_str("new"),
                _ => members[at].1 = changed(&members[at].1, choices),
            }
            Tree::Object(members)
        }
    }
}

/// One of the many texts of a value.
fn spelled(tree: &Tree, choices: &mut Choices<'_>) -> String {
    let value = match tree {
        Tree::Word(word) => (*word).to_owned(),
        Tree::Number { negative, digits, exponent } => {
            spelled_number(*negative && digits != "0", digits, *exponent, choices)
        }
        Tree::Text(text) => spelled_text(text, choices),
        Tree::Array(values) => {
            let values: Vec<_> = values.iter().map(|value| spelled(value, choices)).collect();
            format!("[{}{}]", choices.space(), values.join(","))
        }
        Tree::Object(members) => {
            let mut members: Vec<_> = members
                .iter()
                .map(|(name, value)| {
                    format!(
                        "{}{}{}:{}",
                        choices.space(),
                        spelled_text(name, choices),
                        choices.space(),
                        spelled(value, choices)
                    )
                })
                .collect();
            for place in (1..members.len()).rev() {
                members.swap(place, usize::from(choices.of(u8::try_from(place + 1).unwrap())));
            }
            format!("{{{}{}}}", choices.space(), members.join(","))
        }
    };
    format!("{}{value}{}", choices.space(), choices.space())
}

fn spelled_number(negative: bool, digits: &str, exponent: i64, choices: &mut Choices<'_>) -> String {
    let zeros = choices.of(3);
    let digits = format!("{digits}{}", "0".repeat(zeros.into()));
    let mut exponent = exponent - i64::from(zeros);
    let fraction = usize::from(choices.of(4)).min(digits.len());
    let (whole, fraction) = digits.split_at(digits.len() - fraction);
    exponent += i64::try_from(fraction.len()).unwrap();
    let whole = if whole.is_empty() || whole.starts_with('0') { "0" } else { whole };
    let mut text = format!("{}{whole}", if negative { "-" } else { "" });
    if !fraction.is_empty() {
        text = format!("{text}.{fraction}");
    }
    if exponent != 0 || choices.of(2) == 0 {
        let letter = ["e", "E"][usize::from(choices.of(2))];
        let sign = if exponent < 0 { "-" } else { ["", "+"][usize::from(choices.of(2))] };
        let zeros = "0".repeat(choices.of(3).into());
        text = format!("{text}{letter}{sign}{zeros}{}", exponent.unsigned_abs());
    }
    text
}

fn spelled_text(text: &str, choices: &mut Choices<'_>) -> String {
    let mut spelled = "\"".to_owned();
    for character in text.chars() {
        let must = character < ' ' || matches!(character, '"' | '\\');
        if must || choices.of(3) == 0 {
            for unit in character.encode_utf16(&mut [0; 2]) {
                let unit =
                    if choices.of(2) == 0 { format!("\\u{unit:04x}") } else { format!("\\u{unit:04X}") };
                spelled.push_str(&unit);
            }
        } else {
            spelled.push(character);
        }
    }
    spelled + "\""
}

fn choices() -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec(any::<u8>(), 1..64)
}

proptest! {
    #[test]
    fn two_payloads_have_one_fingerprint_only_if_they_are_equal(
        a in proptest::option::of(proptest::collection::vec(0_u8..3, 0..4)),
        b in proptest::option::of(proptest::collection::vec(0_u8..3, 0..4)),
    ) {
        let same = Fingerprint::exact(a.as_deref()) == Fingerprint::exact(b.as_deref());
        prop_assert_eq!(same, a == b);
    }

    #[test]
    fn however_a_json_value_is_spelled_its_fingerprint_is_the_same(tree in tree(), a in choices(), b in choices()) {
        let (a, b) = (spelled(&tree, &mut Choices(a.iter().cycle())), spelled(&tree, &mut Choices(b.iter().cycle())));
        prop_assert_eq!(json(&a), json(&b), "{} {}", a, b);
        let canonical = canonical_json(a.as_bytes()).unwrap();
        prop_assert_eq!(canonical_json(canonical.as_bytes()).unwrap(), canonical);
    }

    #[test]
    fn whatever_changes_in_a_json_value_changes_its_fingerprint(
        tree in tree(), changes in choices(), a in choices(), b in choices(),
    ) {
        let other = changed(&tree, &mut Choices(changes.iter().cycle()));
        prop_assert_ne!(&tree, &other);
        let (a, b) = (spelled(&tree, &mut Choices(a.iter().cycle())), spelled(&other, &mut Choices(b.iter().cycle())));
        prop_assert_ne!(json(&a), json(&b), "{} {}", a, b);
    }

    #[test]
    fn one_changed_byte_changes_the_exact_fingerprint(
        payload in prop::collection::vec(any::<u8>(), 1..64), place in any::<prop::sample::Index>(), change in 1_u8..,
    ) {
        let mut changed = payload.clone();
        changed[place.index(payload.len())] ^= change;
        prop_assert_ne!(Fingerprint::exact(Some(&payload)), Fingerprint::exact(Some(&changed)));
    }

    #[test]
    fn whatever_is_given_is_compared_or_refused_and_takes_bounded_space(payload in "[0-9eE.+\\-{}\\[\\],:\" \\\\unrtl]{0,40}") {
        if let Ok(canonical) = canonical_json(payload.as_bytes()) {
            prop_assert!(serde_json::from_slice::<serde::de::IgnoredAny>(payload.as_bytes()).is_ok());
            prop_assert!(canonical.len() <= 3 * payload.len());
        }
    }

    #[test]
    fn two_records_with_chosen_headers_are_equal_only_if_each_of_them_is(
        a in prop::collection::vec(("[ab]{0,2}", prop::option::of(prop::collection::vec(0_u8..2, 0..2))), 0..3),
        b in prop::collection::vec(("[ab]{0,2}", prop::option::of(prop::collection::vec(0_u8..2, 0..2))), 0..3),
    ) {
        type Headers = [(String, Option<Vec<u8>>)];
        let names = ["a", "", "ab"];
        let of = |headers: &Headers| {
            let headers: Vec<_> = headers.iter().map(|(name, value)| (name.as_str(), value.as_deref())).collect();
            Fingerprint::exact(None).with_headers(&names, &headers)
        };
        let chosen = |headers: &Headers| -> Vec<Vec<Option<Vec<u8>>>> {
            let values = |name| headers.iter().filter(move |(given, _)| given == name).map(|(_, value)| value.clone());
            names.iter().map(|name| values(name).collect()).collect()
        };
        prop_assert_eq!(of(&a) == of(&b), chosen(&a) == chosen(&b));
    }
}

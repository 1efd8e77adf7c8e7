use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::Path;

use super::*;

fn sources(file: &str, environment: &[(&str, &str)]) -> Sources {
    let environment = environment.iter().map(|(name, value)| (OsString::from(name), OsString::from(value)));
    let mut sources = Sources::read(Some(Path::new("/dev/null")), environment).unwrap();
    sources.file = Some((PathBuf::from("baton.toml"), file.to_owned()));
    sources
}

fn load(file: &str, environment: &[(&str, &str)]) -> Result<Effective, Error> {
    Effective::load(&sources(file, environment))
}

fn refusal(file: &str, environment: &[(&str, &str)]) -> String {
    let effective = match load(file, environment) {
        Ok(effective) => effective,
        Err(e) => return e.to_string(),
    };
    effective.check_ranges().expect_err("must be refused").to_string()
}

fn value(effective: &Effective, key: &str) -> (Option<String>, String) {
    let row = effective.rows().unwrap().into_iter().find(|row| row.key == key);
    row.map(|row| (row.value, row.origin)).unwrap_or_else(|| panic!("no key {key}"))
}

#[test]
fn nothing_given_is_the_defaults() {
    let effective = load("", &[]).unwrap();
    effective.check_ranges().unwrap();
    assert_eq!(value(&effective, "lease.ttl"), (Some("10s".into()), "default".into()));
    assert_eq!(
        value(&effective, "lease.margin"),
        (Some("2s".into()), "default: a fifth of lease.ttl".into())
    );
    assert_eq!(value(&effective, "publish.in_flight_bytes"), (Some("16MiB".into()), "default".into()));
    assert_eq!(value(&effective, "http.listen"), (Some("127.0.0.1:9464".into()), "default".into()));
    assert_eq!(value(&effective, "outbox.database_url"), (None, "not set".into()));
}

#[test]
fn a_flag_goes_before_a_variable_before_the_file_before_database_url() {
    let file = "[outbox]\ndatabase_url = 'postgres://file/x'";
    let conventional = ("DATABASE_URL", "postgres://conventional/x");
    let prefixed = ("BATON_OUTBOX__DATABASE_URL", "postgres://prefixed/x");
    let seen = |sources: &Sources| {
        let url = Effective::load(sources).unwrap().database_url(Side::Outbox).unwrap();
        (url.url, url.origin)
    };
    assert_eq!(
        seen(&sources("", &[conventional])),
        ("postgres://conventional/x".into(), "environment variable DATABASE_URL".into())
    );
    assert_eq!(seen(&sources(file, &[conventional])), ("postgres://file/x".into(), "baton.toml".into()));
    let mut all = sources(file, &[conventional, prefixed]);
    assert_eq!(
        seen(&all),
        ("postgres://prefixed/x".into(), "environment variable BATON_OUTBOX__DATABASE_URL".into())
    );
    all.database_url = Some("postgres://flag/x".into());
    assert_eq!(seen(&all), ("postgres://flag/x".into(), "--database-url".into()));
}

#[test]
fn the_inbox_may_live_elsewhere_and_defaults_to_database_url() {
    let effective =
        load("[outbox]\ndatabase_url = 'postgres://a/x'", &[("DATABASE_URL", "postgres://b/x")]).unwrap();
    assert_eq!(effective.database_url(Side::Outbox).unwrap().url, "postgres://a/x");
    assert_eq!(effective.database_url(Side::Inbox).unwrap().url, "postgres://b/x");
}

#[test]
fn an_unknown_key_is_named_with_its_origin_and_its_neighbour() {
    assert_eq!(
        refusal("[lease]\ntll = '5s'", &[]),
        "unknown key lease.tll in baton.toml (did you mean lease.ttl?); `baton config` shows the known ones"
    );
    assert!(refusal("colour = 'red'", &[]).starts_with("unknown key colour in baton.toml;"));
    assert!(
        refusal("[leases]\nttl = '5s'", &[])
            .contains("unknown key leases in baton.toml (did you mean lease?)")
    );
}

#[test]
fn an_unknown_variable_is_named_with_its_neighbour() {
    let message = refusal("", &[("BATON_LEASE_TTL", "5s")]);
    assert!(
        message.starts_with("unknown environment variable BATON_LEASE_TTL (did you mean BATON_LEASE__TTL?)"),
        "{message}"
    );
    assert!(refusal("", &[("BATON_FOO", "1")]).starts_with("unknown environment variable BATON_FOO;"));
}

#[test]
fn what_kubernetes_injects_is_ignored() {
    load("", &[("BATON_PORT", "tcp://10.0.0.1:9464"), ("BATON_SERVICE_HOST", "10.0.0.1")]).unwrap();
}

#[test]
fn a_value_out_of_range_names_key_bound_and_origin() {
    for (file, key, bound) in [
        ("[lease]\nttl = '999ms'", "lease.ttl", "a lease of 0.999s is shorter than a second"),
        ("[lease]\nttl = '5s'\nmargin = '5s'", "lease.margin", "margin 5s"),
        ("[poll]\nfloor = '2s'\nceiling = '1s'", "poll.ceiling", "poll.floor"),
        ("[publish]\nin_flight_rows = 10", "publish.page_rows", "publish.in_flight_rows"),
    ] {
        let message = refusal(file, &[]);
        assert!(message.starts_with(key) && message.contains(bound), "{message}");
    }
    // The origin is that of the key to blame, not of the section.
    let message = refusal("[lease]\nmargin = '1s'", &[("BATON_LEASE__TTL", "10ms")]);
    assert!(message.starts_with("lease.ttl from environment variable BATON_LEASE__TTL: "), "{message}");
}

#[test]
fn a_value_of_the_wrong_kind_names_key_and_origin() {
    for (file, expected) in [
        (
            "[lease]\nttl = 10",
            "lease.ttl from baton.toml: `10` has no unit; write a duration like 500ms, 30s or 6h",
        ),
        (
            "[publish]\npage_rows = 0",
            "publish.page_rows from baton.toml: `0` is not a whole number of at least 1",
        ),
        (
            "[publish]\nin_flight_bytes = '5 apples'",
            "publish.in_flight_bytes from baton.toml: `5 apples` is not a size",
        ),
        ("[relay]\nce_time = 'maybe'", "relay.ce_time from baton.toml: "),
        ("[relay]\nowner = 5", "relay.owner from baton.toml: must be a string"),
        (
            "[http]\nlisten = ':9464'",
            "http.listen from baton.toml: `:9464` is not an address; write host:port like ",
        ),
        ("[http]\nlisten = false", "http.listen from baton.toml: `false` is not an address; "),
        ("[log]\nformat = 'xml'", "log.format from baton.toml: `xml` is not a log format; use human or json"),
        ("lease = 5", "lease in baton.toml is a section: set the keys in it"),
        ("[lease.ttl]\nx = 1", "lease.ttl in baton.toml is a key, not a section: give it a value"),
        ("[kafka]\nproperties = 5", "kafka.properties in baton.toml is a section"),
        (
            "[kafka.properties]\nacks = ['all']",
            "kafka.properties.acks from baton.toml: must be a single value",
        ),
    ] {
        let message = refusal(file, &[]);
        assert!(message.starts_with(expected), "{message}");
    }
}

#[test]
fn broken_toml_is_named_by_line_without_showing_it() {
    let message = refusal("[outbox]\n\ndatabase_url = \"postgres://app:hunter2@db/x", &[]);
    assert!(message.starts_with("baton.toml, line 3, is not valid TOML: "), "{message}");
    assert!(!message.contains("hunter2"), "{message}");
}

#[test]
fn librdkafka_settings_may_be_written_dotted_or_quoted_and_come_from_the_environment() {
    let file = "[kafka.properties]\nsasl.mechanism = 'PLAIN'\n'sasl.username' = 'app'\nlinger.ms = 5";
    let effective = load(file, &[("BATON_KAFKA__PROPERTIES__SASL_PASSWORD", "hunter2")]).unwrap();
    let properties: BTreeMap<_, _> =
        effective.config.kafka.properties.iter().map(|(k, v)| (k.as_str(), v.0.as_str())).collect();
    let expected = [
        ("linger.ms", "5"),
        ("sasl.mechanism", "PLAIN"),
        ("sasl.password", "hunter2"),
        ("sasl.username", "app"),
    ];
    assert_eq!(properties, BTreeMap::from(expected));
    assert_eq!(
        value(&effective, "kafka.properties.sasl.password"),
        (Some("***".into()), "environment variable BATON_KAFKA__PROPERTIES__SASL_PASSWORD".into())
    );
    assert_eq!(value(&effective, "kafka.properties.sasl.username").0, Some("app".into()));
}

#[test]
fn a_librdkafka_setting_that_would_break_a_guarantee_is_refused_with_the_reason() {
    let message = refusal("[kafka.properties]\n'message.timeout.ms' = 30000", &[]);
    assert!(
        message.starts_with("kafka.properties.message.timeout.ms from baton.toml: 30000 is refused: "),
        "{message}"
    );
    assert!(message.contains("overtaken"), "{message}");
}

#[test]
fn a_librdkafka_setting_that_does_not_exist_is_named() {
    let message = refusal("[kafka.properties]\n'no.such.setting' = 1", &[]);
    assert!(message.starts_with("kafka.properties.no.such.setting from baton.toml: "), "{message}");
}

#[test]
fn no_secret_is_shown_in_the_listing() {
    let file = "[kafka.properties]\n'sasl.password' = 'hunter2'\n'ssl.key.password' = 'hunter2'\n'sasl.oauthbearer.client.secret' = 'hunter2'";
    let environment = [
        ("DATABASE_URL", "postgres://app:hunter2@db/x"),
        ("BATON_INBOX__DATABASE_URL", "host=db password=hunter2"),
    ];
    let rows = load(file, &environment).unwrap().rows().unwrap();
    let shown = serde_json::to_string(&rows).unwrap();
    assert!(!shown.contains("hunter2"), "{shown}");
    assert!(shown.contains("postgres://app:***@db/x"), "{shown}");
}

#[test]
fn an_empty_database_url_is_one_that_is_missing() {
    let error = load("", &[("DATABASE_URL", "")]).unwrap().database_url(Side::Outbox).err().unwrap();
    assert!(error.to_string().starts_with("the database is not given; set DATABASE_URL"), "{error}");
}

/// The example file: commented-out settings are `#key = value`, sentences are `# …`.
fn example() -> String {
    std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../baton.example.toml")).unwrap()
}

#[test]
fn the_example_file_has_every_key_and_its_default() {
    let uncommented: String = example()
        .lines()
        .map(|line| {
            line.strip_prefix('#')
                .filter(|rest| rest.starts_with(|c: char| c.is_ascii_lowercase() || c == '"'))
                .unwrap_or(line)
        })
        .flat_map(|line| [line, "\n"])
        .collect();
    let shown = load(&uncommented, &[]).unwrap();
    shown.check_ranges().unwrap();
    let defaults: BTreeMap<_, _> =
        load("", &[]).unwrap().rows().unwrap().into_iter().map(|row| (row.key, row.value)).collect();

    // Those whose default depends on where the process runs show an example instead.
    let without_default =
        ["inbox.database_url", "kafka.brokers", "outbox.database_url", "relay.owner", "relay.source"];
    let mut seen = Vec::new();
    for show::Row { key, value, origin } in shown.rows().unwrap() {
        if key.starts_with("kafka.properties.") {
            continue;
        }
        assert_eq!(origin, "baton.toml", "{key} is missing in baton.example.toml");
        if !without_default.contains(&key.as_str()) {
            assert_eq!(Some(&value), defaults.get(&key), "the default of {key}");
        }
        seen.push(key);
    }
    let known: Vec<_> = Config::known_keys().into_iter().filter(|key| key != "kafka.properties").collect();
    assert_eq!(seen, known);
}

#[test]
fn the_example_file_explains_every_key_with_its_default() {
    let text = example();
    let mut comment = String::new();
    for line in text.lines() {
        if line.starts_with('[') {
            continue;
        }
        if let Some(sentence) = line.strip_prefix("# ") {
            comment.push_str(sentence);
            comment.push(' ');
        } else if let Some(setting) = line.strip_prefix('#').filter(|rest| rest.contains('=')) {
            let (key, value) = setting.split_once(" = ").unwrap();
            assert!(comment.contains("Default"), "{key} has no sentence with its default: {comment:?}");
            let value = value.trim_matches('"');
            // librdkafka's settings are examples; what depends on the process has no default to show.
            if !key.starts_with('"') && !comment.contains("Default: none") {
                assert!(comment.contains(&format!("Default: {value}")), "{key} = {value} but: {comment}");
            }
            if value.parse::<Span>().is_ok() {
                assert!(comment.contains("Duration"), "{key} does not say its unit: {comment}");
            }
            if !key.starts_with('"') {
                comment.clear();
            }
        } else if line.is_empty() {
            comment.clear();
        }
    }
}

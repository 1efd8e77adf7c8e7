//! What the binary says to bad input, with which code, and that it never shows a password.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::process::{Command, Output};

const SECRET: &str = "hunter2";

#[track_caller]
fn refuses(code: i32, args: &[&str], environment: &[(&str, &str)], words: &[&str]) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_orders"));
    let Output { status, stdout, stderr } =
        command.args(args).env_clear().envs(environment.iter().copied()).output().unwrap();
    let text = format!("{}{}", String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr));
    assert_eq!(status.code(), Some(code), "{text}");
    for word in words {
        assert!(text.contains(word), "no {word:?} in: {text}");
    }
    assert!(!text.contains(SECRET) && !text.contains("panicked"), "{text}");
}

#[test]
fn missing_variables_are_named_with_the_form_they_have() {
    for command in ["setup", "bill", "check"] {
        refuses(2, &[command], &[], &["DATABASE_URL is not set", "postgres://"]);
        let database = [("DATABASE_URL", "postgres://127.0.0.1:1/x")];
        refuses(2, &[command], &database, &["KAFKA_BROKERS is not set", "host:port"]);
    }
    refuses(2, &["place", "--count", "1"], &[], &["DATABASE_URL is not set"]);
}

#[test]
fn a_malformed_url_is_refused_without_showing_it() {
    let url = format!("mysql://app:{SECRET}@db/x");
    let environment = [("DATABASE_URL", url.as_str()), ("KAFKA_BROKERS", "127.0.0.1:1")];
    for args in [["check"].as_slice(), &["setup"], &["bill"], &["place", "--count", "1"]] {
        refuses(2, args, &environment, &["DATABASE_URL is not a Postgres URL"]);
    }
}

#[test]
fn a_database_that_does_not_answer_is_named() {
    let url = format!("postgres://app:{SECRET}@127.0.0.1:1/x");
    let environment = [("DATABASE_URL", url.as_str()), ("KAFKA_BROKERS", "127.0.0.1:1")];
    for args in [["check"].as_slice(), &["setup"], &["bill"], &["place", "--count", "1"]] {
        refuses(
            1,
            args,
            &environment,
            &["cannot connect to Postgres at 127.0.0.1:1/x", "Connection refused"],
        );
    }
}

#[test]
fn fractions_that_do_not_add_up_are_a_usage_error() {
    let database = [("DATABASE_URL", "postgres://127.0.0.1:1/x")];
    let args = ["place", "--count", "1", "--poison", "0.9", "--flaky", "0.2"];
    refuses(2, &args, &database, &["--poison and --flaky together are more than all orders"]);
    refuses(
        2,
        &["place", "--count", "1", "--rate", "0"],
        &database,
        &["must be a number above 0, like 200/s"],
    );
    refuses(2, &["place"], &database, &["--count"]);
}

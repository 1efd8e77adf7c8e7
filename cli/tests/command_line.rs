//! The binary as people meet it: what it prints, with which code it ends, and that no password is ever in either.
//!
//! Those that need a server take the one that `DATABASE_URL` names (`cargo xtask test` sets it) and a database of their
//! own in it.

#![expect(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

use std::io::Read as _;
use std::net::TcpListener;
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use sqlx::{AssertSqlSafe, Connection as _, PgConnection};

const SECRET: &str = "hunter2";

/// `baton` with nothing of this process's environment, in a directory without a configuration file.
fn baton(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
    command.args(args).env_clear().current_dir(env!("CARGO_TARGET_TMPDIR")).stdin(Stdio::null());
    // The tests run at the same time.
    command.env("BATON_HTTP__LISTEN", "off");
    command
}

/// The output of a run that must end with `code`, without the secret.
#[track_caller]
fn ends_with(code: i32, command: &mut Command) -> (String, String) {
    let Output { status, stdout, stderr } = command.output().unwrap();
    let (stdout, stderr) = (String::from_utf8(stdout).unwrap(), String::from_utf8(stderr).unwrap());
    assert_eq!(status.code(), Some(code), "stdout: {stdout}\nstderr: {stderr}");
    assert!(!stdout.contains(SECRET) && !stderr.contains(SECRET), "stdout: {stdout}\nstderr: {stderr}");
    (stdout, stderr)
}

#[track_caller]
fn refuses(code: i32, command: &mut Command, words: &[&str]) {
    let (_, stderr) = ends_with(code, command);
    for word in words {
        assert!(stderr.contains(word), "no {word:?} in: {stderr}");
    }
    assert!(!stderr.contains("panicked"), "{stderr}");
}

static COUNT: AtomicU32 = AtomicU32::new(0);

/// A database of the shared server, dropped in the end.
struct Scratch {
    server: String,
    name: String,
    url: String,
}

impl Scratch {
    fn new() -> Self {
        let server = std::env::var("DATABASE_URL")
            .expect("DATABASE_URL is not set: run the tests with `cargo xtask test`");
        let name = format!("baton_cli_{}_{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        execute(&server, &format!("DROP DATABASE IF EXISTS \"{name}\" WITH (FORCE)"));
        execute(&server, &format!("CREATE DATABASE \"{name}\""));
        let (address, _) = server.rsplit_once('/').unwrap();
        Self { url: format!("{address}/{name}"), server, name }
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        execute(&self.server, &format!("DROP DATABASE IF EXISTS \"{}\" WITH (FORCE)", self.name));
    }
}

fn execute(url: &str, sql: &str) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let done = async {
        let mut connection = PgConnection::connect(url).await?;
        sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut connection).await?;
        connection.close().await
    };
    runtime.block_on(async { tokio::time::timeout(Duration::from_secs(60), done).await.unwrap().unwrap() });
}

#[test]
fn a_command_that_does_not_exist_is_a_usage_error() {
    refuses(2, &mut baton(&["frobnicate"]), &["frobnicate"]);
    refuses(2, &mut baton(&[]), &["Usage: baton"]);
}

#[test]
fn a_url_in_the_wrong_place_is_shown_without_its_password() {
    refuses(
        2,
        &mut baton(&["status", &format!("postgres://app:{SECRET}@db/x")]),
        &["postgres://app:***@db/x"],
    );
}

#[test]
fn a_missing_database_url_says_how_to_give_one() {
    for command in
        [["status"].as_slice(), &["migrate", "outbox"], &["migrate", "inbox", "--check"], &["relay"]]
    {
        refuses(2, baton(command).env("KAFKA_BROKERS", "127.0.0.1:1"), &["set DATABASE_URL", "postgres://"]);
    }
}

#[test]
fn missing_brokers_say_how_to_give_them() {
    refuses(
        2,
        baton(&["relay"]).env("DATABASE_URL", "postgres://127.0.0.1:1/x"),
        &["set KAFKA_BROKERS", "host:port"],
    );
}

#[test]
fn a_malformed_database_url_is_a_matter_of_configuration() {
    let with_port = format!("postgres://app:{SECRET}@127.0.0.1:port/x");
    let other_kind = format!("mysql://app:{SECRET}@127.0.0.1/x");
    for url in [with_port, other_kind] {
        for command in [["status"].as_slice(), &["migrate", "outbox"], &["relay"]] {
            let words = [
                "the database URL from environment variable DATABASE_URL is not a Postgres URL",
                "write postgres://",
            ];
            refuses(2, baton(command).env("DATABASE_URL", &url).env("KAFKA_BROKERS", "127.0.0.1:1"), &words);
        }
    }
}

#[test]
fn a_database_that_does_not_answer_is_named_without_the_password() {
    let url = format!("postgres://app:{SECRET}@127.0.0.1:1/x");
    let words = ["cannot reach Postgres at 127.0.0.1:1/x", "--database-url", "does it run there"];
    refuses(1, &mut baton(&["--database-url", &url, "status"]), &words);
}

#[test]
fn an_unknown_key_is_refused_by_every_command() {
    let file = format!("{}/unknown_key.toml", env!("CARGO_TARGET_TMPDIR"));
    std::fs::write(&file, "[lease]\ntll = '5s'\n").unwrap();
    for command in [["status"].as_slice(), &["config"], &["migrate", "outbox", "--check"], &["relay"]] {
        refuses(
            2,
            baton(command).args(["--config", &file]),
            &["unknown key lease.tll in", "did you mean lease.ttl?"],
        );
    }
}

#[test]
fn an_unknown_variable_is_refused_and_what_kubernetes_injects_is_not() {
    refuses(
        2,
        baton(&["config"]).env("BATON_LEASE_TTL", "5s"),
        &["BATON_LEASE_TTL", "did you mean BATON_LEASE__TTL?"],
    );
    let injected = [("BATON_PORT", "tcp://10.0.0.1:9464"), ("BATON_SERVICE_HOST", "10.0.0.1")];
    ends_with(0, baton(&["config"]).envs(injected));
}

#[test]
fn a_setting_that_would_break_a_guarantee_is_refused_at_start() {
    let refused = [
        ("MESSAGE_TIMEOUT_MS", "30000"),
        ("ENABLE_IDEMPOTENCE", "false"),
        ("ACKS", "1"),
        ("PARTITIONER", "consistent_random"),
        ("TRANSACTIONAL_ID", "mine"),
        ("ENABLE_GAPLESS_GUARANTEE", "false"),
    ];
    for (name, value) in refused {
        let variable = format!("BATON_KAFKA__PROPERTIES__{name}");
        let mut command = baton(&["relay"]);
        command
            .env("DATABASE_URL", "postgres://127.0.0.1:1/x")
            .env("KAFKA_BROKERS", "127.0.0.1:1")
            .env(&variable, value);
        refuses(2, &mut command, &[&variable, &format!("{value} is refused: ")]);
    }
}

#[test]
fn no_secret_is_in_the_listing_of_the_configuration() {
    let environment = [
        ("DATABASE_URL", "postgres://app:hunter2@db/x"),
        ("BATON_KAFKA__PROPERTIES__SASL_PASSWORD", "hunter2"),
        ("BATON_KAFKA__PROPERTIES__SSL_KEY_PASSWORD", "hunter2"),
    ];
    for command in [["config"].as_slice(), &["config", "--json"]] {
        let (stdout, _) = ends_with(0, baton(command).envs(environment));
        assert!(stdout.contains("postgres://app:***@db/x") && stdout.contains("sasl.password"), "{stdout}");
    }
}

#[test]
fn errors_are_json_where_logs_are() {
    let (_, stderr) = ends_with(2, &mut baton(&["--log-format", "json", "status"]));
    let line: serde_json::Value = serde_json::from_str(stderr.trim()).unwrap();
    assert_eq!(line["level"], "ERROR");
    assert!(line["fields"]["message"].as_str().unwrap().contains("set DATABASE_URL"));
}

#[test]
fn a_database_without_an_outbox_says_to_migrate_it() {
    let scratch = Scratch::new();
    let with_url = |args: &[&str]| {
        let mut command = baton(args);
        command.env("DATABASE_URL", &scratch.url).env("KAFKA_BROKERS", "127.0.0.1:1");
        command
    };
    for command in [["status"].as_slice(), &["relay"], &["migrate", "outbox", "--check"]] {
        refuses(1, &mut with_url(command), &["baton migrate outbox"]);
    }
    refuses(1, &mut with_url(&["migrate", "inbox", "--check"]), &["baton migrate inbox"]);
}

#[test]
fn migrating_says_what_it_did_and_may_be_repeated() {
    let scratch = Scratch::new();
    let with_url = |args: &[&str]| {
        let mut command = baton(args);
        command.env("DATABASE_URL", &scratch.url);
        command
    };
    let (stdout, _) = ends_with(0, &mut with_url(&["migrate", "outbox", "--shards", "3"]));
    assert!(stdout.contains("migrations applied") && stdout.contains("3 shards, slot period 6h"), "{stdout}");
    let (stdout, _) = ends_with(0, &mut with_url(&["migrate", "outbox"]));
    assert!(stdout.contains("no migration was pending") && stdout.contains("3 shards"), "{stdout}");
    ends_with(0, &mut with_url(&["migrate", "outbox", "--check"]));

    let (stdout, _) = ends_with(0, &mut with_url(&["status", "--json"]));
    let status: serde_json::Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!(status["shards"].as_array().unwrap().len(), 3);
    assert_eq!(status["pending"], serde_json::json!({"count": 0, "exact": true}));

    execute(&scratch.url, "INSERT INTO outbox.message (topic, key, payload) VALUES ('t', 'k', '1')");
    refuses(1, &mut with_url(&["migrate", "outbox", "--shards", "4"]), &["has 3 shards and cannot get 4"]);
    let (stdout, _) = ends_with(0, &mut with_url(&["status"]));
    assert!(stdout.starts_with("oldest waiting message: ") && stdout.contains("(1 waiting)"), "{stdout}");
}

#[test]
fn a_wrong_password_and_a_missing_database_are_told_apart() {
    let scratch = Scratch::new();
    let nowhere = format!("{}_nowhere", scratch.url);
    refuses(1, baton(&["status"]).env("DATABASE_URL", &nowhere), &["has no such database", "does not exist"]);

    let role = format!("role_{}", scratch.name);
    execute(&scratch.url, &format!("CREATE ROLE \"{role}\" LOGIN PASSWORD 'right'"));
    let (_, address) = scratch.url.rsplit_once('@').unwrap();
    let wrong = format!("postgres://{role}:{SECRET}@{address}");
    let Output { stderr, .. } = baton(&["status"]).env("DATABASE_URL", &wrong).output().unwrap();
    execute(&scratch.url, &format!("DROP ROLE \"{role}\""));
    let stderr = String::from_utf8(stderr).unwrap();
    // A server that trusts everybody lets the role in, and then it may not read.
    assert!(
        stderr.contains("check user and password") || stderr.contains("baton migrate outbox"),
        "{stderr}"
    );
    assert!(!stderr.contains(SECRET), "{stderr}");
    assert!(stderr.matches("password authentication failed").count() <= 1, "said twice: {stderr}");
}

#[test]
fn an_unreachable_broker_is_named() {
    let scratch = Scratch::new();
    ends_with(0, baton(&["migrate", "outbox"]).env("DATABASE_URL", &scratch.url));
    let mut command = baton(&["relay"]);
    command.env("DATABASE_URL", &scratch.url).env("KAFKA_BROKERS", "127.0.0.1:1");
    refuses(1, &mut command, &["kafka at 127.0.0.1:1 did not answer", "KAFKA_BROKERS"]);
}

#[test]
fn sigterm_ends_a_relay_that_is_still_starting_with_0() {
    // A server that takes the connection and never says a word keeps the relay busy starting.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("postgres://app:{SECRET}@{}/x", silent.local_addr().unwrap());
    let mut command = baton(&["relay"]);
    command
        .env("DATABASE_URL", &url)
        .env("KAFKA_BROKERS", "127.0.0.1:1")
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    let relay = command.spawn().unwrap();
    let (mut connection, _) = silent.accept().unwrap();
    // Its first bytes: it is past the point where it set up its signal handlers.
    connection.read_exact(&mut [0; 8]).unwrap();
    let killed = Command::new("kill").args(["-TERM", &relay.id().to_string()]).status().unwrap();
    assert!(killed.success());
    let Output { status, stderr, .. } = relay.wait_with_output().unwrap();
    let stderr = String::from_utf8(stderr).unwrap();
    assert_eq!(status.code(), Some(0), "{stderr}");
    assert!(stderr.contains("SIGTERM: draining"), "{stderr}");
}

//! Bad input: one clear message that says what was wrong and what to do, the right exit code, no password, no panic.

use std::time::Duration;

use baton_tests::{Finished, Harness, Load, Outcome, Place, Schema, Site, test};

const PATIENCE: Duration = Duration::from_secs(40);
const PASSWORD: &str = "hunter2-secret";

/// What must be so of every refusal: its code, its words, one line of error, nothing secret, no panic.
fn refused(ended: &Finished, code: i32, words: &[&str]) {
    assert_eq!(ended.status.code(), Some(code), "{ended}");
    let errors: Vec<&str> = ended.stderr.lines().filter(|line| line.starts_with("error: ")).collect();
    assert_eq!(errors.len(), 1, "one message: {ended}");
    for word in words {
        assert!(errors[0].contains(word), "{word:?} is missing: {ended}");
    }
    for output in [&ended.stdout, &ended.stderr] {
        assert!(!output.contains(PASSWORD), "the password shows: {ended}");
        assert!(!output.contains("panicked"), "{ended}");
    }
}

async fn baton(site: &Site, args: &[&str], env: &[(&str, &str)]) -> Outcome<Finished> {
    let launch = env.iter().fold(site.baton(args)?, |launch, (name, value)| launch.env(name, *value));
    launch.finish(PATIENCE).await
}

#[test]
fn a_wrong_database_url_is_named_without_its_password() {
    test(Duration::from_secs(120), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        let url = |text: &str| text.replace("PW", PASSWORD);
        let mysql = url("mysql://baton:PW@127.0.0.1/x");
        for command in [&["status"][..], &["relay"], &["migrate", "outbox"]] {
            let ended = baton(&site, command, &[("DATABASE_URL", &mysql)]).await?;
            refused(&ended, 2, &["DATABASE_URL", "postgres://"]);
        }
        let ended = baton(&site, &["status"], &[("DATABASE_URL", &format!("postgres://{PASSWORD}"))]).await?;
        assert!(!ended.status.success() && !ended.stderr.contains("panicked"), "{ended}");

        // Nobody listens there. A relay waits a while first: the server may be starting.
        let nobody = url("postgres://baton:PW@127.0.0.1:1/x");
        for command in [&["status"][..], &["relay"]] {
            let ended = baton(&site, command, &[("DATABASE_URL", &nobody)]).await?;
            refused(&ended, 1, &["127.0.0.1:1", "DATABASE_URL"]);
        }

        // The right server, the wrong password and the wrong name.
        let right = &site.place().database_url;
        let (scheme, rest) = right.split_once("://").unwrap_or(("postgres", right));
        let (_, host) = rest.split_once('@').unwrap_or(("", rest));
        let stranger = format!("{scheme}://nobody-at-all:{PASSWORD}@{host}");
        for command in [&["status"][..], &["relay"]] {
            let ended = baton(&site, command, &[("DATABASE_URL", &stranger)]).await?;
            refused(&ended, 1, &["nobody-at-all"]);
        }
        let group = format!("{scheme}://baton_relay@{host}");
        let ended = baton(&site, &["relay"], &[("DATABASE_URL", &group)]).await?;
        assert!(ended.stderr.contains("password") || ended.stderr.contains("a role with LOGIN"), "{ended}");
        let absent = format!("{}_absent", right.split('?').next().unwrap_or(right));
        for command in [&["status"][..], &["relay"]] {
            let ended = baton(&site, command, &[("DATABASE_URL", &absent)]).await?;
            refused(&ended, 1, &["_absent", "does not exist"]);
        }
        Ok(())
    });
}

#[test]
fn an_address_that_is_not_given_is_asked_for() {
    test(Duration::from_secs(60), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        let without = site.baton(&["status"])?.without_env("DATABASE_URL").finish(PATIENCE).await?;
        refused(&without, 2, &["DATABASE_URL"]);
        let without = site.baton(&["relay"])?.without_env("KAFKA_BROKERS").finish(PATIENCE).await?;
        refused(&without, 2, &["KAFKA_BROKERS"]);
        Ok(())
    });
}

#[test]
fn an_unreachable_broker_ends_the_relay_with_the_brokers_name() {
    test(Duration::from_secs(90), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        let topic = site.topic("kept", 1).await?;
        sqlx::query("INSERT INTO outbox.message (topic, key, payload) VALUES ($1, 'k', 'kept')")
            .bind(&topic)
            .execute(site.pool())
            .await?;
        let ended = baton(&site, &["relay"], &[("KAFKA_BROKERS", "127.0.0.1:1")]).await?;
        refused(&ended, 1, &["127.0.0.1:1: nobody listens on port 1", "KAFKA_BROKERS"]);
        let ended = baton(&site, &["relay"], &[("KAFKA_BROKERS", "no-such-host.invalid:9092")]).await?;
        refused(&ended, 1, &["no-such-host.invalid:9092: the name cannot be resolved (DNS"]);
        // Nothing is lost by it.
        baton(&site, &["relay", "--until-empty"], &[]).await?.success()?;
        assert_eq!(site.kafka().count(&topic).await?, 1);
        Ok(())
    });
}

#[test]
fn missing_migrations_are_named_with_the_command_that_brings_them() {
    test(Duration::from_secs(60), Load::Light, async |harness: &mut Harness| {
        let site = harness.site_at(&Place::shared()?, Schema::Empty).await?;
        for command in [&["status"][..], &["relay"], &["migrate", "outbox", "--check"]] {
            refused(&baton(&site, command, &[]).await?, 1, &["baton migrate outbox"]);
        }
        refused(&baton(&site, &["migrate", "inbox", "--check"], &[]).await?, 1, &["baton migrate inbox"]);

        baton(&site, &["migrate", "outbox"], &[]).await?.success()?;
        baton(&site, &["migrate", "inbox"], &[]).await?.success()?;
        baton(&site, &["migrate", "outbox", "--check"], &[]).await?.success()?;
        baton(&site, &["migrate", "inbox", "--check"], &[]).await?.success()?;
        baton(&site, &["relay", "--until-empty"], &[]).await?.success()?;
        Ok(())
    });
}

#[test]
fn another_number_of_shards_is_refused_once_there_are_messages() {
    test(Duration::from_secs(60), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        sqlx::query("INSERT INTO outbox.message (topic, key, payload) VALUES ('t', 'k', 'x')")
            .execute(site.pool())
            .await?;
        let ended = baton(&site, &["migrate", "outbox", "--shards", "16"], &[]).await?;
        refused(&ended, 1, &["8", "16"]);
        baton(&site, &["migrate", "outbox", "--shards", "8"], &[]).await?.success()?;
        baton(&site, &["migrate", "outbox", "--check"], &[]).await?.success()?;
        Ok(())
    });
}

#[test]
fn an_unknown_or_unusable_configuration_key_is_named_with_where_it_stands() {
    test(Duration::from_secs(60), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        let ended = baton(&site, &["relay"], &[("BATON_LEASE__TLL", "3s")]).await?;
        refused(&ended, 2, &["BATON_LEASE__TLL", "BATON_LEASE__TTL"]);
        let ended = baton(&site, &["relay"], &[("BATON_LEASE__TTL", "soon")]).await?;
        refused(&ended, 2, &["BATON_LEASE__TTL", "soon", "30s"]);
        let ended = baton(&site, &["relay"], &[("BATON_LEASE__TTL", "10ms")]).await?;
        refused(&ended, 2, &["BATON_LEASE__TTL", "a lease of 0.01s", "1s"]);
        let ended = baton(&site, &["relay"], &[("BATON_LEASE__TTL", "0s")]).await?;
        refused(&ended, 2, &["lease.ttl", "BATON_LEASE__TTL", "a lease of 0s", "at least 1s"]);
        let ended = baton(&site, &["relay"], &[("BATON_PUBLISH__IN_FLIGHT_ROWS", "1")]).await?;
        refused(&ended, 2, &["publish.page_rows", "2000", "publish.in_flight_rows (1)", "lower the one"]);
        for nowhere in ["nohost.invalid:1", "192.0.2.1:9464"] {
            let ended = baton(&site, &["relay"], &[("BATON_HTTP__LISTEN", nowhere)]).await?;
            refused(
                &ended,
                2,
                &[nowhere, "http.listen", "no address of this machine", "127.0.0.1:9464", "off"],
            );
        }
        // What Kubernetes injects for a Service of that name is none of ours.
        let ended = baton(
            &site,
            &["relay", "--until-empty"],
            &[("BATON_PORT", "tcp://10.0.0.1:80"), ("BATON_SERVICE_HOST", "10.0.0.1")],
        )
        .await?;
        ended.success()?;

        let file = harness.directory().join("wrong.toml");
        let path = file.display().to_string();
        for (text, code, words) in [
            ("[lease]\nttll = \"3s\"\n", 2, ["lease.ttll", "wrong.toml"]),
            ("[lease\n", 2, ["wrong.toml", "wrong.toml"]),
            ("[kafka.properties]\n\"message.timeout.ms\" = 3000\n", 2, ["message.timeout.ms", "overtaken"]),
            ("[kafka.properties]\n\"no.such.setting\" = 1\n", 2, ["no.such.setting", "kafka.properties"]),
        ] {
            std::fs::write(&file, text)?;
            let ended = baton(&site, &["--config", &path, "relay"], &[]).await?;
            refused(&ended, code, &words);
        }
        let ended = baton(&site, &["relay", "--config", "absent.toml"], &[]).await?;
        refused(&ended, 2, &["there is no configuration file absent.toml", "--config"]);
        let ended = site.baton(&["frobnicate"])?.finish(PATIENCE).await?;
        assert_eq!(ended.status.code(), Some(2), "{ended}");
        Ok(())
    });
}

#[test]
fn a_malformed_row_is_refused_in_the_producers_own_transaction_by_a_constraint_that_says_why() {
    test(Duration::from_secs(60), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        for (columns, values, constraint) in [
            ("topic", "'no spaces please'", "topic_must_be_1_to_249_of_letters_digits_dot_underscore_dash"),
            ("topic, key", "'t', repeat('k', 65537)", "key_at_most_64_kib"),
            ("topic, headers", "'t', '[1]'", "headers_must_be_an_object_or_an_array_of_pairs"),
            (
                "topic, headers",
                "'t', '{\"a\": {\"base64\": \"?\"}}'",
                "headers_must_be_an_object_or_an_array_of_pairs",
            ),
            ("topic, headers", "'t', '{\"ce_id\": \"x\"}'", "headers_must_not_name_what_has_a_column"),
            ("topic, idempotency_key", "'t', ''", "idempotency_key_from_1_byte_to_1_kib"),
            ("topic, type", "'t', repeat('x', 1025)", "type_from_1_byte_to_1_kib"),
            ("topic, created_at", "'t', 'infinity'", "created_at_from_1970_to_9999"),
            ("topic, created_at", "'t', '-infinity'", "created_at_from_1970_to_9999"),
            ("topic, created_at", "'t', '1969-12-31 23:59:59.999999+00'", "created_at_from_1970_to_9999"),
            ("topic, created_at", "'t', '10000-01-01 00:00:00+00'", "created_at_from_1970_to_9999"),
        ] {
            let sql = format!("INSERT INTO outbox.message ({columns}) VALUES ({values})");
            let refusal = sqlx::query(sqlx::AssertSqlSafe(sql)).execute(site.pool()).await.err();
            let database = refusal.as_ref().and_then(|error| error.as_database_error());
            assert_eq!(database.and_then(|error| error.constraint()), Some(constraint), "{values}");
        }
        Ok(())
    });
}

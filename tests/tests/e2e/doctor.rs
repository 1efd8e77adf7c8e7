//! `baton doctor` finds what was broken, each with its advice, and nothing in a healthy site.

use std::time::Duration;

use baton_tests::{Failure, Harness, Load, Outcome, Site, eventually, fail, figure, test};
use serde_json::Value;
use sqlx::{AssertSqlSafe, Connection, Executor};

use crate::endurance::Role;

const PATIENCE: Duration = Duration::from_secs(30);

#[test]
fn a_healthy_site_has_no_warnings_and_no_errors() {
    test(Duration::from_secs(60), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        let topic = site.topic("healthy", 1).await?;
        site.pool()
            .execute(AssertSqlSafe(format!(
                "INSERT INTO outbox.message (topic, key) VALUES ('{topic}', 'a'), ('{topic}', 'b')"
            )))
            .await?;
        let mut relay = site.relay("relay")?.start()?;
        site.emptied().await?;
        let (code, findings) = examine(&site, &["--older-than", "1h"]).await?;
        let ill: Vec<&Value> = findings
            .iter()
            .filter(|f| !["ok", "note"].contains(&f["level"].as_str().unwrap_or("")))
            .collect();
        assert!(ill.is_empty() && code == Some(0), "exit {code:?}: {ill:#?}");
        for check in [
            "postgres",
            "pooler",
            "migrations",
            "privileges",
            "recovery",
            "guards",
            "cursors",
            "leases",
            "relays",
            "shards",
            "kafka",
        ] {
            assert!(
                findings.iter().any(|f| f["check"] == check && f["level"] == "ok"),
                "{check} is missing: {findings:#?}"
            );
        }
        let lines = site.baton(&["doctor", "--older-than", "1h"])?.finish(PATIENCE).await?.success()?;
        assert!(lines.contains("0 errors, 0 warnings"), "{lines}");
        assert!(relay.terminate(PATIENCE).await?.success(), "{}", relay.stderr());
        Ok(())
    });
}

#[test]
fn what_is_ill_is_found_each_with_its_advice_the_errors_first() {
    test(Duration::from_secs(60), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        let narrow = site
            .topic_with(
                "narrow",
                1,
                &[
                    ("max.message.bytes", "10000"),
                    ("cleanup.policy", "compact"),
                    ("unclean.leader.election.enable", "true"),
                    ("message.timestamp.type", "LogAppendTime"),
                    ("min.insync.replicas", "2"),
                ],
            )
            .await?;
        let missing = site.topic_name("missing");
        let keys = site.key_of_each_shard().await?;
        for (topic, key) in [(&narrow, &keys[0]), (&missing, &keys[1])] {
            sqlx::query("INSERT INTO outbox.message (topic, key) VALUES ($1, $2)")
                .bind(topic)
                .bind(key)
                .execute(site.pool())
                .await?;
        }
        // A relay parks what it cannot publish, before the sequence is broken.
        let mut relay = site.relay("relay")?.start()?;
        eventually("the refused message to be written down", PATIENCE, async || {
            let count: i64 =
                sqlx::query_scalar("SELECT count(*) FROM outbox.parked").fetch_one(site.pool()).await?;
            if count > 0 { Ok(()) } else { fail!("nothing is parked") }
        })
        .await?;
        relay.kill().await?;
        // Before anything is prepared: that keeps its lock on the sequence.
        site.pool()
            .execute(
                "ALTER SEQUENCE outbox.message_position_seq CACHE 100;
                 UPDATE outbox.settings SET system_identifier = 7;
                 UPDATE outbox.shard SET owner = 'ghost', lease_until = '9999-12-31' WHERE shard = 3;
                 INSERT INTO outbox.relay (owner, live_until) VALUES ('ghost', 'infinity')",
            )
            .await?;
        let gid = site.topic_name("orphan");
        let mut orphan = site.connect().await?;
        orphan
            .execute("BEGIN; INSERT INTO outbox.message (topic, key) VALUES ('never-published', 'orphan')")
            .await?;
        orphan.execute(AssertSqlSafe(format!("PREPARE TRANSACTION '{gid}'"))).await?;
        orphan.close().await?;
        let mut open = site.connect().await?;
        open.execute("SET application_name = 'forgotten'; BEGIN; CREATE TABLE idle (n int)").await?;
        let pid: i32 = sqlx::query_scalar("SELECT pg_backend_pid()").fetch_one(&mut open).await?;

        let (code, findings) = examine(&site, &["--older-than", "0s"]).await?;
        assert_eq!(code, Some(1), "{findings:#?}");
        for (check, level, found, advice) in [
            ("guards", "error", "has CACHE 100", "baton rebase"),
            ("guards", "error", "belongs to the cluster 7", "baton rebase"),
            ("leases", "error", "shard 3 ends at 9999-12-31", "UPDATE outbox.shard SET owner = NULL"),
            (
                "leases",
                "warning",
                "the relay ghost counts as alive",
                "DELETE FROM outbox.relay WHERE owner = 'ghost'",
            ),
            ("topics", "error", &format!("the topic {missing} is not there"), &format!("create {missing}")),
            (
                "parked",
                "warning",
                "1 messages are parked, none of them dead (1 unknown_topic)",
                "baton parked list",
            ),
            (
                "topics",
                "warning",
                &format!("the topic {narrow} takes batches of at most 10000"),
                "batch.size",
            ),
            ("topics", "warning", "may elect a leader that lacks", "unclean.leader.election.enable"),
            ("topics", "error", "wants 2 replicas in sync and has 1", "min.insync.replicas"),
            ("topics", "note", "is compacted", "a key"),
            ("topics", "note", "that of its arrival", "relay.ce_time"),
            ("topics", "note", "has one replica", "three replicas"),
            ("transactions", "warning", &format!("pid {pid}"), &format!("pg_terminate_backend({pid})")),
            ("transactions", "warning", "\"forgotten\"", "pg_terminate_backend"),
            ("prepared transactions", "warning", &gid, &format!("ROLLBACK PREPARED '{gid}'")),
        ] {
            let seen = findings.iter().any(|f| {
                f["check"] == check
                    && f["level"] == level
                    && f["found"].as_str().is_some_and(|text| text.contains(found))
                    && f["advice"].as_str().is_some_and(|text| text.contains(advice))
            });
            assert!(seen, "{check}, {level}, {found:?}, {advice:?} is missing: {findings:#?}");
        }
        let levels: Vec<usize> = findings
            .iter()
            .filter_map(|f| ["error", "warning", "note", "ok"].iter().position(|level| f["level"] == *level))
            .collect();
        assert!(levels.is_sorted() && levels.len() == findings.len(), "{findings:#?}");
        figure(&format!(
            "baton doctor found {} errors in an ill site",
            levels.iter().filter(|l| **l == 0).count()
        ));
        sqlx::raw_sql(AssertSqlSafe(format!("ROLLBACK PREPARED '{gid}'"))).execute(site.pool()).await?;
        open.close().await?;
        Ok(())
    });
}

#[test]
fn lost_settings_and_lost_cursors_are_found_and_what_is_advised_mends_them() {
    test(Duration::from_secs(60), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        let topic = site.topic("bare", 1).await?;
        for key in site.key_of_each_shard().await? {
            sqlx::query("INSERT INTO outbox.message (topic, key) VALUES ($1, $2)")
                .bind(&topic)
                .bind(key)
                .execute(site.pool())
                .await?;
        }
        site.pool()
            .execute("DELETE FROM outbox.settings; DELETE FROM outbox.advance WHERE shard = 3; DELETE FROM outbox.fence WHERE shard = 5")
            .await?;
        let (code, findings) = examine(&site, &[]).await?;
        assert_eq!(code, Some(1), "{findings:#?}");
        let advice = |findings: &[Value], check: &str, found: &str| -> Outcome<String> {
            let seen = findings
                .iter()
                .find(|f| f["check"] == check && f["level"] == "error" && text(f, "found").contains(found));
            match seen {
                Some(finding) => Ok(text(finding, "advice").to_owned()),
                None => fail!("{check}, {found:?} is missing: {findings:#?}"),
            }
        };
        let settings = advice(&findings, "settings", "outbox.settings has no row")?;
        let cursors = advice(&findings, "cursors", "shards without a cursor: 3, 5:")?;
        assert!(cursors.contains("`baton rebase`"), "{cursors}");
        let status = site.baton(&["status"])?.finish(PATIENCE).await?.success()?;
        assert!(status.contains(&settings), "{status}");
        let refused = site.relay("relay")?.finish(PATIENCE).await?;
        assert!(refused.status.code() == Some(1) && refused.stderr.contains(&settings), "{refused}");

        // Word for word: a statement, then a command.
        let said: Vec<&str> = settings.split('`').skip(1).step_by(2).collect();
        let [statement, command] = said[..] else { fail!("not a statement and a command: {settings}") };
        site.pool().execute(AssertSqlSafe(statement.to_owned())).await?;
        let words: Vec<&str> = command.split(' ').skip(1).collect();
        site.baton(&words)?.finish(PATIENCE).await?.success()?;
        site.baton(&["relay", "--until-empty"])?.finish(PATIENCE).await?.success()?;
        assert_eq!(site.kafka().count(&topic).await?, 8);
        let (_, findings) = examine(&site, &["--older-than", "1h"]).await?;
        let ill: Vec<&Value> = findings.iter().filter(|f| f["level"] == "error").collect();
        assert!(ill.is_empty(), "{ill:#?}");
        Ok(())
    });
}

#[test]
fn a_transaction_of_another_database_holds_back_neither_vacuum_nor_publishing_here_and_is_not_blamed() {
    test(Duration::from_secs(60), Load::Light, async |harness: &mut Harness| {
        let (site, elsewhere) = (harness.site().await?, harness.site().await?);
        let topic = site.topic("beside", 1).await?;
        let mut open = elsewhere.connect().await?;
        open.execute("BEGIN; CREATE TABLE idle (n int)").await?;
        let (pid, xid): (i32, i64) =
            sqlx::query_as("SELECT pg_backend_pid(), pg_current_xact_id()::text::bigint")
                .fetch_one(&mut open)
                .await?;
        // What is true of it: a snapshot goes back to it, vacuum does not.
        let mut session = site.connect().await?;
        session.execute("CREATE TABLE garbage AS SELECT generate_series(1, 10000) n").await?;
        session.execute("DELETE FROM garbage").await?;
        let xmin: i64 = sqlx::query_scalar("SELECT pg_snapshot_xmin(pg_current_snapshot())::text::bigint")
            .fetch_one(&mut session)
            .await?;
        assert!(xmin <= xid, "the snapshot begins at {xmin}, after {xid}, which runs");
        eventually("vacuum to clear away what is newer than it", PATIENCE, async || {
            session.execute("VACUUM garbage").await?;
            let size: i64 =
                sqlx::query_scalar("SELECT pg_relation_size('garbage')").fetch_one(&mut session).await?;
            if size == 0 { Ok(()) } else { fail!("{size} bytes are left") }
        })
        .await?;
        sqlx::query("INSERT INTO outbox.message (topic, key) VALUES ($1, 'k')")
            .bind(&topic)
            .execute(&mut session)
            .await?;
        site.baton(&["relay", "--until-empty"])?.finish(PATIENCE).await?.success()?;
        assert_eq!(site.kafka().count(&topic).await?, 1);

        let level = async |site: &Site| -> Outcome<String> {
            let (_, findings) = examine(site, &["--older-than", "0s"]).await?;
            let of_it = findings.iter().find(|f| text(f, "found").contains(&format!("pid {pid},")));
            match of_it {
                Some(finding) => Ok(text(finding, "level").to_owned()),
                None => fail!("it is not found: {findings:#?}"),
            }
        };
        assert_eq!(level(&site).await?, "note");
        assert_eq!(level(&elsewhere).await?, "warning");
        open.close().await?;
        session.close().await?;
        Ok(())
    });
}

fn text<'a>(finding: &'a Value, member: &str) -> &'a str {
    finding[member].as_str().unwrap_or_default()
}

#[test]
fn without_broker_database_or_migrations_it_says_so_and_examines_the_rest() {
    test(Duration::from_secs(90), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        let nobody = "127.0.0.1:1";
        let nowhere = site.place().with_postgres_address(nobody)?.database_url;
        let of = async |launch: baton_tests::Launch| -> Outcome<(Option<i32>, Vec<Value>)> {
            let ended = launch.args(["--json"]).finish(Duration::from_secs(60)).await?;
            Ok((
                ended.status.code(),
                serde_json::from_str(&ended.stdout).map_err(|_| Failure::new(ended.to_string()))?,
            ))
        };
        let level = |findings: &[Value], check: &str| -> Vec<String> {
            let of_check = findings.iter().filter(|f| f["check"] == check);
            of_check.map(|f| format!("{}: {}", f["level"].as_str().unwrap_or(""), f["found"])).collect()
        };
        let doctor = site.baton(&["doctor"])?.env("DATABASE_URL", nowhere);
        let (code, findings) = of(doctor).await?;
        assert_eq!(code, Some(1), "{findings:#?}");
        assert!(level(&findings, "postgres")[0].starts_with("error: "), "{findings:#?}");
        assert!(level(&findings, "kafka")[0].starts_with("ok: "), "{findings:#?}");

        let (code, findings) = of(site.baton(&["doctor"])?.env("KAFKA_BROKERS", nobody)).await?;
        assert_eq!(code, Some(1), "{findings:#?}");
        assert!(level(&findings, "kafka")[0].contains("nobody listens on port 1"), "{findings:#?}");
        assert!(level(&findings, "guards")[0].starts_with("ok: "), "{findings:#?}");

        let bare = site.baton(&["doctor"])?.without_env("DATABASE_URL").without_env("KAFKA_BROKERS");
        let (code, findings) = of(bare).await?;
        assert_eq!(code, Some(1), "{findings:#?}");
        assert!(level(&findings, "postgres")[0].contains("not given"), "{findings:#?}");
        assert!(level(&findings, "kafka")[0].contains("not given"), "{findings:#?}");

        Role::with(&site, "IN ROLE baton_operator, pg_read_all_stats", async |role: &Role| {
            let (code, findings) = of(site.baton(&["doctor"])?.env("DATABASE_URL", &role.url)).await?;
            assert_eq!(code, Some(0), "{findings:#?}");
            assert!(level(&findings, "privileges")[0].starts_with("note: "), "{findings:#?}");
            for check in ["guards", "cursors", "leases", "shards", "topics"] {
                assert!(level(&findings, check)[0].starts_with("ok: "), "{check}: {findings:#?}");
            }
            Ok(())
        })
        .await?;

        site.pool().execute("DROP SCHEMA outbox CASCADE").await?;
        let (code, findings) = of(site.baton(&["doctor"])?).await?;
        assert_eq!(code, Some(1), "{findings:#?}");
        let migrations = level(&findings, "migrations");
        assert!(migrations.len() == 1 && migrations[0].contains("has no outbox"), "{findings:#?}");
        assert_eq!(level(&findings, "topics"), Vec::<String>::new(), "nothing is known of them");
        Ok(())
    });
}

/// What `baton doctor --json` finds, without what other tests of this server have open.
async fn examine(site: &Site, args: &[&str]) -> Outcome<(Option<i32>, Vec<Value>)> {
    let ended = site.baton(&["doctor", "--json"])?.args(args).finish(PATIENCE).await?;
    let findings: Vec<Value> =
        serde_json::from_str(&ended.stdout).map_err(|_| Failure::new(ended.to_string()))?;
    Ok((ended.status.code(), findings))
}

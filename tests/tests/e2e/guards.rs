//! What an administrator or a restore can do to an outbox that would lose or reorder messages without a word: a relay refuses
//! to work on it and says what mends it, and once that is done nothing is lost.

use std::collections::BTreeSet;
use std::time::Duration;

use baton_tests::http::address_of;
use baton_tests::{
    Harness, Load, Outcome, OwnStack, Place, Process, Schema, Site, Standby, eventually, fail, figure, stays,
    test,
};
use sqlx::{AssertSqlSafe, Connection, Executor};

use crate::seen::metrics;

const PATIENCE: Duration = Duration::from_secs(30);

/// What is done to an outbox that was published to its end, and what the refusal must say.
struct Provocation {
    what: &'static str,
    sql: &'static str,
    words: &'static [&'static str],
}

const PROVOCATIONS: &[Provocation] = &[
    Provocation {
        what: "ALTER SEQUENCE … CACHE 100",
        sql: "ALTER SEQUENCE outbox.message_position_seq CACHE 100",
        words: &["has CACHE 100:", "`baton rebase`"],
    },
    Provocation {
        what: "ALTER SEQUENCE … INCREMENT BY 5 CYCLE",
        sql: "ALTER SEQUENCE outbox.message_position_seq INCREMENT BY 5 CYCLE",
        words: &["INCREMENT BY 5, CYCLE:", "`baton rebase`"],
    },
    Provocation {
        what: "ALTER SEQUENCE … RESTART WITH 1",
        sql: "ALTER SEQUENCE outbox.message_position_seq RESTART WITH 1",
        words: &["gives out", "a cursor is at", "`baton rebase`"],
    },
    Provocation {
        // What is enqueued afterwards lies below cursors at first, and then the sequence is ahead of everything again.
        what: "the sequence set back by twelve, and ahead again before a relay looks",
        sql: "SELECT setval('outbox.message_position_seq', max(position) - 12) FROM outbox.cursor",
        words: &["cursor had passed", "`baton rebase`"],
    },
    Provocation {
        what: "a database of another cluster (its system_identifier)",
        sql: "UPDATE outbox.settings SET system_identifier = 7",
        words: &["belongs to the cluster 7", "`baton rebase`"],
    },
    Provocation {
        what: "a cursor from a cluster that was further (its ceiling)",
        sql: "INSERT INTO outbox.advance (shard, number, generation, position, snapshot, ceiling)
              SELECT shard, number + 1, generation, position, snapshot, (ceiling::text::bigint + 1000000000)::text::xid8
              FROM outbox.cursor",
        words: &["a cursor names the transaction", "`baton rebase`"],
    },
    Provocation {
        what: "a message from a cluster that was further (its xid)",
        sql: "INSERT INTO outbox.message (xid, topic, key)
              SELECT (pg_current_xact_id()::text::bigint + 1000000000)::text::xid8, topic, key
              FROM outbox.message LIMIT 1",
        words: &["a message names the transaction", "`baton rebase`"],
    },
];

#[test]
fn each_guard_refuses_at_start_with_what_mends_it_and_then_nothing_is_lost() {
    test(Duration::from_secs(120), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        let topic = site.topic("guarded", 1).await?;
        // Sessions that live through all of it, as a service's do: each may keep numbers that it has taken.
        let (mut one, mut other) = (site.connect().await?, site.connect().await?);
        let mut expected = 0;
        for Provocation { what, sql, words } in PROVOCATIONS {
            expected += enqueue(&site, &mut one, &topic).await?;
            site.baton(&["relay", "--until-empty"])?.finish(PATIENCE).await?.success()?;
            site.pool().execute(*sql).await?;
            expected += enqueue(&site, &mut one, &topic).await? + enqueue(&site, &mut other, &topic).await?;
            let ended = site.relay("relay")?.finish(PATIENCE).await?;
            let error = the_error(&ended.stderr)?;
            assert_eq!(ended.status.code(), Some(1), "{ended}");
            for word in *words {
                assert!(error.contains(word), "{what}: {word:?} is missing: {ended}");
            }
            figure(&format!("must show 3: {what}: exit 1: {error}"));
            let status = site.baton(&["status"])?.finish(PATIENCE).await?.success()?;
            assert!(status.starts_with("nothing is published: "), "{what}: {status}");
            for word in *words {
                assert!(status.contains(word), "{what}: {word:?} is missing: {status}");
            }
            mend(&site, &error).await?;
            expected += enqueue(&site, &mut other, &topic).await?;
            site.baton(&["relay", "--until-empty"])?.finish(PATIENCE).await?.success()?;
            let status = site.baton(&["status"])?.finish(PATIENCE).await?.success()?;
            assert!(status.starts_with("oldest waiting message"), "{what}: {status}");
            let published = ids_on(&site, &topic).await?;
            let committed = ids_in(&site).await?;
            let lost = committed.difference(&published).count();
            assert_eq!(lost, 0, "{what}: lost after it was mended");
            figure(&format!("must show 3: … mended as it says: {} published, 0 lost", published.len()));
        }
        assert!(expected > 100, "{expected} enqueued");
        one.close().await?;
        other.close().await?;
        Ok(())
    });
}

#[test]
fn an_outbox_that_is_not_migrated_and_a_finite_message_timeout_are_refused() {
    test(Duration::from_secs(60), Load::Light, async |harness: &mut Harness| {
        let site = harness.site_at(&Place::shared()?, Schema::Empty).await?;
        let ended = site.relay("relay")?.finish(PATIENCE).await?;
        assert_eq!(ended.status.code(), Some(1), "{ended}");
        let error = the_error(&ended.stderr)?;
        assert!(error.contains("run `baton migrate outbox`"), "{ended}");
        figure(&format!("must show 3: no migration: exit 1: {error}"));
        site.baton(&["migrate", "outbox"])?.finish(PATIENCE).await?.success()?;
        site.baton(&["relay", "--until-empty"])?.finish(PATIENCE).await?.success()?;

        let configuration = harness.directory().join("finite.toml");
        std::fs::write(&configuration, "[kafka.properties]\n\"message.timeout.ms\" = \"30000\"\n")?;
        let ended = site.relay("finite")?.arg("--config").arg(&configuration).finish(PATIENCE).await?;
        assert_eq!(ended.status.code(), Some(2), "{ended}");
        let error = the_error(&ended.stderr)?;
        assert!(error.contains("message.timeout.ms") && error.contains("overtaken"), "{ended}");
        figure(&format!("must show 3: message.timeout.ms = 30000: exit 2: {error}"));
        Ok(())
    });
}

#[test]
fn a_standby_is_refused_and_works_once_it_is_the_primary() {
    test(Duration::from_secs(180), Load::Alone, async |harness: &mut Harness| {
        let stack = OwnStack::up().await?;
        let site = harness.site_at(stack.place(), Schema::Both { shards: 8 }).await?;
        let topic = site.topic("standby", 1).await?;
        let mut standby = Standby::of(&stack, harness.directory()).await?;
        let mut session = site.connect().await?;
        enqueue(&site, &mut session, &topic).await?;
        session.close().await?;
        standby.follows().await?;
        let there = site.place().with_postgres_address(standby.place().postgres_address()?)?.database_url;
        let ended = site.relay("relay")?.env("DATABASE_URL", there).finish(PATIENCE).await?;
        assert_eq!(ended.status.code(), Some(1), "{ended}");
        let error = the_error(&ended.stderr)?;
        assert!(error.contains("in recovery") && error.contains("point outbox.database_url"), "{ended}");
        figure(&format!("must show 3: a standby: exit 1: {error}"));
        stack.kill_postgres().await?;
        standby.take_over().await?;
        site.baton(&["relay", "--until-empty"])?.finish(PATIENCE).await?.success()?;
        assert_eq!(ids_on(&site, &topic).await?, ids_in(&site).await?);
        drop(standby);
        stack.repair().await
    });
}

#[test]
fn a_sequence_that_is_changed_under_a_running_relay_stops_it_until_it_is_mended() {
    test(Duration::from_secs(120), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        let topic = site.topic("watched", 1).await?;
        let mut session = site.connect().await?;
        let mut relay = site.relay("relay")?.env("BATON_HTTP__LISTEN", "127.0.0.1:0").start()?;
        let address = address_of(&relay).await?;
        enqueue(&site, &mut session, &topic).await?;
        site.emptied().await?;
        assert!(metrics(&address).await?.value("baton_guard_violations")? < 0.5);

        site.pool().execute("ALTER SEQUENCE outbox.message_position_seq CACHE 100").await?;
        let error = refuses(&relay, "CACHE 100").await?;
        figure(&format!("must show 3: CACHE 100 under a running relay: it stays, and says: {error}"));
        assert!(metrics(&address).await?.value("baton_guard_violations")? > 0.5);
        let published = site.kafka().count(&topic).await?;
        enqueue(&site, &mut session, &topic).await?;
        stays("publishing to stand still", Duration::from_secs(1), async || {
            let count = site.kafka().count(&topic).await?;
            if count == published { Ok(()) } else { fail!("{count} published, {published} before") }
        })
        .await?;
        assert_eq!(relay.try_exited()?, None, "the relay ended: {}", relay.stderr());
        // Mended by hand it looks sound; what was enqueued meanwhile may lie below cursors all the same.
        site.pool().execute("ALTER SEQUENCE outbox.message_position_seq CACHE 1").await?;
        enqueue(&site, &mut session, &topic).await?;
        stays("publishing to stand still until a rebase", Duration::from_secs(2), async || {
            let count = site.kafka().count(&topic).await?;
            if count == published { Ok(()) } else { fail!("{count} published, {published} before") }
        })
        .await?;
        let other = site.relay("other")?.finish(PATIENCE).await?;
        assert_eq!(other.status.code(), Some(1), "{other}");
        let refused = the_error(&other.stderr)?;
        assert!(refused.contains("CACHE 100") && refused.contains("cannot be seen any more"), "{other}");
        assert!(relay.terminate(PATIENCE).await?.success(), "{}", relay.stderr());
        mend(&site, &error).await?;
        let mut relay = site.relay("relay")?.start()?;
        eventually("it to publish again", PATIENCE, async || {
            if ids_on(&site, &topic).await? == ids_in(&site).await? { Ok(()) } else { fail!("some wait") }
        })
        .await?;

        site.pool().execute("ALTER SEQUENCE outbox.message_position_seq RESTART WITH 1").await?;
        // Below every cursor.
        enqueue(&site, &mut session, &topic).await?;
        let error = refuses(&relay, "gives out").await?;
        figure(&format!("must show 3: RESTART WITH 1 under a running relay: it stays, and says: {error}"));
        // Ahead of every cursor again, it looks sound.
        let published = site.kafka().count(&topic).await?;
        let ahead = async || -> Outcome<bool> {
            let ahead = "SELECT (SELECT last_value FROM outbox.message_position_seq) > max(position) FROM outbox.cursor";
            Ok(sqlx::query_scalar(ahead).fetch_one(site.pool()).await?)
        };
        while !ahead().await? {
            enqueue(&site, &mut session, &topic).await?;
        }
        let said = relay.stderr().matches("cursor had passed").count();
        eventually("it to refuse all the same", PATIENCE, async || {
            let now = relay.stderr().matches("cursor had passed").count();
            if now > said + 1 { Ok(()) } else { fail!("{now} refusals, {said} before") }
        })
        .await?;
        // Another one, which knows nothing of what this one saw.
        let other = site.relay("other")?.finish(PATIENCE).await?;
        assert_eq!(other.status.code(), Some(1), "{other}");
        assert!(the_error(&other.stderr)?.contains("cursor had passed"), "{other}");
        assert_eq!(site.kafka().count(&topic).await?, published, "it published past what lies below cursors");
        assert_eq!(relay.try_exited()?, None, "the relay ended: {}", relay.stderr());
        assert!(relay.terminate(PATIENCE).await?.success(), "{}", relay.stderr());
        mend(&site, &error).await?;
        site.baton(&["relay", "--until-empty"])?.finish(PATIENCE).await?.success()?;
        assert_eq!(ids_on(&site, &topic).await?, ids_in(&site).await?);
        session.close().await?;
        Ok(())
    });
}

#[test]
fn what_a_relay_found_stops_every_relay_until_a_rebase_though_nobody_could_see_it_any_more() {
    test(Duration::from_secs(60), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        let topic = site.topic("noticed", 1).await?;
        let mut session = site.connect().await?;
        for _ in 0..3 {
            enqueue(&site, &mut session, &topic).await?;
        }
        // All of it waits, so nothing comes to lie below a cursor: positions are given out twice above them.
        let back = "SELECT setval('outbox.message_position_seq', max(position) - 12) FROM outbox.message";
        site.pool().execute(back).await?;
        let first = site.relay("first")?.finish(PATIENCE).await?;
        assert!(the_error(&first.stderr)?.contains("a message is at"), "{first}");
        for _ in 0..3 {
            enqueue(&site, &mut session, &topic).await?;
        }
        for command in [&["relay"] as &[&str], &["status"], &["doctor"]] {
            let ended = site.baton(command)?.finish(PATIENCE).await?;
            let said = format!("{}{}", ended.stdout, ended.stderr);
            assert!(said.contains("a relay stopped because the sequence"), "{ended}");
        }
        assert_eq!(site.kafka().count(&topic).await?, 0);
        let planned = site.baton(&["rebase", "--dry-run"])?.finish(PATIENCE).await?.success()?;
        assert!(planned.contains("a relay stopped and wrote down: the sequence"), "{planned}");
        site.baton(&["rebase"])?.finish(PATIENCE).await?.success()?;
        site.baton(&["relay", "--until-empty"])?.finish(PATIENCE).await?.success()?;
        assert_eq!(ids_on(&site, &topic).await?, ids_in(&site).await?);
        session.close().await?;
        Ok(())
    });
}

#[test]
fn services_that_share_a_database_share_its_outbox_and_cannot_read_each_others_messages() {
    test(Duration::from_secs(60), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        let topic = site.topic("shared", 1).await?;
        // Two of the role's members, as far as Postgres lets them: a session that has taken the role on.
        let (mut orders, mut billing) = (site.connect().await?, site.connect().await?);
        for session in [&mut orders, &mut billing] {
            session.execute("SET ROLE baton_producer").await?;
            for key in ["a", "b", "c"] {
                sqlx::query(
                    "INSERT INTO outbox.message (topic, key, payload) VALUES ($1, $2, 'secret') RETURNING id",
                )
                .bind(&topic)
                .bind(key)
                .execute(&mut *session)
                .await?;
            }
            for column in ["payload", "key", "headers", "topic"] {
                let read = format!("SELECT {column} FROM outbox.message");
                let refused = sqlx::query(AssertSqlSafe(read)).fetch_all(&mut *session).await;
                let code = refused.err().and_then(|e| Some(e.as_database_error()?.code()?.into_owned()));
                assert_eq!(code.as_deref(), Some("42501"), "a producer may read {column}");
            }
        }
        site.baton(&["relay", "--until-empty"])?.finish(PATIENCE).await?.success()?;
        assert_eq!(ids_on(&site, &topic).await?.len(), 6);
        orders.close().await?;
        billing.close().await?;
        Ok(())
    });
}

/// The one error that a command ended with.
fn the_error(stderr: &str) -> Outcome<String> {
    let mut errors = stderr.lines().filter_map(|line| line.strip_prefix("error: "));
    match (errors.next(), errors.next()) {
        (Some(error), None) => Ok(error.to_owned()),
        _ => fail!("not one error: {stderr}"),
    }
}

/// Waits for an ERROR of a running relay with this word in it.
async fn refuses(relay: &Process, word: &str) -> Outcome<String> {
    eventually(format!("an ERROR about {word}"), PATIENCE, async || {
        let log = relay.stderr();
        match log.lines().find(|line| line.contains("ERROR") && line.contains(word)) {
            Some(line) => Ok(line.to_owned()),
            None => fail!("none in: {log}"),
        }
    })
    .await
}

/// Does what the message says, word for word.
async fn mend(site: &Site, error: &str) -> Outcome {
    let mut done = 0;
    for command in error.split('`').skip(1).step_by(2) {
        let Some(command) = command.strip_prefix("baton ") else { fail!("not a command of ours: {command}") };
        let words: Vec<&str> = command.split(' ').collect();
        // A relay that was stopped while it refused has let its leases run out.
        let said = eventually(format!("baton {command}"), PATIENCE, async || {
            site.baton(&words)?.finish(PATIENCE).await?.success()
        })
        .await?;
        figure(&format!("must show 3: … `baton {command}` says: {}", said.trim().replace('\n', "; ")));
        done += 1;
    }
    if done == 0 { fail!("it does not say what to do: {error}") } else { Ok(()) }
}

/// A message for each shard, in a transaction of its own each. How many.
async fn enqueue(site: &Site, session: &mut sqlx::PgConnection, topic: &str) -> Outcome<usize> {
    let keys = site.key_of_each_shard().await?;
    for key in &keys {
        sqlx::query("INSERT INTO outbox.message (topic, key) VALUES ($1, $2)")
            .bind(topic)
            .bind(key)
            .execute(&mut *session)
            .await?;
    }
    Ok(keys.len())
}

async fn ids_in(site: &Site) -> Outcome<BTreeSet<String>> {
    let ids: Vec<String> =
        sqlx::query_scalar("SELECT id::text FROM outbox.message").fetch_all(site.pool()).await?;
    Ok(ids.into_iter().collect())
}

async fn ids_on(site: &Site, topic: &str) -> Outcome<BTreeSet<String>> {
    let records = site.kafka().records(topic).await?;
    Ok(records.iter().filter_map(|record| record.header("ce_id").map(str::to_owned)).collect())
}

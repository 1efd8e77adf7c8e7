//! Bringing databases up to date, and telling what state they are in.

use std::time::Duration;

use baton_migrations::{Error, Line, State, check, migrate_inbox, migrate_outbox};
use sqlx::{AssertSqlSafe, Connection as _, Executor as _, PgConnection};

use crate::fixture::{self, refusal, value};

#[tokio::test]
async fn an_empty_database_is_missing_both_lines_and_current_after_migrating() {
    fixture::empty(async |db| {
        let mut c = db.connect().await;
        for line in [Line::Outbox, Line::Inbox] {
            assert_eq!(check(&mut c, line).await.unwrap(), State::Missing);
        }

        let outbox = migrate_outbox(&mut c, None, None).await.unwrap();
        let inbox = migrate_inbox(&mut c).await.unwrap();

        assert_eq!((outbox.line, outbox.versions), (Line::Outbox, fixture::outbox_versions()));
        assert_eq!((inbox.line, inbox.versions, inbox.settings), (Line::Inbox, vec![1, 2, 3, 4], None));
        let settings = outbox.settings.unwrap();
        assert_eq!((settings.shards.get(), settings.slot_period), (8, Duration::from_secs(6 * 3600)));
        for line in [Line::Outbox, Line::Inbox] {
            assert_eq!(check(&mut c, line).await.unwrap(), State::Current);
        }
        let books: Vec<String> = sqlx::query_scalar(
            "SELECT schemaname::text FROM pg_tables WHERE tablename = '_migrations' ORDER BY 1",
        )
        .fetch_all(&mut c)
        .await
        .unwrap();
        assert_eq!(books, ["inbox", "outbox"]);
    })
    .await;
}

#[tokio::test]
async fn a_migration_that_changes_something_leaves_an_audit_row_and_another_leaves_none() {
    fixture::empty(async |db| {
        let mut c = db.connect().await;
        for period in [None, None, Some(Duration::from_secs(3600)), Some(Duration::from_secs(3600))] {
            migrate_outbox(&mut c, None, period).await.unwrap();
            migrate_inbox(&mut c).await.unwrap();
        }

        let outbox: Vec<(String, i64, serde_json::Value)> =
            sqlx::query_as("SELECT command, affected, arguments FROM outbox.audit ORDER BY id")
                .fetch_all(&mut c)
                .await
                .unwrap();
        assert_eq!(outbox.len(), 2, "{outbox:?}");
        let versions = i64::try_from(fixture::outbox_versions().len()).unwrap();
        assert_eq!((outbox[0].0.as_str(), outbox[0].1), ("migrate outbox", versions));
        assert_eq!(outbox[1].2["slot_period_seconds"], 3600.0);
        let inbox: i64 =
            value(&mut c, "SELECT count(*) FROM inbox.audit WHERE command = 'migrate inbox'").await;
        assert_eq!(inbox, 1);
    })
    .await;
}

#[tokio::test]
async fn migrating_again_writes_nothing() {
    fixture::empty(async |db| {
        let mut c = db.connect().await;
        let first = migrate_outbox(&mut c, None, None).await.unwrap();
        migrate_inbox(&mut c).await.unwrap();
        let wal: String = value(&mut c, "SELECT pg_current_xact_id()::text").await;

        let again = migrate_outbox(&mut c, first.settings.map(|s| s.shards), None).await.unwrap();
        let inbox = migrate_inbox(&mut c).await.unwrap();

        assert_eq!((again.versions, again.roles, again.settings), (vec![], vec![], first.settings));
        assert_eq!((inbox.versions, inbox.roles), (vec![], vec![]));
        let after: String = value(&mut c, "SELECT pg_current_xact_id()::text").await;
        let written = "SELECT count(*) FROM pg_class WHERE xmin::text::bigint > $1::bigint";
        let written: i64 = sqlx::query_scalar(written).bind(&wal).fetch_one(&mut c).await.unwrap();
        assert_eq!(written, 0, "no catalogue row was written between transactions {wal} and {after}");
    })
    .await;
}

#[tokio::test]
async fn of_several_migrations_at_once_one_applies_and_the_others_find_it_done() {
    fixture::empty(async |db| {
        let mut tasks = tokio::task::JoinSet::new();
        for n in 0..6 {
            let mut c = db.connect().await;
            tasks.spawn(async move {
                match n % 2 {
                    0 => migrate_outbox(&mut c, None, None).await,
                    _ => migrate_inbox(&mut c).await,
                }
            });
        }
        let applied = tasks.join_all().await.into_iter().map(|a| a.unwrap().versions.len()).sum::<usize>();
        assert_eq!(applied, fixture::texts("outbox").len() + fixture::texts("inbox").len());
    })
    .await;
}

#[tokio::test]
async fn a_migration_waits_rightly_where_transactions_default_to_repeatable_read() {
    fixture::empty(async |db| {
        let set = format!("ALTER DATABASE {} SET default_transaction_isolation = 'repeatable read'", db.name);
        db.connect().await.execute(AssertSqlSafe(set)).await.unwrap();
        let (mut a, mut b) = (db.connect().await, db.connect().await);
        let (a, b) = tokio::join!(migrate_outbox(&mut a, None, None), migrate_outbox(&mut b, None, None));
        assert_eq!(a.unwrap().versions.len() + b.unwrap().versions.len(), fixture::outbox_versions().len());
    })
    .await;
}

#[tokio::test]
async fn a_migration_that_is_dropped_half_way_leaves_nothing() {
    fixture::empty(async |db| {
        for millis in [1, 5, 20, 40, 80] {
            let mut c = db.connect().await;
            let done =
                tokio::time::timeout(Duration::from_millis(millis), migrate_outbox(&mut c, None, None)).await;
            drop(c);
            let mut c = db.connect().await;
            let expected = if done.is_ok() { State::Current } else { State::Missing };
            // A session whose client went away may still be rolling back, or may have got its commit in.
            wait_for_sessions_to_end(&mut c).await;
            let state = check(&mut c, Line::Outbox).await.unwrap();
            assert!(state == expected || state == State::Current, "{state:?} after {millis} ms");
            if state == State::Current {
                break;
            }
        }
        migrate_outbox(&mut db.connect().await, None, None).await.unwrap();
    })
    .await;
}

async fn wait_for_sessions_to_end(c: &mut PgConnection) {
    let others = "SELECT count(*) FROM pg_stat_activity
                  WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'";
    for _ in 0..500 {
        if value::<i64>(c, others).await == 0 {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("another session is still there");
}

#[tokio::test]
async fn tables_without_a_record_of_migrations_are_not_touched() {
    fixture::empty(async |db| {
        let mut c = db.connect().await;
        c.execute("CREATE SCHEMA outbox").await.unwrap();
        c.execute("CREATE TABLE outbox.message (id int)").await.unwrap();

        let error = migrate_outbox(&mut c, None, None).await.unwrap_err();

        assert!(
            matches!(&error, Error::Unrecorded { line: Line::Outbox, found } if found == "message"),
            "{error}"
        );
        assert!(error.to_string().contains("drop schema outbox cascade"), "{error}");
        let error = check(&mut c, Line::Outbox).await.unwrap_err();
        assert!(matches!(error, Error::Unrecorded { .. }), "{error}");
    })
    .await;
}

#[tokio::test]
async fn an_empty_schema_of_that_name_is_taken_as_it_is() {
    fixture::empty(async |db| {
        let mut c = db.connect().await;
        c.execute("CREATE SCHEMA outbox").await.unwrap();
        migrate_outbox(&mut c, None, None).await.unwrap();
    })
    .await;
}

#[tokio::test]
async fn whatever_is_recorded_and_missing_is_named() {
    fixture::outbox(async |db| {
        let mut c = db.connect().await;
        for (damage, named) in [
            ("DELETE FROM outbox.settings", "the row of outbox.settings"),
            ("DROP TABLE outbox.token", "token"),
            ("DROP TABLE outbox.message_2", "message_2, token"),
        ] {
            c.execute(damage).await.unwrap();
            let error = migrate_outbox(&mut c, None, None).await.unwrap_err();
            let Error::Incomplete { line: Line::Outbox, missing } = &error else { panic!("{error}") };
            assert!(missing.contains(named), "{missing}");
        }
        let error = check(&mut c, Line::Outbox).await.unwrap_err();
        assert!(matches!(error, Error::Incomplete { .. }), "{error}");
    })
    .await;
}

#[tokio::test]
async fn a_record_that_does_not_fit_this_binary_is_refused_with_the_reason() {
    fixture::outbox(async |db| {
        let mut c = db.connect().await;

        let (newest, later) = (Line::Outbox.newest(), Line::Outbox.newest() + 1);

        let insert = "INSERT INTO outbox._migrations VALUES ($1, 'later', now(), true, '', 0)";
        sqlx::query(insert).bind(later).execute(&mut c).await.unwrap();
        let state = check(&mut c, Line::Outbox).await.unwrap();
        assert_eq!(state, State::Ahead { applied: later, newest });
        let error = migrate_outbox(&mut c, None, None).await.unwrap_err();
        assert!(
            matches!(error, Error::Ahead { applied, newest: knows, .. } if (applied, knows) == (later, newest)),
            "{error}"
        );

        let begun = "UPDATE outbox._migrations SET success = false WHERE version = $1";
        sqlx::query(begun).bind(later).execute(&mut c).await.unwrap();
        let error = check(&mut c, Line::Outbox).await.unwrap_err();
        assert!(matches!(error, Error::Unfinished { version, .. } if version == later), "{error}");

        sqlx::query("DELETE FROM outbox._migrations WHERE version = $1").bind(later).execute(&mut c).await.unwrap();
        c.execute("UPDATE outbox._migrations SET checksum = '\\x00'").await.unwrap();
        let error = migrate_outbox(&mut c, None, None).await.unwrap_err();
        assert!(matches!(error, Error::Changed { version: 1, .. }), "{error}");
    })
    .await;
}

#[tokio::test]
async fn messages_with_strange_times_do_not_keep_an_operator_from_migrating() {
    fixture::outbox_of(3, async |db| {
        let mut c = db.connect().await;
        c.execute(
            "INSERT INTO outbox.message (topic, created_at) VALUES ('t', 'infinity'), ('t', '1500-01-01'), ('t', '20000-01-01')",
        )
        .await
        .unwrap();

        let applied = migrate_outbox(&mut c, None, None).await.unwrap();

        assert_eq!(applied.versions, fixture::outbox_versions()[3..]);
        assert_eq!(check(&mut c, Line::Outbox).await.unwrap(), State::Current);
        let kept: i64 = value(&mut c, "SELECT count(*) FROM outbox.message").await;
        assert_eq!(kept, 3);
        let more = "INSERT INTO outbox.message (topic, created_at) VALUES ('t', 'infinity')";
        let constraint = Some("created_at_from_1970_to_9999".to_owned());
        assert_eq!(refusal(&mut c, more).await, ("23514".to_owned(), constraint));
    })
    .await;
}

#[tokio::test]
async fn a_lease_without_an_end_is_refused_and_one_that_is_there_ends() {
    fixture::outbox_of(4, async |db| {
        let mut c = db.connect().await;
        c.execute("UPDATE outbox.shard SET owner = 'nobody', lease_until = 'infinity' WHERE shard = 3")
            .await
            .unwrap();
        c.execute("UPDATE outbox.shard SET owner = 'a', lease_until = '2100-01-01' WHERE shard = 4")
            .await
            .unwrap();

        migrate_outbox(&mut c, None, None).await.unwrap();

        let ended =
            "SELECT array_agg(shard ORDER BY shard) FROM outbox.shard WHERE lease_until <= clock_timestamp()";
        assert_eq!(value::<Vec<i16>>(&mut c, ended).await, [3]);
        let forever = "UPDATE outbox.shard SET owner = 'nobody', lease_until = 'infinity' WHERE shard = 0";
        assert_eq!(refusal(&mut c, forever).await, ("23514".to_owned(), Some("a_lease_ends".to_owned())));
        c.execute("UPDATE outbox.shard SET owner = NULL, lease_until = NULL WHERE shard = 3").await.unwrap();
    })
    .await;
}

#[tokio::test]
async fn producers_go_on_while_a_migration_waits_for_one_that_stays_open() {
    fixture::outbox_of(3, async |db| {
        let insert = "INSERT INTO outbox.message (topic) VALUES ('t')";
        let mut holder = db.connect().await;
        let mut open = holder.begin().await.unwrap();
        open.execute(insert).await.unwrap();
        let mut c = db.connect().await;
        c.execute("SET lock_timeout = '100ms'").await.unwrap();
        let migrating = tokio::spawn(async move { migrate_outbox(&mut c, None, None).await });
        let mut producer = db.connect().await;
        let waits = "SELECT count(*) FROM pg_locks WHERE NOT granted AND database = (SELECT oid FROM pg_database WHERE datname = current_database())";
        for _ in 0..5 {
            // While it waits, and whoever comes next queues behind it.
            let mut looks = 0;
            while value::<i64>(&mut producer, waits).await == 0 {
                looks += 1;
                assert!(looks < 2_000, "the migration does not wait");
            }
            let inserted = tokio::time::timeout(Duration::from_secs(5), producer.execute(insert)).await;
            inserted.expect("a producer stands still behind the migration").unwrap();
        }
        open.commit().await.unwrap();
        let applied = migrating.await.unwrap().unwrap();
        assert_eq!(applied.versions, fixture::outbox_versions()[3..]);
        assert_eq!(value::<i64>(&mut producer, "SELECT count(*) FROM outbox.message").await, 6);
    })
    .await;
}

#[tokio::test]
async fn a_migration_that_waits_in_vain_changes_nothing_and_names_who_holds_the_tables() {
    fixture::outbox_of(3, async |db| {
        let mut holder = db.connect().await;
        holder.execute("SET application_name = 'the-report'").await.unwrap();
        let pid: i32 = value(&mut holder, "SELECT pg_backend_pid()").await;
        let mut open = holder.begin().await.unwrap();
        open.execute("SELECT FROM outbox.message").await.unwrap();
        let mut prepared = db.connect().await;
        let prepare = format!(
            "BEGIN; INSERT INTO outbox.message (topic) VALUES ('t'); PREPARE TRANSACTION '{}'",
            db.name
        );
        prepared.execute(AssertSqlSafe(prepare)).await.unwrap();
        let mut c = db.connect().await;
        c.execute("SET lock_timeout = '20ms'").await.unwrap();

        let error = migrate_outbox(&mut c, None, None).await.unwrap_err();

        prepared.execute(AssertSqlSafe(format!("ROLLBACK PREPARED '{}'", db.name))).await.unwrap();
        let Error::Locked { line: Line::Outbox, tries: 10, .. } = &error else { panic!("{error}") };
        let said = error.to_string();
        for words in
            [&format!("pid {pid} (the-report, in a transaction for "), &db.name, "pg_terminate_backend"]
        {
            assert!(said.contains(words), "{words:?} is missing: {said}");
        }
        let state = check(&mut c, Line::Outbox).await.unwrap();
        assert_eq!(state, State::Behind { applied: 3, newest: Line::Outbox.newest() });
        // Nobody is left waiting for it, and it can be run again over the same connection.
        open.rollback().await.unwrap();
        migrate_outbox(&mut c, None, None).await.unwrap();
    })
    .await;
}

#[tokio::test]
async fn a_database_that_does_not_hold_utf_8_is_refused() {
    let create = "TEMPLATE template0 ENCODING 'SQL_ASCII' LC_COLLATE 'C' LC_CTYPE 'C'";
    fixture::with_options(create, async |db| {
        let error = migrate_outbox(&mut db.connect().await, None, None).await.unwrap_err();
        assert!(matches!(&error, Error::Encoding { found } if found == "SQL_ASCII"), "{error}");
    })
    .await;
}

#[tokio::test]
async fn a_migration_inside_a_transaction_of_the_caller_is_refused() {
    fixture::empty(async |db| {
        let mut c = db.connect().await;
        let mut tx = c.begin().await.unwrap();
        assert!(matches!(migrate_outbox(&mut tx, None, None).await, Err(Error::Migrate { .. })));
    })
    .await;
}

#[tokio::test]
async fn a_role_that_may_not_make_a_schema_is_told_which_can() {
    fixture::empty(async |db| {
        let mut stranger = db.login("").await;
        let error = migrate_outbox(&mut stranger.connection, None, None).await.unwrap_err();
        assert!(matches!(error, Error::Denied { doing: "migrate", .. }), "{error}");
        assert!(error.to_string().contains("CREATEROLE"), "{error}");
        assert_eq!(check(&mut stranger.connection, Line::Outbox).await.unwrap(), State::Missing);
    })
    .await;
}

#[tokio::test]
async fn an_owner_without_createrole_migrates_where_the_roles_are_there() {
    fixture::outbox(async |elsewhere| {
        migrate_inbox(&mut elsewhere.connect().await).await.unwrap();
        fixture::empty(async |db| {
            let mut owner = db.login("").await;
            let give = format!("ALTER DATABASE {} OWNER TO {}", db.name, owner.role);
            db.connect().await.execute(AssertSqlSafe(give)).await.unwrap();
            migrate_outbox(&mut owner.connection, None, None).await.unwrap();
            migrate_inbox(&mut owner.connection).await.unwrap();
        })
        .await;
    })
    .await;
}

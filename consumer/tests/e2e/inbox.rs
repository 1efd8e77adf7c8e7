//! The inbox without Kafka.

use std::sync::Arc;
use std::time::Duration;

use baton_consumer::inbox::Error;
use baton_consumer::{Failure, Inbox, Once, Outcome, Verdict};
use sqlx::{Executor, PgPool, Postgres, Transaction};
use tokio::sync::{Notify, oneshot};

use crate::fixture::{World, eventually, in_world};
use crate::proxy::Proxy;

fn inbox(pool: &PgPool) -> Inbox {
    Inbox::new("billing", pool.clone()).unwrap()
}

async fn effect(tx: &mut Transaction<'_, Postgres>, key: &str) -> Result<(), sqlx::Error> {
    sqlx::query("INSERT INTO effect (key) VALUES ($1)").bind(key).execute(&mut **tx).await.map(|_| ())
}

async fn pay(inbox: &Inbox, key: &str, payload: &[u8]) -> Result<Once, Error> {
    inbox
        .run_once("payments", key, payload, async |tx| match effect(tx, key).await {
            Ok(()) => Verdict::done_with("paid"),
            Err(error) => error.into(),
        })
        .await
}

fn stored(once: Once) -> Option<Outcome> {
    match once {
        Once::Duplicate(outcome) => outcome,
        other => panic!("{other:?}"),
    }
}

/// Waits until some session of this database waits for another one's transaction.
pub(crate) async fn somebody_waits(world: &World) {
    eventually("a claim waits for another transaction", || async {
        let waiting: i64 = sqlx::query_scalar(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'",
        )
        .fetch_one(&world.pool)
        .await
        .unwrap();
        if waiting > 0 { Ok(()) } else { Err(format!("{waiting} wait")) }
    })
    .await;
}

#[test]
fn the_action_runs_once_and_everyone_else_gets_its_outcome() {
    in_world(1, |world| async move {
        let inbox = inbox(&world.pool);
        assert!(
            matches!(pay(&inbox, "pay-1", b"100").await.unwrap(), Once::Fresh(Some(outcome)) if outcome.as_json() == "\"paid\"")
        );
        assert_eq!(stored(pay(&inbox, "pay-1", b"100").await.unwrap()).unwrap().as_json(), "\"paid\"");
        assert_eq!(world.effect_keys().await, ["pay-1"]);
    });
}

#[test]
fn another_payload_is_a_conflict_after_done_after_dead_while_in_progress_and_while_running() {
    in_world(1, |world| async move {
        let inbox = inbox(&world.pool);
        pay(&inbox, "done", b"100").await.unwrap();
        for (key, state) in [("dead", "dead"), ("leased", "in_progress")] {
            pay(&inbox, key, b"100").await.unwrap();
            let cause = (state == "dead").then_some("permanent");
            sqlx::query(
                "UPDATE inbox.message SET state = $2, cause = $3, outcome = NULL,
                        lease_until = CASE WHEN $2 = 'in_progress' THEN clock_timestamp() + '1 h'::interval END,
                        finished_at = CASE WHEN $2 = 'dead' THEN now() END WHERE key = $1",
            )
            .bind(key)
            .bind(state)
            .bind(cause)
            .execute(&world.pool)
            .await
            .unwrap();
        }
        for key in ["done", "dead", "leased"] {
            assert!(matches!(pay(&inbox, key, b"101").await.unwrap(), Once::Conflict), "{key}");
        }
        assert!(
            matches!(pay(&inbox, "dead", b"100").await.unwrap(), Once::Dead { cause, .. } if cause == "permanent")
        );
        assert!(matches!(pay(&inbox, "leased", b"100").await.unwrap(), Once::InProgress));

        let (go, gate) = oneshot::channel::<()>();
        let entered = Arc::new(Notify::new());
        let first = tokio::spawn({
            let (inbox, entered) = (inbox.clone(), Arc::clone(&entered));
            async move {
                let action = async |tx: &mut Transaction<'_, Postgres>| {
                    effect(tx, "running").await.unwrap();
                    entered.notify_one();
                    gate.await.unwrap();
                    Verdict::done()
                };
                inbox.run_once("payments", "running", b"100", action).await.unwrap()
            }
        });
        entered.notified().await;
        let other = tokio::spawn({
            let inbox = inbox.clone();
            async move { pay(&inbox, "running", b"101").await.unwrap() }
        });
        somebody_waits(&world).await;
        go.send(()).unwrap();
        assert!(matches!(first.await.unwrap(), Once::Fresh(None)));
        assert!(matches!(other.await.unwrap(), Once::Conflict));
        assert_eq!(world.effect_keys().await, ["done", "dead", "leased", "running"]);
    });
}

#[test]
fn concurrent_duplicates_wait_and_get_the_stored_outcome_also_under_repeatable_read() {
    in_world(1, |world| async move {
        let isolation =
            format!("ALTER DATABASE {} SET default_transaction_isolation = 'repeatable read'", world.name);
        world.pool.execute(sqlx::AssertSqlSafe(isolation)).await.unwrap();
        let pool = world.pool_of(12).await;
        let inbox = inbox(&pool);
        let mut tasks = Vec::new();
        for _ in 0..10 {
            let inbox = inbox.clone();
            tasks.push(tokio::spawn(async move { pay(&inbox, "same", b"100").await.unwrap() }));
        }
        let mut fresh = 0;
        for task in tasks {
            match task.await.unwrap() {
                Once::Fresh(_) => fresh += 1,
                other => assert_eq!(stored(other).unwrap().as_json(), "\"paid\""),
            }
        }
        assert_eq!(fresh, 1);
        assert_eq!(world.effect_keys().await, ["same"]);
    });
}

#[test]
fn a_waiting_duplicate_runs_when_the_first_one_rolls_back() {
    in_world(1, |world| async move {
        let inbox = inbox(&world.pool);
        let (go, gate) = oneshot::channel::<()>();
        let entered = Arc::new(Notify::new());
        let first = tokio::spawn({
            let (inbox, entered) = (inbox.clone(), Arc::clone(&entered));
            async move {
                let action = async |tx: &mut Transaction<'_, Postgres>| {
                    effect(tx, "first").await.unwrap();
                    entered.notify_one();
                    gate.await.unwrap();
                    Verdict::transient("not now")
                };
                inbox.run_once("payments", "key", b"100", action).await.unwrap()
            }
        });
        entered.notified().await;
        let second = tokio::spawn({
            let inbox = inbox.clone();
            async move { pay(&inbox, "key", b"100").await.unwrap() }
        });
        somebody_waits(&world).await;
        go.send(()).unwrap();
        assert!(matches!(first.await.unwrap(), Once::Failed(Failure::Transient(_))));
        assert!(matches!(second.await.unwrap(), Once::Fresh(_)));
        assert_eq!(world.effect_keys().await, ["key"]);
    });
}

#[test]
fn an_action_that_fails_or_panics_leaves_no_trace() {
    in_world(1, |world| async move {
        let inbox = inbox(&world.pool);
        let failed = inbox
            .run_once("s", "permanent", b"", async |tx| {
                effect(tx, "x").await.unwrap();
                Verdict::permanent("no")
            })
            .await
            .unwrap();
        assert!(matches!(failed, Once::Failed(Failure::Permanent(_))));
        let panicked = inbox
            .run_once("s", "panic", b"", async |tx| {
                effect(tx, "x").await.unwrap();
                panic!("boom")
            })
            .await
            .unwrap();
        assert!(matches!(panicked, Once::Failed(Failure::Panicked(message)) if message == "boom"));
        assert!(world.effect_keys().await.is_empty());
        assert!(world.rows().await.is_empty());
    });
}

/// Drops a call that waits for the reply to one statement, and then looks at the pool's only connection.
async fn drop_half_way(world: &World, key: &str, statement: &'static str) {
    let proxy = Proxy::start(&world.options).await;
    let pool = proxy.pool(1).await;
    let inbox = inbox(&pool);
    proxy.hold_reply_to(statement);
    let task = tokio::spawn({
        let (inbox, key) = (inbox.clone(), key.to_owned());
        async move { pay(&inbox, &key, b"").await }
    });
    proxy.holding().await;
    task.abort();
    assert!(task.await.unwrap_err().is_cancelled());
    proxy.release();
    let in_transaction: bool =
        sqlx::query_scalar("SELECT state LIKE '%in transaction%' FROM pg_stat_activity WHERE pid = $1")
            .bind(sqlx::query_scalar::<_, i32>("SELECT pg_backend_pid()").fetch_one(&pool).await.unwrap())
            .fetch_one(&world.pool)
            .await
            .unwrap();
    assert!(!in_transaction, "dropped at {statement}, the pool's only connection is in a transaction");
    let again = pay(&inbox, key, b"").await.unwrap();
    assert!(matches!(again, Once::Fresh(_) | Once::Duplicate(_)), "{again:?}");
}

#[test]
fn a_call_that_is_dropped_half_way_leaves_no_open_transaction_in_the_pool() {
    in_world(1, |world| async move {
        let statements = [
            "BEGIN ISOLATION",
            "INSERT INTO inbox.message",
            "INSERT INTO effect",
            "UPDATE inbox.message",
            "COMMIT\0",
        ];
        for (nr, statement) in statements.into_iter().enumerate() {
            drop_half_way(&world, &nr.to_string(), statement).await;
        }
        assert_eq!(world.effects().await.len(), statements.len(), "each once");
    });
}

#[test]
fn a_connection_that_is_killed_in_the_action_rolls_everything_back() {
    in_world(1, |world| async move {
        let inbox = inbox(&world.pool);
        let once = inbox
            .run_once("s", "killed", b"", async |tx| {
                effect(tx, "x").await.unwrap();
                let pid: i32 =
                    sqlx::query_scalar("SELECT pg_backend_pid()").fetch_one(&mut **tx).await.unwrap();
                sqlx::query("SELECT pg_terminate_backend($1)").bind(pid).execute(&world.pool).await.unwrap();
                // Although its connection is gone the action says that all is well.
                Verdict::done()
            })
            .await;
        assert!(matches!(once, Err(Error::Complete { .. })), "{once:?}");
        assert!(world.effect_keys().await.is_empty());
        assert!(matches!(pay(&inbox, "killed", b"").await.unwrap(), Once::Fresh(_)));
    });
}

#[test]
fn a_commit_whose_reply_is_lost_is_found_by_asking_the_row() {
    in_world(1, |world| async move {
        let proxy = Proxy::start(&world.options).await;
        let inbox = inbox(&proxy.pool(1).await);
        proxy.lose_reply_to("COMMIT\0");
        assert_eq!(stored(pay(&inbox, "lost", b"100").await.unwrap()).unwrap().as_json(), "\"paid\"");
        assert_eq!(world.effect_keys().await, ["lost"]);
        assert!(proxy.has_lost(), "the test lost nothing");
    });
}

#[test]
fn a_session_that_stalls_is_ended_by_the_server() {
    in_world(1, |world| async move {
        let inbox = inbox(&world.pool).stall_timeout(Duration::from_millis(200));
        let once = inbox
            .run_once("s", "stalled", b"", async |tx| {
                effect(tx, "x").await.unwrap();
                let pid: i32 =
                    sqlx::query_scalar("SELECT pg_backend_pid()").fetch_one(&mut **tx).await.unwrap();
                eventually("the server has ended the session", || async {
                    let there: Option<i32> =
                        sqlx::query_scalar("SELECT pid FROM pg_stat_activity WHERE pid = $1")
                            .bind(pid)
                            .fetch_optional(&world.pool)
                            .await
                            .unwrap();
                    there.map_or(Ok(()), |_| Err("it lives".to_owned()))
                })
                .await;
                Verdict::done()
            })
            .await;
        assert!(matches!(once, Err(Error::Complete { .. })), "{once:?}");
        let slow = inbox
            .run_once("s", "slow", b"", async |tx| {
                match sqlx::query("SELECT pg_sleep(30)").execute(&mut **tx).await {
                    Ok(_) => Verdict::done(),
                    Err(error) => error.into(),
                }
            })
            .await
            .unwrap();
        assert!(matches!(slow, Once::Failed(Failure::Transient(_))), "{slow:?}");
        assert!(world.rows().await.is_empty());
    });
}

#[test]
fn an_action_that_ends_its_transaction_itself_is_found_out() {
    in_world(1, |world| async move {
        let inbox = inbox(&world.pool);
        for sql in ["COMMIT", "ROLLBACK"] {
            let once = inbox
                .run_once("s", sql, b"", async |tx| {
                    effect(tx, sql).await.unwrap();
                    sqlx::raw_sql(sql).execute(&mut **tx).await.unwrap();
                    Verdict::done()
                })
                .await;
            assert!(matches!(once, Err(Error::Fenced { .. })), "{once:?}");
        }
    });
}

#[test]
fn a_passed_over_sql_error_is_not_taken_for_success() {
    in_world(1, |world| async move {
        let once = inbox(&world.pool)
            .run_once("s", "passed-over", b"", async |tx| {
                effect(tx, "x").await.unwrap();
                let _ = sqlx::query("SELECT 1 / 0").execute(&mut **tx).await;
                Verdict::done()
            })
            .await;
        assert!(matches!(once, Err(Error::Complete { .. })), "{once:?}");
        assert!(world.effect_keys().await.is_empty());
    });
}

#[test]
fn a_constraint_that_is_checked_at_commit_is_the_actions_failure() {
    in_world(1, |world| async move {
        world
            .pool
            .execute("CREATE TABLE late (n int CONSTRAINT one_of_each UNIQUE DEFERRABLE INITIALLY DEFERRED)")
            .await
            .unwrap();
        let once = inbox(&world.pool)
            .run_once("s", "late", b"", async |tx| {
                sqlx::query("INSERT INTO late VALUES (1), (1)").execute(&mut **tx).await.unwrap();
                Verdict::done()
            })
            .await
            .unwrap();
        assert!(matches!(once, Once::Failed(Failure::Permanent(_))), "{once:?}");
        assert!(world.rows().await.is_empty());
    });
}

#[test]
fn an_asynchronous_commit_is_made_synchronous_and_a_stricter_one_is_left() {
    in_world(1, |world| async move {
        for (setting, expected) in [("off", "on"), ("remote_apply", "remote_apply")] {
            let alter = format!("ALTER DATABASE {} SET synchronous_commit = '{setting}'", world.name);
            world.pool.execute(sqlx::AssertSqlSafe(alter)).await.unwrap();
            let inbox = inbox(&world.pool_of(1).await);
            let once = inbox
                .run_once("s", setting, b"", async |tx| {
                    let seen: String =
                        sqlx::query_scalar("SHOW synchronous_commit").fetch_one(&mut **tx).await.unwrap();
                    Verdict::done_with(&seen)
                })
                .await
                .unwrap();
            assert!(
                matches!(&once, Once::Fresh(Some(seen)) if seen.decode::<String>().unwrap() == expected),
                "{once:?}"
            );
        }
    });
}

#[test]
fn what_the_table_does_not_take_is_refused_before_anything_runs() {
    in_world(1, |world| async move {
        let inbox = inbox(&world.pool);
        for (scope, key) in [("s", String::new()), ("s", "k".repeat(1025)), ("s", "a\0b".to_owned())] {
            assert!(matches!(
                inbox.run_once(scope, &key, b"", async |_| unreachable!()).await,
                Err(Error::Text { .. })
            ));
        }
        assert!(matches!(
            inbox.run_once(&"s".repeat(1281), "k", b"", async |_| unreachable!()).await,
            Err(Error::Text { .. })
        ));
        assert!(matches!(Inbox::new(&"c".repeat(250), world.pool.clone()), Err(Error::Text { .. })));

        // The largest of each fits, all at once.
        let inbox = Inbox::new(&"c".repeat(249), world.pool.clone()).unwrap();
        let largest =
            inbox.run_once(&"s".repeat(1280), &"k".repeat(1024), b"", async |_| Verdict::done()).await;
        assert!(matches!(largest, Ok(Once::Fresh(None))), "{largest:?}");
    });
}

#[test]
fn other_scopes_and_other_consumers_do_not_meet() {
    in_world(1, |world| async move {
        let inbox = inbox(&world.pool);
        let shipping = Inbox::new("shipping", world.pool.clone()).unwrap();
        pay(&inbox, "k", b"1").await.unwrap();
        let other = inbox.run_once("refunds", "k", b"2", async |_| Verdict::done()).await.unwrap();
        assert!(matches!(other, Once::Fresh(None)));
        assert!(matches!(pay(&shipping, "k", b"3").await.unwrap(), Once::Fresh(_)));
    });
}

#[test]
fn a_claim_costs_the_same_whatever_the_inbox_holds() {
    in_world(1, |world| async move {
        sqlx::raw_sql(
            "INSERT INTO inbox.message (consumer, scope, key, fingerprint, state, finished_at)
             SELECT 'billing', 'payments', 'old-' || n, 'v1:sha256:00', 'done', now() FROM generate_series(1, 100000) n;
             ANALYZE inbox.message",
        )
        .execute(&world.pool)
        .await
        .unwrap();
        // One session, and a first claim that is not counted: what it reads of the catalogue it keeps.
        let mut session = world.pool.acquire().await.unwrap();
        for key in ["first", "old-50000", "new"] {
            let sql = include_str!("../../queries/message_claim.sql");
            let explain = format!("EXPLAIN (ANALYZE, BUFFERS, COSTS OFF, TIMING OFF) {sql}");
            let plan: Vec<String> = sqlx::query_scalar(sqlx::AssertSqlSafe(explain))
                .bind("billing")
                .bind("payments")
                .bind(key)
                .bind("v1:sha256:00")
                .bind(1_i32)
                .bind(None::<i64>)
                .bind(None::<String>)
                .bind(None::<i32>)
                .bind(None::<i64>)
                .bind(None::<String>)
                .bind(None::<i64>)
                .fetch_all(&mut *session)
                .await
                .unwrap();
            let plan = plan.join("\n");
            assert!(!plan.contains("Seq Scan"), "{plan}");
            let buffers: u32 = plan
                .lines()
                .find_map(|line| line.trim().strip_prefix("Buffers: shared "))
                .unwrap()
                .split_whitespace()
                .filter_map(|part| part.strip_prefix("hit=").or_else(|| part.strip_prefix("read=")))
                .filter_map(|count| count.parse::<u32>().ok())
                .sum();
            assert!(key == "first" || buffers < 30, "{key}: {plan}");
        }
    });
}

//! Many pieces of work in one transaction of the inbox, without Kafka.

use std::collections::BTreeMap;
use std::sync::Arc;

use baton_consumer::inbox::{Answer, Batch, Error, Fresh, Item};
use baton_consumer::{Failure, Inbox, Once, Verdict};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use sqlx::{PgPool, Postgres, Transaction};
use tokio::sync::{Notify, oneshot};

use crate::fixture::{World, eventually, in_world};
use crate::proxy::Proxy;

/// Scope, key and payload.
type Given = (String, String, String);

fn given(keys: &[(&str, &str)]) -> Vec<Given> {
    keys.iter().map(|(key, payload)| ("s".to_owned(), (*key).to_owned(), (*payload).to_owned())).collect()
}

fn numbered(numbers: impl Iterator<Item = usize>) -> Vec<Given> {
    numbers.map(|n| ("s".to_owned(), format!("k{n:05}"), "1".to_owned())).collect()
}

fn items(given: &[Given]) -> Vec<Item<'_>> {
    given.iter().map(|(scope, key, payload)| Item { scope, key, payload: payload.as_bytes() }).collect()
}

fn inbox(pool: &PgPool) -> Inbox {
    Inbox::new("billing", pool.clone()).unwrap()
}

/// One effect an item, and an outcome that names it.
async fn apply(
    given: &[Given],
    fresh: &mut [Fresh],
    tx: &mut Transaction<'_, Postgres>,
) -> Result<(), Failure> {
    for item in fresh {
        let (scope, key, payload) = &given[item.index()];
        effect(tx, &format!("{scope}/{key}={payload}")).await?;
        item.set_outcome(&format!("{key} by {}", item.index()))?;
    }
    Ok(())
}

async fn effect(tx: &mut Transaction<'_, Postgres>, key: &str) -> Result<(), sqlx::Error> {
    sqlx::query("INSERT INTO effect (key) VALUES ($1)").bind(key).execute(&mut **tx).await.map(|_| ())
}

async fn run(inbox: &Inbox, given: &[Given]) -> Result<Batch, Error> {
    inbox.run_batch(&items(given), async |fresh, tx| apply(given, fresh, tx).await).await
}

async fn settled(inbox: &Inbox, given: &[Given]) -> Vec<String> {
    answers(run(inbox, given).await.unwrap())
}

fn answers(batch: Batch) -> Vec<String> {
    match batch {
        Batch::Settled(answers) => answers.iter().map(told).collect(),
        other => panic!("{other:?}"),
    }
}

fn told(answer: &Answer) -> String {
    match answer {
        Ok(Once::Fresh(outcome)) => format!("fresh {}", outcome.as_ref().map_or("-", |o| o.as_json())),
        Ok(Once::Duplicate(outcome)) => {
            format!("duplicate {}", outcome.as_ref().map_or("-", |o| o.as_json()))
        }
        Ok(Once::Dead { cause, .. }) => format!("dead {cause}"),
        Ok(other) => format!("{other:?}"),
        Err(Error::Leased { key }) => format!("leased {key}"),
        Err(error) => panic!("{error:?}"),
    }
}

/// Makes a row as leases or dead letters leave it.
async fn put(world: &World, key: &str, state: &str) {
    let inbox = inbox(&world.pool);
    inbox.run_once("s", key, b"1", async |_| Verdict::done()).await.unwrap();
    sqlx::query(
        "UPDATE inbox.message SET state = CASE $2 WHEN 'dead' THEN 'dead' ELSE 'in_progress' END,
                cause = CASE $2 WHEN 'dead' THEN 'permanent' END,
                lease_until = CASE $2 WHEN 'held' THEN clock_timestamp() + '1 h'::interval WHEN 'left' THEN clock_timestamp() END,
                finished_at = CASE $2 WHEN 'dead' THEN now() END
         WHERE key = $1",
    )
    .bind(key)
    .bind(state)
    .execute(&world.pool)
    .await
    .unwrap();
}

async fn nothing_is_left(world: &World) {
    assert!(world.effect_keys().await.is_empty());
    assert!(world.rows().await.is_empty());
}

#[test]
fn everything_that_is_new_is_applied_in_the_order_given_and_its_outcomes_are_handed_back_later() {
    in_world(1, |world| async move {
        let inbox = inbox(&world.pool);
        let batch = given(&[("b", "1"), ("a", "1"), ("c", "1")]);
        assert_eq!(
            settled(&inbox, &batch).await,
            ["fresh \"b by 0\"", "fresh \"a by 1\"", "fresh \"c by 2\""]
        );
        assert_eq!(world.effect_keys().await, ["s/b=1", "s/a=1", "s/c=1"]);
        assert!(world.rows().await.values().all(|(state, ..)| state == "done"));
        assert_eq!(
            settled(&inbox, &batch).await,
            ["duplicate \"b by 0\"", "duplicate \"a by 1\"", "duplicate \"c by 2\""]
        );
        // One by one they are the same work.
        let alone = inbox.run_once("s", "a", b"1", async |_| unreachable!()).await;
        assert_eq!(told(&alone), "duplicate \"a by 1\"");
    });
}

#[test]
fn items_that_are_known_are_answered_alone_and_do_not_hold_up_the_rest() {
    in_world(1, |world| async move {
        let inbox = inbox(&world.pool);
        settled(&inbox, &given(&[("done", "1")])).await;
        for state in ["dead", "held", "left"] {
            put(&world, state, state).await;
        }
        let batch = given(&[
            ("new", "1"),
            ("done", "1"),
            ("done", "2"),
            ("dead", "1"),
            ("dead", "2"),
            ("held", "1"),
            ("held", "2"),
            ("left", "1"),
            ("left", "2"),
            ("newer", "1"),
        ]);
        assert_eq!(
            settled(&inbox, &batch).await,
            [
                "fresh \"new by 0\"",
                "duplicate \"done by 0\"",
                "Conflict",
                "dead permanent",
                "Conflict",
                "InProgress",
                "Conflict",
                "leased left",
                "Conflict",
                "fresh \"newer by 9\""
            ]
        );
        assert_eq!(world.effect_keys().await, ["s/done=1", "s/new=1", "s/newer=1"]);
    });
}

#[test]
fn a_key_that_comes_again_in_its_batch_is_a_duplicate_of_the_first_or_a_conflict() {
    in_world(1, |world| async move {
        let inbox = inbox(&world.pool);
        let batch = given(&[("a", "1"), ("b", "2"), ("a", "1"), ("a", "3"), ("b", "2"), ("a", "1")]);
        let first = settled(&inbox, &batch).await;
        let expected = [
            "fresh \"a by 0\"",
            "fresh \"b by 1\"",
            "duplicate \"a by 0\"",
            "Conflict",
            "duplicate \"b by 1\"",
            "duplicate \"a by 0\"",
        ];
        assert_eq!(first, expected);
        assert_eq!(world.effect_keys().await, ["s/a=1", "s/b=2"]);
        // What conflicts comes first this time, and the stored payload decides for both.
        let again = settled(&inbox, &given(&[("a", "3"), ("a", "1"), ("a", "3")])).await;
        assert_eq!(again, ["Conflict", "duplicate \"a by 0\"", "Conflict"]);
    });
}

#[test]
fn nothing_is_asked_of_anybody_for_an_empty_batch_and_nothing_runs_where_nothing_is_fresh() {
    in_world(1, |world| async move {
        let inbox = inbox(&world.pool);
        let batch = given(&[("a", "1")]);
        settled(&inbox, &batch).await;
        let known = inbox.run_batch(&items(&batch), async |_, _| unreachable!()).await.unwrap();
        assert_eq!(answers(known), ["duplicate \"a by 0\""]);
        world.pool.close().await;
        assert!(answers(inbox.run_batch(&[], async |_, _| unreachable!()).await.unwrap()).is_empty());
    });
}

#[test]
fn an_action_that_fails_or_panics_leaves_no_trace_of_the_whole_batch() {
    in_world(1, |world| async move {
        let inbox = inbox(&world.pool);
        let batch = given(&[("a", "1"), ("b", "1")]);
        let failed = inbox
            .run_batch(&items(&batch), async |fresh, tx| {
                apply(&batch, fresh, tx).await?;
                Err(Failure::permanent("no"))
            })
            .await;
        assert!(matches!(failed, Ok(Batch::Failed(Failure::Permanent(_)))), "{failed:?}");
        nothing_is_left(&world).await;
        let panicked = inbox
            .run_batch(&items(&batch), async |fresh, tx| {
                apply(&batch, fresh, tx).await?;
                panic!("boom")
            })
            .await;
        assert!(
            matches!(&panicked, Ok(Batch::Failed(Failure::Panicked(said))) if said == "boom"),
            "{panicked:?}"
        );
        nothing_is_left(&world).await;
        // An error of SQL that it passed over is none of its successes.
        let passed_over = inbox
            .run_batch(&items(&batch), async |fresh, tx| {
                apply(&batch, fresh, tx).await?;
                let _ = sqlx::query("SELECT 1 / 0").execute(&mut **tx).await;
                Ok(())
            })
            .await;
        assert!(matches!(passed_over, Err(Error::Complete { .. })), "{passed_over:?}");
        nothing_is_left(&world).await;
        assert_eq!(settled(&inbox, &batch).await, ["fresh \"a by 0\"", "fresh \"b by 1\""]);
    });
}

#[test]
fn a_constraint_that_is_checked_at_commit_is_the_batchs_failure() {
    in_world(1, |world| async move {
        sqlx::raw_sql("CREATE TABLE late (n int UNIQUE DEFERRABLE INITIALLY DEFERRED)")
            .execute(&world.pool)
            .await
            .unwrap();
        let batch = given(&[("a", "1"), ("b", "1")]);
        let failed = inbox(&world.pool)
            .run_batch(&items(&batch), async |fresh, tx| {
                for _ in fresh {
                    sqlx::query("INSERT INTO late VALUES (1)").execute(&mut **tx).await?;
                }
                Ok(())
            })
            .await;
        assert!(matches!(failed, Ok(Batch::Failed(Failure::Permanent(_)))), "{failed:?}");
        nothing_is_left(&world).await;
    });
}

#[test]
fn an_action_that_ends_its_transaction_itself_is_found_out_and_marks_nothing() {
    in_world(1, |world| async move {
        let inbox = inbox(&world.pool);
        let other = "ROLLBACK; BEGIN; INSERT INTO effect (key) VALUES ('another transaction')";
        for (nr, sql) in ["COMMIT", "ROLLBACK", "COMMIT; BEGIN", other].into_iter().enumerate() {
            let batch = given(&[(&format!("{nr} a"), "1"), (&format!("{nr} b"), "1")]);
            let fenced = inbox
                .run_batch(&items(&batch), async |fresh, tx| {
                    apply(&batch, fresh, tx).await?;
                    sqlx::raw_sql(sql).execute(&mut **tx).await?;
                    Ok(())
                })
                .await;
            assert!(matches!(fenced, Err(Error::Fenced { .. })), "{sql}: {fenced:?}");
        }
        let marked = world.rows().await.into_values().filter(|(state, ..)| state == "done").count();
        assert_eq!(marked, 0, "{:?}", world.rows().await);
        assert!(!world.effect_keys().await.contains(&"another transaction".to_owned()));
    });
}

#[test]
fn a_batch_that_is_dropped_half_way_leaves_no_trace_and_no_open_transaction_in_the_pool() {
    in_world(1, |world| async move {
        let statements = [
            "BEGIN ISOLATION",
            "claimed AS (",
            "INSERT INTO effect",
            "ON CONFLICT (consumer, scope, key) DO UPDATE",
        ];
        for statement in statements {
            let proxy = Proxy::start(&world.options).await;
            let pool = proxy.pool(1).await;
            let inbox = inbox(&pool);
            let batch = given(&[("a", "1"), ("b", "1")]);
            proxy.hold_reply_to(statement);
            let task = tokio::spawn({
                let (inbox, batch) = (inbox.clone(), batch.clone());
                async move { run(&inbox, &batch).await }
            });
            proxy.holding().await;
            task.abort();
            assert!(task.await.unwrap_err().is_cancelled());
            proxy.release();
            let pid: i32 = sqlx::query_scalar("SELECT pg_backend_pid()").fetch_one(&pool).await.unwrap();
            let in_transaction: bool = sqlx::query_scalar(
                "SELECT state LIKE '%in transaction%' FROM pg_stat_activity WHERE pid = $1",
            )
            .bind(pid)
            .fetch_one(&world.pool)
            .await
            .unwrap();
            assert!(
                !in_transaction,
                "dropped at {statement}, the pool's only connection is in a transaction"
            );
            nothing_is_left(&world).await;
        }
    });
}

#[test]
fn a_connection_that_is_killed_in_the_action_rolls_the_whole_batch_back() {
    in_world(1, |world| async move {
        let inbox = inbox(&world.pool);
        let batch = given(&[("a", "1"), ("b", "1")]);
        let killed = inbox
            .run_batch(&items(&batch), async |fresh, tx| {
                apply(&batch, fresh, tx).await?;
                let pid: i32 = sqlx::query_scalar("SELECT pg_backend_pid()").fetch_one(&mut **tx).await?;
                sqlx::query("SELECT pg_terminate_backend($1)").bind(pid).execute(&world.pool).await?;
                Ok(())
            })
            .await;
        assert!(matches!(killed, Err(Error::Complete { .. })), "{killed:?}");
        nothing_is_left(&world).await;
    });
}

#[test]
fn a_commit_of_a_batch_whose_reply_is_lost_is_found_by_asking_the_rows() {
    in_world(1, |world| async move {
        let proxy = Proxy::start(&world.options).await;
        let inbox = inbox(&proxy.pool(1).await);
        proxy.lose_reply_to("COMMIT\0");
        let batch = given(&[("a", "1"), ("b", "1"), ("a", "1"), ("a", "2")]);
        assert_eq!(
            settled(&inbox, &batch).await,
            ["duplicate \"a by 0\"", "duplicate \"b by 1\"", "duplicate \"a by 0\"", "Conflict"]
        );
        assert!(proxy.has_lost(), "the test lost nothing");
        assert_eq!(world.effect_keys().await, ["s/a=1", "s/b=1"]);
    });
}

#[test]
fn a_batch_waits_for_the_one_before_it_and_finds_its_outcomes_or_takes_its_place() {
    in_world(1, |world| async move {
        for (first_is_done, key) in [(true, "committed"), (false, "rolled back")] {
            let inbox = inbox(&world.pool);
            let (go, gate) = oneshot::channel::<()>();
            let entered = Arc::new(Notify::new());
            let batch = given(&[("z", key), (key, "1")]);
            let first = tokio::spawn({
                let (inbox, entered, batch) = (inbox.clone(), Arc::clone(&entered), batch.clone());
                async move {
                    let action = async |fresh: &mut [Fresh], tx: &mut Transaction<'_, Postgres>| {
                        apply(&batch, fresh, tx).await?;
                        entered.notify_one();
                        gate.await.unwrap();
                        if first_is_done { Ok(()) } else { Err(Failure::transient("not now")) }
                    };
                    inbox.run_batch(&items(&batch), action).await.unwrap()
                }
            });
            entered.notified().await;
            let later = given(&[("0 new", key), (key, "2"), (key, "1")]);
            let second = tokio::spawn({
                let (inbox, later) = (inbox.clone(), later.clone());
                async move { settled(&inbox, &later).await }
            });
            somebody_waits(&world).await;
            go.send(()).unwrap();
            let (first, second) = (first.await.unwrap(), second.await.unwrap());
            if first_is_done {
                assert_eq!(answers(first), ["fresh \"z by 0\"".to_owned(), format!("fresh \"{key} by 1\"")]);
                assert_eq!(
                    second,
                    [
                        "fresh \"0 new by 0\"".to_owned(),
                        "Conflict".to_owned(),
                        format!("duplicate \"{key} by 1\"")
                    ]
                );
            } else {
                assert!(matches!(first, Batch::Failed(Failure::Transient(_))));
                assert_eq!(second[1..], [format!("fresh \"{key} by 1\""), "Conflict".to_owned()]);
            }
        }
    });
}

/// Waits until some session of this database waits for another one's transaction.
async fn somebody_waits(world: &World) {
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
fn batches_that_overlap_in_opposite_orders_apply_each_key_once_and_never_deadlock() {
    in_world(1, |world| async move {
        let inbox = inbox(&world.pool);
        const ROUNDS: usize = 40;
        const KEYS: usize = 60;
        for round in 0..ROUNDS {
            let keys = round * KEYS..(round + 1) * KEYS;
            let (up, down) = (numbered(keys.clone()), numbered(keys.clone().rev()));
            let middle = numbered(keys.clone().skip(KEYS / 3).chain(keys.clone().take(KEYS / 2)));
            let ran = tokio::join!(run(&inbox, &up), run(&inbox, &down), run(&inbox, &middle));
            let mut fresh = 0;
            for batch in [ran.0, ran.1, ran.2] {
                fresh += answers(batch.unwrap()).iter().filter(|told| told.starts_with("fresh")).count();
            }
            assert_eq!(fresh, KEYS, "round {round}");
        }
        let mut keys = world.effect_keys().await;
        keys.sort();
        let expected: Vec<String> = (0..ROUNDS * KEYS).map(|n| format!("s/k{n:05}=1")).collect();
        assert_eq!(keys, expected);
    });
}

#[test]
fn five_thousand_items_go_through_at_once_and_cost_the_same_for_each_whatever_the_inbox_holds() {
    in_world(1, |world| async move {
        // As a young table is: it was analysed when it was nearly empty, and plans were made then.
        let pool = world.pool_of(1).await;
        let inbox = inbox(&pool);
        for n in 0..8 {
            settled(&inbox, &numbered(n..=n)).await;
        }
        sqlx::query("VACUUM ANALYZE inbox.message").execute(&world.pool).await.unwrap();
        let batch = numbered(0..5_000);
        // The effects in one statement: what remains is the inbox.
        let action = async |fresh: &mut [Fresh], tx: &mut Transaction<'_, Postgres>| {
            let keys: Vec<&str> = fresh.iter().map(|item| batch[item.index()].1.as_str()).collect();
            sqlx::query("INSERT INTO effect (key) SELECT unnest($1::text[])")
                .bind(keys)
                .execute(&mut **tx)
                .await?;
            Ok(())
        };
        let told = answers(inbox.run_batch(&items(&batch), action).await.unwrap());
        assert_eq!(told.iter().filter(|told| *told == "fresh -").count(), 4_992);
        assert_eq!(told.iter().filter(|told| told.starts_with("duplicate \"k")).count(), 8);
        assert_eq!(world.effects().await.len(), 5_000);
        let again = settled(&inbox, &batch).await;
        assert_eq!(again.iter().filter(|told| *told == "duplicate -").count(), 4_992);
    });
}

#[test]
fn an_item_that_does_not_fit_refuses_its_batch_before_anything_runs() {
    in_world(1, |world| async move {
        let inbox = inbox(&world.pool);
        let batch = given(&[("a", "1"), (&"k".repeat(1025), "1")]);
        let refused = inbox.run_batch(&items(&batch), async |_, _| unreachable!()).await;
        assert!(matches!(refused, Err(Error::Text { what: "key", .. })), "{refused:?}");
        nothing_is_left(&world).await;
    });
}

#[test]
fn an_asynchronous_commit_of_a_batch_is_made_synchronous() {
    in_world(1, |world| async move {
        let alter = format!("ALTER DATABASE {} SET synchronous_commit = off", world.name);
        sqlx::raw_sql(sqlx::AssertSqlSafe(alter)).execute(&world.pool).await.unwrap();
        let batch = given(&[("a", "1")]);
        let action = async |fresh: &mut [Fresh], tx: &mut Transaction<'_, Postgres>| {
            let seen: String = sqlx::query_scalar("SHOW synchronous_commit").fetch_one(&mut **tx).await?;
            Ok(fresh[0].set_outcome(&seen)?)
        };
        let batch = inbox(&world.pool_of(1).await).run_batch(&items(&batch), action).await.unwrap();
        assert_eq!(answers(batch), ["fresh \"on\""]);
    });
}

/// Batches of keys and payloads, few of each so that they meet.
fn batches() -> impl Strategy<Value = Vec<Vec<Given>>> {
    let item = (0..2_u8, 0..6_u8, 0..2_u8).prop_map(|(scope, key, payload)| {
        (format!("scope {scope}"), format!("key {key}"), format!("payload {payload}"))
    });
    proptest::collection::vec(proptest::collection::vec(item, 0..12), 1..4)
}

#[test]
fn a_batch_answers_as_the_same_calls_one_by_one() {
    in_world(1, |world| async move {
        let together = Inbox::new("together", world.pool.clone()).unwrap();
        let alone = Inbox::new("alone", world.pool.clone()).unwrap();
        let handle = tokio::runtime::Handle::current();
        let test = |batches: Vec<Vec<Given>>| {
            handle.block_on(async {
                sqlx::raw_sql("TRUNCATE inbox.message, effect").execute(&world.pool).await.unwrap();
                for batch in &batches {
                    let at_once = answers(run(&together, batch).await.unwrap());
                    let applied = world.effect_keys().await;
                    sqlx::raw_sql("TRUNCATE effect").execute(&world.pool).await.unwrap();
                    let mut in_turn = Vec::new();
                    for (index, (scope, key, payload)) in batch.iter().enumerate() {
                        let once = alone.run_once(scope, key, payload.as_bytes(), async |tx| {
                            let effect = effect(tx, &format!("{scope}/{key}={payload}")).await;
                            effect.map_or_else(Into::into, |()| {
                                Verdict::done_with(&format!("{key} by {index}"))
                            })
                        });
                        in_turn.push(told(&once.await));
                    }
                    prop_assert_eq!(at_once, in_turn);
                    prop_assert_eq!(applied, world.effect_keys().await);
                    sqlx::raw_sql("TRUNCATE effect").execute(&world.pool).await.unwrap();
                }
                prop_assert_eq!(rows(&world, "together").await, rows(&world, "alone").await);
                Ok(())
            })
        };
        let config = Config { cases: 40, failure_persistence: None, ..Config::default() };
        tokio::task::block_in_place(|| TestRunner::new(config).run(&batches(), test)).unwrap();
    });
}

/// What one consumer's rows say, but for the times.
async fn rows(world: &World, consumer: &str) -> BTreeMap<(String, String), (String, String, Option<String>)> {
    let rows: Vec<(String, String, String, String, Option<String>)> = sqlx::query_as(
        "SELECT scope, key, state, fingerprint, outcome::text FROM inbox.message WHERE consumer = $1",
    )
    .bind(consumer)
    .fetch_all(&world.pool)
    .await
    .unwrap();
    rows.into_iter()
        .map(|(scope, key, state, fingerprint, outcome)| ((scope, key), (state, fingerprint, outcome)))
        .collect()
}

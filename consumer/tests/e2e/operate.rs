//! Work that an operator has requeued: who takes it, and what it is taken for.

use std::sync::Arc;

use baton_consumer::inbox::{Batch, Error, Item};
use baton_consumer::operate::decide::{Decision, decide};
use baton_consumer::operate::parked::{Filter, list};
use baton_consumer::{Inbox, Once, Verdict};
use sqlx::Connection;
use tokio::sync::Notify;

use crate::fixture::{World, in_world};
use crate::inbox::somebody_waits;

/// Dead work in scope `s` with its record set aside, as `AfterDeadLetter::Block` leaves it, and a replay that died for another cause; and the operator's requeue of all of it.
async fn requeued(world: &World, keys: &[&str]) {
    for (nr, key) in keys.iter().enumerate() {
        // For its fingerprint.
        let done = inbox(world).run_once("s", key, b"pay", async |_| Verdict::done()).await.unwrap();
        assert!(matches!(done, Once::Fresh(_)));
        sqlx::query(
            r#"WITH dead AS (
                   UPDATE inbox.message SET state = 'dead', cause = 'permanent', error = 'no', record_time = now() - '9 d'::interval
                   WHERE key = $1)
               INSERT INTO inbox.parked (consumer, topic, "partition", "offset", key, scope, idempotency_key, state, cause, attempts)
               VALUES ('billing', 't', 0, $2, $1::bytea, 's', $1, 'dead', 'exhausted', 3)"#,
        )
        .bind(key)
        .bind(i64::try_from(nr).unwrap())
        .execute(&world.pool)
        .await
        .unwrap();
    }
    let mut connection = sqlx::PgConnection::connect_with(&world.options).await.unwrap();
    let filter = Filter { consumer: Some("billing".to_owned()), ..Filter::default() };
    let dead = list(&mut connection, &filter).await.unwrap();
    let decided = decide(&mut connection, Decision::Requeue, &dead, &filter).await.unwrap();
    assert_eq!((decided.changed, decided.rows), (keys.len(), keys.len()));
    connection.close().await.unwrap();
}

fn inbox(world: &World) -> Inbox {
    Inbox::new("billing", world.pool.clone()).unwrap()
}

async fn effect(tx: &mut sqlx::Transaction<'_, sqlx::Postgres>, key: &str) -> Verdict {
    sqlx::query("INSERT INTO effect (key) VALUES ($1)").bind(key).execute(&mut **tx).await.map(|_| ()).into()
}

async fn pay(inbox: &Inbox, key: &str) -> Result<Once, Error> {
    inbox.run_once("s", key, b"pay", async |tx| effect(tx, key).await).await
}

async fn row(world: &World, key: &str) -> (String, i64, i32) {
    sqlx::query_as("SELECT state, generation, attempts FROM inbox.message WHERE key = $1")
        .bind(key)
        .fetch_one(&world.pool)
        .await
        .unwrap()
}

#[test]
fn requeued_work_is_run_once_by_whoever_comes_first_and_another_payload_is_a_conflict() {
    in_world(1, |world| async move {
        requeued(&world, &["k"]).await;
        assert_eq!(row(&world, "k").await, ("in_progress".to_owned(), 2, 0));
        let other = inbox(&world).run_once("s", "k", b"other", async |_| Verdict::done()).await.unwrap();
        assert!(matches!(other, Once::Conflict), "{other:?}");
        // What fails leaves it for the next one.
        let failed =
            inbox(&world).run_once("s", "k", b"pay", async |_| Verdict::transient("not yet")).await.unwrap();
        assert!(matches!(failed, Once::Failed(_)), "{failed:?}");
        assert_eq!(row(&world, "k").await, ("in_progress".to_owned(), 2, 0));

        let [gate, entered] = [0, 1].map(|_| Arc::new(Notify::new()));
        let first = tokio::spawn({
            let (inbox, gate, entered) = (inbox(&world), gate.clone(), entered.clone());
            async move {
                let run = inbox.run_once("s", "k", b"pay", async |tx| {
                    entered.notify_one();
                    gate.notified().await;
                    effect(tx, "k").await
                });
                run.await.unwrap()
            }
        });
        entered.notified().await;
        let second = tokio::spawn({
            let inbox = inbox(&world);
            async move { pay(&inbox, "k").await }
        });
        somebody_waits(&world).await;
        gate.notify_one();
        let (first, second) = (first.await.unwrap(), second.await.unwrap().unwrap());
        assert!(matches!(first, Once::Fresh(_)), "{first:?}");
        assert!(matches!(second, Once::Duplicate(_)), "{second:?}");
        assert_eq!(world.effect_keys().await, ["k"]);
        assert_eq!(row(&world, "k").await, ("done".to_owned(), 3, 1));
    });
}

#[test]
fn a_batch_runs_requeued_work_and_answers_what_comes_again_in_it_as_single_calls_do() {
    in_world(1, |world| async move {
        requeued(&world, &["b", "a"]).await;
        let item = |key| Item { scope: "s", key, payload: b"pay" };
        let items = [item("b"), item("new"), item("a"), item("b")];
        let batch = inbox(&world)
            .run_batch(&items, async |fresh, tx| {
                for fresh in fresh {
                    let key = items[fresh.index()].key;
                    sqlx::query("INSERT INTO effect (key) VALUES ($1)").bind(key).execute(&mut **tx).await?;
                }
                Ok(())
            })
            .await
            .unwrap();
        let Batch::Settled(answers) = batch else { panic!("{batch:?}") };
        let is_fresh: Vec<bool> = answers.iter().map(|answer| matches!(answer, Ok(Once::Fresh(_)))).collect();
        assert_eq!(is_fresh, [true, true, true, false], "{answers:?}");
        assert!(matches!(answers[3], Ok(Once::Duplicate(_))), "{answers:?}");
        assert_eq!(world.effect_keys().await, ["b", "new", "a"]);
        assert_eq!(row(&world, "a").await, ("done".to_owned(), 3, 1));
    });
}

#[test]
fn requeued_work_that_is_as_old_as_what_was_purged_is_run_and_what_is_new_and_as_old_is_not() {
    in_world(1, |world| async move {
        requeued(&world, &["k", "l"]).await;
        sqlx::query("INSERT INTO inbox.horizon VALUES ('billing', now() - '8 d'::interval)")
            .execute(&world.pool)
            .await
            .unwrap();
        assert!(matches!(pay(&inbox(&world), "k").await.unwrap(), Once::Fresh(_)));
        let items = [Item { scope: "s", key: "l", payload: b"pay" }];
        let batch = inbox(&world).run_batch(&items, async |_, _| Ok(())).await.unwrap();
        assert!(
            matches!(&batch, Batch::Settled(answers) if matches!(answers[..], [Ok(Once::Fresh(_))])),
            "{batch:?}"
        );
    });
}

#[test]
fn requeued_work_whose_action_ended_its_transaction_is_not_run_again() {
    in_world(1, |world| async move {
        requeued(&world, &["k"]).await;
        let apart = inbox(&world)
            .run_once("s", "k", b"pay", async |tx| {
                let done = effect(tx, "k").await;
                sqlx::raw_sql("COMMIT").execute(&mut **tx).await.unwrap();
                done
            })
            .await;
        assert!(matches!(apart, Err(Error::Fenced { .. })), "{apart:?}");
        let again = pay(&inbox(&world), "k").await;
        assert!(matches!(again, Err(Error::Leased { .. })), "{again:?}");
        assert_eq!(world.effect_keys().await, ["k"]);
    });
}

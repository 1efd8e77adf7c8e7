//! What is finished goes after the horizon, and a repeat of it is refused by its record's time.

use std::time::Duration;

use baton_consumer::inbox::{Left, Purged};
use baton_consumer::{Inbox, Once, Verdict};
use sqlx::Executor;

use crate::fixture::{Probe, Running, Send, World, eventually, header, in_world};
use crate::inbox::somebody_waits;
use crate::proxy::Proxy;

const HORIZON: Duration = Inbox::DEFAULT_HORIZON;

/// Two years before these tests were written, in milliseconds.
const LONG_AGO: i64 = 1_732_900_000_000;

fn start(world: &World, probe: &Probe) -> Running {
    Running::start(world.builder().transactional(probe.clone()).build().unwrap())
}

fn inbox(world: &World) -> Inbox {
    Inbox::new("billing", world.pool.clone()).unwrap()
}

/// A row of each state and kind, by its age in days: of the record, and since it was finished.
async fn row(world: &World, key: &str, state: &str, record_days: Option<i32>, finished_days: i32) {
    sqlx::query(
        r#"INSERT INTO inbox.message (consumer, scope, key, fingerprint, state, topic, "partition", "offset", cause, record_time, created_at, finished_at)
           VALUES ('billing', '', $1, 'v1:sha256:00', $2, 'orders', 0, hashtext($1), CASE WHEN $2 = 'dead' THEN 'permanent' END,
                   now() - make_interval(days => $3), now() - make_interval(days => $4), CASE WHEN $2 <> 'in_progress' THEN now() - make_interval(days => $4) END)"#,
    )
    .bind(key)
    .bind(state)
    .bind(record_days)
    .bind(finished_days)
    .execute(&world.pool)
    .await
    .unwrap();
}

async fn parked(world: &World, key: &str, state: &str, settled_days: Option<i32>) {
    sqlx::query(
        r#"INSERT INTO inbox.parked (consumer, topic, "partition", "offset", scope, idempotency_key, state, record_time, first_failed_at, settled_at)
           VALUES ('billing', 'orders', 0, hashtext($1), '', $1, $2, now() - '50 d'::interval, now() - '50 d'::interval,
                   now() - make_interval(days => $3))"#,
    )
    .bind(key)
    .bind(state)
    .bind(settled_days)
    .execute(&world.pool)
    .await
    .unwrap();
}

/// Lets everything have been finished so many days earlier, as time would.
async fn age(world: &World, days: i32) {
    sqlx::query("UPDATE inbox.message SET created_at = created_at - make_interval(days => $1), finished_at = finished_at - make_interval(days => $1)")
        .bind(days)
        .execute(&world.pool)
        .await
        .unwrap();
}

/// How many days ago the record was whose time is the watermark.
async fn watermark_days(world: &World) -> Option<i32> {
    sqlx::query_scalar("SELECT extract(day FROM now() - purged_record_time)::int FROM inbox.horizon WHERE consumer = 'billing'")
        .fetch_optional(&world.pool)
        .await
        .unwrap()
}

async fn keys(world: &World) -> Vec<String> {
    world.rows().await.into_keys().collect()
}

async fn purge(world: &World) -> Purged {
    inbox(world).purge(HORIZON).await.unwrap()
}

/// The same record again: key, payload and time.
fn repeated(id: &str) -> Send<'_> {
    let mut record = Send::new(id, "pay");
    record.timestamp = Some(LONG_AGO);
    record
}

#[test]
fn finished_rows_go_after_the_horizon_and_not_before_and_no_others_ever() {
    in_world(1, |world| async move {
        row(&world, "gone, 40 days", "done", Some(40), 31).await;
        row(&world, "gone, 35 days", "done", Some(35), 32).await;
        row(&world, "gone, without a time", "done", None, 31).await;
        row(&world, "stays, finished in time", "done", Some(33), 29).await;
        row(&world, "stays, without a time", "done", None, 29).await;
        row(&world, "stays, record from the future", "done", Some(-1000), 40).await;
        row(&world, "stays, dead", "dead", Some(500), 400).await;
        row(&world, "stays, in progress", "in_progress", Some(500), 400).await;
        row(&world, "stays, parked", "done", Some(34), 33).await;
        parked(&world, "stays, parked", "dead", None).await;
        row(&world, "stays, another's", "done", Some(32), 31).await;
        world
            .pool
            .execute("UPDATE inbox.message SET consumer = 'mail' WHERE key LIKE '%another%'")
            .await
            .unwrap();

        let purged = purge(&world).await;
        assert_eq!((purged.rows, purged.parked, purged.left), (3, 0, Left::Nothing));
        assert!(purged.watermark.is_some());
        assert_eq!(
            watermark_days(&world).await,
            Some(35),
            "the highest of what is gone, and of nothing else"
        );
        assert!(keys(&world).await.iter().all(|key| key.starts_with("stays")), "{:?}", keys(&world).await);
        assert_eq!(keys(&world).await.len(), 7);

        let again = purge(&world).await;
        assert_eq!((again.rows, again.watermark), (0, purged.watermark));
        row(&world, "gone, 60 days", "done", Some(60), 31).await;
        assert_eq!((purge(&world).await.rows, watermark_days(&world).await), (1, Some(35)), "it never falls");
    });
}

#[test]
fn parked_records_go_when_they_were_settled_longer_ago_than_the_horizon_and_others_stay() {
    in_world(1, |world| async move {
        for state in ["retrying", "blocked", "dead"] {
            parked(&world, &format!("stays, {state}"), state, None).await;
        }
        for state in ["done", "discarded"] {
            parked(&world, &format!("stays, {state} lately"), state, Some(29)).await;
            parked(&world, &format!("gone, {state}"), state, Some(31)).await;
            parked(&world, &format!("gone, {state}, by whom is not known"), state, None).await;
        }
        let purged = purge(&world).await;
        assert_eq!((purged.rows, purged.parked), (0, 4));
        assert_eq!(watermark_days(&world).await, Some(50), "a discarded record has no other row");
        let left: Vec<String> = sqlx::query_scalar("SELECT idempotency_key FROM inbox.parked")
            .fetch_all(&world.pool)
            .await
            .unwrap();
        assert!(left.len() == 5 && left.iter().all(|key| key.starts_with("stays")), "{left:?}");
    });
}

#[test]
fn a_repeat_is_a_duplicate_within_the_horizon_and_one_dead_letter_after_it() {
    in_world(1, |world| async move {
        let probe = Probe::new();
        let consumer = start(&world, &probe);
        world.send(repeated("1")).await;
        world.eventually_effects(1).await;
        age(&world, 29).await;
        assert_eq!(purge(&world).await.rows, 0);
        world.send(repeated("1")).await;
        world.eventually_committed(0, 2).await;
        assert!(world.read(&world.dlt()).await.is_empty(), "a duplicate");

        age(&world, 2).await;
        assert_eq!(purge(&world).await.rows, 1);
        world.send(repeated("1")).await;
        let letters = world.eventually_letters(1).await;
        assert_eq!(header(&letters[0], "dlt-cause").as_deref(), Some("too_old"));
        world.send(repeated("1")).await;
        world.eventually_committed(0, 4).await;
        assert_eq!(world.read(&world.dlt()).await.len(), 1, "its row says that it is dead");
        assert_eq!(
            (world.effects().await.len(), probe.calls().len()),
            (1, 1),
            "the handler is not even asked"
        );
        let rows = world.rows().await;
        assert!(
            rows.values().all(|(state, cause, _)| state == "dead" && cause.as_deref() == Some("too_old")),
            "{rows:?}"
        );

        // What is newer than the watermark is new.
        let mut newer = repeated("2");
        newer.timestamp = Some(LONG_AGO + 1);
        world.send(newer).await;
        world.eventually_effects(2).await;
        consumer.stop().await.unwrap();
    });
}

#[test]
fn a_first_start_over_old_history_applies_all_of_it_while_purges_run() {
    in_world(1, |world| async move {
        let consumer = start(&world, &Probe::new());
        for id in ["1", "2", "3"] {
            world.send(repeated(id)).await;
            world.eventually_effects(id.parse().unwrap()).await;
            let purged = purge(&world).await;
            assert_eq!((purged.rows, purged.watermark), (0, None), "it was applied a moment ago");
        }
        assert!(world.read(&world.dlt()).await.is_empty());
        consumer.stop().await.unwrap();
    });
}

/// Case 33. Without the look of `message_complete.sql` the effect is there twice.
#[test]
fn a_claim_with_a_snapshot_from_before_a_purge_that_inserts_after_it_applies_nothing() {
    in_world(1, |world| async move {
        let probe = Probe::new();
        let consumer = start(&world, &probe);
        world.send(repeated("1")).await;
        world.eventually_effects(1).await;
        age(&world, 31).await;

        // Between a claim's snapshot and its look at the index.
        let trigger = "CREATE FUNCTION hold() RETURNS trigger LANGUAGE plpgsql AS
                           $$ BEGIN PERFORM pg_advisory_xact_lock_shared(33); RETURN NEW; END $$;
                       CREATE TRIGGER hold BEFORE INSERT ON inbox.message FOR EACH ROW EXECUTE FUNCTION hold()";
        sqlx::raw_sql(trigger).execute(&world.pool).await.unwrap();
        let mut held = world.pool.acquire().await.unwrap();
        held.execute("SELECT pg_advisory_lock(33)").await.unwrap();
        world.send(repeated("1")).await;
        somebody_waits(&world).await;
        assert_eq!(purge(&world).await.rows, 1);
        held.execute("SELECT pg_advisory_unlock(33)").await.unwrap();

        let settled = eventually("the repeat is settled", || async {
            match (world.read(&world.dlt()).await, world.effects().await.len()) {
                (letters, effects) if letters.len() == 1 || effects == 2 => Ok((letters, effects)),
                (letters, effects) => Err(format!("{} letters, {effects} effects", letters.len())),
            }
        });
        let (letters, effects) = settled.await;
        assert_eq!(effects, 1, "applied twice");
        assert_eq!(header(&letters[0], "dlt-cause").as_deref(), Some("too_old"));
        assert_eq!(probe.calls().len(), 2, "the claim itself did see the purge, so this shows nothing");
        consumer.stop().await.unwrap();
    });
}

/// Case 33, where the purge is under way.
#[test]
fn a_claim_that_waits_for_a_purge_applies_nothing() {
    in_world(1, |world| async move {
        let consumer = start(&world, &Probe::new());
        world.send(repeated("1")).await;
        world.eventually_effects(1).await;
        age(&world, 31).await;
        let mut purging = world.pool.begin().await.unwrap();
        let cut_off: time::OffsetDateTime =
            sqlx::query_scalar("SELECT now() - '30 d'::interval").fetch_one(&mut *purging).await.unwrap();
        let gone: i64 = sqlx::query_scalar(include_str!("../../queries/message_purge.sql"))
            .bind("billing")
            .bind(cut_off)
            .bind(10_i64)
            .bind(None::<time::OffsetDateTime>)
            .fetch_one(&mut *purging)
            .await
            .unwrap();
        assert_eq!(gone, 1);
        world.send(repeated("1")).await;
        somebody_waits(&world).await;
        purging.commit().await.unwrap();
        let letters = world.eventually_letters(1).await;
        assert_eq!(header(&letters[0], "dlt-cause").as_deref(), Some("too_old"));
        assert_eq!(world.effects().await.len(), 1);
        consumer.stop().await.unwrap();
    });
}

#[test]
fn a_purge_of_many_rows_takes_them_in_batches_and_a_second_one_leaves_it_to_the_first() {
    in_world(1, |world| async move {
        world
            .pool
            .execute(
                "INSERT INTO inbox.message (consumer, scope, key, fingerprint, state, record_time, created_at, finished_at)
                 SELECT 'billing', '', n::text, 'v1:sha256:00', 'done', now() - '40 d'::interval, now() - '31 d'::interval, now() - '31 d'::interval
                 FROM generate_series(1, 15000) n",
            )
            .await
            .unwrap();
        let mut held = world.pool.begin().await.unwrap();
        let has_it: bool = sqlx::query_scalar(include_str!("../../queries/horizon_lock.sql"))
            .bind("billing")
            .fetch_one(&mut *held)
            .await
            .unwrap();
        assert!(has_it);
        let second = purge(&world).await;
        assert_eq!((second.rows, second.left, second.watermark), (0, Left::ToAnother, None));
        held.rollback().await.unwrap();

        let (a, b) = (inbox(&world), inbox(&world));
        let (a, b) = tokio::join!(a.purge(HORIZON), b.purge(HORIZON));
        let (a, b) = (a.unwrap(), b.unwrap());
        assert_eq!(a.rows + b.rows, 15_000, "{a:?} {b:?}");
        assert!(a.left == Left::Nothing || b.left == Left::Nothing, "{a:?} {b:?}");
        assert!(world.rows().await.is_empty());
        assert_eq!(watermark_days(&world).await, Some(40));
    });
}

#[test]
fn a_purge_that_is_dropped_anywhere_has_done_a_batch_completely_or_not_at_all() {
    in_world(1, |world| async move {
        for statement in
            ["BEGIN ISOLATION", "pg_try_advisory_xact_lock", "DELETE FROM inbox.message", "COMMIT\0"]
        {
            world.pool.execute("DELETE FROM inbox.horizon").await.unwrap();
            row(&world, "old", "done", Some(40), 31).await;
            let proxy = Proxy::start(&world.options).await;
            let dropped = Inbox::new("billing", proxy.pool(1).await).unwrap();
            proxy.hold_reply_to(statement);
            let task = tokio::spawn({
                let dropped = dropped.clone();
                async move { dropped.purge(HORIZON).await }
            });
            proxy.holding().await;
            task.abort();
            assert!(task.await.unwrap_err().is_cancelled());
            proxy.release();
            // Over the same pool, whose only connection must not be in a transaction.
            let once = dropped.run_once("", "new", b"", async |_| Verdict::done()).await.unwrap();
            assert!(matches!(once, Once::Fresh(_) | Once::Duplicate(_)), "{once:?}");
            if statement == "COMMIT\0" {
                // It was on its way: the server is at it, or has done it.
                eventually("what was committed is gone", || async {
                    let keys = keys(&world).await;
                    if keys.contains(&"old".to_owned()) { Err(format!("{keys:?}")) } else { Ok(()) }
                })
                .await;
                assert!(watermark_days(&world).await.is_some());
            } else {
                assert!(keys(&world).await.contains(&"old".to_owned()), "dropped at {statement}");
                assert_eq!(watermark_days(&world).await, None, "dropped at {statement}");
            }
            eventually("the lock is free again", || async {
                match purge(&world).await {
                    Purged { left: Left::Nothing, .. } => Ok(()),
                    purged => Err(format!("{purged:?}")),
                }
            })
            .await;
            assert_eq!(keys(&world).await, ["new"]);
        }
    });
}

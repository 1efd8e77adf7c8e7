//! Connections that transactions which follow each other closely pass on.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use baton_consumer::inbox::Error;
use baton_consumer::{Inbox, Once, Verdict};
use sqlx::PgPool;
use sqlx::postgres::PgPoolOptions;

use crate::fixture::{World, eventually, in_world};

const MESSAGES: usize = 40;

/// A pool that counts how often a connection that was there before is taken from it.
async fn counted(world: &World, connections: u32) -> (PgPool, Arc<AtomicUsize>) {
    let taken = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&taken);
    let pool = PgPoolOptions::new()
        .max_connections(connections)
        .before_acquire(move |_, _| {
            counter.fetch_add(1, Ordering::Relaxed);
            Box::pin(async { Ok(true) })
        })
        .connect_with(world.options.clone())
        .await
        .unwrap();
    (pool, taken)
}

async fn pay(inbox: &Inbox, key: &str) -> Result<Once, Error> {
    inbox
        .run_once("payments", key, b"1", async |tx| {
            let effect = sqlx::query("INSERT INTO effect (key) VALUES ($1)").bind(key).execute(&mut **tx);
            effect.await.map_or_else(Into::into, |_| Verdict::done())
        })
        .await
}

async fn all_are_back(pool: &PgPool) {
    eventually("every connection is back in its pool", || async {
        let (idle, all) = (pool.num_idle(), pool.size());
        if u32::try_from(idle) == Ok(all) { Ok(()) } else { Err(format!("{idle} of {all}")) }
    })
    .await;
}

#[test]
fn messages_that_follow_each_other_take_a_connection_from_the_pool_less_often_than_once_each() {
    in_world(1, |world| async move {
        let (pool, taken) = counted(&world, 2).await;
        let inbox = Inbox::new("billing", pool.clone()).unwrap();
        for n in 0..MESSAGES {
            assert!(matches!(pay(&inbox, &format!("k-{n}")).await, Ok(Once::Fresh(_))));
        }
        let taken = taken.load(Ordering::Relaxed);
        assert!(taken < MESSAGES, "taken {taken} times for {MESSAGES} messages");
        all_are_back(&pool).await;
        // Also what is kept at the very end does not hold it up.
        pay(&inbox, "last").await.unwrap();
        pool.close().await;
        assert!(matches!(pay(&inbox, "later").await, Err(Error::Connect(_))));
    });
}

#[test]
fn the_only_connection_of_a_pool_goes_back_each_time() {
    in_world(1, |world| async move {
        let (pool, taken) = counted(&world, 1).await;
        let inbox = Inbox::new("billing", pool.clone()).unwrap();
        for n in 0..MESSAGES {
            pay(&inbox, &format!("k-{n}")).await.unwrap();
        }
        assert_eq!(taken.load(Ordering::Relaxed), MESSAGES);
    });
}

#[test]
fn a_kept_connection_that_died_costs_a_call_at_most_and_no_effect() {
    in_world(1, |world| async move {
        let (pool, _) = counted(&world, 2).await;
        let inbox = Inbox::new("billing", pool.clone()).unwrap();
        for n in 0..10 {
            pay(&inbox, &format!("a-{n}")).await.unwrap();
            sqlx::query(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
                 WHERE datname = current_database() AND pid <> pg_backend_pid()",
            )
            .execute(&world.pool)
            .await
            .unwrap();
            let key = format!("b-{n}");
            if let Err(error) = pay(&inbox, &key).await {
                assert!(matches!(error, Error::Begin(_)), "{error:?}");
                assert!(matches!(pay(&inbox, &key).await, Ok(Once::Fresh(_))));
            }
        }
        let effects: i64 =
            sqlx::query_scalar("SELECT count(*) FROM effect").fetch_one(&world.pool).await.unwrap();
        assert_eq!(effects, 20);
    });
}

#[test]
fn an_inbox_may_be_dropped_after_its_runtime() {
    in_world(1, |world| async move {
        let options = world.options.clone();
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            let inbox = runtime.block_on(async {
                let pool = PgPoolOptions::new().max_connections(2).connect_with(options).await.unwrap();
                let inbox = Inbox::new("billing", pool).unwrap();
                pay(&inbox, "k").await.unwrap();
                inbox
            });
            drop(runtime);
            drop(inbox);
        })
        .join()
        .unwrap();
    });
}

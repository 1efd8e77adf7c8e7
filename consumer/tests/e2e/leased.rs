//! Effects outside the database: leases, takeovers, budgets, and asking before anything runs again.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use baton_consumer::inbox::{Error, Lease, Reconciled};
use baton_consumer::{Failure, Inbox, Once, Outcome, Verdict};
use sqlx::PgPool;
use tokio::sync::{Notify, oneshot};

use crate::fixture::{World, eventually, in_world};
use crate::proxy::Proxy;

/// Shorter than any test, longer than a statement on a busy machine.
const TTL: Duration = Duration::from_secs(2);

/// A service outside: which keys took effect, and how often it was asked.
#[derive(Default)]
struct Provider {
    charged: AtomicU32,
    asked: AtomicU32,
}

impl Provider {
    fn charge(&self) {
        self.charged.fetch_add(1, Ordering::SeqCst);
    }

    fn charged(&self) -> u32 {
        self.charged.load(Ordering::SeqCst)
    }

    fn asked(&self) -> u32 {
        self.asked.load(Ordering::SeqCst)
    }

    /// What it says of every key.
    fn says(
        self: &Arc<Self>,
        what: fn() -> Reconciled,
    ) -> impl Fn(String) -> std::future::Ready<Reconciled> + use<> {
        let provider = Arc::clone(self);
        move |_| {
            provider.asked.fetch_add(1, Ordering::SeqCst);
            std::future::ready(what())
        }
    }
}

fn worker(pool: &PgPool, owner: &str) -> Inbox {
    Inbox::new("billing", pool.clone()).unwrap().owner(owner).lease_ttl(TTL).attempts(3)
}

/// Charges and is done.
async fn pay(inbox: &Inbox, provider: &Arc<Provider>, key: &str, payload: &[u8]) -> Result<Once, Error> {
    let nothing = provider.says(|| Reconciled::NotApplied);
    inbox
        .run_leased("payments", key, payload, &nothing, async |lease: &mut Lease<'_>| {
            provider.charge();
            Verdict::done_with(&lease.attempt())
        })
        .await
}

/// Begins and dies half-way, after the effect where `charges`.
async fn die(inbox: &Inbox, provider: &Arc<Provider>, key: &str, charges: bool) {
    let (began, begun) = oneshot::channel();
    let nothing = provider.says(|| Reconciled::NotApplied);
    let dying = inbox.run_leased("payments", key, b"100", &nothing, async |_: &mut Lease<'_>| {
        if charges {
            provider.charge();
        }
        began.send(()).unwrap();
        std::future::pending().await
    });
    tokio::select! {
        once = dying => panic!("{once:?}"),
        begun = begun => begun.unwrap(),
    }
}

/// Ends the lease of a key by the database's clock, as time would.
async fn run_out(world: &World, key: &str) {
    sqlx::query("UPDATE inbox.message SET lease_until = clock_timestamp() WHERE key = $1")
        .bind(key)
        .execute(&world.pool)
        .await
        .unwrap();
}

/// State, owner's name, generation, attempts.
async fn row(world: &World, key: &str) -> (String, Option<String>, i64, i32) {
    sqlx::query_as(
        "SELECT state, split_part(owner, '/', 1), generation, attempts FROM inbox.message WHERE key = $1",
    )
    .bind(key)
    .fetch_one(&world.pool)
    .await
    .unwrap()
}

fn number(outcome: Option<&Outcome>) -> u32 {
    outcome.unwrap().decode().unwrap()
}

/// The story of `cargo run --example recovery`, on the database.
#[test]
fn a_second_owner_takes_over_and_the_first_can_neither_renew_nor_complete() {
    in_world(1, |world| async move {
        let (a, b) = (worker(&world.pool, "worker-a"), worker(&world.pool, "worker-b"));
        let provider = Arc::new(Provider::default());
        let (go, gate) = oneshot::channel::<()>();
        let entered = Arc::new(Notify::new());
        let first = tokio::spawn({
            let (a, entered, provider) = (a.clone(), Arc::clone(&entered), Arc::clone(&provider));
            async move {
                let nothing = provider.says(|| Reconciled::NotApplied);
                let action = async |lease: &mut Lease<'_>| {
                    assert_eq!((lease.attempt(), lease.generation()), (1, 1));
                    entered.notify_one();
                    gate.await.unwrap();
                    assert!(matches!(lease.progress().await, Err(Error::Lost { .. })), "an old heartbeat");
                    Verdict::done_with("of worker-a")
                };
                a.run_leased("payments", "key", b"100", &nothing, action).await
            }
        });
        entered.notified().await;
        assert!(matches!(pay(&b, &provider, "key", b"100").await.unwrap(), Once::InProgress));
        assert_eq!((provider.charged(), provider.asked()), (0, 0), "a claim before the expiry runs nothing");

        // While the second is at it, the first comes back, says that it moves on, and that it is done.
        run_out(&world, "key").await;
        let nothing = provider.says(|| Reconciled::NotApplied);
        let taken = b
            .run_leased("payments", "key", b"100", &nothing, async |lease: &mut Lease<'_>| {
                provider.charge();
                go.send(()).unwrap();
                let late = first.await.unwrap();
                assert!(matches!(late, Err(Error::Lost { .. })), "{late:?}");
                Verdict::done_with(&lease.attempt())
            })
            .await
            .unwrap();
        assert!(matches!(&taken, Once::Fresh(outcome) if number(outcome.as_ref()) == 2), "{taken:?}");
        assert_eq!((provider.charged(), provider.asked()), (1, 1), "it asked before it ran");
        assert_eq!(row(&world, "key").await, ("done".into(), Some("worker-b".into()), 2, 2));
        let again = pay(&a, &provider, "key", b"100").await.unwrap();
        assert!(matches!(&again, Once::Duplicate(outcome) if number(outcome.as_ref()) == 2), "{again:?}");
        assert_eq!(provider.charged(), 1);
    });
}

#[test]
fn a_late_owner_that_fails_gives_back_nothing_of_the_next_ones() {
    in_world(1, |world| async move {
        let (a, b) = (worker(&world.pool, "worker-a"), worker(&world.pool, "worker-b"));
        let provider = Arc::new(Provider::default());
        let (go, gate) = oneshot::channel::<()>();
        let entered = Arc::new(Notify::new());
        let first = tokio::spawn({
            let (entered, nothing) = (Arc::clone(&entered), provider.says(|| Reconciled::NotApplied));
            async move {
                let action = async |_: &mut Lease<'_>| {
                    entered.notify_one();
                    gate.await.unwrap();
                    Verdict::transient("late")
                };
                a.run_leased("payments", "key", b"100", &nothing, action).await
            }
        });
        entered.notified().await;
        run_out(&world, "key").await;
        let nothing = provider.says(|| Reconciled::NotApplied);
        let second = b.run_leased("payments", "key", b"100", &nothing, async |_: &mut Lease<'_>| {
            go.send(()).unwrap();
            assert!(matches!(first.await.unwrap(), Ok(Once::Failed(Failure::Transient(_)))));
            assert_eq!(row(&world, "key").await, ("in_progress".into(), Some("worker-b".into()), 2, 2));
            Verdict::done()
        });
        assert!(matches!(second.await.unwrap(), Once::Fresh(None)));
    });
}

#[test]
fn spent_attempts_make_it_dead_and_it_is_never_run_again() {
    in_world(1, |world| async move {
        let inbox = worker(&world.pool, "worker");
        let provider = Arc::new(Provider::default());
        for attempt in 1..=3 {
            die(&inbox, &provider, "key", false).await;
            assert_eq!(row(&world, "key").await.3, attempt);
            assert!(matches!(pay(&inbox, &provider, "key", b"100").await.unwrap(), Once::InProgress));
            run_out(&world, "key").await;
        }
        let asked = provider.asked();
        for _ in 0..2 {
            let once = pay(&inbox, &provider, "key", b"100").await.unwrap();
            let Once::Dead { cause, error } = once else { panic!("{once:?}") };
            let error = error.unwrap();
            assert_eq!(cause, "exhausted");
            assert!(error.contains("3 attempts are spent") && error.contains("worker"), "{error}");
        }
        assert!(matches!(pay(&inbox, &provider, "key", b"101").await.unwrap(), Once::Conflict));
        assert_eq!((provider.charged(), provider.asked()), (0, asked), "nothing ran and nobody was asked");
        assert_eq!(row(&world, "key").await.0, "dead");
    });
}

#[test]
fn who_takes_over_asks_first_and_each_answer_has_its_path() {
    in_world(1, |world| async move {
        let inbox = worker(&world.pool, "worker");
        let provider = Arc::new(Provider::default());
        let refuse = async |_: &mut Lease<'_>| -> Verdict { panic!("it must not run") };

        die(&inbox, &provider, "applied", true).await;
        run_out(&world, "applied").await;
        let applied = provider.says(|| Reconciled::Applied(Some(Outcome::json("receipt").unwrap())));
        for _ in 0..2 {
            let once = inbox.run_leased("payments", "applied", b"100", &applied, refuse).await.unwrap();
            assert!(
                matches!(&once, Once::Duplicate(Some(outcome)) if outcome.as_json() == "\"receipt\""),
                "{once:?}"
            );
        }
        assert_eq!(provider.asked(), 1, "what is settled needs no question");

        die(&inbox, &provider, "unknown", true).await;
        run_out(&world, "unknown").await;
        let unknown = provider.says(|| Reconciled::StillUnknown);
        for _ in 0..5 {
            let once = inbox.run_leased("payments", "unknown", b"100", &unknown, refuse).await.unwrap();
            assert!(matches!(once, Once::InProgress), "{once:?}");
        }
        assert_eq!(provider.asked(), 6, "it can be asked again at once");
        assert_eq!(row(&world, "unknown").await.3, 1, "asking spends no attempt");
        let once = pay(&inbox, &provider, "unknown", b"100").await.unwrap();
        assert!(matches!(&once, Once::Fresh(outcome) if number(outcome.as_ref()) == 2), "{once:?}");
        assert_eq!(provider.charged(), 3, "twice by those that died, once after nothing was found");
    });
}

#[test]
fn a_failure_frees_the_key_at_once_and_whatever_it_was_somebody_is_asked_before_the_next_run() {
    in_world(1, |world| async move {
        let inbox = worker(&world.pool, "worker").attempts(10);
        let provider = Arc::new(Provider::default());
        let asked = provider.says(|| Reconciled::NotApplied);
        for (before, fails) in (0..).zip(["transient", "permanent", "unknown", "panic", "last"]) {
            let once = inbox
                .run_leased("payments", "key", b"100", &asked, async |_: &mut Lease<'_>| match fails {
                    "transient" => Verdict::transient("away"),
                    "permanent" => Verdict::permanent("wrong"),
                    "panic" => panic!("half-way"),
                    _ => Verdict::unknown("no answer came"),
                })
                .await
                .unwrap();
            assert!(matches!(once, Once::Failed(_)), "{fails}: {once:?}");
            assert_eq!(provider.asked(), before, "before {fails}");
        }
        // An outcome that cannot be stored: what it tells of has taken effect all the same.
        let once = inbox
            .run_leased("payments", "key", b"100", &asked, async |_: &mut Lease<'_>| {
                provider.charge();
                Verdict::done_with(&std::collections::HashMap::from([((1, 2), "no JSON")]))
            })
            .await
            .unwrap();
        assert!(matches!(once, Once::Failed(Failure::Permanent(_))), "{once:?}");
        let applied = provider.says(|| Reconciled::Applied(None));
        let refuse = async |_: &mut Lease<'_>| -> Verdict { panic!("it must not run") };
        let once = inbox.run_leased("payments", "key", b"100", &applied, refuse).await.unwrap();
        assert!(matches!(once, Once::Duplicate(None)), "{once:?}");
        assert_eq!((provider.charged(), provider.asked(), row(&world, "key").await.3), (1, 6, 6));
    });
}

#[test]
fn a_question_that_hangs_panics_or_is_dropped_spends_no_attempt() {
    in_world(1, |world| async move {
        let inbox = worker(&world.pool, "worker");
        let provider = Arc::new(Provider::default());
        let refuse = async |_: &mut Lease<'_>| -> Verdict { panic!("it must not run") };
        die(&inbox, &provider, "key", false).await;
        run_out(&world, "key").await;

        let hangs = |_: String| std::future::pending();
        let once = inbox.run_leased("payments", "key", b"100", &hangs, refuse).await.unwrap();
        assert!(matches!(once, Once::InProgress), "{once:?}");
        let panics = |key: String| {
            assert!(key.is_empty(), "before there is a future");
            std::future::pending()
        };
        let once = inbox.run_leased("payments", "key", b"100", &panics, refuse).await.unwrap();
        assert!(matches!(once, Once::Failed(Failure::Panicked(_))), "{once:?}");
        for _ in 0..3 {
            let asked = Notify::new();
            let hangs = |_: String| {
                asked.notify_one();
                std::future::pending()
            };
            tokio::select! {
                once = inbox.run_leased("payments", "key", b"100", &hangs, refuse) => panic!("{once:?}"),
                () = asked.notified() => {}
            }
            run_out(&world, "key").await;
        }
        assert_eq!(row(&world, "key").await.3, 1);
        let once = pay(&inbox, &provider, "key", b"100").await.unwrap();
        assert!(matches!(&once, Once::Fresh(outcome) if number(outcome.as_ref()) == 2), "{once:?}");
    });
}

#[test]
fn a_claim_whose_answer_came_too_late_runs_nothing() {
    in_world(1, |world| async move {
        let proxy = Proxy::start(&world.options).await;
        let (late, other) = (worker(&proxy.pool(1).await, "late"), worker(&world.pool, "other"));
        let provider = Arc::new(Provider::default());
        proxy.hold_reply_to("COMMIT\0");
        let first = tokio::spawn({
            let provider = Arc::clone(&provider);
            async move { pay(&late, &provider, "key", b"100").await }
        });
        proxy.holding().await;
        eventually("the other to have taken over and be done", || async {
            match pay(&other, &provider, "key", b"100").await.unwrap() {
                Once::Fresh(_) => Ok(()),
                once => Err(format!("{once:?}")),
            }
        })
        .await;
        proxy.release();
        let once = first.await.unwrap();
        assert!(matches!(once, Err(Error::Lost { .. })), "{once:?}");
        assert_eq!(provider.charged(), 1);
    });
}

#[test]
fn a_claim_that_waited_for_another_transaction_has_its_whole_lease() {
    in_world(1, |world| async move {
        let inbox = worker(&world.pool, "worker");
        let provider = Arc::new(Provider::default());
        let mut other = world.pool.begin().await.unwrap();
        sqlx::query(
            "INSERT INTO inbox.message (consumer, scope, key, fingerprint, state)
             VALUES ('billing', 'payments', 'key', 'v1:sha256:00', 'in_progress')",
        )
        .execute(&mut *other)
        .await
        .unwrap();
        let waiting = tokio::spawn({
            let provider = Arc::clone(&provider);
            async move { pay(&inbox, &provider, "key", b"100").await.unwrap() }
        });
        eventually("it to have waited for longer than its lease", || async {
            let waits: bool = sqlx::query_scalar(
                "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'
                                AND clock_timestamp() - query_start > make_interval(secs => $1))",
            )
            .bind(TTL.as_secs_f64())
            .fetch_one(&world.pool)
            .await
            .unwrap();
            if waits { Ok(()) } else { Err("not yet".to_owned()) }
        })
        .await;
        other.rollback().await.unwrap();
        let once = waiting.await.unwrap();
        assert!(matches!(once, Once::Fresh(_)), "{once:?}");
        assert_eq!(row(&world, "key").await.3, 1);
    });
}

#[test]
fn what_a_lease_left_behind_is_not_run_in_a_transaction() {
    in_world(1, |world| async move {
        let inbox = worker(&world.pool, "worker");
        let provider = Arc::new(Provider::default());
        die(&inbox, &provider, "key", true).await;
        let refuse =
            async |_: &mut sqlx::Transaction<'_, sqlx::Postgres>| -> Verdict { panic!("it must not run") };
        let once = inbox.run_once("payments", "key", b"100", refuse).await.unwrap();
        assert!(matches!(once, Once::InProgress), "{once:?}");
        run_out(&world, "key").await;
        let once = inbox.run_once("payments", "key", b"100", refuse).await;
        assert!(matches!(once, Err(Error::Leased { .. })), "{once:?}");
        let once = inbox.run_once("payments", "key", b"101", refuse).await.unwrap();
        assert!(matches!(once, Once::Conflict), "{once:?}");
    });
}

#[test]
fn another_payload_is_a_conflict_on_every_path() {
    in_world(1, |world| async move {
        let inbox = worker(&world.pool, "worker");
        let provider = Arc::new(Provider::default());
        let mut table = String::new();
        for path in ["running", "taken over", "given back", "finished", "dead"] {
            match path {
                "running" => die(&inbox, &provider, path, false).await,
                "taken over" => {
                    die(&inbox, &provider, path, false).await;
                    run_out(&world, path).await;
                }
                "given back" => {
                    let failing = async |_: &mut Lease<'_>| Verdict::transient("away");
                    let nothing = provider.says(|| Reconciled::NotApplied);
                    inbox.run_leased("payments", path, b"100", &nothing, failing).await.unwrap();
                }
                "finished" => drop(pay(&inbox, &provider, path, b"100").await.unwrap()),
                _ => {
                    for _ in 0..3 {
                        die(&inbox, &provider, path, false).await;
                        run_out(&world, path).await;
                    }
                }
            }
            let (before, charged) = (row(&world, path).await, provider.charged());
            let once = pay(&inbox, &provider, path, b"101").await.unwrap();
            table.push_str(&format!("{path}: {once:?}\n"));
            assert!(matches!(once, Once::Conflict), "{path}: {once:?}");
            assert_eq!((row(&world, path).await, provider.charged()), (before, charged), "{path}");
        }
        println!("{table}");
    });
}

/// What was begun and is stuck, what a finished batch left, what has just begun, what is old and moves on, a race that is lost.
#[test]
fn what_is_stuck_is_recovered_and_what_moves_on_is_left_alone() {
    in_world(1, |world| async move {
        let (inbox, other) = (worker(&world.pool, "worker"), worker(&world.pool, "other"));
        let provider = Arc::new(Provider::default());

        // A stuck one, by the clock alone: nobody renews it.
        die(&inbox, &provider, "stuck", false).await;
        eventually("the stuck one to be recovered", || async {
            match pay(&other, &provider, "stuck", b"100").await.unwrap() {
                Once::Fresh(outcome) if number(outcome.as_ref()) == 2 => Ok(()),
                once => Err(format!("{once:?}")),
            }
        })
        .await;

        // One of a batch whose others are done: recovered alone, the others stay as they are.
        pay(&inbox, &provider, "batch-1", b"100").await.unwrap();
        die(&inbox, &provider, "batch-2", false).await;
        run_out(&world, "batch-2").await;
        assert!(matches!(pay(&other, &provider, "batch-2", b"100").await.unwrap(), Once::Fresh(_)));
        assert_eq!(row(&world, "batch-1").await, ("done".into(), Some("worker".into()), 1, 1));

        // One that has just begun.
        die(&inbox, &provider, "begun", false).await;
        assert!(matches!(pay(&other, &provider, "begun", b"100").await.unwrap(), Once::InProgress));
        assert_eq!(row(&world, "begun").await, ("in_progress".into(), Some("worker".into()), 1, 1));

        // One that is far older than a lease, and says that it moves on.
        let nothing = provider.says(|| Reconciled::NotApplied);
        let old = inbox.run_leased("payments", "old", b"100", &nothing, async |lease: &mut Lease<'_>| {
            let begun = tokio::time::Instant::now();
            while begun.elapsed() < TTL * 2 {
                lease.progress().await.unwrap();
                let met = pay(&other, &provider, "old", b"100").await.unwrap();
                assert!(matches!(met, Once::InProgress), "{met:?}");
            }
            Verdict::done()
        });
        assert!(matches!(old.await.unwrap(), Once::Fresh(None)));
        assert_eq!(row(&world, "old").await, ("done".into(), Some("worker".into()), 1, 1));

        // Ten at once after one that is left behind: one of them runs it.
        die(&inbox, &provider, "race", false).await;
        run_out(&world, "race").await;
        let charged = provider.charged();
        let racers = (0..10).map(|n| {
            let (racer, provider) = (worker(&world.pool, &format!("racer-{n}")), Arc::clone(&provider));
            tokio::spawn(async move { pay(&racer, &provider, "race", b"100").await.unwrap() })
        });
        let mut fresh = 0;
        for racer in racers.collect::<Vec<_>>() {
            match racer.await.unwrap() {
                Once::Fresh(_) => fresh += 1,
                Once::InProgress | Once::Duplicate(_) => {}
                once => panic!("{once:?}"),
            }
        }
        assert_eq!((fresh, provider.charged() - charged), (1, 1));
        assert_eq!(row(&world, "race").await.2, 2, "a lost race changes nothing");
    });
}

#[test]
fn at_exactly_its_end_a_lease_is_over() {
    in_world(1, |world| async move {
        let inbox = worker(&world.pool, "worker");
        let provider = Arc::new(Provider::default());
        let nothing = provider.says(|| Reconciled::NotApplied);
        let once = inbox
            .run_leased("payments", "key", b"100", &nothing, async |_: &mut Lease<'_>| {
                provider.charge();
                run_out(&world, "key").await;
                Verdict::done()
            })
            .await;
        assert!(
            matches!(once, Err(Error::Lost { .. })),
            "nobody else has come, and it is over all the same: {once:?}"
        );
        assert_eq!(row(&world, "key").await.0, "in_progress");
    });
}

#[test]
fn a_completion_whose_reply_is_lost_is_found_by_its_generation() {
    in_world(1, |world| async move {
        let proxy = Proxy::start(&world.options).await;
        let inbox = worker(&proxy.pool(1).await, "worker");
        let provider = Arc::new(Provider::default());
        let nothing = provider.says(|| Reconciled::NotApplied);
        let once = inbox
            .run_leased("payments", "key", b"100", &nothing, async |_: &mut Lease<'_>| {
                proxy.lose_reply_to("COMMIT\0");
                Verdict::done_with("paid")
            })
            .await
            .unwrap();
        assert!(matches!(&once, Once::Fresh(Some(outcome)) if outcome.as_json() == "\"paid\""), "{once:?}");
        assert!(proxy.has_lost(), "the test lost nothing");
        assert_eq!(row(&world, "key").await, ("done".into(), Some("worker".into()), 1, 1));
    });
}

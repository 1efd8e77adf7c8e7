//! The test kit, used as whoever tests a handler uses it: no broker takes part.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use baton_consumer::inbox::{Lease, Reconcile, Reconciled};
use baton_consumer::testing::{self, Delivered, Kit};
use baton_consumer::{Compare, Delivery, Failure, Json, LeasedHandler, Outcome, Scope, Verdict, handler_fn};
use serde_json::json;
use sqlx::PgPool;

use crate::fixture::in_world;

/// A database with an inbox and a table `effect`.
fn in_database<F: Future<Output = ()>>(test: impl FnOnce(PgPool) -> F) {
    in_world(1, |world| async move { test(world.pool.clone()).await });
}

#[derive(serde::Deserialize)]
struct Order {
    cents: i64,
}

/// Writes an effect, and refuses what costs nothing.
fn billing(pool: &PgPool) -> Kit {
    let handler = handler_fn::<Json<Order>, _>(|delivery, tx| {
        Box::pin(async move {
            let effect = sqlx::query("INSERT INTO effect (key, at_offset) VALUES ($1, $2)");
            let Json(order) = delivery.payload();
            match effect.bind(delivery.idempotency_key()).bind(order.cents).execute(&mut **tx).await {
                Ok(_) if order.cents == 0 => Verdict::permanent("it costs nothing"),
                Ok(_) => Verdict::done_with(&order.cents),
                Err(error) => error.into(),
            }
        })
    });
    Kit::transactional("billing", pool.clone(), handler)
}

fn placed() -> testing::Draft {
    testing::message("orders", "customer-7").message_type("order.placed").idempotency_key("order-7")
}

async fn effects(pool: &PgPool) -> i64 {
    sqlx::query_scalar("SELECT count(*) FROM effect").fetch_one(pool).await.unwrap()
}

async fn rows(pool: &PgPool) -> i64 {
    sqlx::query_scalar("SELECT count(*) FROM inbox.message").fetch_one(pool).await.unwrap()
}

fn is_outcome(outcome: Option<&Outcome>, expected: i64) -> bool {
    outcome.and_then(|outcome| outcome.decode().ok()) == Some(expected)
}

#[test]
fn a_record_that_comes_again_is_a_duplicate_with_the_outcome_of_the_first() {
    in_database(|pool| async move {
        let (kit, record) = (billing(&pool), placed().json(&json!({"cents": 100})));
        let first = kit.deliver(&record).await;
        assert!(
            matches!(&first, Delivered::Applied(outcome) if is_outcome(outcome.as_ref(), 100)),
            "{first:?}"
        );
        let second = kit.deliver(&placed().at(2, 40).json(&json!({"cents": 100}))).await;
        assert!(matches!(second, Delivered::Duplicate(_)), "another place, the same message: {second:?}");
        assert!(is_outcome(second.outcome(), 100));
        assert_eq!(effects(&pool).await, 1);
    });
}

#[test]
fn of_two_at_the_same_moment_one_is_applied_and_one_a_duplicate() {
    in_database(|pool| async move {
        let (kit, record) = (billing(&pool), placed().json(&json!({"cents": 100})));
        let both = kit.deliver_at_once(&record).await;
        assert_eq!(both.iter().filter(|one| matches!(one, Delivered::Applied(_))).count(), 1, "{both:?}");
        assert_eq!(both.iter().filter(|one| matches!(one, Delivered::Duplicate(_))).count(), 1, "{both:?}");
        assert_eq!(effects(&pool).await, 1);
    });
}

#[test]
fn another_payload_under_the_same_key_is_a_conflict_unless_the_settings_say_otherwise() {
    in_database(|pool| async move {
        let kit = billing(&pool).fingerprint(Compare::CanonicalJson).scope(Scope::Topic);
        let _ = kit.deliver(&placed().json(&json!({"cents": 100}))).await;
        let conflict = kit.deliver(&placed().json(&json!({"cents": 999}))).await;
        assert!(matches!(conflict, Delivered::Conflict), "{conflict:?}");
        let same_value = kit.deliver(&placed().bytes("{ \"cents\": 100 }")).await;
        assert!(matches!(same_value, Delivered::Duplicate(_)), "{same_value:?}");
        let other_type =
            kit.deliver(&placed().message_type("order.cancelled").json(&json!({"cents": 7}))).await;
        assert!(matches!(other_type, Delivered::Conflict), "one scope for the topic: {other_type:?}");
        assert_eq!(effects(&pool).await, 1);
    });
}

#[test]
fn a_crash_before_the_commit_leaves_no_trace_and_the_next_delivery_applies() {
    in_database(|pool| async move {
        let (kit, record) = (billing(&pool), placed().json(&json!({"cents": 100})));
        let verdict = kit.crash_before_commit(&record).await;
        assert!(matches!(verdict, Verdict::Done(Some(_))), "{verdict:?}");
        assert_eq!((effects(&pool).await, rows(&pool).await), (0, 0));
        let next = kit.deliver(&record).await;
        assert!(matches!(next, Delivered::Applied(_)), "{next:?}");
        assert_eq!(effects(&pool).await, 1);
    });
}

#[test]
fn a_crash_after_the_commit_makes_the_next_delivery_a_duplicate() {
    in_database(|pool| async move {
        let (kit, record) = (billing(&pool), placed().json(&json!({"cents": 100})));
        kit.crash_after_commit(&record).await;
        let next = kit.deliver(&record).await;
        assert!(matches!(next, Delivered::Duplicate(_)), "{next:?}");
        assert_eq!(effects(&pool).await, 1);
    });
}

#[test]
fn what_fails_is_told_as_it_failed_and_leaves_no_trace() {
    in_database(|pool| async move {
        let kit = billing(&pool);
        let permanent = kit.deliver(&placed().json(&json!({"cents": 0}))).await;
        assert!(matches!(permanent, Delivered::Failed(Failure::Permanent(_))), "{permanent:?}");
        let undecodable = kit.deliver(&placed().bytes("{")).await;
        assert!(matches!(undecodable, Delivered::Failed(Failure::Undecodable(_))), "{undecodable:?}");
        let tombstone = kit.deliver(&testing::message("orders", "7").tombstone()).await;
        assert!(matches!(tombstone, Delivered::Failed(Failure::Undecodable(_))), "{tombstone:?}");
        let nameless = kit.deliver(&testing::message("orders", "7").idempotency_key("").bytes("1")).await;
        assert!(matches!(nameless, Delivered::NoIdentity(_)), "{nameless:?}");
        assert_eq!((effects(&pool).await, rows(&pool).await), (0, 0));
    });
}

#[test]
fn a_handler_that_commits_by_itself_is_found_out() {
    in_database(|pool| async move {
        let handler = handler_fn::<Json<Order>, _>(|_, tx| {
            Box::pin(async move { sqlx::query("COMMIT").execute(&mut **tx).await.map(|_| ()).into() })
        });
        let kit = Kit::transactional("billing", pool, handler);
        let found = kit.deliver(&placed().json(&json!({"cents": 1}))).await;
        assert!(matches!(found, Delivered::Error(_)), "{found:?}");
    });
}

#[test]
fn the_attempt_that_a_handler_sees_is_the_tests_to_say() {
    in_database(|pool| async move {
        let handler = handler_fn::<Json<Order>, _>(|delivery, _| {
            let attempt = delivery.attempt();
            Box::pin(async move { if attempt < 3 { Verdict::transient("not yet") } else { Verdict::done() } })
        });
        let (kit, record) =
            (Kit::transactional("billing", pool, handler), placed().json(&json!({"cents": 1})));
        let first = kit.deliver(&record).await;
        assert!(matches!(first, Delivered::Failed(Failure::Transient(_))), "{first:?}");
        let third = kit.deliver_attempt(&record, 3).await;
        assert!(matches!(third, Delivered::Applied(None)), "{third:?}");
    });
}

/// A payment provider: what it charged by key, and what it was asked.
#[derive(Clone, Default)]
struct Provider {
    charged: Arc<Mutex<BTreeMap<String, i64>>>,
    asked: Arc<Mutex<Vec<String>>>,
}

impl Provider {
    fn asked(&self) -> Vec<String> {
        self.asked.lock().unwrap().clone()
    }
}

impl Reconcile for Provider {
    async fn lookup(&self, key: &str) -> Reconciled {
        self.asked.lock().unwrap().push(format!("lookup {key}"));
        match self.charged.lock().unwrap().get(key) {
            Some(cents) => Reconciled::Applied(Outcome::json(cents).ok()),
            None => Reconciled::NotApplied,
        }
    }
}

impl LeasedHandler for Provider {
    type Payload = Json<Order>;

    async fn handle(&self, delivery: &Delivery<Json<Order>>, lease: &mut Lease<'_>) -> Verdict {
        let (key, cents) = (lease.idempotency_key().to_owned(), delivery.payload().0.cents);
        self.asked.lock().unwrap().push(format!("charge {key}"));
        if cents == 0 {
            return Verdict::transient("busy");
        }
        self.charged.lock().unwrap().insert(key, cents);
        Verdict::done_with(&cents)
    }
}

#[test]
fn with_a_lease_the_next_one_after_a_crash_waits_for_its_end_and_then_asks_before_it_charges() {
    in_database(|pool| async move {
        let provider = Provider::default();
        let kit = Kit::leased("payments", pool, provider.clone());
        let record = placed().json(&json!({"cents": 100}));
        let verdict = kit.crash_before_commit(&record).await;
        assert!(matches!(verdict, Verdict::Done(_)), "{verdict:?}");

        let held = kit.deliver(&record).await;
        assert!(matches!(held, Delivered::InProgress), "the lease of the dead is not over: {held:?}");
        assert_eq!(kit.end_leases().await.unwrap(), 1);
        let found = kit.deliver(&record).await;
        assert!(matches!(found, Delivered::Duplicate(_)), "{found:?}");
        assert!(is_outcome(found.outcome(), 100));
        assert_eq!(provider.asked(), ["charge order-7", "lookup order-7"], "charged once");
    });
}

#[test]
fn with_a_lease_what_did_not_take_effect_is_charged_after_the_crash() {
    in_database(|pool| async move {
        let provider = Provider::default();
        let kit = Kit::leased("payments", pool, provider.clone());
        let record = placed().json(&json!({"cents": 100}));
        let _ = kit.crash_before_commit(&record).await;
        provider.charged.lock().unwrap().clear();
        let _ = kit.end_leases().await.unwrap();
        let applied = kit.deliver(&record).await;
        assert!(matches!(applied, Delivered::Applied(Some(_))), "{applied:?}");
        assert_eq!(provider.asked(), ["charge order-7", "lookup order-7", "charge order-7"]);
    });
}

#[test]
fn with_a_lease_duplicates_conflicts_and_failures_are_told_as_in_a_transaction() {
    in_database(|pool| async move {
        let provider = Provider::default();
        let kit = Kit::leased("payments", pool, provider.clone());
        let record = placed().json(&json!({"cents": 100}));
        kit.crash_after_commit(&record).await;
        assert!(matches!(kit.deliver(&record).await, Delivered::Duplicate(Some(_))));
        assert!(matches!(kit.deliver(&placed().json(&json!({"cents": 9}))).await, Delivered::Conflict));
        assert_eq!(kit.end_leases().await.unwrap(), 0, "a crash after the commit leaves no lease");
        let busy = testing::message("orders", "8").idempotency_key("order-8").json(&json!({"cents": 0}));
        assert!(matches!(kit.deliver(&busy).await, Delivered::Failed(Failure::Transient(_))));
        let again = kit.deliver(&busy).await;
        assert!(matches!(again, Delivered::Failed(Failure::Transient(_))), "{again:?}");
        assert_eq!(provider.asked()[1..], ["charge order-8", "lookup order-8", "charge order-8"]);
    });
}

#[test]
#[should_panic(expected = "the handler did not come to its end: Duplicate")]
fn a_crash_that_cannot_take_place_fails_the_test() {
    in_database(|pool| async move {
        let (kit, record) = (billing(&pool), placed().json(&json!({"cents": 100})));
        let _ = kit.deliver(&record).await;
        let _ = kit.crash_before_commit(&record).await;
    });
}

#[test]
#[should_panic(expected = "nothing was committed: Failed(Permanent")]
fn a_crash_after_a_commit_that_did_not_come_fails_the_test() {
    in_database(|pool| async move {
        billing(&pool).crash_after_commit(&placed().json(&json!({"cents": 0}))).await;
    });
}

//! Leased handlers behind the Kafka runtime: effects elsewhere, asked after before they are made again.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use baton_consumer::inbox::{Lease, Reconcile, Reconciled};
use baton_consumer::{Builder, Delivery, LeasedHandler, Outcome, Raw, Verdict};
use tokio::sync::Semaphore;

use crate::fixture::{Running, Send, World, eventually, header, in_world};

/// A service that takes effects by idempotency key, and the journal of what it was asked.
#[derive(Clone)]
struct Provider(Arc<Inner>);

struct Inner {
    /// `call KEY`, `lookup KEY`.
    journal: Mutex<Vec<String>>,
    effects: Mutex<BTreeMap<String, String>>,
    healed: Mutex<bool>,
    gate: Semaphore,
}

impl Provider {
    fn new() -> Self {
        Self(Arc::new(Inner {
            journal: Mutex::default(),
            effects: Mutex::default(),
            healed: Mutex::default(),
            gate: Semaphore::new(0),
        }))
    }

    fn heal(&self) {
        *self.0.healed.lock().unwrap() = true;
    }

    fn is_healed(&self) -> bool {
        *self.0.healed.lock().unwrap()
    }

    fn journal(&self) -> Vec<String> {
        self.0.journal.lock().unwrap().clone()
    }

    fn note(&self, what: &str, key: &str) {
        self.0.journal.lock().unwrap().push(format!("{what} {}", key.trim_start_matches("/test#")));
    }

    fn apply(&self, key: &str) {
        self.0.effects.lock().unwrap().insert(key.to_owned(), format!("receipt of {key}"));
    }
}

impl Reconcile for Provider {
    async fn lookup(&self, key: &str) -> Reconciled {
        self.note("lookup", key);
        if key.ends_with("mute") && !self.is_healed() {
            return Reconciled::StillUnknown;
        }
        match self.0.effects.lock().unwrap().get(key) {
            Some(receipt) => Reconciled::Applied(Outcome::json(receipt).ok()),
            None => Reconciled::NotApplied,
        }
    }
}

impl LeasedHandler for Provider {
    type Payload = Raw;

    async fn handle(&self, delivery: &Delivery<Raw>, lease: &mut Lease<'_>) -> Verdict {
        let key = lease.idempotency_key().to_owned();
        assert_eq!(key, delivery.idempotency_key());
        self.note("call", &key);
        let text = delivery.payload().0.as_ref().map(|payload| String::from_utf8_lossy(payload).into_owned());
        match text.as_deref().unwrap_or_default() {
            "lost reply" => {
                self.apply(&key);
                return Verdict::unknown("no answer came");
            }
            "sick" if !self.is_healed() => return Verdict::transient("busy"),
            "away" if !self.is_healed() => return Verdict::outage("the provider is away"),
            "permanent" => return Verdict::permanent("no such account"),
            "panic" => {
                self.apply(&key);
                panic!("after the effect");
            }
            "hold" => {
                self.apply(&key);
                self.0.gate.acquire().await.unwrap().forget();
            }
            _ => {}
        }
        self.apply(&key);
        Verdict::done_with(&format!("receipt of {key}"))
    }
}

fn builder(world: &World) -> Builder {
    world.builder().park_after(Duration::ZERO).lease_ttl(Duration::from_secs(1))
}

fn start(builder: Builder, provider: &Provider) -> Running {
    Running::start(builder.leased(provider.clone()).build().unwrap())
}

async fn eventually_done(world: &World, keys: &[&str]) {
    eventually(&format!("{keys:?} are done"), || async {
        let rows = world.rows().await;
        let is_done = |key: &&&str| rows.get(&format!("/test#{key}")).is_some_and(|row| row.0 == "done");
        if keys.iter().filter(is_done).count() == keys.len() { Ok(()) } else { Err(format!("{rows:?}")) }
    })
    .await;
}

#[test]
fn a_message_is_applied_once_and_its_outcome_kept() {
    in_world(1, |world| async move {
        for id in ["1", "1", "2", "1"] {
            world.send(Send::new(id, "pay")).await;
        }
        let provider = Provider::new();
        let running = start(builder(&world), &provider);
        world.eventually_committed(0, 4).await;
        assert_eq!(provider.journal(), ["call 1", "call 2"]);
        let outcome: String =
            sqlx::query_scalar("SELECT outcome::text FROM inbox.message WHERE key = '/test#1'")
                .fetch_one(&world.pool)
                .await
                .unwrap();
        assert_eq!(outcome, "\"receipt of /test#1\"");
        running.stop().await.unwrap();
    });
}

#[test]
fn an_effect_whose_reply_was_lost_is_asked_after_and_not_made_again() {
    in_world(1, |world| async move {
        world.send(Send::new("1", "lost reply")).await;
        world.send(Send::new("2", "pay")).await;
        let provider = Provider::new();
        let running = start(builder(&world).park_after(Duration::from_secs(60)), &provider);
        world.eventually_committed(0, 2).await;
        assert_eq!(provider.journal(), ["call 1", "lookup 1", "call 2"]);
        eventually_done(&world, &["1", "2"]).await;
        running.stop().await.unwrap();
    });
}

#[test]
fn a_panic_after_the_effect_is_asked_after_and_is_no_dead_letter() {
    in_world(1, |world| async move {
        world.send(Send::new("1", "panic")).await;
        let provider = Provider::new();
        let running = start(builder(&world).park_after(Duration::from_secs(60)), &provider);
        world.eventually_committed(0, 1).await;
        assert_eq!(provider.journal(), ["call 1", "lookup 1"]);
        eventually_done(&world, &["1"]).await;
        assert!(world.read(&world.dlt()).await.is_empty());
        running.stop().await.unwrap();
    });
}

#[test]
fn a_key_that_fails_for_long_is_set_aside_and_asked_after_before_each_try() {
    in_world(1, |world| async move {
        for (id, key, payload) in [("a1", "a", "sick"), ("a2", "a", "pay"), ("b1", "b", "pay")] {
            world.send(Send::new(id, payload).keyed(key)).await;
        }
        let provider = Provider::new();
        let running = start(builder(&world), &provider);
        world.eventually_committed(0, 3).await;
        eventually("it was tried again", || async {
            let journal = provider.journal();
            if journal.iter().filter(|line| *line == "call a1").count() > 2 {
                Ok(())
            } else {
                Err(format!("{journal:?}"))
            }
        })
        .await;
        provider.heal();
        eventually_done(&world, &["a1", "a2", "b1"]).await;
        let journal = provider.journal();
        let of_a1: Vec<&str> =
            journal.iter().filter(|line| line.ends_with("a1")).map(String::as_str).collect();
        assert_eq!(of_a1[0], "call a1");
        for pair in of_a1[1..].chunks(2) {
            assert_eq!(pair, ["lookup a1", "call a1"]);
        }
        assert_eq!(journal.iter().filter(|line| *line == "call a2").count(), 1);
        let place = |line: &str| journal.iter().rposition(|found| found == line).unwrap();
        assert!(place("call a1") < place("call a2"), "{journal:?}");
        running.stop().await.unwrap();
    });
}

#[test]
fn what_cannot_be_told_holds_its_key_up_alone_and_spends_no_attempt() {
    in_world(1, |world| async move {
        world.send(Send::new("mute", "lost reply").keyed("a")).await;
        world.send(Send::new("a2", "pay").keyed("a")).await;
        world.send(Send::new("b1", "pay").keyed("b")).await;
        let provider = Provider::new();
        let two = builder(&world).attempts(NonZeroU32::new(2).unwrap());
        let running = start(two, &provider);
        world.eventually_committed(0, 3).await;
        eventually("it was asked often", || async {
            let asked = provider.journal().iter().filter(|line| *line == "lookup mute").count();
            if asked > 3 { Ok(()) } else { Err(asked.to_string()) }
        })
        .await;
        provider.heal();
        eventually_done(&world, &["mute", "a2", "b1"]).await;
        assert_eq!(provider.journal().iter().filter(|line| *line == "call mute").count(), 1);
        assert!(world.read(&world.dlt()).await.is_empty());
        running.stop().await.unwrap();
    });
}

#[test]
fn an_outage_of_the_provider_spends_no_attempt_however_long_it_is_probed() {
    in_world(1, |world| async move {
        world.send(Send::new("1", "away")).await;
        let provider = Provider::new();
        let two = builder(&world).attempts(NonZeroU32::new(2).unwrap());
        let running = start(two, &provider);
        eventually("it was probed more often than it has attempts", || async {
            let calls = provider.journal().iter().filter(|line| *line == "call 1").count();
            if calls > 3 { Ok(()) } else { Err(calls.to_string()) }
        })
        .await;
        provider.heal();
        eventually_done(&world, &["1"]).await;
        assert!(world.read(&world.dlt()).await.is_empty());
        running.stop().await.unwrap();
    });
}

#[test]
fn spent_attempts_and_permanent_failures_are_dead_letters_and_marked() {
    in_world(1, |world| async move {
        for (id, payload) in [("1", "sick"), ("2", "permanent"), ("3", "pay")] {
            world.send(Send::new(id, payload).keyed(id)).await;
        }
        let provider = Provider::new();
        let three = builder(&world).attempts(NonZeroU32::new(3).unwrap());
        let running = start(three, &provider);
        let mut letters = world.eventually_letters(2).await;
        letters.sort_by_key(|letter| header(letter, "ce_id"));
        assert_eq!(header(&letters[0], "dlt-cause").as_deref(), Some("exhausted"));
        assert_eq!(header(&letters[0], "dlt-attempts").as_deref(), Some("3"));
        assert_eq!(header(&letters[1], "dlt-cause").as_deref(), Some("permanent"));
        eventually("both are marked", || async {
            let rows = world.rows().await;
            let of = |key: &str| rows.get(key).map(|row| (row.0.as_str(), row.1.as_deref()));
            if of("/test#1") == Some(("dead", Some("exhausted")))
                && of("/test#2") == Some(("dead", Some("permanent")))
            {
                Ok(())
            } else {
                Err(format!("{rows:?}"))
            }
        })
        .await;
        assert_eq!(provider.journal().iter().filter(|line| *line == "call 1").count(), 3);
        eventually_done(&world, &["3"]).await;
        running.stop().await.unwrap();
    });
}

#[test]
fn whoever_comes_after_a_process_that_died_in_its_handler_asks_first() {
    in_world(1, |world| async move {
        world.send(Send::new("1", "hold")).await;
        let provider = Provider::new();
        let patience = Duration::from_millis(200);
        let mut one = start(builder(&world).drain_deadline(patience), &provider);
        eventually("it is in the handler", || async {
            if provider.journal() == ["call 1"] { Ok(()) } else { Err(format!("{:?}", provider.journal())) }
        })
        .await;
        // It outlives the drain deadline, and is dropped as a killed process would be.
        one.ask_to_stop();
        one.ended().await.unwrap();
        assert_eq!(world.committed(0).await, None);
        let two = start(builder(&world), &provider);
        world.eventually_committed(0, 1).await;
        eventually_done(&world, &["1"]).await;
        assert_eq!(provider.journal(), ["call 1", "lookup 1"]);
        two.stop().await.unwrap();
    });
}

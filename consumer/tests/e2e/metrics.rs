//! What a consumer counts and traces, with a recorder for the whole process: names of consumers tell tests apart.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Once, PoisonError};
use std::time::Duration;

use baton_consumer::inbox::{Lease, Reconcile, Reconciled};
use baton_consumer::testing::{self, Delivered, Kit};
use baton_consumer::{Builder, Consumer, Delivery, LeasedHandler, Policy, Raw, Verdict, handler_fn};
use metrics::{Counter, Gauge, Histogram, HistogramFn, Key, KeyName, Metadata, Recorder, SharedString, Unit};
use sqlx::PgPool;

use crate::fixture::{Probe, Running, Send, World, eventually, in_world, logged};

/// Keeps the last value of every series, of a histogram how many there were.
#[derive(Default)]
struct Series {
    counters: Mutex<BTreeMap<String, Arc<AtomicU64>>>,
    gauges: Mutex<BTreeMap<String, Arc<AtomicU64>>>,
    described: Mutex<BTreeMap<String, &'static str>>,
}

struct Samples(Arc<AtomicU64>);

impl HistogramFn for Samples {
    fn record(&self, _: f64) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

/// As Prometheus would show it, sorted by label.
fn shown(key: &Key) -> String {
    let mut labels: Vec<String> =
        key.labels().map(|label| format!("{}={}", label.key(), label.value())).collect();
    labels.sort();
    format!("{}{{{}}}", key.name(), labels.join(","))
}

impl Series {
    fn of(map: &Mutex<BTreeMap<String, Arc<AtomicU64>>>, key: &Key) -> Arc<AtomicU64> {
        let mut map = map.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(map.entry(shown(key)).or_default())
    }

    fn count(&self, series: &str) -> Option<u64> {
        Some(self.counters.lock().unwrap().get(series)?.load(Ordering::SeqCst))
    }

    fn gauge(&self, series: &str) -> Option<f64> {
        Some(f64::from_bits(self.gauges.lock().unwrap().get(series)?.load(Ordering::SeqCst)))
    }
}

impl Recorder for &'static Series {
    fn describe_counter(&self, name: KeyName, _: Option<Unit>, _: SharedString) {
        self.described.lock().unwrap().insert(name.as_str().to_owned(), "counter");
    }

    fn describe_gauge(&self, name: KeyName, _: Option<Unit>, _: SharedString) {
        self.described.lock().unwrap().insert(name.as_str().to_owned(), "gauge");
    }

    fn describe_histogram(&self, name: KeyName, _: Option<Unit>, _: SharedString) {
        self.described.lock().unwrap().insert(name.as_str().to_owned(), "histogram");
    }

    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        Counter::from_arc(Series::of(&self.counters, key))
    }

    fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::from_arc(Series::of(&self.gauges, key))
    }

    fn register_histogram(&self, key: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::from_arc(Arc::new(Samples(Series::of(&self.counters, key))))
    }
}

fn series() -> &'static Series {
    static SERIES: std::sync::OnceLock<Series> = std::sync::OnceLock::new();
    static INSTALLED: Once = Once::new();
    let series: &'static Series = SERIES.get_or_init(Series::default);
    INSTALLED.call_once(|| metrics::set_global_recorder(series).unwrap());
    series
}

/// The value of a counter; 0 where it is at 0, and none where nobody has spoken of it.
fn count(name: &str, consumer: &str, label: &str) -> Option<u64> {
    let labels = if label < "consumer" {
        format!("{label},consumer={consumer}")
    } else {
        format!("consumer={consumer},{label}")
    };
    series().count(&format!("baton_{name}{{{}}}", labels.trim_matches(',')))
}

fn gauge(name: &str, consumer: &str) -> Option<f64> {
    series().gauge(&format!("baton_{name}{{consumer={consumer}}}"))
}

async fn eventually_gauge(name: &str, consumer: &str, expected: f64) {
    eventually(&format!("{name} is {expected}"), || async {
        let found = gauge(name, consumer);
        if found == Some(expected) { Ok(()) } else { Err(format!("{found:?}")) }
    })
    .await;
}

fn builder(world: &World, consumer: &str) -> Builder {
    let quick = Policy { base: Duration::from_millis(20), factor: 2.0, cap: Duration::from_millis(200) };
    let _ = series();
    Consumer::builder(consumer, world.pool.clone(), world.kafka())
        .group(world.group())
        .topics([&world.topic])
        .retry(quick)
        .park_after(Duration::ZERO)
        .attempts(NonZeroU32::new(3).unwrap())
}

#[test]
fn after_known_traffic_every_count_is_what_was_sent() {
    in_world(1, |world| async move {
        let probe = Probe::new();
        let mut nameless = Send::new("x", "x");
        nameless.headers.clear();
        for record in [
            Send::new("1", "a"),
            Send::new("1", "a"),
            Send::new("1", "another payload"),
            Send::new("2", "permanent"),
            nameless,
            Send::new("3", "flaky:2").keyed("flaky"),
            Send::new("4", "transient").keyed("hopeless"),
        ] {
            world.send(record).await;
        }
        let running =
            Running::start(builder(&world, "metered").transactional(probe.clone()).build().unwrap());
        let settled = |key: &'static str| {
            let world = &world;
            move || async move {
                let rows = world.rows().await;
                if rows.contains_key(key) { Ok(()) } else { Err(format!("{rows:?}")) }
            }
        };
        world.eventually_committed(0, 7).await;
        eventually("what was set aside is done", settled("/test#3")).await;
        eventually("what is hopeless is dead", settled("/test#4")).await;
        eventually_gauge("consumer_in_flight_records", "metered", 0.0).await;

        let found = |name: &str, label: &str, words: &[&str]| -> Vec<Option<u64>> {
            words.iter().map(|word| count(name, "metered", &format!("{label}={word}"))).collect()
        };
        let outcomes = ["fresh", "duplicate", "conflict", "dead", "in_progress"];
        assert_eq!(found("consumed_total", "outcome", &outcomes), [2, 1, 1, 3, 0].map(Some));
        let causes = ["conflict", "permanent", "no_identity", "exhausted", "too_old"];
        assert_eq!(found("dead_letters_total", "cause", &causes), [1, 1, 1, 1, 0].map(Some));
        // `flaky` failed once, and `hopeless` three times.
        let causes = ["handler", "outage", "database", "fenced"];
        assert_eq!(found("retries_total", "cause", &causes), [4, 0, 0, 0].map(Some));
        assert_eq!(count("handler_seconds", "metered", ""), Some(7), "the handler ran so often");
        let states = ["retrying", "blocked", "dead"];
        assert_eq!(found("consumer_parked_total", "state", &states), [2, 0, 0].map(Some));
        eventually("the tries of what was set aside are counted", || async {
            let tries = found("consumer_parked_retries_total", "result", &["done", "dead", "postponed"]);
            if tries == [1, 1, 1].map(Some) { Ok(()) } else { Err(format!("{tries:?}")) }
        })
        .await;
        let operations = ["complete", "complete_leased", "parked", "bury"];
        assert_eq!(found("consumer_fenced_total", "operation", &operations), [0; 4].map(Some));
        assert!(count("consumer_commits_total", "metered", "result=sent") >= Some(1));
        assert_eq!(found("consumer_rebalances_total", "event", &["assigned", "lost"]), [1, 0].map(Some));
        assert_eq!(gauge("consumer_assigned_partitions", "metered"), Some(1.0));
        assert_eq!(gauge("consumer_in_flight_bytes", "metered"), Some(0.0));

        // A gate holds one record, which is then in flight; what is away opens the breaker.
        world.send(Send::new("5", "gate")).await;
        probe.entered(1).await;
        eventually_gauge("consumer_in_flight_records", "metered", 1.0).await;
        assert!(gauge("consumer_in_flight_bytes", "metered") > Some(4.0));
        probe.open(1);
        assert_eq!(gauge("breaker_state", "metered"), Some(0.0));
        world.send(Send::new("6", "away")).await;
        eventually_gauge("breaker_state", "metered", 1.0).await;
        probe.heal();
        eventually_gauge("breaker_state", "metered", 0.0).await;
        assert!(count("retries_total", "metered", "cause=outage") >= Some(1));

        let documented = include_str!("../../src/metrics.rs");
        for (name, kind) in series().described.lock().unwrap().iter() {
            assert!(
                documented.contains(&format!("//! | `{name}`"))
                    || documented.contains(&format!(", `{name}` |")),
                "{name}"
            );
            assert_eq!(name.ends_with("_total"), *kind == "counter", "{name} is a {kind}");
        }
        assert_eq!(series().described.lock().unwrap().len(), 14);

        running.stop().await.unwrap();
        assert_eq!(count("consumer_rebalances_total", "metered", "event=revoked"), Some(1));
        assert_eq!(gauge("consumer_assigned_partitions", "metered"), Some(0.0));
    });
}

#[test]
fn a_partition_whose_offset_is_gone_is_a_gauge_to_alert_on() {
    in_world(1, |world| async move {
        let start = || {
            let probe = Probe::new();
            Running::start(builder(&world, "expired").transactional(probe).build().unwrap())
        };
        for id in ["1", "2"] {
            world.send(Send::new(id, "a")).await;
        }
        let running = start();
        world.eventually_committed(0, 2).await;
        running.stop().await.unwrap();
        for id in ["3", "4", "5"] {
            world.send(Send::new(id, "a")).await;
        }
        world.expire(0, 4).await;
        assert_eq!(gauge("consumer_stopped_partitions", "expired"), Some(0.0));
        let running = start();
        eventually_gauge("consumer_stopped_partitions", "expired", 1.0).await;
        running.stop().await.unwrap();
        assert_eq!(gauge("consumer_stopped_partitions", "expired"), Some(0.0), "not this process's any more");
    });
}

/// Somebody who takes so long that the lease is over before it says that it is done.
struct Sleeper(PgPool);

impl Reconcile for Sleeper {
    async fn lookup(&self, _: &str) -> Reconciled {
        Reconciled::NotApplied
    }
}

impl LeasedHandler for Sleeper {
    type Payload = Raw;

    async fn handle(&self, _: &Delivery<Raw>, _: &mut Lease<'_>) -> Verdict {
        let over = sqlx::query("UPDATE inbox.message SET lease_until = clock_timestamp()");
        over.execute(&self.0).await.map(|_| ()).into()
    }
}

#[test]
fn a_completion_that_comes_too_late_is_counted_apart() {
    in_world(1, |world| async move {
        let _ = series();
        let record = testing::message("orders", "7").bytes("1");
        let kit = Kit::leased("sleeping", world.pool.clone(), Sleeper(world.pool.clone()));
        let late = kit.deliver(&record).await;
        assert!(matches!(late, Delivered::Error(_)), "{late:?}");
        assert_eq!(count("consumer_fenced_total", "sleeping", "operation=complete_leased"), Some(1));

        let commits = handler_fn::<Raw, _>(|_, tx| {
            Box::pin(async move { sqlx::query("COMMIT").execute(&mut **tx).await.map(|_| ()).into() })
        });
        let found = Kit::transactional("committing", world.pool.clone(), commits).deliver(&record).await;
        assert!(matches!(found, Delivered::Error(_)), "{found:?}");
        assert_eq!(count("consumer_fenced_total", "committing", "operation=complete"), Some(1));
        assert_eq!(count("handler_seconds", "committing", ""), Some(1));
    });
}

/// While it is at work somebody else settles its message, or takes over the record that was set aside.
struct Overtaken(PgPool);

impl Reconcile for Overtaken {
    async fn lookup(&self, _: &str) -> Reconciled {
        Reconciled::NotApplied
    }
}

impl LeasedHandler for Overtaken {
    type Payload = Raw;

    async fn handle(&self, delivery: &Delivery<Raw>, lease: &mut Lease<'_>) -> Verdict {
        let (others_work, verdict) = match (delivery.raw().map(AsRef::as_ref), lease.attempt()) {
            (Some(b"settled"), _) => (
                "UPDATE inbox.message SET state = 'done', finished_at = clock_timestamp(), lease_until = NULL",
                Verdict::permanent("somebody else will do it"),
            ),
            (_, 1) => return Verdict::transient("later"),
            _ => ("UPDATE inbox.parked SET generation = generation + 1", Verdict::done()),
        };
        sqlx::query(others_work).execute(&self.0).await.unwrap();
        verdict
    }
}

#[test]
fn what_somebody_else_has_settled_or_taken_meanwhile_is_counted_as_fenced() {
    in_world(1, |world| async move {
        world.send(Send::new("1", "settled").keyed("a")).await;
        let builder = builder(&world, "late").lease_ttl(Duration::from_secs(1));
        let running = Running::start(builder.leased(Overtaken(world.pool.clone())).build().unwrap());
        eventually_count("operation=bury").await;
        assert_eq!(count("consumed_total", "late", "outcome=duplicate"), Some(1), "it stands as done");
        world.send(Send::new("2", "aside").keyed("b")).await;
        eventually_count("operation=parked").await;
        running.stop().await.unwrap();
    });
}

async fn eventually_count(operation: &str) {
    eventually(&format!("fenced, {operation}"), || async {
        let found = count("consumer_fenced_total", "late", operation);
        if found == Some(1) { Ok(()) } else { Err(format!("{found:?}")) }
    })
    .await;
}

#[test]
fn a_handler_runs_within_the_span_of_its_attempt() {
    in_world(1, |world| async move {
        let logs = handler_fn::<Raw, _>(|_, _| {
            Box::pin(async {
                tracing::info!(target: "baton_consumer::test", "within a handler");
                Verdict::done()
            })
        });
        let parent = "00-abababababababababababababababab-0101010101010101-01";
        let key = format!("key-of-{}", world.name);
        let record = testing::message("orders", "customer-7").idempotency_key(&key);
        let record = record.header("traceparent", parent).bytes("1");
        let applied = Kit::transactional("traced", world.pool.clone(), logs).deliver(&record).await;
        assert!(matches!(applied, Delivered::Applied(None)), "{applied:?}");
        let lines = logged(&["within a handler", "process{", &key]);
        assert_eq!(lines.len(), 1, "{lines:?}");
        for field in [
            "messaging.system=\"kafka\"",
            "messaging.operation.type=\"process\"",
            "messaging.destination.name=\"orders\"",
            "baton.consumer=\"traced\"",
            parent,
        ] {
            assert!(lines[0].contains(field), "{field} in {}", lines[0]);
        }
    });
}

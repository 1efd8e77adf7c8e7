//! From the insert to the topic at 2,000 messages a second, against a bare commit and a bare produce at the same rate.
//!
//! ```text
//! commit    insert sent ─▶ commit confirmed                   an outbox without a relay
//! produce   handed to the producer ─▶ appended by the broker  the relay's producer settings, one producer
//! relay     insert sent ─▶ committed ▶ read ▶ published ─▶ appended by the broker
//! ```
//!
//! What cannot be seen from outside is when the relay hears of an acknowledgement. The broker writes down when it appended a
//! record, in whole milliseconds of a clock that all share here, and acknowledges it then: so that is where both the relay and
//! the bare produce are timed to, and both lose half a millisecond by it. How much later an acknowledgement comes is told
//! beside: the bare produce is timed to both. A consumer that waits for the records would see them, too, but at one record a
//! fetch it costs the broker as much as the producers do.
//!
//! Writers are paced by a timetable and never wait for one another's commits, so a stall is seen by all that it delays. The
//! first two seconds count for nothing.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::try_join_all;
use rdkafka::message::{Header, OwnedHeaders};
use tokio::time::{Instant, sleep, sleep_until};

use crate::arena::Arena;
use crate::benches::idle::rests;
use crate::benches::stamps::{Acks, Stamps};
use crate::broker::{Ends, between};
use crate::lab::{Lab, Result};
use crate::measure::quantile;
use crate::process::Relay;
use crate::report::{Bar, MIB, Report};

const RATE: u32 = 2_000;
const WRITERS: usize = 32;
const KEYS: usize = 1_000;
const WARM_UP: u32 = 2;
/// Bytes of a payload, of which the first eight are the message's number.
const PAYLOAD: usize = 200;
/// The last message of a leg has come within this, or is lost.
const PATIENCE: Duration = Duration::from_secs(20);
/// What the relay may add to the sum of both medians.
const MARGIN_MS: f64 = 4.0;

/// Milliseconds of one leg.
#[derive(Debug, Clone, Copy)]
struct Leg {
    p50: f64,
    p99: f64,
}

#[derive(Default)]
struct Legs {
    p50: Vec<f64>,
    p99: Vec<f64>,
}

impl Legs {
    fn push(&mut self, leg: Leg) {
        self.p50.push(leg.p50);
        self.p99.push(leg.p99);
    }
}

/// What the legs with a relay cost, and Postgres without one.
#[derive(Default)]
struct Cost {
    bare_postgres: Vec<Option<f64>>,
    relay: Vec<Option<f64>>,
    postgres: Vec<Option<f64>>,
    broker: Vec<Option<f64>>,
    resident: Vec<f64>,
    rate: Vec<f64>,
    /// The median commit, in milliseconds.
    commit: Vec<f64>,
}

pub(crate) async fn run(lab: &Lab) -> Result<Report> {
    let (rounds, seconds) = lab.tier.choose((5, 20), (3, 6));
    let messages = usize::try_from(RATE * (seconds + WARM_UP))?;
    let bare = lab.arena().await?;
    let arena = lab.arena().await?;
    let (mut commit, mut produce, mut acked, mut relay) =
        (Legs::default(), Legs::default(), Legs::default(), Legs::default());
    let mut cost = Cost::default();
    for round in 0..rounds {
        for leg in if round % 2 == 0 { [0, 1, 2] } else { [2, 1, 0] } {
            bare.sql(&["CHECKPOINT"]).await?;
            match leg {
                0 => commit.push(commit_leg(lab, &bare, messages, &mut cost).await?),
                1 => {
                    let (seen, ack) = produce_leg(&arena, messages).await?;
                    produce.push(seen);
                    acked.push(ack);
                }
                _ => relay.push(relay_leg(lab, &arena, messages, &mut cost).await?),
            }
        }
    }
    bare.close().await?;
    arena.close().await?;

    let sum = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a + b).collect::<Vec<_>>();
    let (middles, tails) = (sum(&commit.p50, &produce.p50), sum(&commit.p99, &produce.p99));
    let over = |of: &[f64], by: &[f64], allowed: fn(f64) -> f64| {
        of.iter().zip(by).map(|(of, by)| of / allowed(*by)).collect::<Vec<_>>()
    };
    let mut report = Report::new("latency");
    report.verdict(
        over(&relay.p50, &middles, |sum| sum + MARGIN_MS),
        "p50 enqueue to append / (p50 commit + p50 produce + 4 ms)",
        Bar::AtMost(1.0),
    );
    report.verdict(
        over(&relay.p99, &tails, |sum| sum * 3.0),
        "p99 enqueue to append / 3 (p99 commit + p99 produce)",
        Bar::AtMost(1.0),
    );
    for (name, legs) in [
        ("bare commit", commit),
        ("bare produce to append", produce),
        ("bare produce to acknowledgement", acked),
        ("relay, insert to append", relay),
    ] {
        report.figure(format!("{name}: p50"), "ms", legs.p50);
        report.figure(format!("{name}: p99"), "ms", legs.p99);
    }
    let why = lab.servers.unseen.join("; ");
    report.figure("with the relay: commit: p50", "ms", cost.commit);
    report.figure("inserts reached with the relay", "messages/s", cost.rate);
    report.per_million("bare commit: Postgres".to_owned(), cost.bare_postgres, 1.0, &why);
    report.per_million("relay".to_owned(), cost.relay, 1.0, &why);
    report.per_million("with the relay: Postgres".to_owned(), cost.postgres, 1.0, &why);
    report.per_million("with the relay: broker".to_owned(), cost.broker, 1.0, &why);
    report.figure("relay: resident", "MiB", cost.resident);
    Ok(report)
}

/// Inserts by timetable, each in a transaction of its own.
async fn commit_leg(lab: &Lab, arena: &Arena, messages: usize, cost: &mut Cost) -> Result<Leg> {
    let stamps = Arc::new(Stamps::new(messages));
    let servers = lab.servers.cpu();
    insert(arena, &stamps).await?;
    let count = f64::from(u32::try_from(messages)?);
    cost.bare_postgres.push(lab.servers.cpu().since(servers).postgres.map(|cpu| cpu * 1e6 / count));
    leg(stamps.since_sent(&stamps.committed)?)
}

async fn produce_leg(arena: &Arena, messages: usize) -> Result<(Leg, Leg)> {
    let stamps = Arc::new(Stamps::new(messages));
    let from = arena.broker.ends(&arena.topic)?;
    let producer = Acks::producer(&arena.settings, &stamps)?;
    stamps.start();
    let headers = ["ce_specversion", "ce_id", "ce_source", "ce_type", "content-type"];
    for n in 0..messages {
        sleep_until(stamps.due(n, RATE)).await;
        let key = format!("key-{}", n % KEYS);
        // As large as the relay's.
        let headers = headers.iter().fold(OwnedHeaders::new_with_capacity(5), |all, key| {
            all.insert(Header { key, value: Some("0123456789abcdef0123456789abcdef") })
        });
        stamps.sent.mark(n);
        Acks::send(&producer, &arena.topic, n, &key, &payload(n), headers)?;
    }
    appended(arena, &stamps, &from).await?;
    stamps.acked.complete("acknowledged")?;
    Ok((leg(stamps.since_sent(&stamps.appended)?)?, leg(stamps.since_sent(&stamps.acked)?)?))
}

async fn relay_leg(lab: &Lab, arena: &Arena, messages: usize, cost: &mut Cost) -> Result<Leg> {
    let relay = Relay::start(lab, arena, "relay", &[])?;
    rests(arena).await?;
    let stamps = Arc::new(Stamps::new(messages));
    let from = arena.broker.ends(&arena.topic)?;
    let (cpu, servers) = (relay.cpu_seconds()?, lab.servers.cpu());
    let inserting = insert(arena, &stamps).await?;
    let (relay_cpu, servers) = (relay.cpu_seconds()? - cpu, lab.servers.cpu().since(servers));
    appended(arena, &stamps, &from).await?;
    let count = f64::from(u32::try_from(messages)?);
    let per_million = |cpu: f64| cpu * 1e6 / count;
    cost.relay.push(Some(per_million(relay_cpu)));
    cost.postgres.push(servers.postgres.map(per_million));
    cost.broker.push(servers.broker.map(per_million));
    cost.resident.push(relay.memory()?.peak / MIB);
    cost.rate.push(count / inserting);
    relay.terminate().await?;
    cost.commit.push(leg(stamps.since_sent(&stamps.committed)?)?.p50);
    leg(stamps.since_sent(&stamps.appended)?)
}

/// Milliseconds in, without those of the warm-up.
fn leg(milliseconds: Vec<f64>) -> Result<Leg> {
    let mut counted = milliseconds;
    counted.drain(..usize::try_from(RATE * WARM_UP)?.min(counted.len()));
    Ok(Leg { p50: quantile(&mut counted, 0.5)?, p99: quantile(&mut counted, 0.99)? })
}

fn payload(n: usize) -> [u8; PAYLOAD] {
    let mut payload = [b'x'; PAYLOAD];
    payload[..8].copy_from_slice(&(n as u64).to_be_bytes());
    payload
}

/// The seconds it took: more than the timetable's when inserts could not keep up with it.
async fn insert(arena: &Arena, stamps: &Arc<Stamps>) -> Result<f64> {
    let mut connections = Vec::new();
    for _ in 0..WRITERS {
        connections.push(arena.connect().await?);
    }
    stamps.start();
    let started = Instant::now();
    let writers = connections.into_iter().enumerate().map(|(first, mut connection)| async move {
        for n in (first..stamps.len()).step_by(WRITERS) {
            sleep_until(stamps.due(n, RATE)).await;
            stamps.sent.mark(n);
            sqlx::query(
                "INSERT INTO outbox.message (topic, key, type, payload) VALUES ($1, $2, 'bench', $3)",
            )
            .bind(&arena.topic)
            .bind(format!("key-{}", n % KEYS))
            .bind(payload(n).as_slice())
            .execute(&mut connection)
            .await?;
            stamps.committed.mark(n);
        }
        Ok::<_, Box<dyn std::error::Error + Send + Sync>>(())
    });
    try_join_all(writers).await?;
    Ok(started.elapsed().as_secs_f64())
}

/// Waits until as many records came as there are messages, then notes when each was appended. Nobody reads meanwhile.
async fn appended(arena: &Arena, stamps: &Stamps, from: &Ends) -> Result<()> {
    let started = Instant::now();
    let to = loop {
        let to = arena.broker.ends(&arena.topic)?;
        let came = usize::try_from(between(from, &to))?;
        if came >= stamps.len() {
            break to;
        }
        if started.elapsed() > PATIENCE {
            return Err(format!("{came} of {} messages were published", stamps.len()).into());
        }
        sleep(Duration::from_millis(50)).await;
    };
    for (n, at_ms) in arena.broker.numbered(&arena.topic, from, &to)? {
        stamps.appended.mark_at(n, at_ms);
    }
    Ok(())
}

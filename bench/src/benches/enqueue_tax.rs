//! What a producer pays for an insert, against a plain outbox: uuid key, status column, partial index on what is pending.
//!
//! * WAL bytes and buffers of one-row inserts, as `EXPLAIN (ANALYZE, WAL, BUFFERS)` counts them. After the checkpoint, pages
//!   are written whole into the WAL once: inserts that are not counted touch them first, or the random uuids would pay for
//!   pages that our ascending positions never touch.
//! * How many one-row transactions 8 connections get through, in pairs. No relay runs.

use std::time::Duration;

use futures_util::future::try_join_all;
use serde_json::Value;
use sqlx::PgConnection;
use tokio::time::Instant;

use crate::arena::Arena;
use crate::lab::{Lab, Result};
use crate::measure::ratios;
use crate::report::{Bar, Report};

const PLAIN: [&str; 3] = [
    "CREATE SCHEMA plain",
    "CREATE TABLE plain.outbox (
         id         uuid PRIMARY KEY DEFAULT gen_random_uuid(),
         topic      text NOT NULL,
         key        text,
         type       text,
         payload    bytea,
         headers    jsonb,
         status     text NOT NULL DEFAULT 'pending',
         created_at timestamptz NOT NULL DEFAULT now()
     )",
    "CREATE INDEX outbox_pending ON plain.outbox (created_at) WHERE status = 'pending'",
];

/// What lies in both tables before anything is counted.
const BEFORE: i32 = 50_000;
/// Inserts that touch every page of both tables' indexes after a checkpoint.
const TOUCHING: i32 = 5_000;
const WRITERS: usize = 8;

/// One of the two outboxes.
struct Side {
    name: &'static str,
    fill: &'static str,
    insert: &'static str,
    explain: &'static str,
}

macro_rules! side {
    ($name:literal, $table:literal) => {
        Side {
            name: $name,
            fill: concat!(
                "INSERT INTO ",
                $table,
                " (topic, key, type, payload) SELECT $1, 'key-' || n % 1000, 'bench', $2 FROM generate_series(1, $3) n"
            ),
            insert: concat!("INSERT INTO ", $table, " (topic, key, type, payload) VALUES ($1, $2, 'bench', $3)"),
            explain: concat!(
                "EXPLAIN (ANALYZE, WAL, BUFFERS, COSTS OFF, TIMING OFF, FORMAT JSON) INSERT INTO ",
                $table,
                " (topic, key, type, payload) VALUES ($1, $2, 'bench', $3)"
            ),
        }
    };
}

const OURS: Side = side!("outbox.message", "outbox.message");
const THEIRS: Side = side!("plain outbox", "plain.outbox");

/// What one insert took, on average.
#[derive(Default)]
struct Insert {
    wal_bytes: Vec<f64>,
    wal_records: Vec<f64>,
    buffers: Vec<f64>,
}

#[derive(Default)]
struct Writing {
    rate: Vec<f64>,
    postgres_cpu: Vec<Option<f64>>,
}

pub(crate) async fn run(lab: &Lab) -> Result<Report> {
    let (rounds, inserts) = lab.tier.choose((5, 2_000), (5, 500));
    let (pairs, window) = lab.tier.choose((7, Duration::from_secs(10)), (7, Duration::from_secs(3)));
    let arena = lab.arena().await?;
    arena.sql(&PLAIN).await?;
    for side in [&OURS, &THEIRS] {
        fill(&arena, side, BEFORE).await?;
    }
    arena.sql(&["VACUUM ANALYZE"]).await?;

    let (mut ours, mut theirs) = (Insert::default(), Insert::default());
    for round in 0..rounds {
        for is_ours in if round % 2 == 0 { [false, true] } else { [true, false] } {
            let (side, found) = if is_ours { (&OURS, &mut ours) } else { (&THEIRS, &mut theirs) };
            arena.sql(&["CHECKPOINT"]).await?;
            fill(&arena, side, TOUCHING).await?;
            explained(&arena, side, inserts, found).await?;
        }
    }
    let (mut our_writing, mut their_writing) = (Writing::default(), Writing::default());
    for pair in 0..pairs {
        for is_ours in if pair % 2 == 0 { [false, true] } else { [true, false] } {
            let (side, found) =
                if is_ours { (&OURS, &mut our_writing) } else { (&THEIRS, &mut their_writing) };
            arena.sql(&["CHECKPOINT"]).await?;
            written(lab, &arena, side, window, found).await?;
        }
    }
    arena.close().await?;

    let mut report = Report::new("enqueue_tax");
    for (side, insert, writing) in [(&THEIRS, &theirs, &their_writing), (&OURS, &ours, &our_writing)] {
        let name = |what: &str| format!("{}: {what}", side.name);
        report.figure(name("WAL"), "bytes an insert", insert.wal_bytes.clone());
        report.figure(name("WAL records"), "an insert", insert.wal_records.clone());
        report.figure(name("buffers"), "an insert", insert.buffers.clone());
        report.figure(name("8 writers"), "transactions/s", writing.rate.clone());
        report.per_million(
            name("Postgres"),
            writing.postgres_cpu.clone(),
            1.0,
            &lab.servers.unseen.join("; "),
        );
    }
    report.verdict(
        ratios(&our_writing.rate, &their_writing.rate),
        "inserts of 8 writers / plain outbox",
        Bar::AtLeast(0.85),
    );
    report.verdict(ratios(&ours.wal_bytes, &theirs.wal_bytes), "WAL bytes / plain outbox", Bar::AtMost(1.1));
    report.verdict(ratios(&ours.buffers, &theirs.buffers), "buffers / plain outbox", Bar::AtMost(1.1));
    Ok(report)
}

fn payload() -> Vec<u8> {
    format!("{{\"pad\":\"{}\"}}", "x".repeat(190)).into_bytes()
}

async fn fill(arena: &Arena, side: &Side, messages: i32) -> Result<()> {
    sqlx::query(side.fill)
        .bind(&arena.topic)
        .bind(payload())
        .bind(messages)
        .execute(&mut arena.connect().await?)
        .await?;
    Ok(())
}

async fn explained(arena: &Arena, side: &Side, inserts: i32, found: &mut Insert) -> Result<()> {
    let mut connection = arena.connect().await?;
    let (mut bytes, mut records, mut buffers) = (0.0, 0.0, 0.0);
    for n in 0..inserts {
        let plan: Value = sqlx::query_scalar(side.explain)
            .bind(&arena.topic)
            .bind(format!("key-{}", n % 1000))
            .bind(payload())
            .fetch_one(&mut connection)
            .await?;
        let of = |name: &str| {
            let value = plan.pointer("/0/Plan").and_then(|node| node.get(name)).and_then(Value::as_f64);
            value.ok_or_else(|| format!("EXPLAIN does not tell {name}: {plan}"))
        };
        bytes += of("WAL Bytes")?;
        records += of("WAL Records")?;
        buffers += of("Shared Hit Blocks")? + of("Shared Read Blocks")?;
    }
    found.wal_bytes.push(bytes / f64::from(inserts));
    found.wal_records.push(records / f64::from(inserts));
    found.buffers.push(buffers / f64::from(inserts));
    Ok(())
}

async fn written(lab: &Lab, arena: &Arena, side: &Side, window: Duration, found: &mut Writing) -> Result<()> {
    let mut connections = Vec::new();
    for _ in 0..WRITERS {
        connections.push(arena.connect().await?);
    }
    let (started, servers) = (Instant::now(), lab.servers.cpu());
    let until = started + window;
    let writers = connections
        .into_iter()
        .zip(0..)
        .map(|(connection, number)| write(connection, side.insert, arena.topic.clone(), number, until));
    let inserts: f64 = try_join_all(writers).await?.into_iter().sum();
    found.rate.push(inserts / started.elapsed().as_secs_f64());
    let cpu = lab.servers.cpu().since(servers).postgres;
    found.postgres_cpu.push(cpu.map(|cpu| cpu * 1e6 / inserts));
    Ok(())
}

/// One transaction after the other, as a client that commits each on its own.
async fn write(
    mut connection: PgConnection,
    insert: &'static str,
    topic: String,
    number: i32,
    until: Instant,
) -> Result<f64> {
    let payload = payload();
    let mut inserts = 0;
    while Instant::now() < until {
        sqlx::query(insert)
            .bind(&topic)
            .bind(format!("key-{number}-{}", inserts % 100))
            .bind(&payload)
            .execute(&mut connection)
            .await?;
        inserts += 1;
    }
    Ok(f64::from(inserts))
}

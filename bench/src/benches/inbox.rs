//! What the inbox costs: the same handler with it and without, one message a transaction and 500.
//!
//! The handler writes one row of 200 bytes by one `INSERT` a message. Without the inbox it does so as anybody would with sqlx:
//! a transaction of the same pool, the inserts, COMMIT. One worker, as one partition lane is, of a pool that has a second
//! connection, as a service's has; payloads and keys are made before the clock starts. Every message is new, and the tables are
//! empty before each side.
//!
//! Beside it a handler that writes its 500 rows by one `INSERT … SELECT FROM unnest`: it saves 499 round trips, of which the
//! inbox never had any, so what the inbox adds is a larger part of what remains. Told, not judged.

use std::time::Duration;

use baton_consumer::inbox::{Batch, Fresh, Item};
use baton_consumer::{Failure, Inbox, Once, Verdict};
use sqlx::postgres::PgPoolOptions;
use sqlx::{PgPool, Postgres, Transaction};
use tokio::time::Instant;

use crate::arena::Arena;
use crate::lab::{Lab, Result};
use crate::measure::ratios;
use crate::report::{Bar, Report};

/// How many messages a transaction has where it has many.
const MANY: usize = 500;

/// What the handler writes to.
const EFFECT: &str = "CREATE TABLE effect (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, key text NOT NULL, payload bytea NOT NULL)";
const EMPTY: &str = "TRUNCATE effect, inbox.message";
const INSERT: &str = "INSERT INTO effect (key, payload) VALUES ($1, $2)";
const INSERT_ALL: &str = "INSERT INTO effect (key, payload) SELECT * FROM unnest($1::text[], $2::bytea[])";

/// How messages and the handler's statements are put into transactions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Shape {
    /// A transaction a message.
    OneByOne,
    /// 500 messages a transaction, an INSERT for each.
    Many,
    /// 500 messages a transaction, one INSERT for all.
    ManyAtOnce,
}

const SHAPES: [(Shape, &str); 3] = [
    (Shape::Many, "500 a transaction"),
    (Shape::OneByOne, "one a transaction"),
    (Shape::ManyAtOnce, "500 a transaction and a statement"),
];

#[derive(Default)]
struct Side {
    rate: Vec<f64>,
    postgres_cpu: Vec<Option<f64>>,
}

struct Message {
    key: String,
    payload: Vec<u8>,
}

pub(crate) async fn run(lab: &Lab) -> Result<Report> {
    let (pairs, window) = lab.tier.choose((7, Duration::from_secs(10)), (5, Duration::from_millis(1_500)));
    let arena = lab.arena().await?;
    baton_migrations::migrate_inbox(&mut arena.connect().await?).await?;
    arena.sql(&[EFFECT]).await?;
    let mut report = Report::new("inbox");
    for (shape, name) in SHAPES {
        let (mut with, mut without) = (Side::default(), Side::default());
        for pair in 0..pairs {
            for has_inbox in if pair % 2 == 0 { [false, true] } else { [true, false] } {
                arena.sql(&[EMPTY, "CHECKPOINT"]).await?;
                let side = if has_inbox { &mut with } else { &mut without };
                side_run(lab, &arena, shape, has_inbox, window, side).await?;
            }
        }
        for (side, runs) in [("without", &without), ("with", &with)] {
            report.figure(format!("{name}, {side} inbox"), "messages/s", runs.rate.clone());
            let cpu = format!("{name}, {side}: Postgres");
            report.per_million(cpu, runs.postgres_cpu.clone(), 1.0, &lab.servers.unseen.join("; "));
        }
        let bar = if shape == Shape::ManyAtOnce { Bar::None } else { Bar::AtLeast(0.6) };
        report.verdict(ratios(&with.rate, &without.rate), format!("with / without inbox, {name}"), bar);
    }
    arena.close().await?;
    Ok(report)
}

async fn side_run(
    lab: &Lab,
    arena: &Arena,
    shape: Shape,
    has_inbox: bool,
    window: Duration,
    side: &mut Side,
) -> Result<()> {
    let pool = PgPoolOptions::new().max_connections(2).connect(&arena.settings.database_url).await?;
    let inbox = Inbox::new("bench", pool.clone())?;
    // Statements are prepared, and planned for good, before the clock starts.
    applied(&pool, &inbox, shape, has_inbox, 0, Until::Calls(10)).await?;
    let (started, servers) = (Instant::now(), lab.servers.cpu());
    let messages = applied(&pool, &inbox, shape, has_inbox, 1, Until::Time(started + window)).await?;
    side.rate.push(messages / started.elapsed().as_secs_f64());
    let cpu = lab.servers.cpu().since(servers).postgres;
    side.postgres_cpu.push(cpu.map(|cpu| cpu * 1e6 / messages));
    pool.close().await;
    Ok(())
}

#[derive(Debug, Clone, Copy)]
enum Until {
    Calls(u32),
    Time(Instant),
}

/// Applies messages until then, one call after the other, and says how many.
async fn applied(
    pool: &PgPool,
    inbox: &Inbox,
    shape: Shape,
    has_inbox: bool,
    series: u32,
    until: Until,
) -> Result<f64> {
    let size = if shape == Shape::OneByOne { 1 } else { MANY };
    let mut messages = batch(series, 0, size);
    let (mut calls, mut done) = (0, 0.0);
    loop {
        match until {
            Until::Calls(most) if calls >= most => return Ok(done),
            Until::Time(end) if Instant::now() >= end => return Ok(done),
            _ => {}
        }
        match (shape, has_inbox) {
            (Shape::OneByOne, true) => once(inbox, &messages[0]).await?,
            (_, true) => many(inbox, &messages, shape).await?,
            (_, false) => {
                let mut tx = pool.begin().await?;
                write(&mut tx, shape, messages.iter()).await?;
                tx.commit().await?;
            }
        }
        done += f64::from(u32::try_from(size)?);
        calls += 1;
        messages = batch(series, calls, size);
    }
}

/// Keys as messages have them: random, so that no index is filled in order.
fn batch(series: u32, call: u32, size: usize) -> Vec<Message> {
    let payload =
        format!("{{\"series\":{series},\"call\":{call},\"pad\":\"{}\"}}", "x".repeat(170)).into_bytes();
    (0..size).map(|_| Message { key: uuid::Uuid::new_v4().to_string(), payload: payload.clone() }).collect()
}

async fn write(
    tx: &mut Transaction<'_, Postgres>,
    shape: Shape,
    messages: impl Iterator<Item = &Message>,
) -> std::result::Result<(), sqlx::Error> {
    if shape == Shape::ManyAtOnce {
        let (keys, payloads): (Vec<&str>, Vec<&[u8]>) =
            messages.map(|message| (message.key.as_str(), message.payload.as_slice())).unzip();
        sqlx::query(INSERT_ALL).bind(keys).bind(payloads).execute(&mut **tx).await?;
        return Ok(());
    }
    for message in messages {
        sqlx::query(INSERT).bind(&message.key).bind(&message.payload).execute(&mut **tx).await?;
    }
    Ok(())
}

async fn once(inbox: &Inbox, message: &Message) -> Result<()> {
    let action = async |tx: &mut Transaction<'_, Postgres>| {
        write(tx, Shape::OneByOne, std::iter::once(message))
            .await
            .map_or_else(Into::into, |()| Verdict::done())
    };
    match inbox.run_once("bench", &message.key, &message.payload, action).await? {
        Once::Fresh(_) => Ok(()),
        other => Err(format!("a new message was answered with {other:?}").into()),
    }
}

async fn many(inbox: &Inbox, messages: &[Message], shape: Shape) -> Result<()> {
    let items: Vec<Item<'_>> = messages
        .iter()
        .map(|message| Item { scope: "bench", key: &message.key, payload: &message.payload })
        .collect();
    let action = async |fresh: &mut [Fresh], tx: &mut Transaction<'_, Postgres>| {
        let written = write(tx, shape, fresh.iter().map(|item| &messages[item.index()])).await;
        written.map_err(Failure::from)
    };
    match inbox.run_batch(&items, action).await? {
        Batch::Settled(answers) if answers.iter().all(|answer| matches!(answer, Ok(Once::Fresh(_)))) => {
            Ok(())
        }
        other => Err(format!("new messages were answered with {other:?}").into()),
    }
}

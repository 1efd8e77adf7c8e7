//! Plans and items in the consumer's database. Every statement that changes an item names who has it.

use std::collections::HashMap;
use std::time::Duration;

use serde_json::Value;
use sqlx::{Connection as _, PgConnection};
use time::OffsetDateTime;
use uuid::Uuid;

use super::Error;
use super::choose::Chosen;

/// How long a claim lasts. Nothing is handed over in the last third of it.
pub(super) const LEASE: Duration = Duration::from_secs(30);

/// How many items one statement writes or asks for.
const CHUNK: usize = 5_000;

/// How a plan's items are to be sent.
#[derive(Debug, Clone, sqlx::FromRow)]
pub(super) struct Plan {
    pub(super) consumer: String,
    pub(super) topic: String,
    pub(super) dead_letters: String,
    pub(super) target: String,
    pub(super) new_key: bool,
    pub(super) items: i64,
}

/// What a plan is written with.
pub(super) struct Draft<'a> {
    pub(super) id: Uuid,
    pub(super) plan: Plan,
    pub(super) again: bool,
    pub(super) loop_cap: u32,
    pub(super) filters: Value,
    pub(super) ends: Value,
    pub(super) skipped: Value,
    pub(super) chosen: &'a [Chosen],
}

/// An item that is this run's to send.
#[derive(Debug, Clone)]
pub(super) struct Claimed {
    pub(super) item: i64,
    pub(super) partition: i32,
    pub(super) offset: i64,
    pub(super) round: i32,
    pub(super) idempotency_key: Option<String>,
    pub(super) original_time_ms: Option<i64>,
    pub(super) generation: i64,
}

/// What a plan has left to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, sqlx::FromRow)]
pub(super) struct Left {
    pub(super) waiting: i64,
    pub(super) sending: i64,
}

/// The highest round in which any plan of this consumer has sent each of these records.
pub(super) async fn sent_before(
    connection: &mut PgConnection,
    consumer: &str,
    chosen: &[Chosen],
) -> Result<HashMap<Vec<u8>, i32>, Error> {
    let mut sent = HashMap::new();
    for chunk in chosen.chunks(CHUNK) {
        let subjects: Vec<&[u8]> = chunk.iter().map(|letter| letter.subject.as_slice()).collect();
        let rows: Vec<(Vec<u8>, i32)> = sqlx::query_as(include_str!("../../queries/replay_sent_before.sql"))
            .bind(consumer)
            .bind(subjects)
            .fetch_all(&mut *connection)
            .await
            .map_err(Error::Database)?;
        sent.extend(rows);
    }
    Ok(sent)
}

/// Writes a plan, its items and an audit row, or nothing.
pub(super) async fn write(connection: &mut PgConnection, draft: &Draft<'_>) -> Result<(), Error> {
    write_all(connection, draft).await.map_err(Error::Database)
}

async fn write_all(connection: &mut PgConnection, draft: &Draft<'_>) -> Result<(), sqlx::Error> {
    let mut tx = connection.begin().await?;
    let Draft { id, plan, .. } = draft;
    sqlx::query(include_str!("../../queries/replay_plan_insert.sql"))
        .bind(id)
        .bind(&plan.consumer)
        .bind(&plan.topic)
        .bind(&plan.dead_letters)
        .bind(&plan.target)
        .bind(plan.new_key)
        .bind(draft.again)
        .bind(i32::try_from(draft.loop_cap).unwrap_or(i32::MAX))
        .bind(draft.filters.to_string())
        .bind(draft.ends.to_string())
        .bind(draft.skipped.to_string())
        .bind(plan.items)
        .execute(&mut *tx)
        .await?;
    let mut next = 1_i64;
    for chunk in draft.chosen.chunks(CHUNK) {
        fn each<'c, T>(chunk: &'c [Chosen], of: impl Fn(&'c Chosen) -> T) -> Vec<T> {
            chunk.iter().map(of).collect()
        }
        let keys: Vec<Option<String>> = (next..)
            .zip(chunk)
            .map(
                |(number, letter)| {
                    if plan.new_key { Some(new_key(*id, number)) } else { letter.idempotency_key.clone() }
                },
            )
            .collect();
        sqlx::query(include_str!("../../queries/replay_items_insert.sql"))
            .bind(id)
            .bind(&plan.consumer)
            .bind(next)
            .bind(each(chunk, |letter| letter.partition))
            .bind(each(chunk, |letter| letter.offset))
            .bind(each(chunk, |letter| letter.subject.as_slice()))
            .bind(each(chunk, |letter| i32::try_from(letter.round).unwrap_or(i32::MAX)))
            .bind(each(chunk, |letter| letter.letter.cause.as_deref()))
            .bind(keys)
            .bind(each(chunk, |letter| letter.letter.topic.as_deref()))
            .bind(each(chunk, |letter| letter.letter.partition))
            .bind(each(chunk, |letter| letter.letter.offset))
            .bind(each(chunk, |letter| letter.letter.timestamp_ms))
            .bind(each(chunk, |letter| storable(letter.letter.first_failed_at)))
            .bind(each(chunk, |letter| storable(letter.letter.failed_at)))
            .execute(&mut *tx)
            .await?;
        next += i64::try_from(chunk.len()).unwrap_or(i64::MAX);
    }
    let arguments = serde_json::json!({
        "plan": id, "consumer": plan.consumer, "topic": plan.topic, "dead_letters": plan.dead_letters, "target": plan.target,
        "new_key": plan.new_key, "again": draft.again, "loop_cap": draft.loop_cap, "filters": draft.filters,
    });
    audit_row(&mut tx, "replay plan", &arguments, plan.items).await?;
    tx.commit().await
}

/// The key that makes an item new work.
pub(super) fn new_key(plan: Uuid, item: i64) -> String {
    format!("replay:{plan}:{item}")
}

/// A header may claim any time at all; one that the database cannot say is left out.
fn storable(at: Option<OffsetDateTime>) -> Option<OffsetDateTime> {
    at.filter(|at| (1..=9999).contains(&at.year()))
}

/// The plan of this id.
pub(super) async fn read(connection: &mut PgConnection, id: Uuid) -> Result<Plan, Error> {
    sqlx::query_as(include_str!("../../queries/replay_plan_read.sql"))
        .bind(id)
        .fetch_optional(connection)
        .await
        .map_err(Error::Database)?
        .ok_or(Error::NoPlan(id))
}

/// What is left of a plan.
pub(super) async fn left(connection: &mut PgConnection, id: Uuid) -> Result<Left, Error> {
    let (waiting, sending) = sqlx::query_as(include_str!("../../queries/replay_left.sql"))
        .bind(id)
        .fetch_one(connection)
        .await
        .map_err(Error::Database)?;
    Ok(Left { waiting, sending })
}

/// What a claim came to.
#[derive(Debug, Default)]
pub(super) struct Claims {
    /// In order.
    pub(super) claimed: Vec<Claimed>,
    /// Items of records that another plan has sent.
    pub(super) left_out: u64,
}

/// Claims at most `limit` items, but for those of `without`.
pub(super) async fn claim(
    connection: &mut PgConnection,
    (id, plan): (Uuid, &Plan),
    owner: &str,
    limit: u32,
    without: &[i64],
) -> Result<Claims, Error> {
    claim_all(connection, (id, plan), owner, limit, without).await.map_err(Error::Database)
}

async fn claim_all(
    connection: &mut PgConnection,
    (id, plan): (Uuid, &Plan),
    owner: &str,
    limit: u32,
    without: &[i64],
) -> Result<Claims, sqlx::Error> {
    type Row = (i64, i32, i64, i32, Option<String>, Option<i64>, Option<i64>);
    // Whatever the role's defaults are: the claim sees what the lock has waited for, outlives a crash, and does not hold others up for long.
    let mut tx = connection.begin_with("BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE").await?;
    sqlx::raw_sql(include_str!("../../queries/replay_claim_begin.sql")).execute(&mut *tx).await?;
    sqlx::query(include_str!("../../queries/replay_lock.sql")).bind(&plan.consumer).execute(&mut *tx).await?;
    let rows: Vec<Row> = sqlx::query_as(include_str!("../../queries/replay_claim.sql"))
        .bind(id)
        .bind(owner)
        .bind(LEASE.as_secs_f64())
        .bind(i64::from(limit))
        .bind(without)
        .fetch_all(&mut *tx)
        .await?;
    tx.commit().await?;
    let mut claims = Claims::default();
    for (item, partition, offset, round, idempotency_key, original_time_ms, generation) in rows {
        match generation {
            Some(generation) => claims.claimed.push(Claimed {
                item,
                partition,
                offset,
                round,
                idempotency_key,
                original_time_ms,
                generation,
            }),
            None => claims.left_out += 1,
        }
    }
    // What an UPDATE returns has no order.
    claims.claimed.sort_by_key(|claimed| claimed.item);
    Ok(claims)
}

/// Marks items as sent. Those whose claim was over meanwhile are somebody else's.
pub(super) async fn sent(
    connection: &mut PgConnection,
    id: Uuid,
    owner: &str,
    items: &[&Claimed],
) -> Result<(), Error> {
    sqlx::query(include_str!("../../queries/replay_sent.sql"))
        .bind(id)
        .bind(owner)
        .bind(items.iter().map(|claimed| claimed.item).collect::<Vec<_>>())
        .bind(items.iter().map(|claimed| claimed.generation).collect::<Vec<_>>())
        .execute(connection)
        .await
        .map(drop)
        .map_err(Error::Database)
}

/// Gives claims back of items that were surely not sent, with the reason where there is one.
pub(super) async fn release(
    connection: &mut PgConnection,
    id: Uuid,
    owner: &str,
    items: &[(&Claimed, Option<String>)],
) -> Result<(), Error> {
    sqlx::query(include_str!("../../queries/replay_release.sql"))
        .bind(id)
        .bind(owner)
        .bind(items.iter().map(|(claimed, _)| claimed.item).collect::<Vec<_>>())
        .bind(items.iter().map(|(claimed, _)| claimed.generation).collect::<Vec<_>>())
        .bind(items.iter().map(|(_, error)| error.as_deref()).collect::<Vec<_>>())
        .execute(connection)
        .await
        .map(drop)
        .map_err(Error::Database)
}

/// One row of the audit table.
pub(super) async fn audit(
    connection: &mut PgConnection,
    command: &str,
    arguments: &Value,
    affected: i64,
) -> Result<(), Error> {
    audit_row(connection, command, arguments, affected).await.map_err(Error::Database)
}

async fn audit_row(
    connection: &mut PgConnection,
    command: &str,
    arguments: &Value,
    affected: i64,
) -> Result<(), sqlx::Error> {
    sqlx::query(include_str!("../../queries/inbox_audit_insert.sql"))
        .bind(command)
        .bind(arguments.to_string())
        .bind(affected)
        .execute(connection)
        .await
        .map(drop)
}

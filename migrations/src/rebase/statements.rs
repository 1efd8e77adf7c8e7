//! The statements of a rebase, each in one function.

use sqlx::PgConnection;
use uuid::Uuid;

use super::{Report, Shard};

type Result<T> = std::result::Result<T, sqlx::Error>;

/// What says whether an outbox was restored.
#[derive(Debug, sqlx::FromRow)]
pub(super) struct Facts {
    pub(super) stored_cluster: i64,
    pub(super) this_cluster: i64,
    /// The snapshot that new cursors start from.
    pub(super) snapshot: String,
    /// The next transaction id.
    pub(super) next: i64,
    pub(super) next_position: i64,
    pub(super) highest_position: i64,
    pub(super) altered_sequence: bool,
    pub(super) future_messages: bool,
    pub(super) future_cursors: bool,
    pub(super) passed_messages: bool,
    pub(super) without_cursor: i32,
}

/// What a rebase makes of one shard, and what it needs for that.
#[derive(Debug, sqlx::FromRow)]
pub(super) struct Planned {
    #[sqlx(flatten)]
    pub(super) shard: Shard,
    /// Messages to be moved behind those of the other cluster.
    pub(super) moved: i64,
    /// Messages whose transaction id is to be replaced.
    pub(super) future: i64,
    /// The highest position that came from the other cluster.
    pub(super) used: i64,
    /// The transaction that brought the cursors in.
    pub(super) carried: i64,
}

/// Owner, until when, how many shards.
pub(super) async fn living(tx: &mut PgConnection) -> Result<Vec<(String, String, i64)>> {
    sqlx::query_as(include_str!("../../queries/rebase_living.sql")).fetch_all(tx).await
}

pub(super) async fn subscriptions(tx: &mut PgConnection) -> Result<Vec<String>> {
    sqlx::query_scalar(include_str!("../../queries/rebase_subscriptions.sql")).fetch_all(tx).await
}

pub(super) async fn lock(tx: &mut PgConnection) -> Result<()> {
    sqlx::query(include_str!("../../queries/rebase_lock.sql")).execute(tx).await.map(drop)
}

pub(super) async fn facts(tx: &mut PgConnection) -> Result<Option<Facts>> {
    sqlx::query_as(include_str!("../../queries/rebase_facts.sql")).fetch_optional(tx).await
}

pub(super) async fn plan(tx: &mut PgConnection, snapshot: &str) -> Result<Vec<Planned>> {
    sqlx::query_as(include_str!("../../queries/rebase_plan.sql")).bind(snapshot).fetch_all(tx).await
}

/// Messages, and what a shard stood still at.
pub(super) async fn neutralise(tx: &mut PgConnection, snapshot: &str) -> Result<()> {
    sqlx::query(include_str!("../../queries/rebase_neutralise.sql")).bind(snapshot).execute(&mut *tx).await?;
    sqlx::query(include_str!("../../queries/rebase_stopped.sql")).bind(snapshot).execute(tx).await.map(drop)
}

/// Whoever held a shard, or remembers that it did, can write nothing any more.
pub(super) async fn take_leases(tx: &mut PgConnection, shards: &[i16]) -> Result<()> {
    sqlx::query(include_str!("../../queries/rebase_shards.sql")).bind(shards).execute(&mut *tx).await?;
    sqlx::query(include_str!("../../queries/rebase_fences.sql")).bind(shards).execute(&mut *tx).await?;
    sqlx::query(include_str!("../../queries/rebase_relays.sql")).execute(&mut *tx).await?;
    sqlx::query(include_str!("../../queries/rebase_token.sql")).execute(tx).await.map(drop)
}

pub(super) async fn write_cursors(
    tx: &mut PgConnection,
    shards: &[i16],
    positions: &[i64],
    snapshot: &str,
) -> Result<()> {
    sqlx::query(include_str!("../../queries/rebase_cursors.sql"))
        .bind(shards)
        .bind(positions)
        .bind(snapshot)
        .execute(&mut *tx)
        .await?;
    sqlx::query(include_str!("../../queries/rebase_milestones.sql")).execute(tx).await.map(drop)
}

/// Comes back with the outbox's new id.
pub(super) async fn settle(tx: &mut PgConnection) -> Result<Uuid> {
    sqlx::query_scalar(include_str!("../../queries/rebase_settings.sql")).fetch_one(tx).await
}

pub(super) async fn audit_write(
    tx: &mut PgConnection,
    facts: &Facts,
    report: &Report,
    outbox_id: Uuid,
) -> Result<()> {
    // Numbers and an id only, so nothing in it has to be escaped.
    let arguments = format!(
        r#"{{"from_cluster":"{}","to_cluster":"{}","outbox_id":"{outbox_id}","may_go_twice":{},"waiting":{},"neutralised":{},"moved":{}}}"#,
        facts.stored_cluster,
        facts.this_cluster,
        report.repeats(),
        report.waiting(),
        report.neutralised,
        report.moved,
    );
    sqlx::query(include_str!("../../queries/rebase_audit.sql"))
        .bind(arguments)
        .bind(report.neutralised + report.moved)
        .execute(tx)
        .await
        .map(drop)
}

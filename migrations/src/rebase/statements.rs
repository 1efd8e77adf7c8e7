//! The statements of a rebase, each in one function.

use sqlx::{AssertSqlSafe, Executor as _, PgConnection};
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
    pub(super) given_out_twice: bool,
    pub(super) without_cursor: i32,
    pub(super) noticed: Option<String>,
}

/// What a rebase makes of one shard, and what it needs for that.
#[derive(Debug, sqlx::FromRow)]
pub(super) struct Planned {
    #[sqlx(flatten)]
    pub(super) shard: Shard,
    /// Messages to be moved behind those of the other cluster.
    pub(super) moved: i64,
    /// Messages out of turn, to be moved behind all others.
    pub(super) out_of_turn: i64,
    /// Messages whose transaction id is to be replaced.
    pub(super) future: i64,
}

impl Facts {
    /// Whether the next position is one that is taken.
    pub(super) fn is_behind(&self) -> bool {
        self.next_position <= self.highest_position
    }

    /// Whether something says that the sequence did not always give out a number above all it had given out before.
    fn is_disturbed(&self) -> bool {
        self.is_behind()
            || self.altered_sequence
            || self.passed_messages
            || self.given_out_twice
            || self.noticed.is_some()
    }
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

pub(super) async fn plan(tx: &mut PgConnection, facts: &Facts) -> Result<Vec<Planned>> {
    let sql = judging(include_str!("../../queries/rebase_plan.sql"), facts);
    sqlx::query_as(AssertSqlSafe(sql)).fetch_all(tx).await
}

/// Gives messages fresh positions, as planned.
pub(super) async fn move_messages(tx: &mut PgConnection, facts: &Facts) -> Result<()> {
    let sql = judging(include_str!("../../queries/rebase_move.sql"), facts);
    tx.execute(AssertSqlSafe(sql)).await.map(drop)
}

/// A statement that begins with the judgement of each message. What is put in are numbers, and a snapshot, of the database's own: a
/// block of code takes no parameters.
fn judging(statement: &str, facts: &Facts) -> String {
    statement
        .replace("{judged}", include_str!("../../queries/rebase_judged.sql"))
        .replace("{snapshot}", &facts.snapshot)
        .replace("{next}", &facts.next.to_string())
        .replace("{disturbed}", &facts.is_disturbed().to_string())
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
        r#"{{"from_cluster":"{}","to_cluster":"{}","outbox_id":"{outbox_id}","may_go_twice":{},"waiting":{},"neutralised":{},"moved":{},"out_of_turn":{}}}"#,
        facts.stored_cluster,
        facts.this_cluster,
        report.repeats(),
        report.waiting(),
        report.neutralised,
        report.moved,
        report.out_of_turn,
    );
    sqlx::query(include_str!("../../queries/rebase_audit.sql"))
        .bind(arguments)
        .bind(report.neutralised + report.moved + report.out_of_turn)
        .execute(tx)
        .await
        .map(drop)
}

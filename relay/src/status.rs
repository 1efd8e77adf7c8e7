//! What an operator asks first: how old is the oldest waiting message, who holds what, how far is each shard.
//!
//! Read from the database alone, with any role that may read it. The field names are a public format; the oldest age
//! leads, not the number of processes. Of a shard that stands still it says which transition of which message stopped, under
//! which generation, and why (see `stopped`). And it says where a guard stands, so that nothing is published though relays run.

use std::collections::BTreeMap;
use std::time::Duration;

use baton_protocol::lifecycle::{Word as _, message};
use serde::Serialize;
use sqlx::postgres::PgConnection;
use uuid::Uuid;

use crate::database::{self, Cluster, Error, answer};
use crate::guards;
use crate::leaves::{self, Leaf};
use crate::refusal;

/// How long each of the statements may take.
const PATIENCE: Duration = Duration::from_secs(30);

/// The state of an outbox. Ages and times left in seconds.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Status {
    /// Age of the oldest message that waits to be published; null when none waits.
    pub oldest_pending_age_seconds: Option<f64>,
    /// Shards whose lease ran out without a release and which nobody has taken over yet.
    pub expired_leases: usize,
    /// Messages that wait.
    pub pending: Pending,
    /// Messages set aside.
    pub parked: Parked,
    /// The relays that live.
    pub relays: Vec<Relay>,
    /// The shards, in order.
    pub shards: Vec<Shard>,
    /// The leaves of the table, by slot: where its space goes.
    pub leaves: Vec<Leaf>,
    /// Why no relay may publish from this outbox. Empty as long as it is sound; of a standby nothing is said.
    pub guards: Vec<Guard>,
}

/// Something on which no relay works, as a start would judge it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Guard {
    /// What is wrong, and what would come of it.
    pub found: String,
    /// What mends it.
    pub advice: String,
}

/// How many messages wait.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Pending {
    /// How many.
    pub count: i64,
    /// False: a shard has more than 10,000 waiting, and its part is an estimate.
    pub exact: bool,
}

/// Messages set aside, by state.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Parked {
    /// Tried again by themselves.
    pub retrying: i64,
    /// Behind an earlier one of their key.
    pub blocked: i64,
    /// Given up until an operator acts.
    pub dead: i64,
    /// Of a paused topic.
    pub paused: i64,
    /// Age of the first failure of the oldest; null when none is set aside.
    pub oldest_age_seconds: Option<f64>,
    /// How many of them by cause; one that only waits behind another has none.
    pub by_cause: BTreeMap<String, i64>,
    /// The topics that operators have paused.
    pub paused_topics: Vec<String>,
}

impl Parked {
    /// How many are set aside.
    #[must_use]
    pub fn total(&self) -> i64 {
        self.retrying + self.blocked + self.dead + self.paused
    }
}

/// A relay that lives.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Relay {
    /// Its name.
    pub owner: String,
    /// The shards it holds.
    pub shards: Vec<i16>,
}

/// One shard.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Shard {
    /// Its number.
    pub shard: i16,
    /// Who holds, or last held and did not release, its lease.
    pub owner: Option<String>,
    /// Raised by each claim.
    pub generation: i64,
    /// Below zero: run out. Null: released.
    pub lease_left_seconds: Option<f64>,
    /// How far it is published.
    pub cursor: Cursor,
    /// Messages that wait.
    pub lag_messages: i64,
    /// Age of the oldest of them; null when none waits.
    pub lag_seconds: Option<f64>,
    /// The message it stands still at, if Kafka refuses one.
    pub stopped: Option<Stopped>,
}

/// A message that Kafka refuses, and behind which its shard waits.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Stopped {
    /// Which transition of the message does not come about.
    pub transition: String,
    /// The message.
    pub id: Uuid,
    /// Its position in the outbox.
    pub position: i64,
    /// Its topic.
    pub topic: String,
    /// Its key; null when it has none.
    pub key: Option<String>,
    /// Why, as one word: one of those of a parked message.
    pub cause: String,
    /// What Kafka said.
    pub error: String,
    /// What an operator can do about it; null for a cause of another version.
    pub advice: Option<&'static str>,
    /// That of the lease under which it was tried last.
    pub generation: i64,
    /// How often it was tried, over all generations.
    pub attempts: i32,
    /// RFC 3339, UTC.
    pub first_failed_at: String,
    /// RFC 3339, UTC.
    pub last_failed_at: String,
    /// RFC 3339, UTC. Passed long ago: no relay that tries it is alive.
    pub next_attempt_at: String,
    /// Until then, by the database's clock; below zero once it has passed.
    #[serde(skip)]
    pub next_attempt_in_seconds: f64,
    /// Seconds since the first failure.
    pub age_seconds: f64,
    /// Whether it will be tried again. True as long as the message is there: a relay that holds the shard tries it by itself.
    pub can_run_again: bool,
}

/// A cursor, as Postgres prints its parts.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Cursor {
    /// The highest position consumed in order.
    pub position: i64,
    /// The snapshot up to which everything at or below it is consumed.
    pub snapshot: String,
    /// No transaction at or above it owns a row at or below `position`.
    pub ceiling: String,
    /// Set while late rows are being worked off.
    pub late: Option<Late>,
}

/// Late rows being worked off.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Late {
    /// The snapshot they are read against.
    pub snapshot: String,
    /// The last one consumed.
    pub position: i64,
}

#[derive(sqlx::FromRow)]
struct ShardRow {
    shard: i16,
    owner: Option<String>,
    generation: i64,
    lease_left: Option<f64>,
    position: i64,
    snapshot: String,
    ceiling: String,
    late_snapshot: Option<String>,
    late_position: Option<i64>,
    lag: i64,
    exact: bool,
    lag_seconds: Option<f64>,
}

#[derive(sqlx::FromRow)]
struct StoppedRow {
    shard: i16,
    position: i64,
    id: Uuid,
    topic: String,
    key: Option<String>,
    cause: String,
    error: String,
    generation: i64,
    attempts: i32,
    first_failed_at: String,
    last_failed_at: String,
    next_attempt_at: String,
    next_attempt_in_seconds: f64,
    age_seconds: f64,
}

/// Reads the state of the outbox.
///
/// # Errors
/// When the database fails or the outbox is not migrated.
pub async fn read(connection: &mut PgConnection) -> Result<Status, Error> {
    let asked = sqlx::query(include_str!("../queries/status_settings.sql")).execute(&mut *connection);
    answer("making ready for status", PATIENCE, asked).await?;
    let asked = sqlx::query_as(include_str!("../queries/status_shards.sql")).fetch_all(&mut *connection);
    let rows: Vec<ShardRow> = answer("reading the shards", PATIENCE, asked).await?;
    let parked = parked(&mut *connection).await?;
    let asked = sqlx::query_as(include_str!("../queries/status_relays.sql")).fetch_all(&mut *connection);
    let relays: Vec<(String, Vec<i16>)> = answer("reading the relays", PATIENCE, asked).await?;
    let mut stopped = stopped(&mut *connection).await?;
    let leaves = leaves::read(&mut *connection, PATIENCE).await?;
    let guards = standing(connection).await?;

    Ok(Status {
        oldest_pending_age_seconds: rows.iter().filter_map(|r| r.lag_seconds).reduce(f64::max),
        expired_leases: rows.iter().filter(|r| r.lease_left.is_some_and(|left| left <= 0.0)).count(),
        pending: Pending { count: rows.iter().map(|r| r.lag).sum(), exact: rows.iter().all(|r| r.exact) },
        parked,
        relays: relays.into_iter().map(|(owner, shards)| Relay { owner, shards }).collect(),
        shards: rows
            .into_iter()
            .map(|row| {
                let stopped = stopped.remove(&row.shard);
                Shard { stopped, ..Shard::from(row) }
            })
            .collect(),
        leaves,
        guards,
    })
}

/// What is set aside.
pub(crate) async fn parked(connection: &mut PgConnection) -> Result<Parked, Error> {
    let asked = sqlx::query_as(include_str!("../queries/status_parked.sql")).fetch_one(&mut *connection);
    let (retrying, blocked, dead, paused, oldest_age_seconds, paused_topics) =
        answer("reading what is parked", PATIENCE, asked).await?;
    let asked = sqlx::query_as(include_str!("../queries/status_causes.sql")).fetch_all(connection);
    let causes: Vec<(String, i64)> = answer("reading why it is parked", PATIENCE, asked).await?;
    let by_cause = causes.into_iter().collect();
    Ok(Parked { retrying, blocked, dead, paused, oldest_age_seconds, by_cause, paused_topics })
}

/// What stands against a relay's work. What one relay has found and keeps to itself, until it is stopped, is not seen from here.
async fn standing(connection: &mut PgConnection) -> Result<Vec<Guard>, Error> {
    let mut violations = Vec::new();
    match database::identify(connection, PATIENCE).await {
        Ok((_, Cluster::Stored(stored))) => {
            violations.extend(guards::judge_cluster(stored, guards::cluster(connection, PATIENCE).await?));
        }
        Ok((_, Cluster::NotToBeAsked)) => {}
        Err(Error::Recovery) => return Ok(Vec::new()),
        Err(Error::NoSettings) => {
            let found = database::WITHOUT_SETTINGS.to_owned();
            return Ok(vec![Guard { found, advice: database::NO_SETTINGS.to_owned() }]);
        }
        Err(error) => return Err(error),
    }
    violations.extend(guards::judge(&guards::facts(connection, PATIENCE).await?));
    Ok(violations.iter().map(|found| Guard { found: found.found(), advice: found.advice() }).collect())
}

/// The messages that shards stand still at, by shard.
pub(crate) async fn stopped(connection: &mut PgConnection) -> Result<BTreeMap<i16, Stopped>, Error> {
    let asked = sqlx::query_as(include_str!("../queries/status_stopped.sql")).fetch_all(connection);
    let stopped: Vec<StoppedRow> = answer("reading what stops shards", PATIENCE, asked).await?;
    Ok(stopped.into_iter().map(|row| (row.shard, Stopped::from(row))).collect())
}

impl From<ShardRow> for Shard {
    fn from(row: ShardRow) -> Self {
        let late =
            row.late_snapshot.zip(row.late_position).map(|(snapshot, position)| Late { snapshot, position });
        Self {
            shard: row.shard,
            owner: row.owner,
            generation: row.generation,
            lease_left_seconds: row.lease_left,
            cursor: Cursor { position: row.position, snapshot: row.snapshot, ceiling: row.ceiling, late },
            lag_messages: row.lag,
            lag_seconds: row.lag_seconds,
            stopped: None,
        }
    }
}

impl From<StoppedRow> for Stopped {
    fn from(row: StoppedRow) -> Self {
        Self {
            transition: stopped_transition(),
            id: row.id,
            position: row.position,
            topic: row.topic,
            key: row.key,
            advice: message::Cause::of_word(&row.cause).map(refusal::advice),
            cause: row.cause,
            error: row.error,
            generation: row.generation,
            attempts: row.attempts,
            first_failed_at: row.first_failed_at,
            last_failed_at: row.last_failed_at,
            next_attempt_at: row.next_attempt_at,
            next_attempt_in_seconds: row.next_attempt_in_seconds,
            age_seconds: row.age_seconds,
            // The query leaves out what cannot: it is there, and not published.
            can_run_again: true,
        }
    }
}

/// A message that stops its shard is still pending; what does not come about is its acknowledgement.
fn stopped_transition() -> String {
    let from = message::State::Pending;
    let to = from.next(message::Event::Acknowledged).unwrap_or(from);
    format!("{from} → {to}")
}

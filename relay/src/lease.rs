//! Leases on shards: claim, renew, release, and the fair share. The SQL of ownership, each statement in one function.
//!
//! The database's clock decides expiry, in the statement itself. Owner, generation and expiry stand in the `WHERE` of one
//! conditional statement; zero rows is the outcome *fenced*. Locally a lease is trusted from before the request was sent.

use std::time::Duration;

use baton_protocol::lease::share;
use sqlx::postgres::PgConnection;
use uuid::Uuid;

use crate::cursor::{Cursor, Late};
use crate::database::{Error, answer};

/// What a claim won.
#[derive(Debug)]
pub(crate) struct Claimed {
    pub generation: i64,
    pub token: Uuid,
}

/// A shard that nobody holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Free {
    pub shard: i16,
    /// The owner whose lease ran out, if it was not released.
    pub expired_owner: Option<String>,
}

/// Who lives and what is free.
#[derive(Debug, Default)]
pub(crate) struct Overview {
    pub holdings: Vec<(String, usize)>,
    pub free: Vec<Free>,
    /// Until the first lease of another relay runs out, if it is not renewed.
    pub next_expiry: Option<Duration>,
}

impl Overview {
    /// What `me` should do about its number of shards.
    pub(crate) fn decide(&self, me: &str, shards: i16) -> share::Decision {
        share::decide(me, &self.holdings, usize::try_from(shards).unwrap_or(0), self.free.len())
    }
}

fn millis(ttl: Duration) -> i64 {
    i64::try_from(ttl.as_millis()).unwrap_or(i64::MAX)
}

/// Makes sure that the crash token is there.
pub(crate) async fn ensure_token(connection: &mut PgConnection, patience: Duration) -> Result<(), Error> {
    answer(
        "ensuring the crash token",
        patience,
        sqlx::query(include_str!("../queries/token_ensure.sql")).execute(connection),
    )
    .await?;
    Ok(())
}

/// Reads who lives and what is free.
pub(crate) async fn overview(
    connection: &mut PgConnection,
    owner: &str,
    patience: Duration,
) -> Result<Overview, Error> {
    let asked =
        sqlx::query_as(include_str!("../queries/lease_overview.sql")).bind(owner).fetch_all(connection);
    type Row = (Option<i16>, bool, Option<String>, Option<i64>, Option<i64>);
    let rows: Vec<Row> = answer("reading the leases", patience, asked).await?;
    let mut overview = Overview::default();
    for (free, expired, owner, held, expires_in) in rows {
        let expiry = expires_in.and_then(|ms| u64::try_from(ms).ok()).map(Duration::from_millis);
        overview.next_expiry = overview.next_expiry.into_iter().chain(expiry).min();
        match (free, owner) {
            (Some(shard), owner) => {
                overview.free.push(Free { shard, expired_owner: owner.filter(|_| expired) });
            }
            (None, Some(owner)) => {
                overview.holdings.push((owner, usize::try_from(held.unwrap_or(0)).unwrap_or(0)));
            }
            (None, None) => {}
        }
    }
    Ok(overview)
}

/// Takes a shard that is free, expired or held by this very process. `None`: somebody else has it.
pub(crate) async fn claim(
    connection: &mut PgConnection,
    shard: i16,
    owner: &str,
    held_by: Option<i64>,
    ttl: Duration,
    patience: Duration,
) -> Result<Option<Claimed>, Error> {
    let asked = sqlx::query_as(include_str!("../queries/lease_claim.sql"))
        .bind(shard)
        .bind(owner)
        .bind(held_by.unwrap_or(-1))
        .bind(millis(ttl))
        .fetch_optional(connection);
    let row: Option<(i64, Uuid)> = answer("claiming a shard", patience, asked).await?;
    Ok(row.map(|(generation, token)| Claimed { generation, token }))
}

/// Reads the durable cursor of a shard that has been claimed: no advance of an earlier generation can come after it.
pub(crate) async fn durable_cursor(
    connection: &mut PgConnection,
    shard: i16,
    patience: Duration,
) -> Result<Cursor, Error> {
    type Row = (i64, String, String, Option<String>, Option<i64>);
    let asked =
        sqlx::query_as(include_str!("../queries/cursor_read.sql")).bind(shard).fetch_optional(connection);
    let row: Option<Row> = answer("reading a cursor", patience, asked).await?;
    let Some((position, snapshot, ceiling, late_snapshot, late_position)) = row else {
        let what = format!("shard {shard} has no row in outbox.advance");
        return Err(Error::Answer { operation: "reading a cursor", what });
    };
    let late = late_snapshot.zip(late_position).map(|(snapshot, position)| Late { snapshot, position });
    Ok(Cursor { position, snapshot, ceiling, late })
}

/// Says that this relay lives.
pub(crate) async fn heartbeat(
    connection: &mut PgConnection,
    owner: &str,
    ttl: Duration,
    patience: Duration,
) -> Result<(), Error> {
    let beat = sqlx::query(include_str!("../queries/relay_heartbeat.sql"))
        .bind(owner)
        .bind(millis(ttl))
        .execute(connection);
    answer("the heartbeat", patience, beat).await?;
    Ok(())
}

/// Extends leases, of shards by their generation and the crash token of their claim. Returned are the shards that still are
/// this relay's own.
pub(crate) async fn renew(
    connection: &mut PgConnection,
    owner: &str,
    held: &[(i16, i64, Uuid)],
    ttl: Duration,
    patience: Duration,
) -> Result<Vec<i16>, Error> {
    if held.is_empty() {
        return Ok(Vec::new());
    }
    let asked = sqlx::query_scalar(include_str!("../queries/lease_renew.sql"))
        .bind(owner)
        .bind(held.iter().map(|h| h.0).collect::<Vec<_>>())
        .bind(held.iter().map(|h| h.1).collect::<Vec<_>>())
        .bind(millis(ttl))
        .bind(held.iter().map(|h| h.2).collect::<Vec<_>>())
        .fetch_all(connection);
    answer("renewing leases", patience, asked).await
}

/// Whether a release found the lease it was for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Released {
    Done,
    Fenced,
}

/// Hands a shard back under the generation it was held by.
pub(crate) async fn release(
    connection: &mut PgConnection,
    shard: i16,
    owner: &str,
    generation: i64,
    patience: Duration,
) -> Result<Released, Error> {
    let asked = sqlx::query_scalar(include_str!("../queries/lease_release.sql"))
        .bind(shard)
        .bind(owner)
        .bind(generation)
        .fetch_optional(connection);
    let row: Option<i16> = answer("releasing a shard", patience, asked).await?;
    Ok(if row.is_some() { Released::Done } else { Released::Fenced })
}

/// Takes this relay out of the fair share, while it still drains what it holds.
pub(crate) async fn say_farewell(
    connection: &mut PgConnection,
    owner: &str,
    patience: Duration,
) -> Result<(), Error> {
    let asked = sqlx::query(include_str!("../queries/relay_farewell.sql")).bind(owner).execute(connection);
    answer("saying farewell", patience, asked).await?;
    Ok(())
}

/// Takes this relay off the list of those that live.
pub(crate) async fn leave(
    connection: &mut PgConnection,
    owner: &str,
    patience: Duration,
) -> Result<(), Error> {
    answer(
        "leaving",
        patience,
        sqlx::query(include_str!("../queries/relay_leave.sql")).bind(owner).execute(connection),
    )
    .await?;
    Ok(())
}

//! `--until-empty`: what was committed and visible at the start, and whether the durable cursors cover it.
//!
//! Judged from the database alone, so it does not matter which relay publishes a shard. What is committed later, and what
//! is not committed yet, is not waited for.

use std::time::Duration;

use sqlx::postgres::PgConnection;

use crate::database::{Error, answer};
use crate::status::Parked;

/// Everything that `snapshot` shows at or below `position`.
#[derive(Debug, Clone)]
pub(crate) struct Target {
    snapshot: String,
    position: i64,
}

/// Messages that are set aside when everything else is published: `--until-empty` does not wait for their retries.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SetAside {
    /// Retrying, blocked or paused.
    pub parked: i64,
    /// Given up until an operator acts.
    pub dead: i64,
}

impl SetAside {
    pub(crate) fn of(parked: &Parked) -> Self {
        Self { parked: parked.retrying + parked.blocked + parked.paused, dead: parked.dead }
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_none(&self) -> bool {
        *self == Self::default()
    }
}

/// How far it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Progress {
    Empty,
    Waiting,
    /// What is left is in shards that stand still, because they may set no more messages aside.
    OnlyStopped,
}

impl Target {
    /// What is visible now.
    pub(crate) async fn now(connection: &mut PgConnection, patience: Duration) -> Result<Self, Error> {
        let asked = sqlx::query_as(include_str!("../queries/outbox_target.sql")).fetch_one(connection);
        let (snapshot, position) = answer("reading what is to be published", patience, asked).await?;
        Ok(Self { snapshot, position })
    }

    /// Compares it with the durable cursors.
    pub(crate) async fn progress(
        &self,
        connection: &mut PgConnection,
        stopped: &[i16],
        patience: Duration,
    ) -> Result<Progress, Error> {
        let asked = sqlx::query_scalar(include_str!("../queries/outbox_pending_shards.sql"))
            .bind(&self.snapshot)
            .bind(self.position)
            .fetch_all(connection);
        let pending: Vec<i16> = answer("reading what is left to publish", patience, asked).await?;
        Ok(match pending.iter().filter(|shard| !stopped.contains(shard)).count() {
            _ if pending.is_empty() => Progress::Empty,
            0 => Progress::OnlyStopped,
            _ => Progress::Waiting,
        })
    }
}

//! Work that was given up and that an operator brings again: `baton replay`.
//!
//! ```text
//! dead row ── a record names an item of a plan that stands in this database, is of this key, and not used ──▶ in progress, next generation
//!                 └─ anything else: the row stays dead, nothing runs
//! ```
//!
//! The item (`inbox.replay_item`) is the token: it is used up in the transaction that takes the row up, so a replay is the
//! operator's decision for one more run, not for two. In one transaction with the effects, a failed attempt gives both back; under a
//! lease the row is in progress from then on, like any other that is left behind. What became of the item is written in the
//! transaction that settles the work: with the mark (`applied`), with the row that is dead once more (`dead_again`), or alone where
//! nothing else is written (`duplicate`, `conflict`). The first word stands.
//!
//! *On failure.* Nothing here is remembered in memory. What dies between a commit and the word about its item finds the work settled
//! when the record comes again, and says so then.

use baton_protocol::dead_letter::Cause;
use baton_protocol::lifecycle::Word;
use baton_protocol::lifecycle::dead_letter::State;
use baton_protocol::replay::Item;
use sqlx::{Postgres, Transaction};
use time::OffsetDateTime;

use super::statements::{self, Claim, storable};
use super::{Buried, Error, Inbox, Once, Work};
use crate::{AfterDeadLetter, Record};

/// What became of a replayed record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    Applied,
    /// It had been applied before.
    Duplicate,
    /// Its key is known with another payload.
    Conflict,
    /// It was given up once more.
    DeadAgain,
}

impl End {
    fn state(self) -> State {
        match self {
            Self::Applied => State::Applied,
            Self::Duplicate => State::Duplicate,
            Self::Conflict => State::Conflict,
            Self::DeadAgain => State::DeadAgain,
        }
    }
}

/// Where a replayed record died first.
#[derive(Debug, Clone, PartialEq, Eq, sqlx::FromRow)]
pub(crate) struct Origin {
    #[sqlx(rename = "original_partition")]
    pub(crate) partition: Option<i32>,
    #[sqlx(rename = "original_offset")]
    pub(crate) offset: Option<i64>,
    #[sqlx(rename = "original_time_ms")]
    pub(crate) timestamp_ms: Option<i64>,
    pub(crate) first_failed_at: Option<OffsetDateTime>,
}

/// Whose the row is from now on.
#[derive(Debug, Clone, Copy)]
pub(super) enum Until<'a> {
    /// This transaction's.
    Commit,
    /// This owner's, until its lease ends.
    Lease(&'a str),
}

impl Inbox {
    /// A claim in the transaction of the effects.
    pub(super) async fn claim_or_revive(
        &self,
        tx: &mut Transaction<'_, Postgres>,
        work: &Work,
    ) -> Result<Claim, Error> {
        match statements::claim(tx, self, work, None).await? {
            Claim::Dead { .. } if work.replay.is_some() => {
                match self.revive(tx, work, Until::Commit).await? {
                    Some(_) => Ok(Claim::Ours),
                    // Another copy of the replay may have been faster.
                    None => statements::claim(tx, self, work, None).await,
                }
            }
            claim => Ok(claim),
        }
    }

    /// Takes a dead row up and uses the item up. The row's new generation; none where it may not be.
    pub(super) async fn revive(
        &self,
        tx: &mut Transaction<'_, Postgres>,
        work: &Work,
        until: Until<'_>,
    ) -> Result<Option<i64>, Error> {
        let Some(Item { plan, number }) = work.replay else { return Ok(None) };
        let (owner, attempts) = match until {
            Until::Commit => (None, work.attempts_column()),
            // Counted when it is about to run, as after any takeover.
            Until::Lease(owner) => (Some(owner), 0),
        };
        sqlx::query_scalar(include_str!("../../queries/message_revive.sql"))
            .bind(&*self.consumer)
            .bind(&work.scope)
            .bind(&work.key)
            .bind(work.fingerprint.as_str())
            .bind(plan)
            .bind(number)
            .bind(owner)
            .bind(owner.map(|_| self.ttl_ms()))
            .bind(attempts)
            .bind(work.record_time_ms())
            .bind(work.origin.as_ref().map(|origin| origin.topic.as_str()))
            .bind(work.origin.as_ref().map(|origin| origin.partition))
            .bind(work.origin.as_ref().map(|origin| origin.offset))
            .fetch_optional(&mut **tx)
            .await
            .map_err(|source| Error::Claim { scope: work.scope.clone(), key: work.key.clone(), source })
    }

    /// What is to be written after a burial that may have found the row dead already.
    pub(super) async fn bury_replayed(
        &self,
        tx: &mut Transaction<'_, Postgres>,
        work: &Work,
        cause: Cause,
        error: &str,
        buried: Buried,
    ) -> Result<Buried, Error> {
        let failed = |source| Error::Bury { key: work.key.clone(), source };
        let buried = match buried {
            Buried::Now => Buried::Now,
            Buried::SettledBefore => {
                let again = sqlx::query(include_str!("../../queries/message_bury_again.sql"))
                    .bind(&*self.consumer)
                    .bind(&work.scope)
                    .bind(&work.key)
                    .bind(work.fingerprint.as_str())
                    .bind(work.attempts_column())
                    .bind(cause.as_str())
                    .bind(storable(error))
                    .execute(&mut **tx)
                    .await
                    .map_err(failed)?;
                if again.rows_affected() == 1 { Buried::Now } else { Buried::SettledBefore }
            }
        };
        let end = match buried {
            Buried::Now => End::DeadAgain,
            Buried::SettledBefore => End::Duplicate,
        };
        settle(tx, &self.consumer, work.replay, end, Some(error)).await.map_err(failed)?;
        Ok(buried)
    }

    /// Says what became of an item where no other row is written.
    pub(crate) async fn settle_replayed(
        &self,
        item: Item,
        end: End,
        error: Option<&str>,
    ) -> Result<(), Error> {
        self.in_transaction(async |tx| {
            settle(tx, &self.consumer, Some(item), end, error).await.map_err(Error::Replay)
        })
        .await
    }

    /// What follows an attempt on a replayed record, in transactions of their own: the word about its item where the attempt had no
    /// transaction to write it in, and the end of the record that was set aside as dead.
    pub(crate) async fn replayed(
        &self,
        work: &Work,
        record: &Record,
        once: Once,
        after: AfterDeadLetter,
    ) -> Result<Once, Error> {
        let Some(item) = work.replay else { return Ok(once) };
        match &once {
            Once::Fresh(_) => self.end_dead(work, record, after).await?,
            Once::Duplicate(_) => {
                self.settle_replayed(item, End::Duplicate, None).await?;
                self.end_dead(work, record, after).await?;
            }
            Once::Dead { error, .. } => {
                self.settle_replayed(item, End::DeadAgain, error.as_deref()).await?;
            }
            Once::InProgress | Once::Conflict | Once::TooOld | Once::Failed(_) => {}
        }
        Ok(once)
    }

    /// Where the item's record came from; none of another database's plan.
    pub(crate) async fn origin_of(&self, item: Item) -> Result<Option<Origin>, Error> {
        sqlx::query_as(include_str!("../../queries/replay_origin.sql"))
            .bind(item.plan)
            .bind(item.number)
            .bind(&*self.consumer)
            .fetch_optional(&self.pool)
            .await
            .map_err(Error::Replay)
    }
}

/// One word about one item. Whether it was the first does not matter: it stands.
pub(super) async fn settle(
    tx: &mut Transaction<'_, Postgres>,
    consumer: &str,
    item: Option<Item>,
    end: End,
    error: Option<&str>,
) -> Result<(), sqlx::Error> {
    let Some(Item { plan, number }) = item else { return Ok(()) };
    sqlx::query(include_str!("../../queries/replay_settle.sql"))
        .bind(plan)
        .bind(number)
        .bind(consumer)
        .bind(end.state().as_str())
        .bind(error.map(storable))
        .execute(&mut **tx)
        .await
        .map(drop)
}

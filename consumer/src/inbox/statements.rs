//! The inbox's statements, each called from one function.

use baton_protocol::dead_letter::{Cause, ERROR_LIMIT};
use sqlx::postgres::PgArguments;
use sqlx::query::Query;
use sqlx::{PgPool, Postgres, Transaction};
use time::OffsetDateTime;

use super::session::Session;
use super::{Buried, Error, Inbox, Work};
use crate::Outcome;

/// By this a lease is renewed, completed and released.
#[derive(Debug, Clone)]
pub(super) struct Holder {
    pub(super) owner: String,
    pub(super) generation: i64,
}

/// What a leased claim got.
#[derive(Debug, Clone)]
pub(super) struct Leased {
    pub(super) holder: Holder,
    /// How often it was run before this claim.
    pub(super) run_before: u32,
}

/// What a claim met.
pub(super) enum Claim {
    /// Nobody has it: it is this transaction's until it ends, or this owner's until its lease does.
    Ours,
    Done(Option<Outcome>),
    Dead {
        cause: String,
        error: Option<String>,
    },
    InProgress {
        /// By a lease that is over.
        is_left_behind: bool,
    },
    Conflict,
}

type Row = (String, bool, Option<String>, Option<String>, Option<String>, bool);

/// Takes the work or says what became of it, with an owner by a lease. Waits while another transaction has it.
pub(super) async fn claim(
    tx: &mut Transaction<'_, Postgres>,
    inbox: &Inbox,
    work: &Work,
    owner: Option<&str>,
) -> Result<Claim, Error> {
    let failed = |source| Error::Claim { scope: work.scope.clone(), key: work.key.clone(), source };
    // Nothing comes back when the row was settled or purged behind this statement's snapshot: the next one sees it.
    let (state, same_payload, outcome, cause, error, is_left_behind) = loop {
        let query = sqlx::query_as::<_, Row>(include_str!("../../queries/message_claim.sql"))
            .bind(&*inbox.consumer)
            .bind(&work.scope)
            .bind(&work.key)
            .bind(work.fingerprint.as_str())
            .bind(work.attempts_column())
            .bind(work.record_time_ms())
            .bind(work.origin.as_ref().map(|origin| origin.topic.as_str()))
            .bind(work.origin.as_ref().map(|origin| origin.partition))
            .bind(work.origin.as_ref().map(|origin| origin.offset))
            .bind(owner)
            .bind(owner.map(|_| inbox.ttl_ms()));
        if let Some(row) = query.fetch_optional(&mut **tx).await.map_err(failed)? {
            break row;
        }
    };
    #[cfg(feature = "plants")]
    let same_payload =
        same_payload || state == "in_progress" && inbox.has(crate::plant::Plant::FingerprintSkipped);
    if !same_payload {
        return Ok(Claim::Conflict);
    }
    match state.as_str() {
        "claimed" => Ok(Claim::Ours),
        "done" => outcome
            .map(Outcome::stored)
            .transpose()
            .map(Claim::Done)
            .map_err(|error| failed(sqlx::Error::Decode(error.into()))),
        "dead" => Ok(Claim::Dead { cause: cause.unwrap_or_default(), error }),
        "in_progress" => Ok(Claim::InProgress { is_left_behind }),
        _ => Err(Error::UnknownState { key: work.key.clone(), state }),
    }
}

type Taken = (String, Option<String>, Option<String>, i64, i32);

/// Takes over what a lease has left behind. An error of the claim's says why not.
pub(super) async fn take(
    tx: &mut Transaction<'_, Postgres>,
    inbox: &Inbox,
    work: &Work,
    budget: u32,
) -> Result<Result<Leased, Claim>, Error> {
    let sql = include_str!("../../queries/lease_take.sql");
    #[cfg(feature = "plants")]
    let sql = if inbox.has(crate::plant::Plant::FingerprintSkipped) {
        include_str!("../../queries/planted_lease_take.sql")
    } else {
        sql
    };
    let taken = sqlx::query_as::<_, Taken>(sql)
        .bind(&*inbox.consumer)
        .bind(&work.scope)
        .bind(&work.key)
        .bind(work.fingerprint.as_str())
        .bind(&*inbox.owner)
        .bind(inbox.ttl_ms())
        .bind(i32::try_from(budget).unwrap_or(i32::MAX))
        .fetch_optional(&mut **tx)
        .await
        .map_err(|source| Error::Claim { scope: work.scope.clone(), key: work.key.clone(), source })?;
    Ok(match taken {
        Some((state, _, _, generation, attempts)) if state == "in_progress" => Ok(Leased {
            holder: Holder { owner: inbox.owner.to_string(), generation },
            run_before: u32::try_from(attempts).unwrap_or(u32::MAX),
        }),
        Some((_, cause, error, ..)) => Err(Claim::Dead { cause: cause.unwrap_or_default(), error }),
        None => Err(Claim::InProgress { is_left_behind: false }),
    })
}

/// Writes outcome and mark. Nothing may be written after it in this transaction.
pub(super) async fn complete(
    tx: &mut Transaction<'_, Postgres>,
    consumer: &str,
    work: &Work,
    outcome: Option<&Outcome>,
) -> Result<(), Error> {
    let changed = sqlx::query(include_str!("../../queries/message_complete.sql"))
        .bind(consumer)
        .bind(&work.scope)
        .bind(&work.key)
        .bind(outcome.map(Outcome::as_json))
        .execute(&mut **tx)
        .await
        .map_err(|source| Error::Complete { key: work.key.clone(), source })?
        .rows_affected();
    if changed == 1 { Ok(()) } else { Err(Error::Fenced { key: work.key.clone() }) }
}

/// Whether the holder still has the work; then for the lease's whole length again. `attempts` are counted with it.
pub(super) async fn renew(
    inbox: &Inbox,
    work: &Work,
    holder: &Holder,
    attempts: i32,
) -> Result<bool, sqlx::Error> {
    by_holder(inbox, include_str!("../../queries/lease_renew.sql"), work, holder, |query| {
        query.bind(inbox.ttl_ms()).bind(attempts)
    })
    .await
}

/// Writes outcome and mark, if the holder still has the work.
pub(super) async fn complete_leased(
    inbox: &Inbox,
    work: &Work,
    holder: &Holder,
    outcome: Option<&Outcome>,
) -> Result<bool, sqlx::Error> {
    let sql = include_str!("../../queries/lease_complete.sql");
    #[cfg(feature = "plants")]
    let sql = if inbox.has(crate::plant::Plant::StaleGeneration) {
        include_str!("../../queries/planted_lease_complete.sql")
    } else {
        sql
    };
    by_holder(inbox, sql, work, holder, |query| query.bind(outcome.map(Outcome::as_json))).await
}

/// Gives the work back, if the holder still has it.
pub(super) async fn release(inbox: &Inbox, work: &Work, holder: &Holder) -> Result<bool, sqlx::Error> {
    by_holder(inbox, include_str!("../../queries/lease_release.sql"), work, holder, |query| query).await
}

/// Whether the holder's completion stands there.
pub(super) async fn completed(inbox: &Inbox, work: &Work, holder: &Holder) -> Result<bool, sqlx::Error> {
    sqlx::query_scalar(include_str!("../../queries/lease_completed.sql"))
        .bind(&*inbox.consumer)
        .bind(&work.scope)
        .bind(&work.key)
        .bind(&holder.owner)
        .bind(holder.generation)
        .bind(work.fingerprint.as_str())
        .fetch_one(&inbox.pool)
        .await
}

type Bound<'q> = Query<'q, Postgres, PgArguments>;

/// One statement that names owner and generation, in a transaction of its own. True: it changed the row.
async fn by_holder<'q>(
    inbox: &'q Inbox,
    sql: &'static str,
    work: &'q Work,
    holder: &'q Holder,
    rest: impl FnOnce(Bound<'q>) -> Bound<'q>,
) -> Result<bool, sqlx::Error> {
    let mut session = Session::acquire(&inbox.pool).await?;
    let mut tx = session.begin_plainly(&inbox.begin).await?;
    let query = sqlx::query(sql)
        .bind(&*inbox.consumer)
        .bind(&work.scope)
        .bind(&work.key)
        .bind(&holder.owner)
        .bind(holder.generation)
        .bind(work.fingerprint.as_str());
    let changed = rest(query).execute(&mut *tx).await?.rows_affected();
    tx.commit().await?;
    session.ended(Ok(()));
    Ok(changed == 1)
}

/// Marks the work as dead, unless somebody settled it.
pub(super) async fn bury(
    tx: &mut Transaction<'_, Postgres>,
    consumer: &str,
    work: &Work,
    cause: Cause,
    error: &str,
) -> Result<Buried, sqlx::Error> {
    let query: Bound<'_> = sqlx::query(include_str!("../../queries/message_bury.sql"));
    let changed = query
        .bind(consumer)
        .bind(&work.scope)
        .bind(&work.key)
        .bind(work.fingerprint.as_str())
        .bind(work.attempts_column())
        .bind(work.record_time_ms())
        .bind(work.origin.as_ref().map(|origin| origin.topic.as_str()))
        .bind(work.origin.as_ref().map(|origin| origin.partition))
        .bind(work.origin.as_ref().map(|origin| origin.offset))
        .bind(cause.as_str())
        .bind(storable(error))
        .execute(&mut **tx)
        .await?
        .rows_affected();
    Ok(if changed == 1 { Buried::Now } else { Buried::SettledBefore })
}

/// The database's time.
pub(super) async fn now(pool: &PgPool) -> Result<OffsetDateTime, sqlx::Error> {
    sqlx::query_scalar(include_str!("../../queries/clock_read.sql")).fetch_one(pool).await
}

/// The milliseconds that a timestamptz can say, years 1 to 9999. A record may claim any time at all, and one that does
/// must not make its claim fail for ever: it is kept without.
pub(super) const STORABLE_MS: std::ops::RangeInclusive<i64> = -62_135_596_800_000..=253_402_300_799_999;

impl Work {
    pub(super) fn attempts_column(&self) -> i32 {
        i32::try_from(self.attempts).unwrap_or(i32::MAX)
    }

    fn record_time_ms(&self) -> Option<i64> {
        self.origin.as_ref()?.timestamp_ms.filter(|ms| STORABLE_MS.contains(ms))
    }
}

/// A text column holds no NUL, and an error can be of any length.
pub(super) fn storable(error: &str) -> String {
    error[..error.floor_char_boundary(ERROR_LIMIT)].replace('\0', "\u{fffd}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_of_any_kind_can_be_stored() {
        assert_eq!(storable("a\0b"), "a\u{fffd}b");
        assert!(storable(&"é".repeat(5000)).len() <= ERROR_LIMIT);
    }
}

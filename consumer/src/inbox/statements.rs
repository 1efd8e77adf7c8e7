//! The inbox's statements, each called from one function.

use baton_protocol::dead_letter::{Cause, ERROR_LIMIT};
use baton_protocol::replay::Item;
use sqlx::postgres::PgArguments;
use sqlx::query::Query;
use sqlx::{PgPool, Postgres, Transaction};
use time::OffsetDateTime;

use super::replayed::{self, End as Replayed};
use super::session::Session;
use super::{Buried, Error, Inbox, Work};
use crate::Outcome;
use crate::metrics::{self, Fenced};

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
    /// Nobody has it, but a duplicate of it may have been purged. The row that is there now is to be rolled back.
    TooOld,
}

/// What a completion found.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Completed {
    Done,
    /// A purge came between the claim's snapshot and its insert, and what it took may have been this work. To be rolled back.
    TooOld,
}

type Row = (String, bool, Option<String>, Option<String>, Option<String>, bool, Option<String>);

/// Takes the work or says what became of it, with an owner by a lease. Waits while another transaction has it.
pub(super) async fn claim(
    tx: &mut Transaction<'_, Postgres>,
    inbox: &Inbox,
    work: &Work,
    owner: Option<&str>,
) -> Result<Claim, Error> {
    let failed = |source| Error::Claim { scope: work.scope.clone(), key: work.key.clone(), source };
    let mut was_lost = false;
    loop {
        let query = sqlx::query_as::<_, Row>(include_str!("../../queries/message_claim.sql"))
            .bind(&*inbox.consumer)
            .bind(&work.scope)
            .bind(&work.key)
            .bind(work.fingerprint.as_str())
            .bind(owner.map_or(work.attempts_column(), |_| 1))
            .bind(work.record_time_ms())
            .bind(work.origin.as_ref().map(|origin| origin.topic.as_str()))
            .bind(work.origin.as_ref().map(|origin| origin.partition))
            .bind(work.origin.as_ref().map(|origin| origin.offset))
            .bind(owner)
            .bind(owner.map(|_| inbox.ttl_ms()));
        // Nothing comes back when the row was settled or purged behind this statement's snapshot: the next one sees it.
        let Some((state, same_payload, outcome, cause, error, is_left_behind, _)) =
            query.fetch_optional(&mut **tx).await.map_err(failed)?
        else {
            continue;
        };
        #[cfg(feature = "plants")]
        let same_payload =
            same_payload || state == "in_progress" && inbox.has(crate::plant::Plant::FingerprintSkipped);
        let claim = claimed(work, state, same_payload, outcome, (cause, error), is_left_behind)?;
        if owner.is_some() || was_lost || !matches!(claim, Claim::InProgress { is_left_behind: true }) {
            return Ok(claim);
        }
        if retake(tx, inbox, work).await? == Retaken::Yes {
            return Ok(Claim::Ours);
        }
        // Somebody else was faster, and what it made of it shows now; or a lease left it behind.
        was_lost = true;
    }
}

/// Whether work that was in progress has become this transaction's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Retaken {
    Yes,
    /// A lease left it behind, or somebody else was faster.
    No,
}

/// Takes work that an operator has requeued, once a claim has found it in progress and held by nobody.
pub(super) async fn retake(
    tx: &mut Transaction<'_, Postgres>,
    inbox: &Inbox,
    work: &Work,
) -> Result<Retaken, Error> {
    let taken = sqlx::query(include_str!("../../queries/message_retake.sql"))
        .bind(&*inbox.consumer)
        .bind(&work.scope)
        .bind(&work.key)
        .bind(work.fingerprint.as_str())
        .bind(work.attempts_column())
        .fetch_optional(&mut **tx)
        .await
        .map_err(|source| Error::Claim { scope: work.scope.clone(), key: work.key.clone(), source })?;
    Ok(if taken.is_some() { Retaken::Yes } else { Retaken::No })
}

/// What a row of a claim says.
fn claimed(
    work: &Work,
    state: String,
    same_payload: bool,
    outcome: Option<String>,
    (cause, error): (Option<String>, Option<String>),
    is_left_behind: bool,
) -> Result<Claim, Error> {
    if !same_payload {
        return Ok(Claim::Conflict);
    }
    match state.as_str() {
        "claimed" => Ok(Claim::Ours),
        "too_old" => Ok(Claim::TooOld),
        "done" => outcome.map(Outcome::stored).transpose().map(Claim::Done).map_err(|error| Error::Claim {
            scope: work.scope.clone(),
            key: work.key.clone(),
            source: sqlx::Error::Decode(error.into()),
        }),
        "dead" => Ok(Claim::Dead { cause: cause.unwrap_or_default(), error }),
        "in_progress" => Ok(Claim::InProgress { is_left_behind }),
        _ => Err(Error::UnknownState { key: work.key.clone(), state }),
    }
}

/// Whether a purge that the claim's statement could not see may have taken this work. Nothing is asked of work without a time.
pub(super) async fn is_too_old(
    tx: &mut Transaction<'_, Postgres>,
    inbox: &Inbox,
    work: &Work,
) -> Result<bool, Error> {
    let Some(record_time_ms) = work.record_time_ms() else { return Ok(false) };
    sqlx::query_scalar(include_str!("../../queries/horizon_look.sql"))
        .bind(&*inbox.consumer)
        .bind(record_time_ms)
        .fetch_one(&mut **tx)
        .await
        .map_err(|source| Error::Claim { scope: work.scope.clone(), key: work.key.clone(), source })
}

type BatchRow =
    (i64, Option<String>, Option<bool>, Option<String>, Option<String>, Option<String>, Option<bool>);

/// From so many items on a claim is planned anew.
const KEPT_PLAN: usize = 100;

/// What a batch's claim says of one item: nothing yet where it is to be asked again.
pub(super) type Told = (usize, Option<Result<Claim, Error>>);

/// Takes what nobody has of the items `asked` for, and tells of the others: of those that are the first of their key and are
/// now this transaction's it tells nothing. Waits while another transaction has one of them.
pub(super) async fn claim_batch(
    tx: &mut Transaction<'_, Postgres>,
    inbox: &Inbox,
    works: &[&Work],
    firsts: &[usize],
    asked: &[usize],
) -> Result<Vec<Told>, Error> {
    fn each<'w, T>(works: &[&'w Work], asked: &[usize], of: impl Fn(&'w Work) -> T) -> Vec<T> {
        asked.iter().map(|&index| of(works[index])).collect()
    }
    // A plan that was kept from when the table held a few rows reads all of it for each item that is known. Making one anew is
    // a round trip and a millisecond: nothing to many items, and to few ones more than they can lose.
    let rows = sqlx::query_as::<_, BatchRow>(include_str!("../../queries/batch_claim.sql"))
        .persistent(asked.len() < KEPT_PLAN)
        .bind(&*inbox.consumer)
        .bind(each(works, asked, |work| work.scope.as_str()))
        .bind(each(works, asked, |work| work.key.as_str()))
        .bind(each(works, asked, |work| work.fingerprint.as_str()))
        .bind(asked.iter().map(|&index| firsts[index] == index).collect::<Vec<_>>())
        .bind(each(works, asked, Work::attempts_column))
        .bind(each(works, asked, Work::record_time_ms))
        .bind(each(works, asked, |work| work.origin.as_ref().map(|origin| origin.topic.as_str())))
        .bind(each(works, asked, |work| work.origin.as_ref().map(|origin| origin.partition)))
        .bind(each(works, asked, |work| work.origin.as_ref().map(|origin| origin.offset)))
        .fetch_all(&mut **tx)
        .await
        .map_err(|source| {
            let scope = asked.first().map(|&index| works[index].scope.clone()).unwrap_or_default();
            Error::Claim { scope, key: several(&each(works, asked, |work| work)), source }
        })?;
    let told = |(nr, state, same_payload, outcome, cause, error, is_left_behind): BatchRow| {
        let index = asked[usize::try_from(nr - 1).unwrap_or(usize::MAX)];
        let claim = state.zip(same_payload).map(|(state, same_payload)| {
            let why = (cause, error);
            claimed(works[index], state, same_payload, outcome, why, is_left_behind.unwrap_or_default())
        });
        (index, claim)
    };
    Ok(rows.into_iter().map(told).collect())
}

/// Names a batch in an error.
pub(super) fn several(works: &[&Work]) -> String {
    match works {
        [] => String::new(),
        [only] => only.key.clone(),
        [first, others @ ..] => format!("{} and {} more", first.key, others.len()),
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
) -> Result<Completed, Error> {
    let is_too_old = sqlx::query_scalar(include_str!("../../queries/message_complete.sql"))
        .bind(consumer)
        .bind(&work.scope)
        .bind(&work.key)
        .bind(outcome.map(Outcome::as_json))
        .fetch_optional(&mut **tx)
        .await
        .map_err(|source| Error::Complete { key: work.key.clone(), source })?;
    match is_too_old {
        Some(false) => Ok(Completed::Done),
        Some(true) => Ok(Completed::TooOld),
        None => {
            metrics::fenced(consumer, Fenced::Complete);
            Err(Error::Fenced { key: work.key.clone() })
        }
    }
}

/// Writes outcomes and marks of a batch. Nothing may be written after it in this transaction.
pub(super) async fn complete_batch(
    tx: &mut Transaction<'_, Postgres>,
    consumer: &str,
    marks: &[(&Work, Option<&Outcome>)],
) -> Result<Completed, Error> {
    fn each<'w, T>(
        marks: &[(&'w Work, Option<&'w Outcome>)],
        of: impl Fn(&'w Work, Option<&'w Outcome>) -> T,
    ) -> Vec<T> {
        marks.iter().map(|&(work, outcome)| of(work, outcome)).collect()
    }
    let key = || several(&each(marks, |work, _| work));
    let (changed, too_old): (i64, i64) = sqlx::query_as(include_str!("../../queries/batch_complete.sql"))
        .bind(consumer)
        .bind(each(marks, |work, _| work.scope.as_str()))
        .bind(each(marks, |work, _| work.key.as_str()))
        .bind(each(marks, |work, _| work.fingerprint.as_str()))
        .bind(each(marks, |_, outcome| outcome.map(Outcome::as_json)))
        .fetch_one(&mut **tx)
        .await
        .map_err(|source| Error::Complete { key: key(), source })?;
    match (usize::try_from(changed) == Ok(marks.len()), too_old) {
        (false, _) => {
            metrics::fenced(consumer, Fenced::Complete);
            Err(Error::Fenced { key: key() })
        }
        (true, 0) => Ok(Completed::Done),
        (true, _) => Ok(Completed::TooOld),
    }
}

/// Whether the holder still has the work; then for the lease's whole length again. `attempts` are counted with it.
pub(super) async fn renew(
    inbox: &Inbox,
    work: &Work,
    holder: &Holder,
    attempts: i32,
) -> Result<bool, sqlx::Error> {
    by_holder(inbox, include_str!("../../queries/lease_renew.sql"), work, holder, None, |query| {
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
    replayed: Replayed,
) -> Result<bool, sqlx::Error> {
    let sql = include_str!("../../queries/lease_complete.sql");
    #[cfg(feature = "plants")]
    let sql = if inbox.has(crate::plant::Plant::StaleGeneration) {
        include_str!("../../queries/planted_lease_complete.sql")
    } else {
        sql
    };
    let also = work.replay.map(|item| (item, replayed));
    by_holder(inbox, sql, work, holder, also, |query| query.bind(outcome.map(Outcome::as_json))).await
}

/// Gives the work back, if the holder still has it.
pub(super) async fn release(
    inbox: &Inbox,
    work: &Work,
    holder: &Holder,
    refund: i32,
) -> Result<bool, sqlx::Error> {
    by_holder(inbox, include_str!("../../queries/lease_release.sql"), work, holder, None, |query| {
        query.bind(refund)
    })
    .await
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

/// One statement that names owner and generation, in a transaction of its own, with what is to be said of a replay's item if it
/// changed the row. True: it did.
async fn by_holder<'q>(
    inbox: &'q Inbox,
    sql: &'static str,
    work: &'q Work,
    holder: &'q Holder,
    also: Option<(Item, Replayed)>,
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
    if let (1, Some((item, end))) = (changed, also) {
        replayed::settle(&mut tx, &inbox.consumer, Some(item), end, None).await?;
    }
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

    pub(super) fn record_time_ms(&self) -> Option<i64> {
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

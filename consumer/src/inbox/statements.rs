//! The inbox's statements, each called from one function.

use baton_protocol::dead_letter::{Cause, ERROR_LIMIT};
use sqlx::postgres::PgArguments;
use sqlx::query::Query;
use sqlx::{PgPool, Postgres, Transaction};
use time::OffsetDateTime;

use super::{Buried, Error, Work};
use crate::Outcome;

/// What a claim met.
pub(super) enum Claim {
    /// Nobody has it: it is this transaction's until it ends.
    Ours,
    Done(Option<Outcome>),
    Dead {
        cause: String,
        error: Option<String>,
    },
    InProgress,
    Conflict,
}

type Row = (String, bool, Option<String>, Option<String>, Option<String>);

/// Takes the work or says what became of it. Waits while another transaction has it.
pub(super) async fn claim(
    tx: &mut Transaction<'_, Postgres>,
    consumer: &str,
    work: &Work,
) -> Result<Claim, Error> {
    let failed = |source| Error::Claim { scope: work.scope.clone(), key: work.key.clone(), source };
    // Nothing comes back when the row was settled or purged behind this statement's snapshot: the next one sees it.
    let (state, same_payload, outcome, cause, error) = loop {
        let query = sqlx::query_as::<_, Row>(include_str!("../../queries/message_claim.sql"))
            .bind(consumer)
            .bind(&work.scope)
            .bind(&work.key)
            .bind(work.fingerprint.as_str())
            .bind(work.attempts_column())
            .bind(work.record_time_ms())
            .bind(work.origin.as_ref().map(|origin| origin.topic.as_str()))
            .bind(work.origin.as_ref().map(|origin| origin.partition))
            .bind(work.origin.as_ref().map(|origin| origin.offset));
        if let Some(row) = query.fetch_optional(&mut **tx).await.map_err(failed)? {
            break row;
        }
    };
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
        "in_progress" => Ok(Claim::InProgress),
        _ => Err(Error::UnknownState { key: work.key.clone(), state }),
    }
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

/// Marks the work as dead, unless somebody settled it.
pub(super) async fn bury(
    tx: &mut Transaction<'_, Postgres>,
    consumer: &str,
    work: &Work,
    cause: Cause,
    error: &str,
) -> Result<Buried, sqlx::Error> {
    let query: Query<'_, Postgres, PgArguments> = sqlx::query(include_str!("../../queries/message_bury.sql"));
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
const STORABLE_MS: std::ops::RangeInclusive<i64> = -62_135_596_800_000..=253_402_300_799_999;

impl Work {
    fn attempts_column(&self) -> i32 {
        i32::try_from(self.attempts).unwrap_or(i32::MAX)
    }

    fn record_time_ms(&self) -> Option<i64> {
        self.origin.as_ref()?.timestamp_ms.filter(|ms| STORABLE_MS.contains(ms))
    }
}

/// A text column holds no NUL, and an error can be of any length.
fn storable(error: &str) -> String {
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

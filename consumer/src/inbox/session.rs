//! One connection for one transaction, safe to drop at any point.
//!
//! A future that is dropped while it begins or ends a transaction leaves the connection in an unknown state, and sqlx
//! would hand it to the next user of the pool with the transaction still open. So a connection goes back only after its
//! transaction has ended in order ([`Session::ended`]); in every other case it is closed, and the server rolls back.

use std::sync::Arc;
use std::time::Duration;

use sqlx::{AssertSqlSafe, Connection, PgPool, Postgres, Transaction};
use tokio::time::Instant;

use super::Error;
use super::kept::{Held, Kept};

pub(super) struct Session {
    /// Taken only where the session ends.
    held: Option<Held>,
    pool: PgPool,
    /// Where its connection came from and may go back to, instead of the pool.
    kept: Option<Arc<Kept>>,
    after: After,
}

enum After {
    Close,
    Keep,
}

impl Session {
    pub(super) async fn open(pool: &PgPool) -> Result<Self, Error> {
        Self::acquire(pool).await.map_err(Error::Connect)
    }

    /// As [`open`](Self::open), for whoever has its own words for what fails.
    pub(super) async fn acquire(pool: &PgPool) -> Result<Self, sqlx::Error> {
        let held = Some(taken(pool).await?);
        Ok(Self { held, pool: pool.clone(), kept: None, after: After::Close })
    }

    /// As [`open`](Self::open), with the connection of a transaction that has just ended where there is one, and for the next one.
    pub(super) async fn follow(pool: &PgPool, kept: &Arc<Kept>) -> Result<Self, Error> {
        let held = match kept.take() {
            Some(held) if !pool.is_closed() => held,
            _ => taken(pool).await.map_err(Error::Connect)?,
        };
        let kept = Some(Arc::clone(kept));
        Ok(Self { held: Some(held), pool: pool.clone(), kept, after: After::Close })
    }

    pub(super) async fn begin(&mut self, begin: &Arc<str>) -> Result<Transaction<'_, Postgres>, Error> {
        self.begin_plainly(begin).await.map_err(Error::Begin)
    }

    /// As [`begin`](Self::begin), for whoever has its own words for what fails.
    pub(super) async fn begin_plainly(
        &mut self,
        begin: &Arc<str>,
    ) -> Result<Transaction<'_, Postgres>, sqlx::Error> {
        let held = self.held.as_mut().ok_or(sqlx::Error::PoolClosed)?;
        held.connection.begin_with(AssertSqlSafe(Arc::clone(begin))).await
    }

    /// Says how the transaction ended. Only after a success is the connection used again.
    pub(super) fn ended(mut self, how: Result<(), sqlx::Error>) {
        match how {
            Ok(()) => self.after = After::Keep,
            Err(error) => {
                tracing::debug!(%error, "the connection is closed, because its transaction did not end");
            }
        }
    }
}

async fn taken(pool: &PgPool) -> Result<Held, sqlx::Error> {
    Ok(Held { connection: pool.acquire().await?, taken: Instant::now() })
}

impl Drop for Session {
    fn drop(&mut self) {
        let Some(mut held) = self.held.take() else { return };
        match (&self.after, &self.kept) {
            (After::Close, _) => held.connection.close_on_drop(),
            (After::Keep, Some(kept)) => kept.put(&self.pool, held),
            (After::Keep, None) => {}
        }
    }
}

/// The statements that open a transaction whose first statement is the claim of one piece of work. The only value put into the
/// text is a number.
pub(super) fn begin_claim_sql(stall: Duration) -> Arc<str> {
    let milliseconds = stall.as_millis().clamp(1, i32::MAX.unsigned_abs().into());
    statements(include_str!("../../queries/transaction_begin.sql"))
        .replace("{stall}", &milliseconds.to_string())
        .into()
}

/// The statements that open any other transaction.
pub(super) fn begin_sql(stall: Duration) -> Arc<str> {
    let synchronous = statements(include_str!("../../queries/synchronous_commit_set.sql"));
    format!("{} {synchronous}", begin_claim_sql(stall)).into()
}

/// They are sent with every message; the comments need not be.
fn statements(file: &str) -> String {
    let statements: Vec<&str> = file.lines().filter(|line| !line.starts_with("--")).collect();
    statements.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stall_is_put_in_as_milliseconds_and_never_turns_the_limit_off() {
        assert!(begin_sql(Duration::from_secs(60)).contains("statement_timeout = 60000;"));
        assert!(begin_sql(Duration::ZERO).contains("statement_timeout = 1;"));
        assert!(begin_sql(Duration::ZERO).starts_with("BEGIN "));
        assert!(begin_claim_sql(Duration::ZERO).contains("statement_timeout = 1;"));
        assert!(begin_sql(Duration::MAX).contains("statement_timeout = 2147483647;"));
    }
}

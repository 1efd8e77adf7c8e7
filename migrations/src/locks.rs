//! Waiting for the locks of a migration without keeping producers waiting.
//!
//! ```text
//!  try: one transaction ── every lock within `wait` ──▶ done
//!    ▲        └── not in time: rolled back, whoever queued behind it goes on ──┐
//!    └──────────────────────────── pause ◀──────────────────────────────────┘   at most [`TRIES`] times, then an error
//! ```
//!
//! A statement that waits for a table's lock makes everybody wait who comes after it, producers too. So a migration waits for
//! 2 s, or as long as the connection's own `lock_timeout` says where that is shorter, gives up, lets the others through for half
//! of that time, and tries again. Each wait is a warning that says for whom; the last one is an error that says what to do.

use std::fmt;
use std::time::Duration;

use sqlx::PgConnection;

/// The longest that producers are kept waiting at a time.
const LONGEST_WAIT: Duration = Duration::from_secs(2);

/// How often it is tried.
pub(crate) const TRIES: u32 = 10;

/// How long one try waits for a lock. The pause after it is half of that.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Patience(Duration);

impl Patience {
    /// What suits this connection.
    pub(crate) async fn of(connection: &mut PgConnection) -> Result<Self, sqlx::Error> {
        let set: i64 = sqlx::query_scalar(include_str!("../queries/lock_timeout_read.sql"))
            .fetch_one(connection)
            .await?;
        Ok(Self::within(Duration::from_millis(set.unsigned_abs())))
    }

    fn within(set: Duration) -> Self {
        Self(if set.is_zero() { LONGEST_WAIT } else { set.min(LONGEST_WAIT) })
    }

    pub(crate) fn wait(self) -> Duration {
        self.0
    }

    pub(crate) fn pause(self) -> Duration {
        self.0 / 2
    }

    /// Bounds the waits of a transaction.
    pub(crate) async fn bound(self, tx: &mut PgConnection) -> Result<(), sqlx::Error> {
        sqlx::query(include_str!("../queries/lock_timeout_set.sql"))
            .bind(format!("{}ms", self.0.as_millis().max(1)))
            .execute(tx)
            .await
            .map(drop)
    }
}

/// Whether a lock was waited for in vain.
pub(crate) fn is_timeout(error: &sqlx::Error) -> bool {
    error.as_database_error().is_some_and(|e| e.code().as_deref() == Some("55P03"))
}

/// Who keeps a migration waiting.
#[derive(Debug, Clone, PartialEq)]
pub struct Holder {
    /// The process of the server; none for a prepared transaction.
    pub pid: Option<i32>,
    /// What it calls itself, where this role may see it.
    pub application_name: Option<String>,
    /// The name of a prepared transaction.
    pub prepared: Option<String>,
    /// For how long its transaction has been open, where this role may see it.
    pub open_for: Option<Duration>,
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.pid, &self.prepared) {
            (_, Some(gid)) => write!(f, "the prepared transaction '{gid}'")?,
            (Some(pid), None) => write!(f, "pid {pid}")?,
            (None, None) => write!(f, "a prepared transaction")?,
        }
        match (&self.application_name, self.open_for) {
            (Some(name), Some(age)) => {
                write!(f, " ({name}, in a transaction for {:.1} s)", age.as_secs_f64())
            }
            (None, Some(age)) => write!(f, " (in a transaction for {:.1} s)", age.as_secs_f64()),
            (Some(name), None) => write!(f, " ({name})"),
            (None, None) => Ok(()),
        }
    }
}

/// The holders, as a sentence lists them.
#[derive(Debug, Clone, PartialEq)]
pub struct Holders(pub Vec<Holder>);

impl fmt::Display for Holders {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            // Or it is the relay, or producers one after the other, each shortly.
            return f.write_str("transactions that have ended by now");
        }
        let holders: Vec<String> = self.0.iter().map(Holder::to_string).collect();
        f.write_str(&holders.join(", "))
    }
}

/// Who holds locks on the tables of a schema, and has for as long as a try waits.
pub(crate) async fn holders(
    connection: &mut PgConnection,
    schema: &str,
    patience: Patience,
) -> Result<Holders, sqlx::Error> {
    type Row = (Option<i32>, Option<String>, Option<String>, Option<f64>);
    let rows: Vec<Row> = sqlx::query_as(include_str!("../queries/lock_holders.sql"))
        .bind(schema)
        .bind(i64::try_from(patience.wait().as_millis()).unwrap_or(i64::MAX))
        .fetch_all(connection)
        .await?;
    let holder = |(pid, application_name, prepared, seconds): Row| Holder {
        pid,
        application_name,
        prepared,
        open_for: seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok()),
    };
    Ok(Holders(rows.into_iter().map(holder).collect()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn producers_wait_two_seconds_at_most_and_less_where_the_connection_says_so() {
        for (set, wait) in [(0, 2_000), (300, 300), (60_000, 2_000)] {
            assert_eq!(Patience::within(Duration::from_millis(set)).wait(), Duration::from_millis(wait));
        }
    }

    #[test]
    fn whoever_holds_a_lock_is_named_by_what_one_needs_to_end_it() {
        let holder = |pid, prepared: Option<&str>, open_for| Holder {
            pid,
            application_name: pid.map(|_| "orders".to_owned()),
            prepared: prepared.map(str::to_owned),
            open_for,
        };
        let age = Some(Duration::from_millis(72_300));
        let holders = Holders(vec![holder(Some(17), None, age), holder(None, Some("x7"), None)]);
        assert_eq!(
            holders.to_string(),
            "pid 17 (orders, in a transaction for 72.3 s), the prepared transaction 'x7'"
        );
    }
}

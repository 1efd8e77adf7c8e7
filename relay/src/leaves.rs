//! The leaves of the outbox, as an operator sees them: how large each is, how far back its rows go, and why it is still there.
//!
//! The leaves are a ring, and time goes round in it:
//!
//! ```text
//!  current ─▶ one back ─▶ two back ─────▶ next ─▶ current …
//!  written    stragglers  may be           waits
//!                         truncated
//! ```
//!
//! What stands against a leaf is computed on the spot from the database, so any process may ask, and nothing that it is told can be
//! out of date. The rule itself, under the lock, is `outbox.truncate_leaf` (`migrations/outbox/0005_retention.sql`); here the
//! same functions are asked without a lock.

use std::time::Duration;

use serde::Serialize;
use sqlx::postgres::PgConnection;

use crate::database::{Error, answer};

/// One leaf.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Leaf {
    /// Its slot, 0 to 3.
    pub slot: i16,
    /// Its size, with indexes and TOAST.
    pub bytes: i64,
    /// Whether rows are written to it now.
    pub current: bool,
    /// When the oldest consumed row in it was created, by the first row of each shard; null when it has none. RFC 3339, UTC.
    pub oldest_consumed_at: Option<String>,
    /// When its turn to be truncated begins, or began if it is in turn now. RFC 3339, UTC.
    pub turn_at: String,
    /// What stands against truncating it; null when it is empty, or the current one.
    pub kept: Option<Kept>,
}

/// Why a leaf is not truncated.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Kept {
    /// In one word.
    pub why: Why,
    /// The same for people.
    pub words: String,
    /// A shard that has not consumed all of it.
    pub shard: Option<i16>,
    /// A position that it has not consumed.
    pub position: Option<i64>,
    /// Until when, where that is known. RFC 3339, UTC.
    pub until: Option<String>,
    /// Who has had it locked for longest, a second at least.
    pub holder: Option<Holder>,
}

/// Why a leaf is not truncated, in one word.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Why {
    /// It is not in turn.
    Turn,
    /// A shard has not consumed a row of it.
    Unconsumed,
    /// It was consumed less than a slot period ago.
    Window,
    /// Somebody has it locked: a dump, a writer, a prepared transaction.
    Locked,
    /// Nothing: the next look of a relay truncates it.
    Due,
}

/// Who has a leaf locked.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Holder {
    /// The server process; null for a prepared transaction.
    pub pid: Option<i32>,
    /// The application's name, or the user's where it has none; null for a prepared transaction.
    pub application_name: Option<String>,
    /// The name of a prepared transaction.
    pub prepared: Option<String>,
    /// For how long its transaction lasts; null where the role may not see it.
    pub age_seconds: Option<f64>,
}

impl Holder {
    fn words(&self) -> String {
        let who = match (&self.prepared, &self.application_name, self.pid) {
            (Some(gid), ..) => format!("the prepared transaction '{gid}'"),
            (None, Some(name), Some(pid)) => format!("{name} (process {pid})"),
            (None, _, Some(pid)) => format!("process {pid}"),
            (None, ..) => "a prepared transaction".to_owned(),
        };
        match self.age_seconds {
            Some(age) => format!("{who} holds it, in a transaction of {age:.0} s"),
            None => format!("{who} holds it"),
        }
    }
}

#[derive(Debug, Clone, Default, sqlx::FromRow)]
struct Row {
    slot: i16,
    back: i16,
    bytes: i64,
    has_rows: bool,
    turn_at: String,
    oldest_consumed_at: Option<String>,
    waiting_shard: Option<i16>,
    waiting_position: Option<i64>,
    kept_until: Option<String>,
    holder_pid: Option<i32>,
    holder_name: Option<String>,
    holder_gid: Option<String>,
    holder_age: Option<f64>,
}

/// Reads what stands with each leaf, in the order of the slots.
pub(crate) async fn read(connection: &mut PgConnection, patience: Duration) -> Result<Vec<Leaf>, Error> {
    let asked = sqlx::query_as(include_str!("../queries/status_leaves.sql")).fetch_all(connection);
    let rows: Vec<Row> = answer("reading the leaves", patience, asked).await?;
    Ok(rows.into_iter().map(Leaf::from).collect())
}

impl From<Row> for Leaf {
    fn from(row: Row) -> Self {
        Self {
            slot: row.slot,
            bytes: row.bytes,
            current: row.back == 0,
            oldest_consumed_at: row.oldest_consumed_at.clone(),
            turn_at: row.turn_at.clone(),
            kept: row.kept(),
        }
    }
}

impl Row {
    /// What stands against truncating this leaf: of several, the one that an operator would have to see to first.
    fn kept(self) -> Option<Kept> {
        if !self.has_rows || self.back == 0 {
            return None;
        }
        let in_turn = self.back == 2;
        let is_held = self.holder_pid.is_some() || self.holder_gid.is_some();
        let holder = is_held.then_some(Holder {
            pid: self.holder_pid,
            application_name: self.holder_name,
            prepared: self.holder_gid,
            age_seconds: self.holder_age,
        });
        let (why, words) = match (&holder, self.waiting_shard.zip(self.waiting_position), &self.kept_until) {
            // What is just one back is looked at by nobody yet.
            _ if self.back == 1 => (Why::Turn, format!("its turn begins at {}", self.turn_at)),
            (_, Some((shard, position)), _) => {
                (Why::Unconsumed, format!("shard {shard} has not consumed position {position}"))
            }
            (_, None, Some(until)) => (Why::Window, format!("its rows are kept until {until} at least")),
            (Some(holder), None, None) => (Why::Locked, holder.words()),
            (None, None, None) if in_turn => {
                (Why::Due, "nothing: the next look of a relay truncates it".to_owned())
            }
            (None, None, None) => (Why::Turn, format!("its turn begins at {}", self.turn_at)),
        };
        let until = match why {
            Why::Turn => Some(self.turn_at),
            Why::Window => self.kept_until,
            Why::Unconsumed | Why::Locked | Why::Due => None,
        };
        Some(Kept { why, words, shard: self.waiting_shard, position: self.waiting_position, until, holder })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(back: i16) -> Row {
        Row { back, has_rows: true, turn_at: "T".to_owned(), ..Row::default() }
    }

    fn why(row: Row) -> Option<(Why, String)> {
        row.kept().map(|kept| (kept.why, kept.words))
    }

    #[test]
    fn an_empty_leaf_and_the_current_one_are_kept_by_nothing() {
        assert_eq!(why(Row { has_rows: false, ..row(2) }), None);
        assert_eq!(why(row(0)), None);
    }

    #[test]
    fn the_reason_that_somebody_must_see_to_comes_before_those_that_pass() {
        let held = Row { holder_pid: Some(7), holder_name: Some("pg_dump".to_owned()), ..row(2) };
        let expected = (Why::Locked, "pg_dump (process 7) holds it".to_owned());
        assert_eq!(why(held.clone()), Some(expected));
        let kept = Row { kept_until: Some("U".to_owned()), ..held };
        assert_eq!(why(kept.clone()), Some((Why::Window, "its rows are kept until U at least".to_owned())));
        let waits = Row { waiting_shard: Some(3), waiting_position: Some(17), ..kept };
        let expected = (Why::Unconsumed, "shard 3 has not consumed position 17".to_owned());
        assert_eq!(why(waits), Some(expected));
    }

    #[test]
    fn a_leaf_that_is_not_in_turn_says_when_it_will_be() {
        let turn = Some((Why::Turn, "its turn begins at T".to_owned()));
        let just_written = Row { waiting_shard: Some(3), waiting_position: Some(17), ..row(1) };
        assert_eq!(why(just_written), turn);
        assert_eq!(why(row(3)), turn);
        assert_eq!(row(3).kept().and_then(|kept| kept.until), Some("T".to_owned()));
        assert_eq!(row(2).kept().map(|kept| kept.why), Some(Why::Due));
    }

    #[test]
    fn a_prepared_transaction_is_told_by_its_name() {
        let prepared = Row { holder_gid: Some("g".to_owned()), holder_age: Some(61.2), ..row(2) };
        let words = "the prepared transaction 'g' holds it, in a transaction of 61 s".to_owned();
        assert_eq!(why(prepared), Some((Why::Locked, words)));
    }
}

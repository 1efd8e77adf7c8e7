//! A page from its hand-over until all of it is acknowledged.

use crate::budget::Held;
use crate::cursor::{Cursor, ReadAt};
use crate::metrics::DatabaseClock;
use crate::pipeline::Which;

/// The rows of one page that are with the producer.
pub(crate) struct Flight {
    pub from: Cursor,
    pub read: ReadAt,
    /// Number of the first row in this producer's window.
    pub first: u64,
    pub rows: Vec<Which>,
    /// Whether any of them went to Kafka, and not aside.
    pub is_sent: bool,
    pub bytes: Held,
    /// When its first row was created, and the database's clock at the read: how old it is once all are acknowledged.
    pub created_ms: i64,
    pub clock: DatabaseClock,
}

impl Flight {
    /// The cursor once the first `rows` of this page are acknowledged.
    pub(crate) fn cursor_after(&self, rows: usize) -> Option<Cursor> {
        let last = self.rows.get(rows.checked_sub(1)?)?;
        Some(self.from.after(&self.read, last.position))
    }
}

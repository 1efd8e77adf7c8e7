//! How many rows a page may have so that it stays within its bytes, without anybody adding bytes up. Pure.
//!
//! A page of `n` rows, none of them larger than `bytes / n`, has at most `bytes`. So the statement gets those two numbers, and
//! of a larger row it only tells that there is one: the page ends before it.
//!
//! ```text
//!   most rows ──a larger row──▶ alone: one row of any size ──▶ as many as fit of its size ──▶ of half of that … ──▶ most rows
//! ```
//!
//! A running sum of bytes, which would end a page exactly, takes Postgres as long as reading the rows does.

use std::collections::BTreeMap;

/// What a row is taken to cost beside its payload, key and headers: in the driver's row and librdkafka's message and headers
/// (seen with 200-byte messages).
pub(crate) const OF_A_ROW: usize = 1_000;

/// A page is not asked for rows of which each could hold less than this.
const LEAST: usize = 2 * OF_A_ROW;

/// A page has no more than this, whatever is allowed: Postgres makes one value of it, and a value has at most a gigabyte.
const MOST: usize = 256 << 20;

/// What the statement is told of one shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Limits {
    /// Most rows.
    pub rows: usize,
    /// Most bytes of a payload. A key and headers may have an eighth of it each.
    pub payload: usize,
}

impl Limits {
    /// What keeps so many rows within so many bytes. One row may have any size, because it must still pass.
    pub(crate) fn of(rows: usize, bytes: usize) -> Self {
        let bytes = bytes.min(MOST);
        let rows = rows.min(bytes / LEAST).max(1);
        // Of five parts, four for the payload, half of one for the key and half of one for the headers.
        let payload = if rows == 1 { usize::MAX } else { (bytes / rows - OF_A_ROW) / 5 * 4 };
        Self { rows, payload }
    }
}

/// What a page must have for each row, so that rows of this size are not larger than their limit.
fn needs(size: usize) -> usize {
    // A payload has four fifths of what is beside the fixed cost.
    OF_A_ROW + size.saturating_sub(OF_A_ROW) / 4 * 5 + 5
}

/// What was seen of the rows of each shard.
#[derive(Debug, Default)]
pub(crate) struct Sizes(BTreeMap<i16, Next>);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Next {
    /// A row that did not fit.
    Alone,
    /// Rows of about so many bytes.
    About(usize),
}

impl Sizes {
    /// What to ask for, of at most so many rows and bytes.
    pub(crate) fn limits(&self, shard: i16, rows: usize, bytes: usize) -> Limits {
        match self.0.get(&shard) {
            None => Limits::of(rows, bytes),
            Some(Next::Alone) => Limits::of(1, bytes),
            Some(Next::About(size)) => Limits::of(rows.min(bytes / needs(*size)).max(1), bytes),
        }
    }

    /// A page came: whether a larger row ended it, and its largest row.
    pub(crate) fn seen(&mut self, shard: i16, ended_by_larger: bool, largest: usize) {
        let before = self.0.remove(&shard);
        if ended_by_larger {
            self.0.insert(shard, Next::Alone);
            return;
        }
        let faded = match before {
            Some(Next::About(size)) => size / 2,
            Some(Next::Alone) | None => 0,
        };
        let about = largest.max(faded);
        if needs(about) > LEAST {
            self.0.insert(shard, Next::About(about));
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Takes one page from the front of rows of these sizes of a payload, as the statement does. `true`: a larger row ended it.
    fn page(rows: &[usize], limits: Limits) -> (usize, bool) {
        let shown = rows.iter().take(limits.rows);
        match shown.clone().position(|payload| *payload > limits.payload) {
            Some(larger) => (larger, true),
            None => (shown.count(), false),
        }
    }

    fn bytes(rows: &[usize]) -> usize {
        rows.iter().map(|payload| OF_A_ROW + payload).sum()
    }

    proptest! {
        #[test]
        fn pages_stay_within_their_bytes_or_have_one_row_and_all_rows_pass(
            sizes in prop::collection::vec(prop_oneof![6 => 0usize..500, 2 => 0usize..20_000, 1 => 0usize..2_000_000], 1..400),
            most in 1usize..300,
            limit in 1usize..200_000,
        ) {
            let mut seen = Sizes::default();
            let (mut left, mut asked) = (sizes.as_slice(), 0);
            while !left.is_empty() {
                let (taken, ended) = page(left, seen.limits(3, most, limit));
                asked += 1;
                let (now, rest) = left.split_at(taken);
                prop_assert!(taken <= 1 || bytes(now) <= limit, "{taken} rows of {} bytes, {limit} allowed", bytes(now));
                seen.seen(3, ended, now.iter().map(|payload| OF_A_ROW + payload).max().unwrap_or(0));
                left = rest;
                // At worst each row announces itself and then comes alone.
                prop_assert!(asked <= 2 * sizes.len());
            }
        }

        #[test]
        fn a_key_headers_and_payload_at_their_limits_are_within_the_bytes(rows in 2usize..3_000, limit in 1usize..20_000_000) {
            let limits = Limits::of(rows, limit);
            prop_assume!(limits.rows > 1);
            prop_assert!(limits.rows * (OF_A_ROW + limits.payload + 2 * (limits.payload / 8)) <= limit);
        }
    }

    proptest! {
        #[test]
        fn rows_of_one_size_are_asked_for_once_however_large_they_are(
            size in prop_oneof![0usize..3_000, 0usize..2_000_000],
            limit in 100_000usize..10_000_000,
        ) {
            let mut seen = Sizes::default();
            let rows = vec![size; 1_000];
            let (mut left, mut asked) = (rows.as_slice(), 0);
            while !left.is_empty() {
                let (taken, ended) = page(left, seen.limits(0, 2_000, limit));
                seen.seen(0, ended, if taken > 0 { OF_A_ROW + size } else { 0 });
                asked += 1;
                left = &left[taken..];
            }
            // Of a page that a limit ends, a good part is used.
            let fit = (limit / needs(LEAST.max(OF_A_ROW + size))).max(1);
            prop_assert!(asked <= 1_000usize.div_ceil(fit) + 3, "{asked} pages asked for rows of {size} bytes, {fit} of them fit");
        }
    }

    #[test]
    fn small_rows_after_a_large_one_are_soon_asked_for_by_the_page_again() {
        let mut seen = Sizes::default();
        seen.seen(0, true, 0);
        assert_eq!(seen.limits(0, 2_000, 8 << 20).rows, 1);
        seen.seen(0, false, 1_000_000);
        let mut asked = 0;
        while seen.limits(0, 2_000, 8 << 20).rows < 2_000 {
            seen.seen(0, false, 1_200);
            asked += 1;
        }
        assert!((2..12).contains(&asked), "{asked}");
    }
}

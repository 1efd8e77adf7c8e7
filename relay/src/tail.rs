//! What the database has confirmed to this process, against what it says when a shard is claimed anew.
//!
//! A server that crashes keeps what it confirmed to the relay, whose own commits are synchronous. A standby that was behind
//! and takes the primary's place does not: its cursors lie where they were, the last rows of the outbox are gone, and
//! their positions are given out again. Nobody can take back what was published of them. So it is said, as an ERROR:
//! services have read messages of which the database knows nothing, and only people can settle that.
//!
//! | read by the claim | said |
//! |---|---|
//! | the token and a cursor at or above the confirmed one | nothing |
//! | another token | WARN: the server has crashed, or another has taken its place |
//! | a cursor below the confirmed one | ERROR: the tail is lost, from which position to which, shard by shard |
//!
//! A tail that was published and not yet under a confirmed cursor, less than a cursor write's period, is told by the
//! WARN alone. A relay that starts anew has nothing to compare with and says nothing.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use uuid::Uuid;

/// What was confirmed to this process since it started.
#[derive(Debug, Default)]
pub(crate) struct Confirmed(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    token: Option<Uuid>,
    positions: BTreeMap<i16, i64>,
}

/// What a claim found out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Found {
    /// The server is not the one, or not in the state, that the last claim has seen.
    other_token: bool,
    /// The confirmed position that the cursor has fallen back from.
    fallen_from: Option<i64>,
}

impl Confirmed {
    /// The database has confirmed that this shard's cursor stands here.
    pub(crate) fn advanced(&self, shard: i16, position: i64) {
        self.lock().positions.insert(shard, position);
    }

    /// A claim has read the crash token and the shard's cursor: says what the database has lost, if it has.
    pub(crate) fn claimed(&self, shard: i16, token: Uuid, position: i64) {
        let found = self.compare(shard, token, position);
        if found.other_token {
            tracing::warn!(
                "the database server has crashed or another has taken its place: what was read ahead is discarded"
            );
        }
        if let Some(from) = found.fallen_from {
            tracing::error!(
                shard,
                from,
                to = position,
                "the database has lost what it had confirmed, as a standby has that was behind when it was promoted: \
                 messages at positions {} to {from} may be published that no table holds; their positions are given \
                 out again, and what is committed under them now is published",
                position.saturating_add(1)
            );
        }
    }

    fn compare(&self, shard: i16, token: Uuid, position: i64) -> Found {
        let mut state = self.lock();
        let before = state.token.replace(token);
        let confirmed = state.positions.insert(shard, position);
        Found {
            other_token: before.is_some_and(|before| before != token),
            fallen_from: confirmed.filter(|confirmed| *confirmed > position),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOTHING: Found = Found { other_token: false, fallen_from: None };

    #[test]
    fn a_first_claim_and_one_that_finds_what_was_confirmed_say_nothing() {
        let (confirmed, token) = (Confirmed::default(), Uuid::from_u128(1));
        assert_eq!(confirmed.compare(3, token, 10), NOTHING);
        confirmed.advanced(3, 20);
        assert_eq!(confirmed.compare(3, token, 20), NOTHING);
        // Another relay has held it meanwhile.
        assert_eq!(confirmed.compare(3, token, 90), NOTHING);
    }

    #[test]
    fn a_crash_that_lost_nothing_is_told_once_and_a_lost_tail_shard_by_shard() {
        let (confirmed, crashed) = (Confirmed::default(), Uuid::from_u128(2));
        for shard in [3, 4, 5] {
            confirmed.compare(shard, Uuid::from_u128(1), 10);
            confirmed.advanced(shard, 20);
        }
        assert_eq!(confirmed.compare(3, crashed, 20), Found { other_token: true, fallen_from: None });
        assert_eq!(confirmed.compare(4, crashed, 12), Found { other_token: false, fallen_from: Some(20) });
        assert_eq!(confirmed.compare(5, crashed, 10), Found { other_token: false, fallen_from: Some(20) });
        // Told, and from then on what the cursor says.
        assert_eq!(confirmed.compare(4, crashed, 12), NOTHING);
    }
}

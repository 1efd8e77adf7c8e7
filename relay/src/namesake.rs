//! Notices another relay that runs under this relay's name.
//!
//! A lease is told by its generation, so the two do each other no harm; but for the fair share they are one relay, and the one
//! that holds nothing would stand by and say nothing.

use std::time::Duration;

use tokio::time::Instant;

/// What the looks so far have shown.
#[derive(Debug, Default)]
pub(crate) struct Namesake {
    /// Since when the name holds more shards than this process does.
    since: Option<Instant>,
    said: bool,
}

impl Namesake {
    /// Whether it is to be said now, that leases of this name are kept alive by somebody else: once, until they are gone.
    ///
    /// `by_name` valid leases have this relay's name, `ours` are this process's. What an earlier process of the name has left
    /// runs out within a lease's length.
    pub(crate) fn look(&mut self, now: Instant, by_name: usize, ours: usize, lease_ttl: Duration) -> bool {
        if by_name <= ours {
            *self = Self::default();
            return false;
        }
        let since = *self.since.get_or_insert(now);
        let says = !self.said && now.duration_since(since) > lease_ttl;
        self.said |= says;
        says
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TTL: Duration = Duration::from_secs(10);

    #[test]
    fn it_is_said_once_and_again_after_it_was_gone() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut namesake = Namesake::default();
        assert!(!namesake.look(at(0), 8, 0, TTL));
        assert!(!namesake.look(at(10), 8, 0, TTL), "what an earlier process left lasts as long");
        assert!(namesake.look(at(11), 8, 0, TTL));
        assert!(!namesake.look(at(30), 4, 0, TTL));
        assert!(!namesake.look(at(31), 0, 0, TTL));
        assert!(!namesake.look(at(40), 8, 4, TTL));
        assert!(namesake.look(at(51), 8, 4, TTL));
    }

    #[test]
    fn our_own_leases_are_nobody_else_s() {
        let start = Instant::now();
        let mut namesake = Namesake::default();
        for seconds in 0..100 {
            assert!(!namesake.look(start + Duration::from_secs(seconds), 8, 8, TTL));
        }
    }

    #[test]
    fn what_an_earlier_process_left_is_nothing_to_say() {
        let start = Instant::now();
        let mut namesake = Namesake::default();
        assert!(!namesake.look(start, 8, 0, TTL));
        assert!(!namesake.look(start + Duration::from_secs(9), 1, 0, TTL));
        assert!(!namesake.look(start + Duration::from_secs(11), 8, 8, TTL));
    }
}

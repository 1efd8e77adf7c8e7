//! Who holds a lease, under which generation, until when; and who may write by it.
//!
//! This is the rule that the statements in `relay/queries/lease_*.sql` and `cursor_advance.sql` say in SQL: what is an
//! `if` here is a condition of one `UPDATE` there, and [`Fenced`] is its zero rows (R4). `now` is the store's clock in
//! the statement that acts (R5), as a duration since any fixed origin.

use std::time::Duration;

use super::Terms;
use crate::lifecycle::lease::{Event, State};

/// What authorises a write: the owner's name and the generation under which it claimed. The name alone never does, for
/// a restarted process may use it again (R3).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Holder<O = String> {
    /// The name.
    pub owner: O,
    /// Given by the claim.
    pub generation: i64,
}

/// One lease, as the store has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Lease<O = String> {
    /// Who holds or last held it, and until when; none of a lease that was never claimed or was released.
    pub held: Option<(O, Duration)>,
    /// Raised by every claim, never given out twice.
    pub generation: i64,
}

/// What a claim found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Claim<O = String> {
    /// It is the claimer's.
    Won {
        /// By this it renews, writes and releases.
        holder: Holder<O>,
        /// From exactly then on it is refused.
        until: Duration,
    },
    /// Somebody else's.
    Held {
        /// From exactly then on anybody may claim.
        until: Duration,
    },
}

/// Why a write by a lease was refused. Nothing changed: somebody else has it, or had better have it (R22).
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Fenced {
    /// It was released, or never claimed.
    #[error("nobody holds it")]
    NotHeld,
    /// Another owner has claimed it since.
    #[error("another owner holds it under generation {current}")]
    AnotherOwner {
        /// Theirs.
        current: i64,
    },
    /// The same owner's name has claimed it since: a restarted process, or this one after a lost connection.
    #[error("it was claimed anew under generation {current}")]
    PastGeneration {
        /// The later one.
        current: i64,
    },
    /// `lease_until` has come, although nobody has claimed it yet.
    #[error("the lease has run out")]
    Expired {
        /// When.
        since: Duration,
    },
    /// The work is done or dead.
    #[error("it is settled")]
    Settled,
}

impl<O> Default for Lease<O> {
    /// Nobody's yet.
    fn default() -> Self {
        Self { held: None, generation: 0 }
    }
}

impl<O: Clone + Eq> Lease<O> {
    /// Where it stands at `now`. The boundary is closed: at exactly `until` it is expired (R6).
    #[must_use]
    pub fn state(&self, now: Duration) -> State {
        match &self.held {
            None => State::Free,
            Some((_, until)) if now < *until => State::Held,
            Some(_) => State::Expired,
        }
    }

    /// Takes the lease if it is nobody's or has run out (R1), or if the very process that holds it asks again:
    /// `held_by` is the generation by which the claimer knows that it holds it. The generation rises each time (R2).
    pub fn claim(&mut self, owner: O, held_by: Option<i64>, now: Duration, terms: Terms) -> Claim<O> {
        let own =
            held_by == Some(self.generation) && self.held.as_ref().is_some_and(|(name, _)| *name == owner);
        let state = self.state(now);
        let event = if own && state == State::Held { Event::Reclaimed } else { Event::Claimed };
        if let (Err(_), Some((_, until))) = (state.next(event), &self.held) {
            return Claim::Held { until: *until };
        }
        let until = now + terms.ttl();
        self.generation += 1;
        self.held = Some((owner.clone(), until));
        Claim::Won { holder: Holder { owner, generation: self.generation }, until }
    }

    /// Nobody's, whoever had it; generations go on from where they are.
    pub(super) fn vacate(&mut self) {
        self.held = None;
        self.generation += 1;
    }

    /// Whether `holder` may write by this lease at `now`. Every write asks this in the statement that writes.
    ///
    /// # Errors
    ///
    /// When the lease is not, or no longer, the holder's.
    pub fn permits(&self, holder: &Holder<O>, now: Duration) -> Result<(), Fenced> {
        let Some((owner, until)) = &self.held else { return Err(Fenced::NotHeld) };
        let current = self.generation;
        if *owner != holder.owner {
            return Err(Fenced::AnotherOwner { current });
        }
        if current != holder.generation {
            return Err(Fenced::PastGeneration { current });
        }
        if now >= *until { Err(Fenced::Expired { since: *until }) } else { Ok(()) }
    }

    /// Extends the lease, counted from `now`: what keeps progressing is never taken over, however long it takes (R21).
    /// Answered is the new end.
    ///
    /// # Errors
    ///
    /// When the lease is not the holder's any more. A past generation revives nothing (R7).
    pub fn renew(&mut self, holder: &Holder<O>, now: Duration, terms: Terms) -> Result<Duration, Fenced> {
        self.permits(holder, now)?;
        let until = now + terms.ttl();
        self.held = Some((holder.owner.clone(), until));
        Ok(until)
    }

    /// Gives the lease back, under the generation by which it was held: the next claim need not wait for its end.
    ///
    /// # Errors
    ///
    /// When the lease is not the holder's any more.
    pub fn release(&mut self, holder: &Holder<O>, now: Duration) -> Result<(), Fenced> {
        self.permits(holder, now)?;
        self.held = None;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const NANOSECOND: Duration = Duration::from_nanos(1);

    fn terms() -> Terms {
        Terms::new(Duration::from_secs(3), None).unwrap()
    }

    fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn won(claim: Claim<u8>) -> Holder<u8> {
        match claim {
            Claim::Won { holder, .. } => holder,
            Claim::Held { until } => panic!("held until {until:?}"),
        }
    }

    /// What one of three owners does. Holders are remembered, so that past ones come back.
    #[derive(Debug, Clone, Copy)]
    enum Deed {
        Claim { owner: u8, knows: bool },
        Renew { past: usize },
        Release { past: usize },
        Wait { half_seconds: u64 },
    }

    fn deeds() -> impl Strategy<Value = Vec<Deed>> {
        let deed = prop_oneof![
            (0_u8..3, any::<bool>()).prop_map(|(owner, knows)| Deed::Claim { owner, knows }),
            (0_usize..4).prop_map(|past| Deed::Renew { past }),
            (0_usize..4).prop_map(|past| Deed::Release { past }),
            // Half the ttl's grid, so that steps end exactly on the boundary often.
            (0_u64..4).prop_map(|half_seconds| Deed::Wait { half_seconds }),
        ];
        proptest::collection::vec(deed, 0..60)
    }

    proptest! {
        #[test]
        fn generations_only_rise_and_only_the_last_winner_can_write_and_only_before_its_end(deeds in deeds()) {
            let (mut lease, mut now) = (Lease::default(), Duration::ZERO);
            let mut winners: Vec<Holder<u8>> = Vec::new();
            let mut end = None;
            for deed in deeds {
                let before = lease;
                let recent = |past: usize| winners.len().checked_sub(past + 1).map(|at| winners[at]);
                match deed {
                    Deed::Claim { owner, knows } => {
                        let held_by = recent(0).filter(|_| knows).map(|last| last.generation);
                        let own = end.is_some() && recent(0).map(|last| last.owner) == Some(owner) && knows;
                        match lease.claim(owner, held_by, now, terms()) {
                            Claim::Won { holder, until } => {
                                prop_assert!(own || end.is_none_or(|end| now >= end), "taken before its end");
                                prop_assert!(winners.iter().all(|past| past.generation < holder.generation));
                                winners.push(holder);
                                end = Some(until);
                            }
                            Claim::Held { until } => {
                                prop_assert!(!own && Some(until) == end && now < until);
                                prop_assert_eq!(lease, before);
                            }
                        }
                    }
                    Deed::Renew { past } => {
                        let Some(holder) = recent(past) else { continue };
                        let allowed = past == 0 && end.is_some_and(|end| now < end);
                        let renewed = lease.renew(&holder, now, terms());
                        prop_assert_eq!(renewed.ok(), allowed.then(|| now + terms().ttl()));
                        if allowed { end = renewed.ok() } else { prop_assert_eq!(lease, before) }
                    }
                    Deed::Release { past } => {
                        let Some(holder) = recent(past) else { continue };
                        let allowed = past == 0 && end.is_some_and(|end| now < end);
                        prop_assert_eq!(lease.release(&holder, now).is_ok(), allowed);
                        if allowed { end = None } else { prop_assert_eq!(lease, before) }
                    }
                    Deed::Wait { half_seconds } => now += Duration::from_millis(500) * u32::try_from(half_seconds).unwrap(),
                }
                let accepted: Vec<_> = winners.iter().filter(|past| lease.permits(past, now).is_ok()).collect();
                prop_assert!(accepted.len() <= 1);
                let expected = winners.last().filter(|_| end.is_some_and(|end| now < end));
                prop_assert_eq!(accepted.first().copied(), expected);
            }
        }

        #[test]
        fn a_lease_that_is_trusted_locally_is_held_in_the_store(
            asked_ms in 0_u64..10_000, request_ms in 0_u64..10_000, later_ms in 0_u64..10_000,
        ) {
            let (mut lease, ms) = (Lease::default(), Duration::from_millis);
            // One clock here: that the two run apart is what the margin is for.
            let holder = won(lease.claim(1, None, ms(asked_ms + request_ms), terms()));
            let later = ms(asked_ms + request_ms + later_ms);
            if terms().trust(ms(asked_ms)).left(later).is_some() {
                prop_assert_eq!(lease.permits(&holder, later), Ok(()));
            }
        }
    }

    #[test]
    fn at_exactly_its_end_the_owner_is_refused_and_anybody_may_claim() {
        let mut lease = Lease::default();
        let holder = won(lease.claim(1, None, seconds(0), terms()));
        let end = terms().ttl();
        assert_eq!(lease.claim(2, None, end - NANOSECOND, terms()), Claim::Held { until: end });
        assert_eq!(lease.permits(&holder, end - NANOSECOND), Ok(()));
        let before = lease;
        assert_eq!(lease.permits(&holder, end), Err(Fenced::Expired { since: end }));
        assert_eq!(lease.renew(&holder, end, terms()), Err(Fenced::Expired { since: end }));
        assert_eq!(lease.release(&holder, end), Err(Fenced::Expired { since: end }));
        assert_eq!(lease, before);
        assert_eq!(won(lease.claim(2, None, end, terms())).generation, 2);
    }

    #[test]
    fn a_name_that_is_used_again_cannot_act_by_its_earlier_generation() {
        let mut lease = Lease::default();
        let first = won(lease.claim(1, None, seconds(0), terms()));
        // Restarted, it does not know the generation: it waits like everybody.
        assert_eq!(lease.claim(1, None, seconds(1), terms()), Claim::Held { until: seconds(3) });
        let second = won(lease.claim(1, None, seconds(3), terms()));
        assert_eq!(lease.renew(&first, seconds(4), terms()), Err(Fenced::PastGeneration { current: 2 }));
        assert_eq!(lease.permits(&second, seconds(4)), Ok(()));
    }

    #[test]
    fn the_process_that_holds_it_claims_anew_at_once_and_its_earlier_generation_is_past() {
        let mut lease = Lease::default();
        let first = won(lease.claim(1, None, seconds(0), terms()));
        let second = won(lease.claim(1, Some(first.generation), seconds(1), terms()));
        assert_eq!(lease.permits(&first, seconds(1)), Err(Fenced::PastGeneration { current: 2 }));
        assert_eq!(lease.permits(&second, seconds(1)), Ok(()));
        // Another owner that knows the generation is still another owner.
        assert_eq!(
            lease.claim(2, Some(second.generation), seconds(1), terms()),
            Claim::Held { until: seconds(4) }
        );
    }

    #[test]
    fn a_released_lease_is_anybodys_at_once() {
        let mut lease = Lease::default();
        let first = won(lease.claim(1, None, seconds(0), terms()));
        assert_eq!(lease.release(&first, seconds(1)), Ok(()));
        assert_eq!(lease.permits(&first, seconds(1)), Err(Fenced::NotHeld));
        assert_eq!(won(lease.claim(2, None, seconds(1), terms())).generation, 2);
        assert_eq!(lease.permits(&first, seconds(1)), Err(Fenced::AnotherOwner { current: 2 }));
    }
}

//! The lengths that a lease is made of, and the trust that follows from a request for it.

use std::time::Duration;

/// Lengths that agree with each other: `ttl` ≥ 1 s, `margin` < `ttl`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Terms {
    ttl: Duration,
    margin: Duration,
}

/// Why lengths of a lease were refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The lease is shorter than a second: a pause of the machine would lose it.
    #[error("a lease of {}s is shorter than a second, and a pause of the machine would lose it; set it to at least 1s", given.as_secs_f64())]
    TtlTooShort {
        /// What was set.
        given: Duration,
    },
    /// The lease is longer than a day: what a dead process holds would stand still as long.
    #[error("a lease of {}s is longer than a day, and what a dead relay holds would stand still as long; set it to at most 24h", given.as_secs())]
    TtlTooLong {
        /// What was set.
        given: Duration,
    },
    /// The margin leaves nothing of the lease.
    #[error(
        "lease margin {margin:?} leaves nothing of the ttl {ttl:?}; set it below the ttl, or leave it out for ttl/5"
    )]
    MarginTooLong {
        /// The margin that was set.
        margin: Duration,
        /// The length of the lease.
        ttl: Duration,
    },
}

impl Default for Terms {
    /// 10 s, with a margin of 2 s.
    fn default() -> Self {
        let ttl = Duration::from_secs(10);
        Self { ttl, margin: ttl / 5 }
    }
}

impl Terms {
    /// Checks the two lengths. Without a margin it is `ttl / 5`.
    ///
    /// # Errors
    ///
    /// When `ttl` is below 1 s or above 24 h, or `margin` not below `ttl`.
    pub fn new(ttl: Duration, margin: Option<Duration>) -> Result<Self, Error> {
        if ttl < Duration::from_secs(1) {
            return Err(Error::TtlTooShort { given: ttl });
        }
        if ttl > Duration::from_secs(24 * 3600) {
            return Err(Error::TtlTooLong { given: ttl });
        }
        let margin = margin.unwrap_or(ttl / 5);
        if margin >= ttl {
            return Err(Error::MarginTooLong { margin, ttl });
        }
        Ok(Self { ttl, margin })
    }

    /// How long the database grants a lease for.
    #[must_use]
    pub fn ttl(&self) -> Duration {
        self.ttl
    }

    /// By how much the trust ends earlier than the lease.
    #[must_use]
    pub fn margin(&self) -> Duration {
        self.margin
    }

    /// How often to renew: a third of the ttl, or half of the trusted time where a long margin makes that shorter. So
    /// one lost renewal never ends the trust.
    #[must_use]
    pub fn renew_every(&self) -> Duration {
        (self.ttl / 3).min((self.ttl - self.margin) / 2)
    }

    /// The trust that a granted claim or renewal gives. `asked_at` is the instant *before* the request was sent.
    #[must_use]
    pub fn trust(&self, asked_at: Duration) -> Trust {
        Trust { until: asked_at.saturating_add(self.ttl - self.margin) }
    }
}

/// Until when a process may act on its lease without asking. Ordered by that instant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Trust {
    until: Duration,
}

impl Trust {
    /// The first instant at which the lease is no longer trusted.
    #[must_use]
    pub fn until(&self) -> Duration {
        self.until
    }

    /// How much trust is left: more than zero, or `None` from exactly [`until`](Self::until) on.
    #[must_use]
    pub fn left(&self, now: Duration) -> Option<Duration> {
        self.until.checked_sub(now).filter(|left| !left.is_zero())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const NANOSECOND: Duration = Duration::from_nanos(1);

    fn terms() -> impl Strategy<Value = Terms> {
        (1_000_u64..100_000, 0.0_f64..1.0).prop_map(|(ttl_ms, part)| {
            let ttl = Duration::from_millis(ttl_ms);
            Terms::new(ttl, Some(ttl.mul_f64(part * 0.999))).unwrap()
        })
    }

    proptest! {
        #[test]
        fn trust_ends_a_margin_before_the_lease_however_long_the_answer_took(
            terms in terms(), asked_ms in 0_u64..1_000_000, request_ms in 0_u64..100_000,
        ) {
            let asked_at = Duration::from_millis(asked_ms);
            let granted_at = asked_at + Duration::from_millis(request_ms);
            let lease_until = granted_at + terms.ttl();
            prop_assert!(terms.trust(asked_at).until() + terms.margin() <= lease_until);
        }

        #[test]
        fn the_boundary_of_trust_is_closed(terms in terms(), asked_ms in 0_u64..1_000_000) {
            let trust = terms.trust(Duration::from_millis(asked_ms));
            prop_assert_eq!(trust.left(trust.until()), None);
            prop_assert_eq!(trust.left(trust.until() + NANOSECOND), None);
            prop_assert_eq!(trust.left(trust.until() - NANOSECOND), Some(NANOSECOND));
        }

        #[test]
        fn one_lost_renewal_does_not_end_the_trust(terms in terms(), asked_ms in 0_u64..1_000_000) {
            let asked_at = Duration::from_millis(asked_ms);
            prop_assert!(asked_at + terms.renew_every() * 2 <= terms.trust(asked_at).until());
            prop_assert!(terms.renew_every() <= terms.ttl() / 3);
        }

        #[test]
        fn an_answer_that_overtakes_a_later_one_does_not_shorten_trust(
            terms in terms(), first_ms in 0_u64..1_000_000, second_ms in 0_u64..1_000_000,
        ) {
            let trust = |ms| terms.trust(Duration::from_millis(ms));
            prop_assert_eq!(trust(first_ms).max(trust(second_ms)), trust(first_ms.max(second_ms)));
        }
    }

    #[test]
    fn the_default_is_ten_seconds_with_a_fifth_as_margin_renewed_every_third() {
        let terms = Terms::default();
        assert_eq!(Terms::new(Duration::from_secs(10), None), Ok(terms));
        assert_eq!((terms.ttl(), terms.margin()), (Duration::from_secs(10), Duration::from_secs(2)));
        assert_eq!(terms.renew_every(), Duration::from_secs(10) / 3);
    }

    #[test]
    fn lengths_that_do_not_fit_together_are_refused() {
        let (second, day) = (Duration::from_secs(1), Duration::from_secs(24 * 3600));
        assert!(Terms::new(second, None).is_ok() && Terms::new(day, None).is_ok());
        let given = second - NANOSECOND;
        assert_eq!(Terms::new(given, None), Err(Error::TtlTooShort { given }));
        let given = day + NANOSECOND;
        assert_eq!(Terms::new(given, None), Err(Error::TtlTooLong { given }));
        assert_eq!(
            Terms::new(second, Some(second)),
            Err(Error::MarginTooLong { margin: second, ttl: second })
        );
        assert!(Terms::new(second, Some(Duration::ZERO)).is_ok());
        assert!(Terms::new(second, Some(second - NANOSECOND)).is_ok());
    }
}

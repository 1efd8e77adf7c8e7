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
    #[error("lease ttl {given:?} is shorter than a second; set it to at least 1s")]
    TtlTooShort {
        /// What was set.
        given: Duration,
    },
    /// The lease is longer than a day: what a dead process holds would stand still as long.
    #[error("lease ttl {given:?} is longer than a day; set it to at most 24h")]
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

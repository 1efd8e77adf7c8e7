//! How long to wait before the next try: capped exponential backoff with full jitter.
//!
//! Before retry `n` (the first is 0) the wait is drawn evenly from `0 ..= min(cap, base · factorⁿ)`. Full jitter
//! spreads the callers of a dependency that comes back over the whole span, instead of having them all return at once.
//!
//! What a wait costs (an attempt of an item's budget, or nothing in an outage) is the caller's to decide; this module
//! only says how long. It is the one place that uses the `backoff` crate.

use std::time::Duration;

use backoff::ExponentialBackoff;
use backoff::backoff::Backoff;

/// The shape of the waits.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Policy {
    /// The longest wait before the first retry. Default: 500 ms.
    pub base: Duration,
    /// By how much the longest wait grows with every further retry; at least 1, which keeps it constant. Default: 2.
    pub factor: f64,
    /// What the longest wait never exceeds, at most a year; a `base` above it counts as `cap`. Default: 5 min.
    pub cap: Duration,
}

impl Default for Policy {
    fn default() -> Self {
        Self { base: Duration::from_millis(500), factor: 2.0, cap: Duration::from_secs(300) }
    }
}

/// Why a [`Policy`] was refused.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The factor is below 1, or not a number.
    #[error("retry factor {given} would not let the waits grow; set it to a number from 1 to 1000")]
    Factor {
        /// What was set.
        given: f64,
    },
    /// The base is zero: retries would follow each other without a pause.
    #[error("retry base is 0, so that retries would follow without a pause; set it to at least 1 ms")]
    Base,
    /// The cap is longer than a year.
    #[error("retry cap {given:?} is longer than a year; set it to at most 365 days")]
    Cap {
        /// What was set.
        given: Duration,
    },
}

const LONGEST: Duration = Duration::from_secs(365 * 24 * 3600);

impl Policy {
    /// Refuses what cannot be meant, for settings that people write.
    ///
    /// # Errors
    ///
    /// When `base` is below 1 ms, `factor` not within `1 ..= 1000`, or `cap` above 365 days.
    pub fn validate(&self) -> Result<(), Error> {
        if !(1.0..=1000.0).contains(&self.factor) {
            return Err(Error::Factor { given: self.factor });
        }
        if self.base < Duration::from_millis(1) {
            return Err(Error::Base);
        }
        if self.cap > LONGEST {
            return Err(Error::Cap { given: self.cap });
        }
        Ok(())
    }

    /// A fresh sequence of waits, at its beginning. A policy that [`validate`](Self::validate) refuses is bent to the
    /// nearest one that it takes, so that nothing loops without a pause.
    #[must_use]
    pub fn delays(&self) -> Delays {
        let cap = self.cap.clamp(Duration::from_millis(1), LONGEST);
        let base = self.base.clamp(Duration::from_millis(1), cap);
        let factor = if self.factor.is_nan() { 1.0 } else { self.factor.clamp(1.0, 1000.0) };
        // The crate draws from `interval · (1 ± randomization)`: half of the longest wait, by 1, is 0 up to all of it.
        let mut waits = ExponentialBackoff {
            initial_interval: base / 2,
            max_interval: cap / 2,
            multiplier: factor,
            randomization_factor: 1.0,
            max_elapsed_time: None,
            ..ExponentialBackoff::default()
        };
        waits.reset();
        Delays { waits, cap }
    }
}

/// The waits of one run of retries. Made by [`Policy::delays`].
#[derive(Debug)]
pub struct Delays {
    waits: ExponentialBackoff,
    cap: Duration,
}

impl Delays {
    /// The wait before the next retry. There always is one: a budget is counted elsewhere.
    pub fn next_delay(&mut self) -> Duration {
        self.waits.next_backoff().unwrap_or(self.cap).min(self.cap)
    }

    /// Back to the beginning, after a success.
    pub fn reset(&mut self) {
        self.waits.reset();
    }
}

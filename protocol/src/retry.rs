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

    /// The wait before retry `n` (the first is 0) by itself, for whoever counts elsewhere.
    #[must_use]
    pub fn delay(&self, n: u32) -> Duration {
        let mut delays = self.delays();
        // By then any factor above 1 that matters has reached any cap.
        for _ in 0..n.min(1000) {
            delays.next_delay();
        }
        delays.next_delay()
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn policy(base_ms: u64, factor: f64, cap_ms: u64) -> Policy {
        Policy { base: Duration::from_millis(base_ms), factor, cap: Duration::from_millis(cap_ms) }
    }

    /// `min(cap, base · factorⁿ)` in seconds.
    fn longest(policy: &Policy, n: i32) -> f64 {
        (policy.base.as_secs_f64() * policy.factor.powi(n)).min(policy.cap.as_secs_f64())
    }

    proptest! {
        #[test]
        fn no_wait_is_longer_than_the_formula_says(
            base_ms in 1_u64..5_000, factor in 1.0_f64..4.0, cap_ms in 1_u64..100_000, runs in 1_usize..3,
        ) {
            let policy = policy(base_ms, factor, cap_ms);
            prop_assert_eq!(policy.validate(), Ok(()));
            let mut delays = policy.delays();
            for _ in 0..runs {
                for n in 0..40 {
                    let (delay, longest) = (delays.next_delay().as_secs_f64(), longest(&policy, n));
                    prop_assert!(delay <= longest + 1e-6, "retry {n} waits {delay} s, more than {longest} s");
                    prop_assert!(delay <= policy.cap.as_secs_f64());
                }
                delays.reset();
            }
        }

        #[test]
        fn a_policy_that_is_refused_still_never_waits_beyond_its_cap_or_a_year(
            base in any::<Duration>(), factor in any::<f64>(), cap in any::<Duration>(),
        ) {
            let mut delays = Policy { base, factor, cap }.delays();
            for _ in 0..20 {
                prop_assert!(delays.next_delay() <= cap.clamp(Duration::from_millis(1), LONGEST));
            }
        }
    }

    #[test]
    fn waits_are_spread_evenly_over_the_whole_span() {
        for (n, longest_ms) in [(0, 500.0), (1, 1_000.0), (3, 4_000.0), (20, 300_000.0)] {
            let mut tenths = [0_u32; 10];
            for _ in 0..5_000 {
                let mut delays = Policy::default().delays();
                let last = (0..=n).map(|_| delays.next_delay()).last().unwrap();
                let tenth =
                    (0..10).rev().find(|t| last.as_secs_f64() * 10_000.0 >= longest_ms * f64::from(*t));
                tenths[usize::try_from(tenth.unwrap()).unwrap()] += 1;
            }
            // 500 are expected in each; 350 and 650 are seven standard deviations away.
            assert!(tenths.iter().all(|count| (350..650).contains(count)), "retry {n}: {tenths:?}");
        }
    }

    #[test]
    fn the_default_is_half_a_second_doubling_to_five_minutes() {
        assert_eq!(Policy::default(), policy(500, 2.0, 300_000));
        assert_eq!(Policy::default().validate(), Ok(()));
    }

    #[test]
    fn what_cannot_be_meant_is_refused() {
        for factor in [0.0, 0.99, -2.0, 1000.1, f64::INFINITY] {
            assert_eq!(policy(1, factor, 1).validate(), Err(Error::Factor { given: factor }));
        }
        assert!(matches!(policy(1, f64::NAN, 1).validate(), Err(Error::Factor { .. })));
        assert_eq!(policy(0, 2.0, 1).validate(), Err(Error::Base));
        let given = LONGEST + Duration::from_millis(1);
        assert_eq!(Policy { cap: given, ..Policy::default() }.validate(), Err(Error::Cap { given }));
    }
}

//! Which orders of a run are poison and which flaky: evenly spread, and exactly as many as the fractions say.

use crate::order::Behave;

/// How many attempts of a flaky order fail.
const FLAKY_ATTEMPTS: u32 = 2;

/// Fractions of orders that do not simply go well.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Mix {
    poison: f64,
    flaky: f64,
}

/// Fractions that do not add up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// Not from 0 to 1.
    #[error("--poison and --flaky are fractions of all orders, each from 0 to 1")]
    NotAFraction,
    /// More than all.
    #[error("--poison and --flaky together are more than all orders; let them add up to at most 1")]
    MoreThanAll,
}

impl Mix {
    /// `poison` and `flaky` of all orders, from 0 to 1, together at most 1.
    ///
    /// # Errors
    /// When they are not.
    pub fn new(poison: f64, flaky: f64) -> Result<Self, Error> {
        if !(0.0..=1.0).contains(&poison) || !(0.0..=1.0).contains(&flaky) {
            return Err(Error::NotAFraction);
        }
        if poison + flaky > 1.0 {
            return Err(Error::MoreThanAll);
        }
        Ok(Self { poison, flaky })
    }

    /// How the order with this number, counted from 0, behaves.
    #[must_use]
    pub fn behaviour(&self, number: u64) -> Behave {
        if due(number + 1, self.poison) > due(number, self.poison) {
            return Behave::Poison;
        }
        // Counted among those that are not poison, so that the two never claim the same order.
        let healthy = number - due(number, self.poison);
        let share = self.flaky / (1.0 - self.poison);
        if due(healthy + 1, share) > due(healthy, share) { Behave::Flaky(FLAKY_ATTEMPTS) } else { Behave::Ok }
    }
}

/// How many of the first `count` are due at this fraction.
#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "counts are far below 2^52, and a fraction of one is at least 0"
)]
fn due(count: u64, fraction: f64) -> u64 {
    // The small term keeps 10 × 0.1 from falling short of 1.
    (count as f64 * fraction + 1e-9).floor() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(mix: Mix, total: u64) -> (usize, usize) {
        let all: Vec<Behave> = (0..total).map(|number| mix.behaviour(number)).collect();
        let count = |wanted: fn(&Behave) -> bool| all.iter().filter(|b| wanted(b)).count();
        (count(|b| *b == Behave::Poison), count(|b| matches!(b, Behave::Flaky(_))))
    }

    #[test]
    fn a_run_has_exactly_the_fractions_asked_for() {
        assert_eq!(counts(Mix::new(0.01, 0.05).unwrap(), 2_000), (20, 100));
        assert_eq!(counts(Mix::new(0.1, 0.0).unwrap(), 10), (1, 0));
        assert_eq!(counts(Mix::new(0.0, 0.5).unwrap(), 10), (0, 5));
        assert_eq!(counts(Mix::new(1.0, 0.0).unwrap(), 7), (7, 0));
        assert_eq!(counts(Mix::new(0.5, 0.5).unwrap(), 8), (4, 4));
        assert_eq!(counts(Mix::new(0.0, 0.0).unwrap(), 100), (0, 0));
    }

    #[test]
    fn fractions_that_do_not_add_up_are_refused() {
        assert_eq!(Mix::new(-0.1, 0.0), Err(Error::NotAFraction));
        assert_eq!(Mix::new(0.0, f64::NAN), Err(Error::NotAFraction));
        assert_eq!(Mix::new(0.6, 0.5), Err(Error::MoreThanAll));
    }
}

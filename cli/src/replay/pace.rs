//! How many items go at once, and how long to wait before the next ones. Pure.

use std::time::Duration;

/// Items claimed at once: what a crash leaves behind until its claims lapse.
const MOST: u32 = 200;

/// How often a second a rate is kept up.
const TURNS: f64 = 10.0;

/// So many at once, and after them at least so long a pause.
pub(super) fn pace(rate: Option<f64>) -> (u32, Duration) {
    let Some(rate) = rate else { return (MOST, Duration::ZERO) };
    let batch = (rate / TURNS).floor().clamp(1.0, f64::from(MOST));
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    let items = batch as u32;
    (items, Duration::from_secs_f64(batch / rate))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_kept_in_small_steps_and_never_exceeded() {
        assert_eq!(pace(None), (MOST, Duration::ZERO));
        assert_eq!(pace(Some(1.0)), (1, Duration::from_secs(1)));
        assert_eq!(pace(Some(0.5)), (1, Duration::from_secs(2)));
        assert_eq!(pace(Some(100.0)), (10, Duration::from_millis(100)));
        for rate in [0.001, 0.7, 3.0, 19.0, 99.0, 12_345.0, 1e9] {
            let (items, pause) = pace(Some(rate));
            assert!(items >= 1 && items <= MOST);
            assert!(f64::from(items) <= rate * pause.as_secs_f64() * 1.001 + 1e-6, "{rate}");
        }
    }
}

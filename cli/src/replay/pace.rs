//! How many items go at once, and how long to wait before the next ones. Pure.
//!
//! A turn takes its time, because a letter has to be fetched first. So what goes in it is what has become due since the turn before
//! began: a rate is kept whatever a turn takes, never exceeded, and what was missed for longer than a second is not made up for.

use std::time::Duration;

/// Items claimed at once: what a crash leaves behind until its claims lapse.
const MOST: u32 = 200;

/// How soon after each other turns begin at the earliest, where a rate is set.
const TURN: Duration = Duration::from_millis(100);

/// How many items go in a turn that begins so long after the one before; the first turn comes after none.
pub(super) fn items(rate: Option<f64>, since: Option<Duration>) -> u32 {
    let Some(rate) = rate else { return MOST };
    let since = since.unwrap_or(TURN).min(pause(Some(rate)).max(Duration::from_secs(1)));
    let due = rate * since.as_secs_f64();
    (1..=MOST).rev().find(|items| f64::from(*items) <= due).unwrap_or(1)
}

/// How long after the beginning of a turn the next one may begin.
pub(super) fn pause(rate: Option<f64>) -> Duration {
    rate.map_or(Duration::ZERO, |rate| Duration::from_secs_f64(1.0 / rate).max(TURN))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_kept_however_long_a_turn_takes_and_never_exceeded() {
        for rate in [0.001, 0.7, 3.0, 10.0, 60.0, 199.0] {
            for turn in [0.0, 0.05, 0.3, 0.6] {
                let (mut at, mut sent, mut last) = (0.0, 0.0, None);
                for _ in 0..1_000 {
                    let items = items(Some(rate), last.map(Duration::from_secs_f64));
                    sent += f64::from(items);
                    let first = f64::from(super::items(Some(rate), None));
                    assert!(sent <= rate * at * 1.001 + first + 1e-6, "{rate} {turn}: {sent} in {at} s");
                    let next = pause(Some(rate)).as_secs_f64().max(turn);
                    at += next;
                    last = Some(next);
                }
                assert!(sent >= rate * at * 0.5, "{rate} {turn}: {sent} in {at} s");
            }
        }
    }

    #[test]
    fn without_a_rate_as_many_go_as_may_be_claimed_at_once() {
        assert_eq!((items(None, None), pause(None)), (MOST, Duration::ZERO));
        assert_eq!(items(Some(1e9), None), MOST);
    }

    #[test]
    fn what_was_missed_for_longer_than_a_second_is_not_made_up_for() {
        assert_eq!(items(Some(50.0), Some(Duration::from_secs(30))), 50);
        assert_eq!(items(Some(0.5), Some(Duration::from_secs(60))), 1);
    }
}

//! Waiting, with an end and with a memory of what was seen last.
//!
//! [`eventually`] is the only way a test waits for another process. It asks again and again, and when its time is up it
//! says what was waited for, for how long, and what was seen last, so that a red test needs no second run to be
//! understood. Whatever waits right now is also written down for the test as a whole, whose own hard time-out (see
//! [`crate::run`]) names it.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout_at};

use crate::failure::{Failure, Outcome};

/// The first pause between two looks; it doubles up to [`LONGEST_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_millis(200);

tokio::task_local! {
    /// What the running test waits for.
    pub(crate) static WAITS: Waits;
}

/// Looks until `look` says Ok, at most for `patience`.
///
/// An `Err` is what was seen instead; errors of a connection in the middle of a fault are such a sight too. A look that
/// does not come back is cut off at the end of `patience`.
///
/// # Errors
///
/// When time is up: what was waited for and what was seen last.
///
/// # Cancel safety
///
/// Dropping it drops the look under way and nothing else.
pub async fn eventually<T>(
    what: impl fmt::Display,
    patience: Duration,
    mut look: impl AsyncFnMut() -> Outcome<T>,
) -> Outcome<T> {
    let what = what.to_string();
    let _note = WAITS.try_with(|waits| waits.note(&what)).ok();
    let deadline = Instant::now() + patience;
    let mut pause = FIRST_PAUSE;
    let mut last: Option<Failure> = None;
    loop {
        match timeout_at(deadline, look()).await {
            Ok(Ok(value)) => return Ok(value),
            Ok(Err(sight)) => last = Some(sight),
            Err(_) => {
                let last = last.map_or_else(|| "nothing".to_owned(), |sight| sight.to_string());
                crate::fail!(
                    "waited {patience:?} for {what}; seen last: {last}; one more look did not come back"
                );
            }
        }
        if Instant::now() + pause >= deadline {
            let last = last.map_or_else(String::new, |sight| sight.to_string());
            crate::fail!("waited {patience:?} for {what}; seen last: {last}");
        }
        sleep(pause).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

/// Makes sure that something stays true for a while: `look` must say Ok each time.
///
/// # Errors
///
/// The first sight that was not Ok.
pub async fn stays(
    what: impl fmt::Display,
    period: Duration,
    mut look: impl AsyncFnMut() -> Outcome,
) -> Outcome {
    let _note = WAITS.try_with(|waits| waits.note(&format!("the end of: {what}"))).ok();
    let end = Instant::now() + period;
    while Instant::now() < end {
        look().await.map_err(|sight| sight.during(&what))?;
        sleep(LONGEST_PAUSE / 4).await;
    }
    Ok(())
}

/// Lets load or a fault last. This is the only pause that tests make without looking at anything.
pub async fn lasts(what: impl fmt::Display, period: Duration) {
    let _note = WAITS.try_with(|waits| waits.note(&format!("the end of: {what}"))).ok();
    sleep(period).await;
}

/// What one test waits for now; cheap to clone, readable from the watchdog's thread.
#[derive(Debug, Clone, Default)]
pub(crate) struct Waits(Arc<Mutex<Vec<(u64, String, Instant)>>>);

impl Waits {
    fn note(&self, what: &str) -> Note {
        let mut waits = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let number = waits.last().map_or(0, |(number, ..)| number + 1);
        waits.push((number, what.to_owned(), Instant::now()));
        Note { waits: self.clone(), number }
    }

    /// For people: each wait and how long it has lasted.
    pub(crate) fn show(&self) -> String {
        let waits = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if waits.is_empty() {
            return "it waited for nothing that goes through `eventually`".to_owned();
        }
        let lines: Vec<String> = waits
            .iter()
            .map(|(_, what, since)| {
                format!("it has waited {:.1} s for {what}", since.elapsed().as_secs_f64())
            })
            .collect();
        lines.join("\n")
    }
}

/// Takes the wait off the list when it is over, however it ends.
#[derive(Debug)]
struct Note {
    waits: Waits,
    number: u64,
}

impl Drop for Note {
    fn drop(&mut self) {
        let mut waits = self.waits.0.lock().unwrap_or_else(PoisonError::into_inner);
        waits.retain(|(number, ..)| *number != self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_wait_ends_as_soon_as_the_look_says_yes() {
        let mut looks = 0;
        let seen = eventually("the third look", Duration::from_secs(5), async || {
            looks += 1;
            if looks < 3 {
                crate::fail!("look {looks}");
            }
            Ok(looks)
        })
        .await
        .unwrap();
        assert_eq!(seen, 3);
    }

    #[tokio::test]
    async fn a_wait_in_vain_says_what_it_saw_last() {
        let mut looks = 0;
        let failure = eventually("a miracle", Duration::from_millis(100), async || -> Outcome {
            looks += 1;
            crate::fail!("no miracle in look {looks}")
        })
        .await
        .unwrap_err()
        .to_string();
        assert!(failure.contains("waited 100ms for a miracle; seen last: no miracle in look "), "{failure}");
    }

    #[tokio::test]
    async fn a_look_that_hangs_is_cut_off() {
        let failure = eventually("an answer", Duration::from_millis(50), async || -> Outcome {
            std::future::pending().await
        })
        .await
        .unwrap_err()
        .to_string();
        assert!(failure.contains("did not come back"), "{failure}");
    }

    #[tokio::test]
    async fn what_is_waited_for_is_written_down_while_it_lasts() {
        let waits = Waits::default();
        WAITS
            .scope(waits.clone(), async {
                let inner = waits.clone();
                let _ = eventually("the moon", Duration::from_secs(1), async || {
                    assert!(inner.show().contains("for the moon"), "{}", inner.show());
                    Ok(())
                })
                .await;
            })
            .await;
        assert!(waits.show().contains("nothing"), "{}", waits.show());
    }

    #[tokio::test]
    async fn what_stops_being_true_is_reported() {
        let mut looks = 0;
        let failure = stays("silence", Duration::from_secs(5), async || {
            looks += 1;
            if looks == 4 {
                crate::fail!("a noise");
            }
            Ok(())
        })
        .await
        .unwrap_err();
        assert_eq!(failure.message(), "silence: a noise");
    }
}

//! Waiting with an end, for servers that are other processes.
#![expect(
    clippy::disallowed_methods,
    reason = "a synchronous program that waits for other processes: no runtime to block, no clock to pause"
)]

use std::thread;
use std::time::{Duration, Instant};

/// A moment after which waiting stops.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Deadline(Instant);

impl Deadline {
    pub(crate) fn after(patience: Duration) -> Self {
        Self(Instant::now() + patience)
    }

    pub(crate) fn passed(self) -> bool {
        Instant::now() >= self.0
    }
}

/// How long something took, for people.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Stopwatch(Instant);

impl Stopwatch {
    pub(crate) fn start() -> Self {
        Self(Instant::now())
    }

    pub(crate) fn seconds(self) -> f64 {
        self.0.elapsed().as_secs_f64()
    }
}

/// One step of a poll: long enough to cost nothing, short enough not to be felt.
pub(crate) fn briefly() {
    thread::sleep(Duration::from_millis(100));
}

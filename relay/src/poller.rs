//! Takes a producer's delivery reports and errors from librdkafka, on a thread of its own.
//!
//! ```text
//!   resting ──a row is handed over to a producer that had none unreported──▶ polling ──all reported──▶ resting
//!      └ once a second: a look, for what concerns no row (a fatal error)
//! ```
//!
//! rdkafka's own threaded producer polls for ever, a tenth of a second at a time, and the last millisecond of each
//! of its polls is spent in a spin, because librdkafka waits for whole milliseconds only: 1 % of a core for each producer with nothing to do.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use rdkafka::error::KafkaError;
use rdkafka::producer::{BaseProducer, ProducerContext};

/// How long one poll takes while reports are expected; the end of a producer may wait for so long.
const POLL: Duration = Duration::from_millis(250);

/// How often a resting one looks.
const LOOK: Duration = Duration::from_secs(1);

/// Events taken at one look.
const EVENTS_OF_A_LOOK: usize = 16;

/// The thread. Ends when this is dropped, which may block for a poll.
#[derive(Debug)]
pub(crate) struct Poller {
    thread: Option<JoinHandle<()>>,
    ends: Arc<AtomicBool>,
}

impl Poller {
    /// Starts polling; `expects` says whether reports are to come.
    pub(crate) fn start<C: ProducerContext + 'static>(
        producer: Arc<BaseProducer<C>>,
        expects: impl Fn() -> bool + Send + 'static,
    ) -> Result<Self, KafkaError> {
        let ends = Arc::new(AtomicBool::new(false));
        let told_to_end = Arc::clone(&ends);
        let thread = std::thread::Builder::new().name("delivery reports".to_owned()).spawn(move || {
            while !told_to_end.load(Ordering::Acquire) {
                if expects() {
                    producer.poll(POLL);
                    continue;
                }
                for _ in 0..EVENTS_OF_A_LOOK {
                    producer.poll(Duration::ZERO);
                }
                // A wake that came since then is not lost: it makes this return at once.
                std::thread::park_timeout(LOOK);
            }
        });
        let thread = thread.map_err(|error| KafkaError::ClientCreation(error.to_string()))?;
        Ok(Self { thread: Some(thread), ends })
    }

    /// Reports are to come from now on.
    pub(crate) fn wake(&self) {
        if let Some(thread) = &self.thread {
            thread.thread().unpark();
        }
    }
}

impl Drop for Poller {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Release);
        self.wake();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread that takes delivery reports panicked");
        }
    }
}

//! SIGTERM and SIGINT: the first asks for a drain, the second ends the process at once.
//!
//! Ending at once is safe: whatever was leased expires by itself, and what was in flight is published again.

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::oneshot;

/// Waits for the first signal. The handlers are in place when this returns, not only when the future is first polled.
///
/// # Errors
/// When the operating system refuses a handler.
pub(crate) fn shutdown() -> std::io::Result<impl Future<Output = ()> + Send + 'static> {
    let mut signals =
        Signals { term: signal(SignalKind::terminate())?, int: signal(SignalKind::interrupt())? };
    let (asked, asked_for) = oneshot::channel();
    // Lives as long as the process: there is no moment after which a second signal should be ignored.
    tokio::spawn(async move {
        let name = signals.next().await;
        tracing::info!("{name}: draining; a second signal ends at once");
        // Nobody listens any more when the work is done anyway.
        let _ = asked.send(());
        let name = signals.next().await;
        tracing::warn!("{name} again: ending at once, without a drain");
        std::process::exit(1);
    });
    Ok(async move {
        let _ = asked_for.await;
    })
}

struct Signals {
    term: Signal,
    int: Signal,
}

impl Signals {
    async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.term.recv() => "SIGTERM",
            _ = self.int.recv() => "SIGINT",
        }
    }
}

//! How many requests are being run, in tasks that their clients' going does not end.

use std::sync::Arc;

use tokio::sync::watch;

/// Counts what runs.
#[derive(Clone, Default)]
pub(super) struct Count(Arc<watch::Sender<usize>>);

impl Count {
    /// One more, until the guard is dropped.
    pub(super) fn begin(&self) -> Begun {
        self.0.send_modify(|count| *count += 1);
        Begun(self.clone())
    }

    pub(super) fn watch(&self) -> Running {
        Running(self.0.subscribe())
    }
}

pub(super) struct Begun(Count);

impl Drop for Begun {
    fn drop(&mut self) {
        self.0.0.send_modify(|count| *count -= 1);
    }
}

/// The requests that a layer's services are running, those included whose clients have hung up.
///
/// A server that ends stops taking requests first, then waits here, as long as it likes; then the runtime may go. What is
/// dropped with the runtime leaves its lease, and the next request with the key asks what became of it.
///
/// ```no_run
/// # async fn example(serve: impl Future<Output = ()>, mut running: baton_consumer::http::Running) {
/// serve.await;
/// if tokio::time::timeout(std::time::Duration::from_secs(30), running.settled()).await.is_err() {
///     eprintln!("{} requests are left to their leases", running.count());
/// }
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct Running(watch::Receiver<usize>);

impl Running {
    /// How many there are now.
    #[must_use]
    pub fn count(&self) -> usize {
        *self.0.borrow()
    }

    /// Waits until there is none.
    ///
    /// # Cancel safety
    ///
    /// It only waits.
    pub async fn settled(&mut self) {
        // Without a sender there is no layer, no service, and nothing that runs.
        let _ = self.0.wait_for(|count| *count == 0).await;
    }
}

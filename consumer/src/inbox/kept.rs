//! Connections that transactions which follow each other closely pass on.
//!
//! A pool of sqlx asks a connection whether it lives when it is taken and when it is given back: two round trips, where the
//! transaction of one message has five. So a connection whose transaction ended in order waits for a moment for the next one.
//! It never keeps anybody waiting for long: it is kept only while the pool could give out another at once, goes back when
//! nothing came for [`IDLE`], and after [`HOLD`] in all.
//!
//! *On failure.* A connection that died meanwhile says so at BEGIN, as one that dies just after the pool gave it out: nothing
//! has happened yet, and it is closed.

use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use sqlx::PgPool;
use sqlx::pool::PoolConnection;
use sqlx::postgres::Postgres;
use tokio::time::Instant;

/// How long a connection waits for the next transaction.
const IDLE: Duration = Duration::from_millis(10);
/// How long it is kept from the pool in all.
const HOLD: Duration = Duration::from_millis(50);

/// A connection out of the pool.
pub(super) struct Held {
    pub(super) connection: PoolConnection<Postgres>,
    /// From the pool, when.
    pub(super) taken: Instant,
}

#[derive(Default)]
pub(super) struct Kept(Mutex<Shelf>);

#[derive(Default)]
struct Shelf {
    waiting: Vec<(Held, Instant)>,
    is_watched: bool,
}

impl Kept {
    /// The one that waited least.
    pub(super) fn take(&self) -> Option<Held> {
        self.with(|shelf| shelf.waiting.pop()).map(|(held, _)| held)
    }

    /// Keeps a connection for the next transaction, or gives it back.
    pub(super) fn put(self: &Arc<Self>, pool: &PgPool, held: Held) {
        let has_others = pool.num_idle() > 0 || pool.size() < pool.options().get_max_connections();
        if !has_others || pool.is_closed() || held.taken.elapsed() >= HOLD {
            return;
        }
        let is_to_be_watched = self.with(|shelf| {
            shelf.waiting.push((held, Instant::now()));
            !std::mem::replace(&mut shelf.is_watched, true)
        });
        if is_to_be_watched {
            tokio::spawn(watch(Arc::downgrade(self)));
        }
    }

    fn with<T>(&self, act: impl FnOnce(&mut Shelf) -> T) -> T {
        act(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Gives back what nobody came for, and ends once nothing waits.
async fn watch(kept: Weak<Kept>) {
    loop {
        tokio::time::sleep(IDLE).await;
        let Some(kept) = kept.upgrade() else { return };
        let (_gone, is_over) = kept.with(|shelf| {
            let (gone, waiting): (Vec<_>, Vec<_>) =
                shelf.waiting.drain(..).partition(|(_, since)| since.elapsed() >= IDLE);
            shelf.waiting = waiting;
            shelf.is_watched = !shelf.waiting.is_empty();
            (gone, shelf.waiting.is_empty())
        });
        if is_over {
            return;
        }
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        // A connection goes back by a task; where no runtime is left to run it, it is only closed.
        if tokio::runtime::Handle::try_current().is_err() {
            self.with(|shelf| shelf.waiting.drain(..).for_each(|(held, _)| drop(held.connection.detach())));
        }
    }
}

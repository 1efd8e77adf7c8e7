//! Whether a consumer moves, and whether it is of use: three pages to mount in a service's own HTTP server.
//!
//! | path | answers |
//! |---|---|
//! | `/livez` | 200 while the poll thread moves, also while database or brokers are away; else 503 |
//! | `/readyz` | 200 when the inbox database can be reached and is migrated, and the consumer is a member of its group; else 503; a line a check |
//! | `/metrics` | what a closure gives, as Prometheus reads it ([`Router::metrics`]); without one 404 |
//!
//! Anything but GET and HEAD is refused with 405, any other path with 404. [`Router`] is a `tower` service for any body, so axum takes
//! it as it is:
//!
//! ```no_run
//! # use baton_consumer::Consumer;
//! # async fn example(consumer: Consumer, render: impl Fn() -> String + Send + Sync + 'static) -> Result<(), Box<dyn std::error::Error>> {
//! let health = consumer.health().router().metrics(render);
//! # /*
//! let app = axum::Router::new().route("/orders", post(place)).fallback_service(health);
//! // or, below a path of its own: .nest_service("/consumer", health)
//! # */
//! # drop(health);
//! consumer.run(async { drop(tokio::signal::ctrl_c().await) }).await?;
//! # Ok(())
//! # }
//! ```
//!
//! **Moves.** The poll thread comes round every 20 ms, and leaves a beat. What may hold it up is known: it waits for lanes at a
//! revocation, and for what the group's coordinator says. So a beat older than the drain deadline and a minute is not an outage that is
//! ridden out but a process to be replaced. Before [`Consumer::run`](crate::Consumer::run) there is nothing to stand still; after it
//! the consumer is neither alive nor ready.
//!
//! **Is of use.** The database is looked at over a connection of its own, at most once in two seconds however many ask, one look at a
//! time and each bounded: lanes that have the whole pool do not make a consumer unready. Whether it is a member is what the poll
//! thread last saw. A rebalance in between does not end that; a lost assignment does.

mod router;

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use baton_protocol::report::chain;
use sqlx::PgPool;
use tokio::time::Instant;

use crate::run;
pub use router::{Router, Text};

/// What may hold up the poll thread besides a drain: what it asks the brokers, partition by partition.
const SLACK: Duration = Duration::from_secs(60);

/// For how long what was seen of the database is told again.
const FRESH: Duration = Duration::from_secs(2);

/// The health of one consumer; from [`Consumer::health`](crate::Consumer::health). A handle, cheap to clone.
#[derive(Clone)]
pub struct Health(Arc<State>);

struct State {
    pool: PgPool,
    bound: Duration,
    began: Instant,
    /// Milliseconds from `began` to the last turn of the poll thread.
    beat: AtomicU64,
    phase: Mutex<Phase>,
    /// Held while it looks, so that who asks meanwhile gets that answer.
    seen: tokio::sync::Mutex<Option<(Instant, Check)>>,
}

/// How far a consumer has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// Nothing is polled yet.
    New,
    /// It polls, and the group has given it nothing (any more).
    Joining,
    Member,
    Ended,
}

/// What is wrong, if anything.
type Check = Result<(), String>;

impl Health {
    pub(crate) fn new(pool: PgPool, drain_deadline: Duration) -> Self {
        Self(Arc::new(State {
            pool,
            bound: drain_deadline + SLACK,
            began: Instant::now(),
            beat: AtomicU64::new(0),
            phase: Mutex::new(Phase::New),
            seen: tokio::sync::Mutex::default(),
        }))
    }

    /// The pages, without `/metrics`.
    #[must_use]
    pub fn router(&self) -> Router {
        Router::new(self.clone())
    }

    fn phase(&self) -> Phase {
        *self.0.phase.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Nothing comes after the end.
    fn enter(&self, next: Phase) {
        let mut phase = self.0.phase.lock().unwrap_or_else(PoisonError::into_inner);
        if *phase != Phase::Ended {
            *phase = next;
        }
    }

    /// The poll thread begins.
    pub(crate) fn polls(&self) {
        self.beat();
        self.enter(Phase::Joining);
    }

    /// The poll thread comes round.
    pub(crate) fn beat(&self) {
        let since = u64::try_from(self.0.began.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.0.beat.store(since, Ordering::Relaxed);
    }

    /// The group has given it its part, which may be nothing.
    pub(crate) fn joined(&self) {
        self.enter(Phase::Member);
    }

    /// The group has gone on without it.
    pub(crate) fn lost(&self) {
        self.enter(Phase::Joining);
    }

    /// Whoever drops it has ended.
    pub(crate) fn until_dropped(&self) -> Ends {
        Ends(self.clone())
    }

    fn alive(&self) -> Check {
        self.alive_at(Instant::now())
    }

    fn alive_at(&self, now: Instant) -> Check {
        match self.phase() {
            Phase::New => return Ok(()),
            Phase::Ended => return Err("the consumer has ended".to_owned()),
            Phase::Joining | Phase::Member => {}
        }
        let beat = Duration::from_millis(self.0.beat.load(Ordering::Relaxed));
        let age = now.saturating_duration_since(self.0.began + beat);
        if age <= self.0.bound {
            return Ok(());
        }
        Err(format!("the poll thread has stood still for {} s", age.as_secs()))
    }

    /// Each check by its name.
    async fn ready(&self) -> [(&'static str, Check); 2] {
        let group = match self.phase() {
            Phase::New => Err("not started".to_owned()),
            Phase::Joining => Err("not a member of its group (yet)".to_owned()),
            Phase::Member => self.alive(),
            Phase::Ended => Err("the consumer has ended".to_owned()),
        };
        [("inbox", self.inbox().await), ("group", group)]
    }

    /// Cancel safe: a look that is dropped is made anew by whoever asks next.
    async fn inbox(&self) -> Check {
        let mut seen = self.0.seen.lock().await;
        if let Some((at, check)) = &*seen
            && at.elapsed() < FRESH
        {
            return check.clone();
        }
        let check = run::check_database(&self.0.pool).await.map_err(|error| chain(&error));
        *seen = Some((Instant::now(), check.clone()));
        check
    }
}

impl fmt::Debug for Health {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Health").field("phase", &self.phase()).finish_non_exhaustive()
    }
}

/// Says that a consumer has ended, when it is dropped, however that comes.
pub(crate) struct Ends(Health);

impl Drop for Ends {
    fn drop(&mut self) {
        self.0.enter(Phase::Ended);
    }
}

#[cfg(test)]
mod tests;

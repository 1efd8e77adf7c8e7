//! Whether this process moves (`/livez`), and whether it is of use (`/readyz`).
//!
//! **Moves.** Each task that must never stand still leaves a beat at every turn of its loop: the main loop, the renewal of
//! leases, each shard. Each of them turns by itself within a known time, also while database or broker is away, because
//! every one of its waits ends: a statement in its patience, a shard's wait when its trust ends or is renewed, a drain at
//! its deadline, a pause between sessions after 5 s. So a beat older than
//!
//! ```text
//! bound = lease TTL + drain deadline + 60 s      (75 s by default)
//! ```
//!
//! is not an outage that is ridden out but a process to be replaced. The reader is no part of it: it may rightly wait for
//! ever, for room or for somebody who asks. The judge has a beat of its own, once a second: where that was missed as well, the
//! whole process did not run (it was stopped, or its machine was), and every task has its full time again from when it woke.
//!
//! **Is of use.** What the main loop last met: whether it found the outbox, and when it last looked at the leases, which it
//! does twice a second. So asking costs the database nothing.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use crate::Settings;
use crate::database::{Error, told};

/// What may lie between two turns besides the lease and the drain: the longest statements, a producer being destroyed.
const SLACK: Duration = Duration::from_secs(60);

/// How often the judge of `/livez` shows that the process runs at all.
pub(crate) const JUDGE_EVERY: Duration = Duration::from_secs(1);

/// So much later than due, the judge's turn says that the process did not run. Far below the bound of a task, far above what a
/// busy machine takes to come round.
const OVERSLEPT: Duration = Duration::from_secs(5);

/// A check of `/readyz`: its name, and what is wrong.
pub(crate) type Check = (&'static str, Result<(), String>);

/// One for the whole process.
#[derive(Debug)]
pub(crate) struct Health {
    began: Instant,
    /// How long a task may leave no beat.
    bound: Duration,
    /// How old the last look at the leases may be.
    looks: Duration,
    tasks: Mutex<BTreeMap<u64, Task>>,
    number: AtomicU64,
    standing: Mutex<Standing>,
    running: Mutex<Running>,
}

/// Since when the process has run without a break, as its judge knows.
#[derive(Debug, Clone, Copy)]
struct Running {
    since: Instant,
    /// The judge's last turn.
    seen: Instant,
}

impl Running {
    /// After one more turn of the judge.
    fn turned(self, now: Instant) -> Self {
        let missing = now.saturating_duration_since(self.seen);
        let since = if missing > JUDGE_EVERY + OVERSLEPT { now } else { self.since };
        Self { since, seen: now.max(self.seen) }
    }
}

#[derive(Debug)]
struct Task {
    name: String,
    /// Milliseconds from `began` to its last beat.
    beat: Arc<AtomicU64>,
}

#[derive(Debug)]
struct Standing {
    database: Result<(), String>,
    migrations: Result<(), String>,
    /// When the leases were last looked at.
    leases: Result<Instant, String>,
}

/// A task's sign of movement. It is watched until this is dropped.
#[derive(Debug)]
pub(crate) struct Beat {
    health: Arc<Health>,
    number: u64,
    beat: Arc<AtomicU64>,
}

impl Beat {
    /// The task has made a turn.
    pub(crate) fn at(&self, now: Instant) {
        self.beat.store(self.health.millis(now), Ordering::Relaxed);
    }
}

impl Drop for Beat {
    fn drop(&mut self) {
        self.health.tasks().remove(&self.number);
    }
}

impl Health {
    pub(crate) fn new(settings: &Settings) -> Self {
        #[cfg(feature = "plants")]
        let slack = settings.still_slack.unwrap_or(SLACK);
        #[cfg(not(feature = "plants"))]
        let slack = SLACK;
        let starting = || "the relay is starting".to_owned();
        let began = Instant::now();
        Self {
            began,
            running: Mutex::new(Running { since: began, seen: began }),
            bound: settings.lease_ttl + settings.drain_deadline + slack,
            looks: settings.lease_ttl.clamp(Duration::from_secs(3), Duration::from_secs(30)),
            tasks: Mutex::default(),
            number: AtomicU64::new(0),
            standing: Mutex::new(Standing {
                database: Err(starting()),
                migrations: Err(starting()),
                leases: Err(starting()),
            }),
        }
    }

    /// From now on this task must move.
    pub(crate) fn watch(self: &Arc<Self>, name: impl Into<String>) -> Beat {
        let number = self.number.fetch_add(1, Ordering::Relaxed);
        let beat = Arc::new(AtomicU64::new(self.millis(Instant::now())));
        self.tasks().insert(number, Task { name: name.into(), beat: Arc::clone(&beat) });
        Beat { health: Arc::clone(self), number, beat }
    }

    /// The outbox was found and is migrated.
    pub(crate) fn found(&self) {
        let mut standing = self.standing();
        standing.database = Ok(());
        standing.migrations = Ok(());
    }

    /// The leases were looked at.
    pub(crate) fn looked(&self, now: Instant) {
        self.standing().leases = Ok(now);
    }

    /// The database cannot be used.
    pub(crate) fn lost(&self, error: &Error) {
        let mut standing = self.standing();
        standing.leases = Err("there is no session with the database".to_owned());
        if matches!(error, Error::NotMigrated | Error::NoSettings | Error::Newer { .. }) {
            standing.database = Ok(());
            standing.migrations = Err(told(error));
        } else {
            standing.database = Err(told(error));
            standing.migrations = Err("unknown while the database cannot be used".to_owned());
        }
    }

    /// The relay hands its leases back and takes no others.
    pub(crate) fn ends(&self) {
        self.standing().leases = Err("the relay is shutting down".to_owned());
    }

    /// The judge has made a turn. Returned: since when the process has run without a break.
    pub(crate) fn turns(&self, now: Instant) -> Instant {
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        *running = running.turned(now);
        running.since
    }

    /// The tasks that have not moved for longer than they may, each in words.
    pub(crate) fn still(&self, now: Instant) -> Vec<String> {
        // Asking is a turn too: the question may come before the judge's own, right after the process woke.
        let running_since = self.millis(self.turns(now));
        let now = self.millis(now);
        let silent = |task: &Task| {
            let from = task.beat.load(Ordering::Relaxed).max(running_since);
            Duration::from_millis(now.saturating_sub(from))
        };
        let tasks = self.tasks();
        let still = tasks.values().filter(|task| silent(task) > self.bound);
        still
            .map(|task| {
                format!(
                    "{} has not moved for {} s (at most {} s)",
                    task.name,
                    silent(task).as_secs(),
                    self.bound.as_secs()
                )
            })
            .collect()
    }

    /// What the relay's own tasks know of its database.
    pub(crate) fn checks(&self, now: Instant) -> Vec<Check> {
        let standing = self.standing();
        let leases = match &standing.leases {
            Err(why) => Err(why.clone()),
            Ok(looked) => {
                let ago = now.saturating_duration_since(*looked);
                if ago > self.looks {
                    Err(format!("not looked at for {:.1} s", ago.as_secs_f64()))
                } else {
                    Ok(())
                }
            }
        };
        vec![
            ("database", standing.database.clone()),
            ("migrations", standing.migrations.clone()),
            ("leases", leases),
        ]
    }

    fn millis(&self, now: Instant) -> u64 {
        u64::try_from(now.saturating_duration_since(self.began).as_millis()).unwrap_or(u64::MAX)
    }

    // A panic while one of these was held leaves plain values, which stay meaningful.
    fn tasks(&self) -> MutexGuard<'_, BTreeMap<u64, Task>> {
        self.tasks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn standing(&self) -> MutexGuard<'_, Standing> {
        self.standing.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failing(health: &Health, now: Instant) -> Vec<&'static str> {
        health.checks(now).into_iter().filter(|(_, check)| check.is_err()).map(|(name, _)| name).collect()
    }

    /// The judge's turns, each when it is due.
    fn judge(health: &Health, from: Instant, to: Instant) {
        let mut at = from;
        while at <= to {
            health.turns(at);
            at += JUDGE_EVERY;
        }
    }

    #[test]
    fn a_task_that_stands_still_is_named_once_its_bound_has_passed_and_no_other() {
        let health = Arc::new(Health::new(&Settings::default()));
        let now = Instant::now();
        let (moving, stuck) = (health.watch("the renewal"), health.watch("shard 3"));
        let bound = Duration::from_secs(75);
        stuck.at(now);
        moving.at(now + bound);
        judge(&health, now, now + bound);
        assert!(health.still(now + bound).is_empty());
        let still = health.still(now + bound + Duration::from_secs(2));
        assert_eq!(still, ["shard 3 has not moved for 77 s (at most 75 s)"]);
        stuck.at(now + bound);
        assert!(health.still(now + bound + Duration::from_secs(2)).is_empty());
    }

    #[test]
    fn a_task_that_has_ended_need_not_move() {
        let health = Arc::new(Health::new(&Settings::default()));
        drop(health.watch("shard 3"));
        let (now, later) = (Instant::now(), Instant::now() + Duration::from_secs(1_000));
        judge(&health, now, later);
        assert!(health.still(later).is_empty());
    }

    #[test]
    fn no_task_is_blamed_for_the_time_in_which_the_whole_process_did_not_run() {
        let health = Arc::new(Health::new(&Settings::default()));
        let (now, bound) = (Instant::now(), Duration::from_secs(75));
        let beat = health.watch("shard 3");
        beat.at(now);
        judge(&health, now, now + Duration::from_secs(10));
        // Stopped for ten minutes, and asked before any task had a moment to run.
        let woken = now + Duration::from_secs(610);
        assert!(health.still(woken).is_empty());
        // One that does not move from then on is named when its time has passed, not never.
        judge(&health, woken, woken + bound);
        assert!(health.still(woken + bound).is_empty());
        assert_eq!(health.still(woken + bound + Duration::from_secs(2)).len(), 1);
    }

    #[test]
    fn a_judge_that_is_a_little_late_excuses_nobody() {
        let now = Instant::now();
        let running = Running { since: now, seen: now };
        let late = running.turned(now + JUDGE_EVERY + OVERSLEPT);
        assert_eq!(late.since, now);
        assert_eq!(
            late.turned(late.seen + JUDGE_EVERY + OVERSLEPT + Duration::from_millis(1)).since,
            late.seen + JUDGE_EVERY + OVERSLEPT + Duration::from_millis(1)
        );
        // Two who ask at once may be a moment out of order.
        assert_eq!(late.turned(now).seen, late.seen);
    }

    #[test]
    fn a_relay_is_ready_from_its_first_look_at_the_leases_until_it_cannot_look() {
        let health = Health::new(&Settings::default());
        let now = Instant::now();
        assert_eq!(failing(&health, now), ["database", "migrations", "leases"]);
        health.found();
        assert_eq!(failing(&health, now), ["leases"]);
        health.looked(now);
        assert!(failing(&health, now + Duration::from_secs(10)).is_empty());
        assert_eq!(failing(&health, now + Duration::from_secs(11)), ["leases"]);

        health.lost(&Error::Silent { operation: "reading the leases", within: Duration::from_secs(2) });
        assert_eq!(failing(&health, now), ["database", "migrations", "leases"]);
        let (_, why) = &health.checks(now)[0];
        assert!(why.as_ref().unwrap_err().contains("reading the leases"), "{why:?}");
        health.lost(&Error::NotMigrated);
        assert_eq!(failing(&health, now), ["migrations", "leases"]);

        health.found();
        health.looked(now);
        health.ends();
        assert_eq!(failing(&health, now), ["leases"]);
    }
}

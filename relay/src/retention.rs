//! Retention: space comes back by truncating the leaf in turn, once nothing in it is needed any more.
//!
//! What may go, and the lock under which that is judged, is one function of the database, `outbox.truncate_leaf`
//! (`migrations/outbox/0005_retention.sql`, `docs/decisions/0006`). It is one statement: a relay that is killed or stopped in the
//! middle leaves no lock behind that the server would not end by itself. Here is only who asks it, and when.
//!
//! ```text
//!            ┌──────────── a slot turns, or a milestone is due ────────────┐
//!            ▼                                                             │
//!          look ──empty, truncated─────────────────────────────────────────┤
//!            │                                                             │
//!            └─▶ not consumed, kept, locked: again after a growing delay ──┘
//! ```
//!
//! With each milestone it also takes away what was parked and is settled, once that is `park.keep` old, and gives up what is dead,
//! where `park.dead_for` is set.
//!
//! Every relay does this, whatever shards it holds, and whoever comes second finds an empty leaf or the other's lock.
//! The connection is its own, so that a look never stands before a lease or a page, and is closed when nothing is due for a
//! while. Nothing here ends a session: when it fails, space stays taken, and that is said. Milestones are durable cursors with a time;
//! a leaf is judged by one that is a slot period old.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use baton_protocol::retry;
use sqlx::Connection as _;
use sqlx::postgres::PgConnection;

use crate::database::{self, Error, answer, told};
use crate::leaves;
use crate::metrics::Metrics;
use crate::settings::Settings;

/// How long a statement may take; it bounds how long the lock on a leaf may be held.
const PATIENCE: Duration = Duration::from_secs(2);

/// A connection is not kept open for a longer pause than this.
const KEPT_OPEN: Duration = Duration::from_secs(10);

/// The longest pause between two tries at a leaf in turn.
const LONGEST_RETRY: Duration = Duration::from_secs(60);

const GROWS: &str = "leaves of the outbox cannot be truncated for now, so it grows; messages flow";

/// Just past a moment by the database's clock.
const JUST_AFTER: Duration = Duration::from_millis(10);

/// What stands with the leaf in turn.
#[derive(Debug, Clone, PartialEq)]
struct Look {
    slot: i16,
    period: Duration,
    /// Until another leaf is in turn.
    turns_in: Duration,
    has_rows: bool,
    stands: Option<Skipped>,
}

/// Why a leaf in turn was left as it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Skipped {
    /// This shard has not consumed this position.
    Unconsumed { shard: i16, position: i64 },
    /// It was consumed less than a slot period ago; for so long it is kept at least.
    Kept { at_least: Duration },
    /// Somebody has it locked.
    Locked,
    /// The look or the truncation failed.
    Failed,
}

impl Skipped {
    /// The words of a metric's label.
    pub(crate) const WORDS: [&str; 4] = ["unconsumed", "kept", "locked", "failed"];

    pub(crate) fn word(self) -> &'static str {
        match self {
            Self::Unconsumed { .. } => "unconsumed",
            Self::Kept { .. } => "kept",
            Self::Locked => "locked",
            Self::Failed => "failed",
        }
    }
}

impl fmt::Display for Skipped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unconsumed { shard, position } => {
                write!(f, "shard {shard} had not consumed position {position}")
            }
            Self::Kept { .. } => f.write_str("it had been consumed for less than a slot period"),
            Self::Locked => f.write_str("somebody had it locked whenever it was tried"),
            Self::Failed => f.write_str("the attempts failed"),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    /// There is nothing to be truncated.
    Empty,
    Truncated {
        bytes: i64,
    },
    Skipped(Skipped),
    /// Another leaf is in turn by now.
    Turned,
}

/// How far apart milestones are: an eighth of a slot period, so that a leaf whose rows were consumed as they came is
/// truncated early in its turn.
fn milestone_every(period: Duration) -> Duration {
    (period / 8).max(Duration::from_millis(200))
}

/// The pauses between two tries at one leaf. Short at first: what is in the way is most often a page being read.
fn retries(period: Duration) -> retry::Policy {
    retry::Policy {
        base: Duration::from_millis(20),
        factor: 2.0,
        cap: (period / 4).clamp(Duration::from_millis(20), LONGEST_RETRY),
    }
}

/// When to look again.
fn pause(look: &Look, outcome: Outcome, retry: Duration) -> Duration {
    let anyway = (look.turns_in + JUST_AFTER).min(milestone_every(look.period));
    match outcome {
        Outcome::Empty | Outcome::Truncated { .. } => anyway,
        Outcome::Turned => JUST_AFTER,
        // Nothing changes before another milestone is a slot period old.
        Outcome::Skipped(Skipped::Kept { at_least }) if !at_least.is_zero() => {
            anyway.min(at_least + JUST_AFTER)
        }
        Outcome::Skipped(_) => anyway.min(retry),
    }
}

/// Looks and truncates until it is dropped.
pub(crate) async fn run(settings: Arc<Settings>, metrics: Arc<Metrics>) -> Result<(), Error> {
    let mut connection = None;
    let mut missed = Missed::default();
    let mut failures = retry::Policy { cap: LONGEST_RETRY, ..retry::Policy::default() }.delays();
    let mut tries = retries(Duration::ZERO).delays();
    let mut in_turn = None;
    loop {
        let next = match turn(&settings, &mut connection, &mut missed).await {
            Ok((look, outcome)) => {
                failures.reset();
                if in_turn != Some((look.slot, look.period)) {
                    in_turn = Some((look.slot, look.period));
                    tries = retries(look.period).delays();
                }
                tell(&metrics, look.slot, outcome);
                missed.tried(look.slot, outcome);
                pause(&look, outcome, tries.next_delay())
            }
            Err(error) => {
                // It may hold a statement that is still under way.
                connection = None;
                metrics.leaf_skipped(Skipped::Failed);
                missed.failed(&error);
                failures.next_delay().max(JUST_AFTER)
            }
        };
        if next > KEPT_OPEN
            && let Some(idle) = connection.take()
        {
            _ = tokio::time::timeout(PATIENCE, idle.close()).await;
        }
        tokio::time::sleep(next).await;
    }
}

/// One look, a milestone if one is due, and a try if nothing stands against it.
async fn turn(
    settings: &Settings,
    connection: &mut Option<PgConnection>,
    missed: &mut Missed,
) -> Result<(Look, Outcome), Error> {
    let open = match connection.take() {
        Some(open) => open,
        None => database::connect(settings, "retention", PATIENCE).await?,
    };
    let connection = connection.insert(open);
    let look = look(connection).await?;
    missed.turned(connection, look.slot).await?;
    write_milestone(connection, milestone_every(look.period)).await?;
    sweep(connection, settings).await?;
    let outcome = match look.stands {
        _ if !look.has_rows => Outcome::Empty,
        Some(stands) => Outcome::Skipped(stands),
        None => truncate(connection, look.slot).await?,
    };
    Ok((look, outcome))
}

/// Most rows that one statement takes away from among what was set aside.
const SWEPT: i64 = 1_000;

/// What was set aside and is settled goes after a while; what is dead is given up, where that is set.
async fn sweep(connection: &mut PgConnection, settings: &Settings) -> Result<(), Error> {
    let millis = |age: Duration| i64::try_from(age.as_millis()).unwrap_or(i64::MAX);
    if let Some(age) = settings.park_dead_for {
        loop {
            let asked = sqlx::query_scalar(include_str!("../queries/parked_expire.sql"))
                .bind(millis(age))
                .bind(SWEPT)
                .fetch_optional(&mut *connection);
            let expired: Option<i64> =
                answer("discarding what has been dead for long", PATIENCE, asked).await?;
            let Some(messages) = expired else { break };
            tracing::warn!(
                messages,
                "parked messages were dead for longer than park.dead_for, they are discarded"
            );
        }
    }
    loop {
        let asked = sqlx::query(include_str!("../queries/parked_sweep.sql"))
            .bind(millis(settings.park_keep))
            .bind(SWEPT)
            .execute(&mut *connection);
        let swept = answer("sweeping what was parked", PATIENCE, asked).await?.rows_affected();
        if i64::try_from(swept).unwrap_or(i64::MAX) < SWEPT {
            return Ok(());
        }
    }
}

fn tell(metrics: &Metrics, slot: i16, outcome: Outcome) {
    match outcome {
        Outcome::Truncated { bytes } => {
            metrics.leaf_truncated();
            tracing::info!(slot, bytes, "truncated a leaf of the outbox, all of it was consumed");
        }
        Outcome::Skipped(why) => {
            metrics.leaf_skipped(why);
            tracing::debug!(slot, "a leaf of the outbox is not truncated yet: {why}");
        }
        Outcome::Empty | Outcome::Turned => {}
    }
}

/// The leaf whose turn may pass without its being truncated, and whether failing has been said.
#[derive(Debug, Default)]
struct Missed {
    leaf: Option<(i16, Skipped)>,
    failing: bool,
}

impl Missed {
    fn tried(&mut self, slot: i16, outcome: Outcome) {
        self.failing = false;
        self.leaf = match outcome {
            Outcome::Skipped(why) => Some((slot, why)),
            Outcome::Turned => self.leaf,
            Outcome::Empty | Outcome::Truncated { .. } => None,
        };
    }

    /// Said once, until it works again.
    fn failed(&mut self, error: &Error) {
        if !std::mem::replace(&mut self.failing, true) {
            let error_told = told(error);
            if error.passes() {
                tracing::warn!("{GROWS}: {error_told}");
            } else {
                tracing::error!("{GROWS}: {error_told}{}", error.advice());
            }
        }
    }

    /// Says, once a turn, that one has passed in vain, and who or what is in the way now.
    async fn turned(&mut self, connection: &mut PgConnection, in_turn: i16) -> Result<(), Error> {
        let Some((slot, why)) = self.leaf.take_if(|(slot, _)| *slot != in_turn) else { return Ok(()) };
        if matches!(why, Skipped::Kept { .. }) {
            tracing::info!(slot, "a leaf of the outbox stays until its next turn: {why}");
            return Ok(());
        }
        let leaf = leaves::read(connection, PATIENCE).await?.into_iter().find(|leaf| leaf.slot == slot);
        let now = leaf.as_ref().and_then(|leaf| leaf.kept.as_ref()).map(|kept| kept.words.as_str());
        let bytes = leaf.as_ref().map_or(0, |leaf| leaf.bytes);
        tracing::warn!(
            slot,
            bytes,
            "a leaf of the outbox was not truncated in its turn, it stays until the next and grows: {why} (now: {})",
            now.unwrap_or("it is empty")
        );
        Ok(())
    }
}

async fn look(connection: &mut PgConnection) -> Result<Look, Error> {
    type Row = (i16, f64, f64, bool, Option<i16>, Option<i64>, Option<f64>);
    let asked = sqlx::query_as(include_str!("../queries/retention_look.sql")).fetch_optional(connection);
    let row: Option<Row> = answer("looking at the leaf in turn", PATIENCE, asked).await?;
    let Some((slot, period, turns_in, has_rows, shard, position, kept_for)) = row else {
        return Err(Error::NotMigrated);
    };
    let stands = match (shard.zip(position), kept_for) {
        (Some((shard, position)), _) => Some(Skipped::Unconsumed { shard, position }),
        (None, Some(left)) if left > 0.0 => Some(Skipped::Kept { at_least: seconds(left) }),
        (None, _) => None,
    };
    Ok(Look { slot, period: seconds(period), turns_in: seconds(turns_in), has_rows, stands })
}

fn seconds(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds).unwrap_or(Duration::ZERO)
}

async fn write_milestone(connection: &mut PgConnection, every: Duration) -> Result<(), Error> {
    // A little less, so that one that is due is not put off because a timer was early.
    let asked = sqlx::query(include_str!("../queries/retention_milestone.sql"))
        .bind(every.as_secs_f64() * 0.9)
        .execute(connection);
    answer("writing a milestone", PATIENCE, asked).await?;
    Ok(())
}

async fn truncate(connection: &mut PgConnection, slot: i16) -> Result<Outcome, Error> {
    const OPERATION: &str = "truncating a leaf";
    type Row = (Option<String>, Option<i64>, Option<i16>, Option<i64>);
    let asked =
        sqlx::query_as(include_str!("../queries/retention_truncate.sql")).bind(slot).fetch_one(connection);
    let (outcome, bytes, shard, position): Row = answer(OPERATION, PATIENCE, asked).await?;
    Ok(match (outcome.as_deref(), bytes, shard.zip(position)) {
        (Some("truncated"), Some(bytes), _) => Outcome::Truncated { bytes },
        (Some("empty"), ..) => Outcome::Empty,
        (Some("not in turn"), ..) => Outcome::Turned,
        (Some("locked"), ..) => Outcome::Skipped(Skipped::Locked),
        (Some("kept"), ..) => Outcome::Skipped(Skipped::Kept { at_least: Duration::ZERO }),
        (Some("unconsumed"), _, Some((shard, position))) => {
            Outcome::Skipped(Skipped::Unconsumed { shard, position })
        }
        (_, _, at) => {
            return Err(Error::Answer {
                operation: OPERATION,
                what: format!("{outcome:?}, {bytes:?}, {at:?}"),
            });
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOURS: Duration = Duration::from_secs(3600);
    const SECOND: Duration = Duration::from_secs(1);

    fn look_at(period: Duration, turns_in: Duration) -> Look {
        Look { slot: 2, period, turns_in, has_rows: true, stands: None }
    }

    #[test]
    fn after_a_truncation_the_next_look_is_at_the_next_turn_or_milestone() {
        let early = look_at(6 * HOURS, 5 * HOURS);
        assert_eq!(pause(&early, Outcome::Empty, SECOND), 6 * HOURS / 8);
        let late = look_at(6 * HOURS, SECOND);
        assert_eq!(pause(&late, Outcome::Truncated { bytes: 1 }, SECOND), SECOND + JUST_AFTER);
    }

    #[test]
    fn what_is_in_the_way_is_tried_again_and_never_later_than_the_turn_ends() {
        let look = look_at(6 * HOURS, 20 * SECOND);
        let locked = Outcome::Skipped(Skipped::Locked);
        assert_eq!(pause(&look, locked, SECOND), SECOND);
        assert_eq!(pause(&look, locked, 60 * SECOND), 20 * SECOND + JUST_AFTER);
        let kept = |at_least| Outcome::Skipped(Skipped::Kept { at_least });
        assert_eq!(pause(&look, kept(7 * SECOND), 60 * SECOND), 7 * SECOND + JUST_AFTER);
        assert_eq!(pause(&look, kept(Duration::ZERO), SECOND), SECOND);
    }

    #[test]
    fn no_pause_is_long_enough_to_miss_a_turn_and_none_makes_a_loop_spin() {
        for period in [SECOND, 2 * SECOND, HOURS, 6 * HOURS, 8760 * HOURS] {
            assert!(milestone_every(period) <= period / 4, "{period:?}");
            let policy = retries(period);
            assert!(policy.validate().is_ok() && policy.cap <= period / 4 && policy.cap <= LONGEST_RETRY);
            for outcome in [Outcome::Empty, Outcome::Turned, Outcome::Skipped(Skipped::Locked)] {
                let shortest = pause(&look_at(period, Duration::ZERO), outcome, JUST_AFTER);
                assert!(shortest >= JUST_AFTER, "{period:?} {outcome:?}");
            }
        }
    }

    #[test]
    fn a_turn_that_passed_in_vain_is_remembered_until_the_leaf_is_empty() {
        let mut missed = Missed::default();
        missed.tried(1, Outcome::Skipped(Skipped::Locked));
        missed.tried(1, Outcome::Turned);
        assert_eq!(missed.leaf, Some((1, Skipped::Locked)));
        missed.tried(1, Outcome::Truncated { bytes: 5 });
        assert_eq!(missed.leaf, None);
    }

    #[test]
    fn every_reason_has_its_word() {
        let all = [
            Skipped::Unconsumed { shard: 1, position: 2 },
            Skipped::Kept { at_least: SECOND },
            Skipped::Locked,
            Skipped::Failed,
        ];
        assert_eq!(all.map(Skipped::word), Skipped::WORDS);
    }
}

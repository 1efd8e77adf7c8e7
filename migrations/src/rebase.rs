//! Accepting an outbox that was restored, or replicated, from another cluster: offline, one transaction, all or nothing.
//!
//! A message carries the transaction id of the cluster that it was written in, and a cursor says by ids of that cluster what
//! is published. In another cluster both mean something else, so the relay refuses to start. But they still can be compared
//! with each other, so what was published is known, message by message:
//!
//! ```text
//! positions     1 2 3 4 5 6 7 8 9        p: published by the old cursor   -: not
//! old cursor    p p p - p p - - -
//! new cursor          │ 4 … 9            lowest that waits − 1, at a snapshot of this cluster
//! again                 p p              5 and 6 go twice, and it says so: 2
//! ```
//!
//! **Guarantees.** Nothing that waited is skipped. What goes twice is counted before it happens. Order within a key stays.
//! Nothing that was alive in the old cluster can write here: every generation is raised, the token and the outbox's id are
//! new. Messages keep their ids, so consumers absorb what goes twice.
//!
//! **What is rewritten.** A message whose transaction id this cluster has not had would be taken for a late one when its
//! number comes: it gets the first id there is. In a younger cluster that is nearly every row, in an older one none. Where the
//! position sequence was not carried over (logical replication) and producers have written already, what they wrote lies
//! at positions that the cursors have passed: it is found by its own transaction, and moved behind the rest.
//!
//! **Where the sequence gave out positions again**, or in another order than that of enqueueing (set back; `CACHE`), positions no
//! longer say what came first, and two messages of a shard may have the same one: a page that ends between them hides the second.
//! Transaction ids do not say it either: a transaction may have begun long before it enqueues, on either side of the change. What says it is
//! `created_at`, which the server's clock gives each row as it is inserted: producers of a key follow one another, so within a key it
//! is the order of enqueueing. By it
//!
//! ```text
//! enqueued      1  2  3  4  5 │set back  3  4  5  6
//! key           a  a  b  a  b │          a  b  a  b
//! published     p  p  -  -  - │          -  -  -  -
//! out of turn                 │          x  x  x  x   3 4 5: given out before; 6: after one of its key that moves
//! becomes       1  2  3  4  5 │          7  8  9 10
//! ```
//!
//! a waiting message is *out of turn* when a message that was enqueued before it has its position; when its transaction began after
//! its shard's cursor had passed that position; when an earlier waiting one of its key has a higher position; or when
//! one of its key that was enqueued before it is out of turn. Those get fresh positions above everything, in the order of enqueueing. So do
//! published ones that go again from a position that an earlier one has. What waits and is not out of turn has, in each key, ascending
//! positions below those, and no two have the same: all of it is read once and in order. This is looked for only where something says that the
//! sequence misbehaved, so a clock that was set back disturbs nothing else.
//!
//! **Refused** while a relay lives, a lease runs or a subscription still writes. Producers wait while it works.
//!
//! **If the process dies here:** the server rolls back, within a second or two, and nothing has changed.

use std::fmt;

use sqlx::{AssertSqlSafe, Connection as _, Executor as _, PgConnection};

use crate::{Line, audit};

mod statements;

use statements::Facts;

/// Whether to do it or to say what would be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Do it.
    Apply,
    /// Change nothing and take no lock.
    DryRun,
}

/// What came of it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Outcome {
    /// The outbox belongs to this cluster and nothing in it lies in the future: nothing was changed.
    Unneeded,
    /// What would be done.
    Planned(Report),
    /// What was done.
    Done(Report),
}

/// A rebase in figures.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Report {
    /// Why it was needed.
    pub reasons: Vec<Reason>,
    /// Each shard, in order.
    pub shards: Vec<Shard>,
    /// Messages whose transaction id was replaced.
    pub neutralised: i64,
    /// Messages written here that got another position, because their own was one of the old cluster's.
    pub moved: i64,
    /// Messages that got another position, because theirs had been given out before, or in another order than that of enqueueing.
    pub out_of_turn: i64,
    /// From where to where the next position was raised; none when it was beyond everything.
    pub sequence: Option<(i64, i64)>,
}

/// What a rebase makes of one shard.
#[derive(Debug, Clone, PartialEq, Eq, sqlx::FromRow)]
#[non_exhaustive]
pub struct Shard {
    /// Its number.
    pub shard: i16,
    /// The position of its old cursor; none when it came without one.
    pub before: Option<i64>,
    /// That of the new one.
    pub after: i64,
    /// Messages that the old cursor does not cover.
    pub waiting: i64,
    /// Messages that it covers and that will be published once more.
    pub repeats: i64,
}

impl Report {
    /// How many messages may be published twice.
    #[must_use]
    pub fn repeats(&self) -> i64 {
        self.shards.iter().map(|shard| shard.repeats).sum()
    }

    /// How many messages wait to be published.
    #[must_use]
    pub fn waiting(&self) -> i64 {
        self.shards.iter().map(|shard| shard.waiting).sum()
    }
}

/// Something that says that an outbox was restored.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Reason {
    /// It was made, or last rebased, in another cluster.
    OtherCluster {
        /// The system identifier of that one.
        from: i64,
        /// The system identifier of this one.
        to: i64,
    },
    /// Messages name transactions that are still to come.
    FutureMessages,
    /// Cursors name transactions that are still to come.
    FutureCursors,
    /// The sequence would give out positions that are taken.
    SequenceBehind {
        /// What it would give out next.
        next: i64,
        /// The highest position in use.
        highest: i64,
    },
    /// The sequence did not give out one number after the other: messages may lie below cursors.
    SequenceAltered,
    /// Messages were enqueued at positions that cursors had passed: the sequence was set back, and may be ahead again.
    PassedMessages,
    /// Two messages have the same position, and the later one waits: the sequence was set back, and may be ahead again.
    GivenOutTwice,
    /// A relay found something and stopped, and it was not rebased since: mended by hand or not, it may have left messages out of turn.
    Noticed {
        /// What it found.
        found: String,
    },
    /// Shards came without a cursor: nobody knows what of them is published.
    NoCursor {
        /// How many.
        shards: i32,
    },
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::OtherCluster { from, to } => {
                write!(f, "the outbox comes from cluster {from} and is in cluster {to}")
            }
            Self::FutureMessages => {
                f.write_str("messages carry transaction ids that this cluster has not reached")
            }
            Self::FutureCursors => {
                f.write_str("cursors carry transaction ids that this cluster has not reached")
            }
            Self::SequenceBehind { next, highest } => {
                write!(f, "the next position would be {next}, but positions up to {highest} are taken")
            }
            Self::SequenceAltered => f.write_str(
                "the sequence of positions was altered: it did not give out one number after the other",
            ),
            Self::PassedMessages => f.write_str(
                "messages were enqueued at positions that cursors had passed: the sequence of positions was set back",
            ),
            Self::GivenOutTwice => {
                f.write_str("positions were given out twice: the sequence of positions was set back")
            }
            Self::Noticed { found } => write!(f, "a relay stopped and wrote down: {found}"),
            Self::NoCursor { shards } => {
                write!(f, "{shards} shards have no cursor: what of them was published is not known")
            }
        }
    }
}

/// Why an outbox could not be rebased. Nothing has been changed then.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A relay lives, or holds a lease that has not run out.
    #[error(
        "the outbox is in use: {who}; stop the relays, wait until the last lease has run out, and run this again"
    )]
    Living {
        /// Each relay, what it holds and until when.
        who: String,
    },
    /// A subscription would go on writing the other cluster's rows.
    #[error(
        "the subscription {names} still writes into this outbox; when it has caught up, end it (ALTER SUBSCRIPTION … DISABLE, or DROP SUBSCRIPTION) and run this again"
    )]
    Subscribed {
        /// Its name, or names.
        names: String,
    },
    /// Somebody has the outbox open.
    #[error(
        "a transaction that writes to the outbox did not end within 3 seconds; find it in pg_stat_activity or pg_prepared_xacts, let it end, and run this again"
    )]
    Busy {
        /// What Postgres said.
        #[source]
        source: sqlx::Error,
    },
    /// There is no row of settings.
    #[error(
        "outbox.settings has no row; copy it from the old database, or restore all tables of schema outbox"
    )]
    NoSettings,
    /// The server is a standby.
    #[error("the database is in recovery (a standby); give the address of the primary")]
    InRecovery,
    /// The role is not the owner.
    #[error(
        "the database role may not rebase the outbox; use the role that owns it, as for `baton migrate outbox`"
    )]
    Denied {
        /// What Postgres said.
        #[source]
        source: sqlx::Error,
    },
    /// A statement failed.
    #[error("cannot rebase the outbox")]
    Failed {
        /// What went wrong.
        #[source]
        source: sqlx::Error,
    },
}

impl From<sqlx::Error> for Error {
    fn from(source: sqlx::Error) -> Self {
        let code = source.as_database_error().and_then(|e| e.code()).unwrap_or_default().into_owned();
        match code.as_str() {
            "42501" => Self::Denied { source },
            "55P03" => Self::Busy { source },
            _ => Self::Failed { source },
        }
    }
}

/// Accepts a restored outbox, or says what that would do. The connection's role must own the outbox.
///
/// # Errors
///
/// When a relay lives, when somebody has the outbox open, or when the role may not. Nothing has been changed then.
///
/// # Cancel safety
///
/// One transaction: a dropped future changes nothing. The connection must be closed then.
pub async fn rebase(connection: &mut PgConnection, mode: Mode) -> Result<Outcome, Error> {
    let begin = match mode {
        Mode::Apply => "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE",
        // One snapshot for all statements, since nobody is kept out.
        Mode::DryRun => "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY",
    };
    let in_recovery: bool =
        sqlx::query_scalar("SELECT pg_is_in_recovery()").fetch_one(&mut *connection).await?;
    if in_recovery {
        return Err(Error::InRecovery);
    }
    let mut tx = connection.begin_with(begin).await?;
    // A pull of the plug, or Ctrl-C, must not leave a statement behind that keeps producers waiting for minutes.
    tx.execute("SET LOCAL client_connection_check_interval = '1s'; SET LOCAL lock_timeout = '3s'; SET LOCAL jit = off").await?;
    // Once without the lock, so that an outbox in use is told so without anybody having to wait.
    refuse_if_in_use(&mut tx).await?;
    if mode == Mode::Apply {
        statements::lock(&mut tx).await?;
        refuse_if_in_use(&mut tx).await?;
    }
    let facts = statements::facts(&mut tx).await?.ok_or(Error::NoSettings)?;
    let reasons = reasons(&facts);
    if reasons.is_empty() {
        return Ok(Outcome::Unneeded);
    }
    let plan = statements::plan(&mut tx, &facts).await?;
    let report = Report {
        reasons,
        shards: plan.iter().map(|planned| planned.shard.clone()).collect(),
        neutralised: plan.iter().map(|planned| planned.future).sum(),
        moved: plan.iter().map(|planned| planned.moved).sum(),
        out_of_turn: plan.iter().map(|planned| planned.out_of_turn).sum(),
        sequence: facts.is_behind().then_some((facts.next_position, facts.highest_position + 1)),
    };
    if mode == Mode::DryRun {
        return Ok(Outcome::Planned(report));
    }
    apply(&mut tx, &facts, &report).await?;
    tx.commit().await?;
    Ok(Outcome::Done(report))
}

async fn refuse_if_in_use(tx: &mut PgConnection) -> Result<(), Error> {
    let living = statements::living(tx).await?;
    if !living.is_empty() {
        let each = living.into_iter().map(|(owner, until, shards)| match shards {
            0 => format!("relay {owner} lives until {until} at least"),
            n => format!("relay {owner} holds {n} shards until {until}"),
        });
        return Err(Error::Living { who: each.collect::<Vec<_>>().join(", ") });
    }
    let subscriptions = statements::subscriptions(tx).await?;
    if !subscriptions.is_empty() {
        return Err(Error::Subscribed { names: subscriptions.join(", ") });
    }
    Ok(())
}

fn reasons(facts: &Facts) -> Vec<Reason> {
    let (from, to) = (facts.stored_cluster, facts.this_cluster);
    let (next, highest) = (facts.next_position, facts.highest_position);
    [
        (from != to).then_some(Reason::OtherCluster { from, to }),
        facts.future_messages.then_some(Reason::FutureMessages),
        facts.future_cursors.then_some(Reason::FutureCursors),
        facts.is_behind().then_some(Reason::SequenceBehind { next, highest }),
        facts.altered_sequence.then_some(Reason::SequenceAltered),
        facts.passed_messages.then_some(Reason::PassedMessages),
        facts.given_out_twice.then_some(Reason::GivenOutTwice),
        facts.noticed.clone().map(|found| Reason::Noticed { found }),
        (facts.without_cursor > 0).then_some(Reason::NoCursor { shards: facts.without_cursor }),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// All that is written, in the order in which each step leaves what the next one needs.
async fn apply(tx: &mut PgConnection, facts: &Facts, report: &Report) -> Result<(), Error> {
    if facts.altered_sequence {
        // Other sessions drop the numbers they hold in reserve.
        tx.execute(include_str!("../queries/rebase_sequence_mend.sql")).await?;
    }
    if let Some((_, next)) = report.sequence {
        let sql = include_str!("../queries/rebase_sequence.sql").replace("{position}", &next.to_string());
        tx.execute(AssertSqlSafe(sql)).await?;
    }
    if report.moved + report.out_of_turn > 0 {
        statements::move_messages(tx, facts).await?;
    }
    statements::neutralise(tx, &facts.snapshot).await?;
    let shards: Vec<i16> = report.shards.iter().map(|shard| shard.shard).collect();
    let positions: Vec<i64> = report.shards.iter().map(|shard| shard.after).collect();
    statements::take_leases(tx, &shards).await?;
    statements::write_cursors(tx, &shards, &positions, &facts.snapshot).await?;
    let outbox_id = statements::settle(tx).await?;
    audit::mend_sequence(tx, Line::Outbox).await?;
    statements::audit_write(tx, facts, report, outbox_id).await?;
    Ok(())
}

//! Guards: what an administrator or a restore can do to an outbox that would lose or reorder its messages without a word.
//! A relay refuses to work on such an outbox and says what was found and what mends it.
//!
//! ```text
//!  start, each session ──▶ facts ──▶ judge ──▶ none: go on
//!  every 5 s of a session ─┘           └─────▶ some: at start the process ends with 1; later the session ends, publishing
//!                                              stops, and the next session judges anew until it is mended
//! ```
//!
//! The rules, each with what would happen without it:
//!
//! * **The sequence of positions hands out one number after the other.** With `CACHE 100` a session goes on using low
//!   numbers while others use higher ones: a message would get a position that its shard's cursor has passed, in a
//!   transaction that the cursor has never seen running. Nothing would ever look for it.
//! * **It is ahead of every position in use.** Else new messages come to lie below cursors, with the same end, or before
//!   earlier ones of their key.
//! * **No message was enqueued at a position that its shard's cursor had passed.** That is what either of these leaves behind
//!   once the sequence is sound again: nothing looks for such a message, and the next advance hides that there was one.
//! * **The outbox belongs to this cluster, and no transaction that it names is still to come.** In another cluster the
//!   snapshots of cursors mean nothing: what they call consumed is what happens to have a low id.
//!
//! A running relay stops for each of them rather than going on with a warning: while it stands still its durable cursors
//! stand still too, and `baton rebase` finds what was enqueued below them; if it went on, they would pass it.
//! What one relay found it writes down (`outbox.audit`), and it stands for all of them until a rebase, though the sequence be ahead
//! again by itself or by hand meanwhile. Only what was enqueued too low and hidden by an advance between the change and the next
//! look is not found: that is why it looks every few seconds.
//!
//! What else a start refuses is decided elsewhere: a standby and missing migrations in [`database`](crate::database), a
//! finite `message.timeout.ms` in [`settings`](crate::settings).

use std::fmt;
use std::time::Duration;

use sqlx::postgres::PgConnection;

use crate::database::{Error, answer, told};

/// How often a session looks again.
pub(crate) const LOOK_EVERY: Duration = Duration::from_secs(5);

/// What the guards judge by.
#[derive(Debug, Clone, PartialEq, Eq, sqlx::FromRow)]
pub(crate) struct Facts {
    pub cache: i64,
    pub increment: i64,
    pub cycle: bool,
    /// The position that the sequence gives out next.
    pub next_position: i64,
    /// The transaction id that the cluster gives out next.
    pub next_xid: i64,
    /// A message's position that the sequence has not given out: the highest.
    pub message_position: Option<i64>,
    /// The highest position of a cursor.
    pub cursor_position: Option<i64>,
    /// The highest of the transactions of messages that may be still to come.
    pub message_xid: Option<i64>,
    /// The highest transaction that a cursor names.
    pub cursor_xid: Option<i64>,
    /// A position at or below its shard's cursor that was taken by a transaction which the cursor says is not there.
    pub passed_position: Option<i64>,
    /// What a relay found and wrote down, if nobody has rebased since.
    pub noticed: Option<String>,
    /// The last rebase in the audit, or 0.
    pub rebased: i64,
}

/// What was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Violation {
    /// The sequence does not hand out one number after the other; its settings, as `ALTER SEQUENCE` names them.
    Sequence(String),
    /// The sequence gives out positions that are taken.
    Behind {
        /// What it gives out next.
        next: i64,
        /// A message or a cursor.
        holder: &'static str,
        /// The highest position in use.
        taken: i64,
    },
    /// A message got a position that its shard's cursor had passed: the sequence was behind, and is not any more.
    Passed {
        /// The highest that was found.
        position: i64,
    },
    /// A relay found something that cannot be seen any more, and it was not rebased since.
    Noticed(String),
    /// The database was made in another cluster.
    Cluster {
        /// That of `outbox.settings`.
        stored: i64,
        /// That of the server.
        found: i64,
    },
    /// The outbox names a transaction that is still to come.
    Future {
        /// A message or a cursor.
        holder: &'static str,
        /// The transaction.
        xid: i64,
        /// The one that the cluster gives out next.
        next: i64,
    },
}

impl Violation {
    /// What is wrong, and what would come of it.
    pub(crate) fn found(&self) -> String {
        match self {
            Self::Sequence(settings) => format!(
                "the sequence outbox.message_position_seq has {settings}: messages would get positions that cursors have passed, and \
                 never be published"
            ),
            Self::Behind { next, holder, taken } => format!(
                "the sequence outbox.message_position_seq gives out {next} next, but {holder} is at {taken}: messages enqueued now \
                 would be skipped, or overtake earlier ones of their key"
            ),
            Self::Passed { position } => format!(
                "the message at {position} was enqueued after its shard's cursor had passed that position, so it is not looked for: \
                 the sequence outbox.message_position_seq was set back, or had CACHE"
            ),
            Self::Noticed(found) => format!(
                "a relay stopped because {found}; this cannot be seen any more, and what it left behind is not mended"
            ),
            Self::Cluster { stored, found } => format!(
                "this outbox belongs to the cluster {stored}, and the server is the cluster {found}: the database was restored or \
                 copied, and what its cursors call published means nothing here"
            ),
            Self::Future { holder, xid, next } => format!(
                "{holder} names the transaction {xid}, and this cluster has only come to {next}: the database was restored or copied, \
                 and what its cursors call published means nothing here"
            ),
        }
    }

    /// What mends it.
    pub(crate) fn advice(&self) -> String {
        match self {
            // Not by hand: what was enqueued meanwhile lies below cursors, and once the sequence looks sound nothing says so.
            Self::Sequence(_) | Self::Behind { .. } | Self::Passed { .. } | Self::Noticed(_) => {
                "stop the relays and run `baton rebase`, which mends the sequence and finds what was enqueued meanwhile"
                    .to_owned()
            }
            Self::Cluster { .. } | Self::Future { .. } => {
                "stop the relays and run `baton rebase`, which says what may be published twice".to_owned()
            }
        }
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}; {}", self.found(), self.advice())
    }
}

/// Everything that was found at once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violations(pub(crate) Vec<Violation>);

impl fmt::Display for Violations {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all: Vec<String> = self.0.iter().map(ToString::to_string).collect();
        f.write_str(&all.join("; and "))
    }
}

impl std::error::Error for Violations {}

/// The rules.
pub(crate) fn judge(facts: &Facts) -> Vec<Violation> {
    let mut found = Vec::new();
    let next = facts.next_xid;
    // A cursor's bounds are at most one beyond what has begun; a message's own transaction has begun.
    let cursor = facts.cursor_xid.filter(|xid| *xid > next).map(|xid| ("a cursor", xid));
    let message = facts.message_xid.filter(|xid| *xid >= next).map(|xid| ("a message", xid));
    found.extend(cursor.or(message).map(|(holder, xid)| Violation::Future { holder, xid, next }));
    let settings: Vec<String> = [
        (facts.cache != 1).then(|| format!("CACHE {}", facts.cache)),
        (facts.increment != 1).then(|| format!("INCREMENT BY {}", facts.increment)),
        facts.cycle.then(|| "CYCLE".to_owned()),
    ]
    .into_iter()
    .flatten()
    .collect();
    if !settings.is_empty() {
        found.push(Violation::Sequence(settings.join(", ")));
    }
    let taken = [("a message", facts.message_position), ("a cursor", facts.cursor_position)];
    let highest = taken.into_iter().filter_map(|(holder, at)| Some((holder, at?))).max_by_key(|(_, at)| *at);
    if let Some((holder, taken)) = highest
        && facts.next_position <= taken
    {
        found.push(Violation::Behind { next: facts.next_position, holder, taken });
    }
    found.extend(facts.passed_position.map(|position| Violation::Passed { position }));
    if found.is_empty() {
        found.extend(facts.noticed.clone().map(Violation::Noticed));
    }
    found
}

/// Whether the outbox belongs to the cluster that answers.
pub(crate) fn judge_cluster(stored: i64, found: i64) -> Option<Violation> {
    (stored != found).then_some(Violation::Cluster { stored, found })
}

/// Reads the facts.
pub(crate) async fn facts(connection: &mut PgConnection, within: Duration) -> Result<Facts, Error> {
    let asked = sqlx::query_as(include_str!("../queries/guard_facts.sql")).fetch_one(connection);
    answer("looking at what guards judge by", within, asked).await
}

/// The identifier of the cluster that answers.
pub(crate) async fn cluster(connection: &mut PgConnection, within: Duration) -> Result<i64, Error> {
    let asked = sqlx::query_scalar(include_str!("../queries/cluster_read.sql")).fetch_one(connection);
    answer("asking which cluster this is", within, asked).await
}

/// Refuses an outbox on which a relay must not work; `earlier` was found by other means.
pub(crate) async fn check(
    connection: &mut PgConnection,
    within: Duration,
    earlier: Option<Violation>,
) -> Result<(), Error> {
    let facts = facts(connection, within).await?;
    let judged = judge(&facts);
    // What was found by other means stands by itself, and may be older than a rebase.
    let words: Vec<String> = judged.iter().map(Violation::found).collect();
    let found: Vec<Violation> = earlier.into_iter().chain(judged).collect();
    if found.is_empty() {
        return Ok(());
    }
    if facts.noticed.is_none()
        && !words.is_empty()
        && let Err(error) = write_down(connection, within, &words.join("; and "), facts.rebased).await
    {
        // It refuses all the same, and so does the next one that sees it.
        tracing::warn!("what a guard found could not be written down: {}", told(&error));
    }
    Err(Error::Guards(Violations(found)))
}

async fn write_down(
    connection: &mut PgConnection,
    within: Duration,
    found: &str,
    rebased: i64,
) -> Result<(), Error> {
    let write =
        sqlx::query(include_str!("../queries/guard_write.sql")).bind(found).bind(rebased).execute(connection);
    answer("writing down what a guard found", within, write).await.map(drop)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Of an outbox that nobody has touched: the furthest message and cursor are exactly one below what comes next.
    fn sound() -> Facts {
        Facts {
            cache: 1,
            increment: 1,
            cycle: false,
            next_position: 101,
            next_xid: 1_000,
            message_position: None,
            cursor_position: Some(100),
            message_xid: Some(999),
            cursor_xid: Some(1_000),
            passed_position: None,
            rebased: 0,
            noticed: None,
        }
    }

    #[test]
    fn a_sound_outbox_passes_also_when_everything_is_as_far_as_it_can_be() {
        assert_eq!(judge(&sound()), []);
        let empty = Facts { next_position: 1, cursor_position: Some(0), message_xid: None, ..sound() };
        assert_eq!(judge(&empty), []);
        assert_eq!(judge_cluster(7, 7), None);
    }

    #[test]
    fn each_violation_says_what_was_found_and_what_mends_it() {
        let says = |facts: Facts, words: &[&str]| {
            let found = judge(&facts);
            assert_eq!(found.len(), 1, "{found:?}");
            let text = found[0].to_string();
            assert!(words.iter().all(|word| text.contains(word)), "{words:?}: {text}");
        };
        says(Facts { cache: 100, ..sound() }, &["has CACHE 100:", "`baton rebase`"]);
        says(Facts { increment: 2, cycle: true, ..sound() }, &["INCREMENT BY 2, CYCLE:", "`baton rebase`"]);
        says(Facts { next_position: 100, ..sound() }, &["100 next", "a cursor is at 100", "`baton rebase`"]);
        says(Facts { message_position: Some(150), ..sound() }, &["a message is at 150", "`baton rebase`"]);
        says(Facts { cursor_xid: Some(1_001), ..sound() }, &["a cursor names", "1001", "`baton rebase`"]);
        says(
            Facts { message_xid: Some(1_000), ..sound() },
            &["a message names", "transaction 1000", "`baton rebase`"],
        );
        says(
            Facts { passed_position: Some(90), ..sound() },
            &["message at 90", "cursor had passed", "`baton rebase`"],
        );
        says(
            Facts { noticed: Some("it was so".into()), ..sound() },
            &["because it was so;", "`baton rebase`"],
        );
        let other = judge_cluster(7, 8).unwrap().to_string();
        assert!(other.contains("cluster 7") && other.contains("`baton rebase`"), "{other}");
    }

    #[test]
    fn everything_that_was_found_is_said_at_once() {
        let found = Violations(judge(&Facts { cache: 100, next_position: 1, ..sound() })).to_string();
        assert!(
            found.contains("CACHE 100") && found.contains("; and ") && found.contains("gives out 1 next"),
            "{found}"
        );
    }

    proptest! {
        #[test]
        fn what_the_statements_of_a_mended_violation_do_leaves_none(cache in 2_i64..1_000, taken in 101_i64..10_000) {
            let facts = Facts { cache, message_position: Some(taken), ..sound() };
            prop_assert_eq!(judge(&facts).len(), 2);
            let mended = Facts { cache: 1, next_position: taken + 1, message_position: None, ..facts };
            prop_assert_eq!(judge(&mended), []);
        }
    }
}

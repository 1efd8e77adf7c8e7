//! Many pieces of work in one transaction: all that are new are applied, or none is.
//!
//! ```text
//! claim, one statement for all ─┬─ new ─────────────────▶ action, once for all of them ─┬─ done ──▶ outcomes + marks ▶ COMMIT
//!                               │                                                       └─ failed ▶ ROLLBACK: no trace
//!                               ├─ again in this batch ─▶ as the first of its key ends, or Conflict
//!                               └─ done │ dead │ held │ left behind │ another payload: answered alone, nothing runs for it
//! ```
//!
//! Each item is answered as it would be alone, one after the other in the order given. Keys are claimed in the order of their
//! bytes, whatever that order is, so that batches which overlap wait for each other and never in a circle.
//!
//! *On failure* nothing is told of single items: whoever brought the batch brings each alone, which finds the one to blame.

use std::collections::HashMap;
use std::panic::AssertUnwindSafe;

use futures_util::FutureExt;
use serde::Serialize;
use sqlx::{Postgres, Transaction};

use super::session::Session;
use super::statements::{self, Claim, Completed, Retaken};
use super::{Error, Inbox, Once, Work, is_actions_fault, met, panic_message};
use crate::{Failure, Outcome};

/// One piece of work of a batch, as [`Inbox::run_once`] takes it.
#[derive(Debug, Clone, Copy)]
pub struct Item<'a> {
    /// Separates keys that mean different things; at most 1,280 bytes, may be empty.
    pub scope: &'a str,
    /// The idempotency key, 1 byte to 1 KiB.
    pub key: &'a str,
    /// Its exact bytes are what makes a second item the same work.
    pub payload: &'a [u8],
}

/// An item that nobody has applied: the action is to apply it.
#[derive(Debug)]
pub struct Fresh {
    index: usize,
    outcome: Option<Outcome>,
}

impl Fresh {
    /// Which item of the batch it is, from 0.
    #[must_use]
    pub fn index(&self) -> usize {
        self.index
    }

    /// Stores an outcome with its mark, as JSON. Without one it has none.
    ///
    /// # Errors
    ///
    /// When it cannot be written as JSON.
    pub fn set_outcome<T: Serialize + ?Sized>(&mut self, outcome: &T) -> Result<(), serde_json::Error> {
        self.outcome = Some(Outcome::json(outcome)?);
        Ok(())
    }
}

/// What became of an item: as [`Inbox::run_once`] would have answered. An error is one of that item alone.
pub type Answer = Result<Once, Error>;

/// What [`Inbox::run_batch`] found or did.
#[derive(Debug)]
#[non_exhaustive]
pub enum Batch {
    /// Everything that was fresh is applied and committed. One answer an item, in their order; none is [`Once::Failed`].
    Settled(Vec<Answer>),
    /// The action failed: what it did through the transaction is rolled back, and nothing is marked. Bring the items one by
    /// one to find which it was.
    Failed(Failure),
}

/// What the claim of a batch met, by item.
enum Met {
    Fresh,
    /// The same work as this earlier item, which is fresh.
    Again(usize),
    Settled(Answer),
}

impl Inbox {
    /// Runs `action` once for all the items that nobody has applied, in one transaction, which also stores their outcomes: for
    /// imports and for whatever else comes by the hundred. Either everything the action did is committed with every mark, or
    /// nothing is.
    ///
    /// The action is given the fresh items in the order of `items`; a key that comes again within the batch is given once. It
    /// is not called where nothing is fresh. Items that are held, left behind, or known with another payload do not hold up the
    /// rest.
    ///
    /// ```no_run
    /// # use baton_consumer::inbox::{Batch, Inbox, Item};
    /// # async fn example(inbox: Inbox, lines: Vec<(String, String)>) -> Result<(), baton_consumer::inbox::Error> {
    /// let items: Vec<Item<'_>> =
    ///     lines.iter().map(|(id, line)| Item { scope: "import", key: id, payload: line.as_bytes() }).collect();
    /// let batch = inbox
    ///     .run_batch(&items, async |fresh, tx| {
    ///         for item in fresh {
    ///             let (id, line) = &lines[item.index()];
    ///             sqlx::query("INSERT INTO line (id, text) VALUES ($1, $2)").bind(id).bind(line).execute(&mut **tx).await?;
    ///         }
    ///         Ok(())
    ///     })
    ///     .await?;
    /// if let Batch::Failed(failure) = batch {
    ///     println!("one by one, then: {failure}");
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error`]: nothing was applied, but for [`Error::Commit`] and [`Error::Fenced`], where it may have been. Call again
    /// with the same items. What is wrong with one item alone is in its answer, but for [`Error::Text`].
    ///
    /// # Cancel safety
    ///
    /// Dropped half-way, its connection is closed and the server rolls back, unless COMMIT was already on its way.
    pub async fn run_batch<A>(&self, items: &[Item<'_>], action: A) -> Result<Batch, Error>
    where
        A: AsyncFnOnce(&mut [Fresh], &mut Transaction<'_, Postgres>) -> Result<(), Failure>,
    {
        let works: Vec<Work> = items
            .iter()
            .map(|item| Work::brought(item.scope, item.key, item.payload, self.compare))
            .collect::<Result<_, _>>()?;
        let works: Vec<&Work> = works.iter().collect();
        match self.settle_batch(&works, async |fresh, _, tx| action(fresh, tx).await).await {
            Err(Error::Commit { key, source }) => self.look_up_batch(&works, key, source).await,
            settled => settled,
        }
    }

    /// Claims, runs and completes a batch in one transaction. The action is also given the answers so far, by item, because who
    /// keeps an order of its own cannot apply what comes after an item that is held; none is there for what is fresh.
    pub(crate) async fn settle_batch<A>(&self, works: &[&Work], action: A) -> Result<Batch, Error>
    where
        A: AsyncFnOnce(
            &mut [Fresh],
            &[Option<Answer>],
            &mut Transaction<'_, Postgres>,
        ) -> Result<(), Failure>,
    {
        if works.is_empty() {
            return Ok(Batch::Settled(Vec::new()));
        }
        let mut session = Session::follow(&self.pool, &self.kept).await?;
        let mut tx = session.begin(&self.begin).await?;
        let claimed = claim(&mut tx, self, works).await?;
        let mut fresh: Vec<Fresh> = Vec::new();
        let mut again: Vec<(usize, usize)> = Vec::new();
        let mut answers: Vec<Option<Answer>> = Vec::with_capacity(works.len());
        for (index, met) in claimed.into_iter().enumerate() {
            answers.push(match met {
                Met::Settled(answer) => Some(answer),
                Met::Fresh => {
                    fresh.push(Fresh { index, outcome: None });
                    None
                }
                Met::Again(first) => {
                    again.push((index, first));
                    None
                }
            });
        }
        if fresh.is_empty() {
            let rolled_back = tx.rollback().await;
            session.ended(rolled_back);
            return Ok(Batch::Settled(answers.into_iter().flatten().collect()));
        }
        let acted = AssertUnwindSafe(async { action(&mut fresh, &answers, &mut tx).await });
        match acted.catch_unwind().await {
            Ok(Ok(())) => {
                let marks: Vec<(&Work, Option<&Outcome>)> =
                    fresh.iter().map(|fresh| (works[fresh.index], fresh.outcome.as_ref())).collect();
                match statements::complete_batch(&mut tx, &self.consumer, &marks).await {
                    Ok(Completed::Done) => {}
                    Ok(Completed::TooOld) => {
                        let rolled_back = tx.rollback().await;
                        session.ended(rolled_back);
                        return Ok(Batch::Failed(Failure::permanent(
                            "one of the batch is as old as what was purged",
                        )));
                    }
                    Err(error) => {
                        let rolled_back = tx.rollback().await;
                        session.ended(rolled_back);
                        return failed_or(error);
                    }
                }
                if let Err(source) = tx.commit().await {
                    return failed_or(Error::Commit { key: statements::several(works), source });
                }
                session.ended(Ok(()));
                Ok(Batch::Settled(answered(answers, fresh, &again)))
            }
            Ok(Err(failure)) => {
                let rolled_back = tx.rollback().await;
                session.ended(rolled_back);
                Ok(Batch::Failed(failure))
            }
            // The panic may have left the connection in the middle of a message: it is closed, not kept.
            Err(panic) => Ok(Batch::Failed(Failure::Panicked(panic_message(panic.as_ref())))),
        }
    }

    /// After a COMMIT without a reply the rows decide, as [`look_up`](Self::look_up) has it.
    async fn look_up_batch(&self, works: &[&Work], key: String, lost: sqlx::Error) -> Result<Batch, Error> {
        let unknown = |source| Error::Commit { key, source };
        let Ok(mut session) = Session::open(&self.pool).await else { return Err(unknown(lost)) };
        let Ok(mut tx) = session.begin(&self.begin).await else { return Err(unknown(lost)) };
        let claimed = claim(&mut tx, self, works).await;
        let rolled_back = tx.rollback().await;
        session.ended(rolled_back);
        let settled = |met| match met {
            Met::Settled(answer) => Some(answer),
            Met::Fresh | Met::Again(_) => None,
        };
        let answers = claimed.ok().and_then(|claimed| claimed.into_iter().map(settled).collect());
        answers.map(Batch::Settled).ok_or_else(|| unknown(lost))
    }
}

/// Claims all of them, and asks again for those of which the statement had nothing to say.
async fn claim(
    tx: &mut Transaction<'_, Postgres>,
    inbox: &Inbox,
    works: &[&Work],
) -> Result<Vec<Met>, Error> {
    let mut met: Vec<Met> = works.iter().map(|_| Met::Fresh).collect();
    let firsts = firsts(works);
    let mut asked: Vec<usize> = (0..works.len()).collect();
    let mut left_behind = Vec::new();
    while !asked.is_empty() {
        let mut unanswered = Vec::new();
        for (index, claim) in statements::claim_batch(tx, inbox, works, &firsts, &asked).await? {
            let Some(claim) = claim else {
                unanswered.push(index);
                continue;
            };
            met[index] = match claim {
                // Claimed in this statement, by the first of its key.
                Ok(Claim::Ours) => Met::Again(firsts[index]),
                Ok(Claim::InProgress { is_left_behind: true }) => {
                    left_behind.push(index);
                    continue;
                }
                Ok(claim) => self::met(claim).map_or(Met::Fresh, |once| Met::Settled(Ok(once))),
                Err(error) => Met::Settled(Err(error)),
            };
        }
        asked = unanswered;
    }
    // In the order in which keys are claimed, and of one key the first first.
    left_behind.sort_unstable_by_key(|&index| (&works[index].scope, &works[index].key, index));
    for index in left_behind {
        let first = firsts[index];
        met[index] = if first != index && matches!(met[first], Met::Fresh) {
            Met::Again(first)
        } else if first == index && statements::retake(tx, inbox, works[index]).await? == Retaken::Yes {
            Met::Fresh
        } else {
            Met::Settled(Err(Error::Leased { key: works[index].key.clone() }))
        };
    }
    Ok(met)
}

/// Of each item the first one in the batch with its scope and key.
fn firsts(works: &[&Work]) -> Vec<usize> {
    let mut seen = HashMap::with_capacity(works.len());
    let keyed = works.iter().map(|work| (work.scope.as_str(), work.key.as_str())).enumerate();
    keyed.map(|(index, key)| *seen.entry(key).or_insert(index)).collect()
}

/// Every item's answer, once the transaction is committed.
fn answered(mut answers: Vec<Option<Answer>>, fresh: Vec<Fresh>, again: &[(usize, usize)]) -> Vec<Answer> {
    for Fresh { index, outcome } in fresh {
        answers[index] = Some(Ok(Once::Fresh(outcome)));
    }
    for &(index, first) in again {
        if let Some(Ok(Once::Fresh(outcome))) = &answers[first] {
            answers[index] = Some(Ok(Once::Duplicate(outcome.clone())));
        }
    }
    answers.into_iter().flatten().collect()
}

/// As a single action's, see [`is_actions_fault`].
fn failed_or(error: Error) -> Result<Batch, Error> {
    is_actions_fault(error).map(|source| Batch::Failed(Failure::permanent(source)))
}

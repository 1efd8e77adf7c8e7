//! What a cell came to, by the ledger.

use std::collections::BTreeMap;
use std::fmt;

use baton_tests::Outcome;
use baton_tests::ledger::{self, Seen};
use baton_tests::service::{Asked, Entry};

use super::Owning;
use super::case::Case;

/// What the table shows of a cell, and everything that was not as it must be.
#[derive(Debug, Default)]
pub(crate) struct Score {
    pub(super) runs: usize,
    /// Faults before the offset was committed.
    pub(super) uncommitted: usize,
    /// Calls once more for a key.
    repeated: usize,
    pub(crate) lost: usize,
    /// Effects once more; calls once more without a look between.
    pub(crate) double: usize,
    /// With another content than was sent.
    pub(crate) conflicting: usize,
    /// Offsets committed before their effects.
    pub(crate) early: usize,
    /// Rows changed by a stale owner.
    pub(crate) stale: usize,
    pub(crate) wrong: Vec<String>,
}

impl fmt::Display for Score {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { runs, uncommitted, repeated, lost, double, .. } = self;
        write!(f, "{runs} / {repeated} / {lost} / {double} ({uncommitted})")
    }
}

impl Score {
    pub(super) fn add(&mut self, what: &str, ids: &[String]) {
        if !ids.is_empty() {
            self.wrong.push(format!("{what}: {}", ids.join(", ")));
        }
    }
}

pub(super) async fn of(case: &Case) -> Outcome<Score> {
    let mut score = Score::default();
    let journal = case.service.journal();
    let seen = match case.cell.owning {
        Owning::Transactional => effects(case).await?,
        Owning::Leased => calls(&journal),
    };
    let findings = ledger::judge(&case.sent, &seen);
    score.lost = findings.lost.len();
    score.conflicting = findings.conflicting.len();
    match case.cell.owning {
        Owning::Transactional => {
            score.double = findings.repeated.len();
            if !findings.effects_are_right() {
                score.wrong.push(findings.to_string());
            }
        }
        Owning::Leased => {
            score.repeated = findings.repeated.len();
            let unasked = repeated_unasked(&journal);
            score.double = unasked.len();
            if !findings.wire_is_right() {
                score.wrong.push(findings.to_string());
            }
            if !unasked.is_empty() {
                let of_them = journal.iter().filter(|entry| unasked.contains(&entry.key));
                let story: Vec<String> = of_them
                    .map(|entry| format!("{} {:?} by {}", entry.key, entry.asked, entry.who))
                    .collect();
                score.wrong.push(format!("called again without a look between: {}", story.join(", ")));
            }
        }
    }
    score.wrong.extend(rows(case).await?);
    let letters = case.site.kafka().records(&format!("{}.effects.dlt", case.topic)).await?;
    let causes: Vec<&str> = letters.iter().filter_map(|letter| letter.header("dlt-cause")).collect();
    if causes != vec!["conflict"; case.forged] {
        score.wrong.push(format!("dead letters {causes:?} of {} forged records", case.forged));
    }
    Ok(score)
}

async fn effects(case: &Case) -> Outcome<Vec<Seen>> {
    let rows: Vec<(String, Vec<u8>, i32)> =
        sqlx::query_as("SELECT key, content, partition FROM effect ORDER BY n")
            .fetch_all(case.site.pool())
            .await?;
    let seen =
        |(id, content, partition): (String, Vec<u8>, i32)| Seen { id, content, lane: partition.to_string() };
    Ok(rows.into_iter().map(seen).collect())
}

fn calls(journal: &[Entry]) -> Vec<Seen> {
    let calls = journal.iter().filter(|entry| entry.asked == Asked::Call);
    calls
        .map(|entry| Seen { id: entry.key.clone(), lane: entry.lane.clone(), content: entry.content.clone() })
        .collect()
}

/// The keys whose call was repeated although nobody had asked after the one before.
fn repeated_unasked(journal: &[Entry]) -> Vec<String> {
    let mut last: BTreeMap<&str, Asked> = BTreeMap::new();
    let mut unasked = Vec::new();
    for entry in journal {
        if last.insert(&entry.key, entry.asked) == Some(Asked::Call) && entry.asked == Asked::Call {
            unasked.push(entry.key.clone());
        }
    }
    unasked
}

/// What the inbox says: all is done, with the outcome that the service gave.
async fn rows(case: &Case) -> Outcome<Vec<String>> {
    let rows: Vec<(String, String, Option<String>)> =
        sqlx::query_as("SELECT key, state, outcome::text FROM inbox.message")
            .fetch_all(case.site.pool())
            .await?;
    let receipts = case.service.receipts();
    let mut wrong = Vec::new();
    if rows.len() != case.sent.len() {
        wrong.push(format!("{} rows of {} messages", rows.len(), case.sent.len()));
    }
    for (key, state, outcome) in rows {
        if state != "done" || outcome.as_ref() != receipts.get(&key) {
            wrong.push(format!("{key} is {state} with {outcome:?}, not {:?}", receipts.get(&key)));
        }
    }
    Ok(wrong)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(asked: Asked, key: &str) -> Entry {
        let (key, who, lane) = (key.to_owned(), String::new(), String::new());
        Entry { asked, key, who, lane, content: Vec::new() }
    }

    #[test]
    fn a_call_repeated_unasked_is_found() {
        let [call, look] = [Asked::Call, Asked::Look].map(|asked| entry(asked, "a"));
        let other = entry(Asked::Look, "b");
        assert!(repeated_unasked(&[call.clone(), other.clone(), look.clone(), call.clone()]).is_empty());
        assert_eq!(repeated_unasked(&[look, call.clone(), other, call]), ["a"]);
    }
}

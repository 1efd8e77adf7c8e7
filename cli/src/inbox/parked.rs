//! `baton inbox parked`: what consumers have set aside, and what an operator decides of it.

use std::collections::BTreeMap;

use baton_consumer::operate::decide::{Decided, Decision, decide};
use baton_consumer::operate::parked::{Content, Filter, Parked, content, list, text_or_base64};
use baton_protocol::lifecycle::Word as _;
use baton_protocol::lifecycle::delivery::State;
use serde_json::json;

use super::show::aside;
use super::{connect, key_shown, or_dash, shown};
use crate::args;
use crate::config::Effective;
use crate::failure::Failure;
use crate::out;
use crate::table::{numbers, render, words};

#[derive(Debug, thiserror::Error)]
enum Refused {
    #[error("name one or more ids, or a filter: `baton inbox parked {0}` never takes everything")]
    Everything(&'static str),
    #[error("nothing has been changed: add --yes to {0} them")]
    Unconfirmed(&'static str),
    #[error(
        "there is no record with id {0} among those that were set aside; `baton inbox parked list` shows them"
    )]
    NoSuchId(i64),
    #[error(
        "{} of them {} being tried by a consumer right now (ids {}) and stayed as {} {}: once that is over, the same command again",
        .0.len(), are(.0.len()), ids(.0), it(.0.len()), are(.0.len())
    )]
    BeingTried(Vec<i64>),
}

fn are(count: usize) -> &'static str {
    if count == 1 { "is" } else { "are" }
}

fn it(count: usize) -> &'static str {
    if count == 1 { "it" } else { "they" }
}

/// The first of them.
fn ids(ids: &[i64]) -> String {
    let first: Vec<String> = ids.iter().take(10).map(i64::to_string).collect();
    let more = if ids.len() > first.len() { ", …" } else { "" };
    format!("{}{more}", first.join(", "))
}

/// Runs the command.
pub(crate) async fn run(config: &Effective, command: &args::InboxParked) -> Result<(), Failure> {
    match command {
        args::InboxParked::List { filter, json } => {
            let mut connection = connect(config).await?;
            let found = list(&mut connection, &filter_of(filter, &[])).await?;
            if *json { out::json(&found) } else { out::text(&for_people(&found)) }
        }
        args::InboxParked::Show { id, json } => show(config, *id, *json).await,
        args::InboxParked::Requeue { ids, filter, yes } => {
            change(config, Decision::Requeue, &filter_of(filter, ids), *yes).await
        }
        args::InboxParked::Discard { ids, filter, yes } => {
            change(config, Decision::Discard, &filter_of(filter, ids), *yes).await
        }
    }
}

fn filter_of(given: &args::InboxFilter, ids: &[i64]) -> Filter {
    Filter {
        consumer: given.consumer.clone(),
        topic: given.topic.clone(),
        key: given.key.clone().map(String::into_bytes),
        cause: given.cause,
        state: given.state,
        older_than: given.older_than,
        ids: ids.to_vec(),
        idempotency_key: None,
    }
}

fn for_people(found: &[Parked]) -> String {
    let rows: Vec<_> = found
        .iter()
        .map(|record| {
            [
                record.id.to_string(),
                record.consumer.clone(),
                record.topic.clone(),
                key_shown(record),
                record.state.clone(),
                or_dash(record.cause.clone()),
                record.attempts.to_string(),
                format!("{:.0}s", record.age_seconds),
                or_dash(record.next_attempt_at.clone()),
                or_dash(record.error.as_deref().map(shown)),
            ]
        })
        .collect();
    let columns = [
        numbers("id"),
        words("consumer"),
        words("topic"),
        words("key"),
        words("state"),
        words("cause"),
        numbers("attempts"),
        numbers("age"),
        words("next attempt"),
        words("error"),
    ];
    render(columns, &rows)
}

async fn show(config: &Effective, id: i64, as_json: bool) -> Result<(), Failure> {
    let mut connection = connect(config).await?;
    let found = list(&mut connection, &Filter { ids: vec![id], ..Filter::default() }).await?;
    let (Some(record), Some(content)) = (found.first(), content(&mut connection, id).await?) else {
        return Err(Failure::failed(Refused::NoSuchId(id)));
    };
    if as_json {
        let mut json = serde_json::to_value(record).map_err(Failure::failed)?;
        json["payload"] = text_or_base64(content.payload.as_deref());
        let headers = content.headers.iter();
        json["headers"] =
            headers.map(|(name, value)| json!([name, text_or_base64(value.as_deref())])).collect();
        return out::json(&json);
    }
    out::text(&format!("{}{}", aside(record), content_for_people(&content)))
}

/// Bytes of a payload that people are shown.
const PREVIEW: usize = 2_000;

fn content_for_people(content: &Content) -> String {
    let mut text = String::from("  headers\n");
    for (name, value) in &content.headers {
        let value = value.as_deref().map(|value| shown(&String::from_utf8_lossy(value)));
        text.push_str(&format!("    {}: {}\n", shown(name), value.unwrap_or_else(|| "null".to_owned())));
    }
    match &content.payload {
        None => text.push_str("  payload       null\n"),
        Some(payload) => {
            let begin = String::from_utf8_lossy(&payload[..payload.len().min(PREVIEW)]);
            let more = if payload.len() > PREVIEW { "…" } else { "" };
            text.push_str(&format!("  payload       {} bytes\n{begin}{more}\n", payload.len()));
        }
    }
    text
}

/// Shows how many, and changes them where that was confirmed.
async fn change(
    config: &Effective,
    decision: Decision,
    filter: &Filter,
    confirmed: bool,
) -> Result<(), Failure> {
    let (verb, done) = match decision {
        Decision::Requeue => ("requeue", "requeued"),
        Decision::Discard => ("discard", "discarded"),
    };
    if filter.is_empty() {
        return Err(Failure::usage(Refused::Everything(verb)));
    }
    let mut connection = connect(config).await?;
    let found = list(&mut connection, filter).await?;
    if let Some(missing) = filter.ids.iter().find(|id| found.iter().all(|record| record.id != **id)) {
        return Err(Failure::failed(Refused::NoSuchId(*missing)));
    }
    let takes = |record: &Parked| State::of_word(&record.state).is_some_and(|state| decision.takes(state));
    let (chosen, others): (Vec<Parked>, Vec<Parked>) = found.into_iter().partition(takes);
    out::text(&plan(verb, &chosen, &others))?;
    if chosen.is_empty() {
        return out::line("nothing has been changed");
    }
    if !confirmed {
        return Err(Failure::usage(Refused::Unconfirmed(verb)));
    }
    let decided = decide(&mut connection, decision, &chosen, filter).await?;
    out::text(&report(done, &decided))?;
    if decided.being_tried.is_empty() {
        Ok(())
    } else {
        Err(Failure::failed(Refused::BeingTried(decided.being_tried)))
    }
}

fn by_state(records: &[Parked]) -> String {
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for record in records {
        *counts.entry(&record.state).or_default() += 1;
    }
    let counts: Vec<String> = counts.iter().map(|(state, count)| format!("{count} {state}")).collect();
    counts.join(", ")
}

fn plan(verb: &str, chosen: &[Parked], others: &[Parked]) -> String {
    let count = |n: usize| if n == 1 { "1 record".to_owned() } else { format!("{n} records") };
    let mut text = format!("to {verb}: {}", count(chosen.len()));
    if !chosen.is_empty() {
        text.push_str(&format!(" ({})", by_state(chosen)));
    }
    text.push('\n');
    if !others.is_empty() {
        text.push_str(&format!("left as they are: {} ({})\n", count(others.len()), by_state(others)));
    }
    let too_old = chosen.iter().filter(|record| record.cause.as_deref() == Some("too_old")).count();
    if verb == "requeue" && too_old > 0 {
        text.push_str(&format!(
            "warning: {too_old} of them are too_old: whether they were applied before the horizon is not known, and a requeue applies them\n"
        ));
    }
    text
}

fn report(done: &str, decided: &Decided) -> String {
    let mut text = format!("{done}: {}", decided.changed);
    if decided.blocked > 0 {
        text.push_str(&format!(
            ", of them {} in their turn, behind an earlier one of their key that is not settled",
            decided.blocked
        ));
    }
    if decided.unblocked > 0 {
        text.push_str(&format!("; let go behind them: {}", decided.unblocked));
    }
    text.push('\n');
    if !decided.changed_before.is_empty() {
        text.push_str(&format!(
            "not {done}: {}, which had changed or gone meanwhile (ids {})\n",
            decided.changed_before.len(),
            ids(&decided.changed_before)
        ));
    }
    text
}

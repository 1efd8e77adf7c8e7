//! `baton inbox show`: what consumers know of one idempotency key.

use baton_consumer::operate::message::{Known, known};
use baton_consumer::operate::parked::{Filter, Parked, list};
use serde::Serialize;

use super::{connect, key_shown, lease, shown};
use crate::config::Effective;
use crate::failure::Failure;
use crate::out;

/// No consumer has a row of it.
#[derive(Debug, thiserror::Error)]
#[error(
    "no consumer{} knows the idempotency key {key:?}: it never came, or it is being handled for the first time, or it was done longer ago \
     than the dedupe horizon and is purged",
    consumer.as_ref().map(|name| format!(" {name:?}")).unwrap_or_default()
)]
struct Unknown {
    key: String,
    consumer: Option<String>,
}

#[derive(Serialize)]
struct Shown<'a> {
    key: &'a str,
    records: Vec<Known>,
    parked: Vec<Parked>,
}

/// Prints what is known of `key`.
pub(crate) async fn run(
    config: &Effective,
    key: &str,
    consumer: Option<&str>,
    json: bool,
) -> Result<(), Failure> {
    let mut connection = connect(config).await?;
    let records = known(&mut connection, key, consumer).await?;
    let filter = Filter {
        consumer: consumer.map(str::to_owned),
        idempotency_key: Some(key.to_owned()),
        ..Filter::default()
    };
    let parked = list(&mut connection, &filter).await?;
    if records.is_empty() && parked.is_empty() {
        return Err(Failure::failed(Unknown { key: key.to_owned(), consumer: consumer.map(str::to_owned) }));
    }
    if json {
        out::json(&Shown { key, records, parked })
    } else {
        let texts: Vec<String> = records.iter().map(record).chain(parked.iter().map(aside)).collect();
        out::text(&texts.join("\n"))
    }
}

/// Lines of a name and a value each.
fn lines(head: &str, rows: &[(&str, Option<String>)]) -> String {
    let mut text = format!("{head}\n");
    for (name, value) in rows {
        if let Some(value) = value {
            text.push_str(&format!("  {name:<13} {value}\n"));
        }
    }
    text
}

fn place(topic: &str, partition: i32, offset: i64) -> String {
    format!("{topic}, partition {partition}, offset {offset}")
}

fn record(known: &Known) -> String {
    let origin = known
        .topic
        .as_deref()
        .zip(known.partition)
        .zip(known.offset)
        .map(|((topic, partition), offset)| place(topic, partition, offset));
    let stopped = known.stopped.as_ref();
    lines(
        &format!("consumer {}, scope {}: {}", known.consumer, shown(&known.scope), known.state),
        &[
            ("stopped at", stopped.map(|s| format!("{}, under generation {}", s.transition, s.generation))),
            ("because", stopped.map(|s| s.why.clone())),
            ("run again", Some(known.how.clone().unwrap_or_else(|| "no".to_owned()))),
            ("generation", Some(known.generation.to_string())),
            ("owner", known.owner.clone()),
            ("lease", known.lease_left_seconds.map(|left| lease(Some(left)))),
            ("attempts", Some(known.attempts.to_string())),
            ("outcome", known.outcome.as_ref().map(|outcome| outcome.get().to_owned())),
            ("cause", known.cause.clone()),
            ("error", known.error.clone()),
            ("record", origin),
            ("record time", known.record_time.clone()),
            ("created", Some(known.created_at.clone())),
            ("finished", known.finished_at.clone()),
        ],
    )
}

/// A record that was set aside.
pub(super) fn aside(parked: &Parked) -> String {
    let stopped = parked.stopped.as_ref();
    let again = match (parked.state.as_str(), parked.can_run_again) {
        (_, true) => format!("baton inbox parked requeue {} --yes", parked.id),
        ("blocked", _) => "by itself, when its turn comes".to_owned(),
        ("retrying", _) => "it is being tried right now".to_owned(),
        _ => "no".to_owned(),
    };
    lines(
        &format!("set aside as {} by consumer {}: {}", parked.id, parked.consumer, parked.state),
        &[
            ("stopped at", stopped.map(|s| format!("{}, under generation {}", s.transition, s.generation))),
            ("because", stopped.map(|s| s.why.clone())),
            ("run again", Some(again)),
            ("key", Some(key_shown(parked))),
            ("record", Some(place(&parked.topic, parked.partition, parked.position))),
            (
                "idempotency",
                Some(format!("{} in scope {}", shown(&parked.idempotency_key), shown(&parked.scope))),
            ),
            ("generation", Some(parked.generation.to_string())),
            ("owner", parked.owner.clone()),
            ("lease", parked.lease_left_seconds.map(|left| lease(Some(left)))),
            ("attempts", Some(parked.attempts.to_string())),
            ("cause", parked.cause.clone()),
            ("error", parked.error.clone()),
            ("first failed", Some(parked.first_failed_at.clone())),
            ("last failed", parked.last_failed_at.clone()),
            ("next attempt", parked.next_attempt_at.clone()),
            ("settled", parked.settled_at.clone()),
        ],
    )
}

//! `baton replay plan`: reads the dead-letter topic up to where it ends now, chooses, and writes the choice down. Sends nothing.

use std::collections::BTreeMap;

use rdkafka::Message as _;
use serde_json::{Value, json};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
use uuid::Uuid;

use super::args::Wish;
use super::choose::{self, Choice, Chosen, Seen, Skipped};
use super::groups::{self, Groups};
use super::letters::{self, Cluster, Stretch};
use super::store::{self, Draft, Plan};
use super::{Error, connect, kafka};
use crate::config::Effective;
use crate::failure::Failure;
use crate::out;
use crate::table::{numbers, render, words};
use baton_protocol::dead_letter;

/// Nothing was given up in it.
#[derive(Debug, thiserror::Error)]
#[error("--from {from} is not before --to {to}: nothing was given up between them")]
struct EmptyTime {
    from: OffsetDateTime,
    to: OffsetDateTime,
}

/// What was read.
struct Read {
    ends: Vec<Stretch>,
    chosen: Vec<Chosen>,
    skipped: Skipped,
    /// Of the topic that is sent to, where that is the original one.
    groups: Option<Groups>,
}

/// Makes a plan and prints it.
pub(super) async fn run(config: &Effective, wish: &Wish) -> Result<(), Failure> {
    if let Some(error) = wish.unknown_cause() {
        return Err(Failure::usage(error));
    }
    if let Some((from, to)) = wish.from.zip(wish.to).filter(|(from, to)| from >= to) {
        return Err(Failure::usage(EmptyTime { from, to }));
    }
    let cluster = kafka(config)?;
    let mut connection = connect(config).await?;
    let dead_letters = wish.dlt.clone().unwrap_or_else(|| dead_letter::topic(&wish.topic, &wish.consumer));
    let target = if wish.to_original {
        wish.topic.clone()
    } else {
        dead_letter::replay_topic(&wish.topic, &wish.consumer)
    };
    let (asked, from) = (wish.clone(), dead_letters.clone());
    let reading = tokio::task::spawn_blocking(move || read(&cluster, &asked, &from));
    let Read { ends, chosen, mut skipped, groups } = reading.await.map_err(|_| Error::Task)??;
    let sent = store::sent_before(&mut connection, &wish.consumer, &chosen).await?;
    let chosen = choose::keep(wish, chosen, &sent, &mut skipped);
    let draft = Draft {
        id: Uuid::new_v4(),
        plan: Plan {
            consumer: wish.consumer.clone(),
            topic: wish.topic.clone(),
            dead_letters,
            target,
            new_key: wish.new_key,
            items: i64::try_from(chosen.len()).unwrap_or(i64::MAX),
        },
        again: wish.again,
        loop_cap: wish.loop_cap,
        filters: filters(wish),
        ends: ends
            .iter()
            .map(|end| (end.partition.to_string(), Value::from(end.to)))
            .collect::<serde_json::Map<_, _>>()
            .into(),
        skipped: skipped_json(&skipped),
        chosen: &chosen,
    };
    store::write(&mut connection, &draft).await?;
    let by_cause = choose::by_cause(&chosen);
    if wish.json {
        let Draft { id, plan: Plan { consumer, topic, target, items, .. }, .. } = &draft;
        let mut shown = json!({
            "plan": id, "consumer": consumer, "topic": topic, "items": items, "by_cause": by_cause, "skipped": skipped_json(&skipped),
            "target": target,
        });
        if let Some(groups) = &groups {
            shown["groups"] = json!(groups.names);
        }
        return out::json(&shown);
    }
    out::text(&for_people(&draft, &by_cause, &skipped, groups.as_ref()))
}

/// Blocks.
fn read(cluster: &Cluster, wish: &Wish, dead_letters: &str) -> Result<Read, Error> {
    let reader = cluster.reader()?;
    // What comes after this is not part of the plan.
    let ends =
        reader.extent(dead_letters)?.ok_or_else(|| Error::NoTopic { topic: dead_letters.to_owned() })?;
    let groups = if wish.to_original {
        let extent =
            reader.extent(&wish.topic)?.ok_or_else(|| Error::NoTopic { topic: wish.topic.clone() })?;
        let partitions: Vec<i32> = extent.iter().map(|stretch| stretch.partition).collect();
        Some(groups::of(cluster, &wish.topic, &partitions)?)
    } else {
        None
    };
    let mut choice = Choice::new(wish, dead_letters);
    reader.each(dead_letters, &ends, |message| {
        choice.see(&Seen {
            partition: message.partition(),
            offset: message.offset(),
            timestamp_ms: message.timestamp().to_millis(),
            key: message.key(),
            headers: letters::headers(message),
        });
    })?;
    let (chosen, skipped) = choice.fitting();
    Ok(Read { ends, chosen, skipped, groups })
}

fn filters(wish: &Wish) -> Value {
    let time = |at: Option<OffsetDateTime>| at.and_then(|at| at.format(&Rfc3339).ok());
    let mut filters = json!({
        "cause": wish.cause, "key": wish.key, "from": time(wish.from), "to": time(wish.to), "limit": wish.limit,
        "headers": wish.headers, "group": wish.group,
    });
    if let Some(filters) = filters.as_object_mut() {
        filters.retain(|_, value| !value.is_null() && value.as_array().is_none_or(|array| !array.is_empty()));
    }
    filters
}

fn skipped_json(skipped: &Skipped) -> Value {
    let Skipped { already_replayed, loop_cap, other_topic, other_consumers, no_letter, unreadable } = skipped;
    json!({
        "already_replayed": already_replayed, "loop_cap": loop_cap, "other_topic": other_topic, "other_consumers": other_consumers,
        "no_letter": no_letter, "unreadable": unreadable,
    })
}

fn for_people(
    draft: &Draft<'_>,
    by_cause: &BTreeMap<String, u64>,
    skipped: &Skipped,
    groups: Option<&Groups>,
) -> String {
    let Draft { id, plan: Plan { consumer, dead_letters, target, items, new_key, .. }, loop_cap, .. } = draft;
    let mut text = format!("plan {id}: {items} dead letters of {consumer} on {dead_letters}\n\n");
    let rows: Vec<_> = by_cause.iter().map(|(cause, count)| [cause.clone(), count.to_string()]).collect();
    text.push_str(&render([words("cause"), numbers("items")], &rows));
    text.push('\n');
    for (count, why) in [
        (skipped.already_replayed, "another plan has sent them; --again takes them all the same".to_owned()),
        (
            skipped.loop_cap,
            format!("they have been replayed {loop_cap} times, which is the loop cap; --loop-cap raises it"),
        ),
        (
            skipped.other_consumers.values().sum(),
            format!(
                "other consumers gave them up ({}); --group takes those of a group",
                named(&skipped.other_consumers)
            ),
        ),
        (skipped.other_topic, "they are another topic's".to_owned()),
        (skipped.no_letter, "nothing in them tells of a death: they are no dead letters".to_owned()),
        (skipped.unreadable, "the names of their headers are not text".to_owned()),
    ] {
        if count > 0 {
            text.push_str(&format!("left out: {count}, because {why}\n"));
        }
    }
    let keys =
        if *new_key { "each under a new key, as new work" } else { "under their own keys, as the same work" };
    text.push_str(&format!("to be sent to {target}, {keys}\n"));
    if let Some(groups) = groups {
        text.push_str(&format!("{}\n", groups.sentence(target)));
    }
    text.push_str(&format!("nothing has been sent: `baton replay run {id}` does it\n"));
    text
}

/// The first few of them, with their counts.
fn named(counts: &BTreeMap<String, u64>) -> String {
    const SHOWN: usize = 5;
    let mut shown: Vec<_> =
        counts.iter().take(SHOWN).map(|(name, count)| format!("{name}: {count}")).collect();
    if counts.len() > SHOWN {
        shown.push(format!("and {} more", counts.len() - SHOWN));
    }
    shown.join(", ")
}

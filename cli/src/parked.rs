//! `baton parked`, `baton pause` and `baton resume`: what operators do about messages that Kafka refuses.
//!
//! The two commands that change messages need a filter or an id, say how many they mean first, and change nothing without
//! `--yes`. Each leaves its row in the audit table.

use std::time::Duration;

use baton_migrations::Line;
use baton_protocol::lifecycle::Word;
use baton_protocol::lifecycle::message::{Cause, State};
use baton_relay::operate::{self, Count, Filter, Item, Pause, Resume};
use clap::builder::ValueParser;
use clap::{Args, Subcommand};
use sqlx::PgConnection;
use sqlx::types::Uuid;

use crate::args::span;
use crate::config::{Effective, Side};
use crate::database;
use crate::failure::Failure;
use crate::migrate;
use crate::out;
use crate::table::{numbers, render, words};

#[derive(Subcommand)]
pub(crate) enum Act {
    /// List them, in the order in which they were parked
    List {
        #[command(flatten)]
        which: Which,
        /// How many to list
        #[arg(long, value_name = "N", default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..))]
        limit: u32,
        /// Print JSON instead of a table
        #[arg(long)]
        json: bool,
    },
    /// Show one: which transition stopped it, under which generation, why, and whether it can be run again
    Show {
        /// The message's id
        #[arg(value_name = "ID")]
        id: Uuid,
        /// Print JSON instead of lines
        #[arg(long)]
        json: bool,
    },
    /// Try the retrying and dead ones once more, now, with a new budget of attempts; needs a filter or an id
    Requeue {
        #[command(flatten)]
        which: Chosen,
    },
    /// Give them up for good; what waits behind them is tried next; needs a filter or an id
    Discard {
        #[command(flatten)]
        which: Chosen,
    },
}

/// Which messages.
#[derive(Args)]
pub(crate) struct Which {
    /// Of this topic
    #[arg(long, value_name = "TOPIC")]
    topic: Option<String>,
    /// Of this key
    #[arg(long, value_name = "KEY")]
    key: Option<String>,
    /// For this cause
    #[arg(long, value_name = "CAUSE", value_parser = ValueParser::from(cause))]
    cause: Option<String>,
    /// In this state
    #[arg(long, value_name = "STATE", value_parser = ValueParser::from(state))]
    state: Option<String>,
    /// First parked so long ago at least
    #[arg(long, value_name = "DURATION", value_parser = ValueParser::from(span))]
    older_than: Option<Duration>,
}

/// Which messages are to be changed.
#[derive(Args)]
pub(crate) struct Chosen {
    /// These messages
    #[arg(value_name = "ID")]
    ids: Vec<Uuid>,
    #[command(flatten)]
    which: Which,
    /// Do it; without this only how many it would be is shown
    #[arg(long)]
    yes: bool,
}

impl Which {
    fn filter(&self, ids: &[Uuid]) -> Filter {
        Filter {
            ids: ids.to_vec(),
            topic: self.topic.clone(),
            key: self.key.clone(),
            cause: self.cause.clone(),
            state: self.state.clone(),
            older_than: self.older_than.map(|age| age.as_secs_f64()),
        }
    }
}

/// Neither a filter nor an id: nobody means everything.
#[derive(Debug, thiserror::Error)]
#[error(
    "say which messages: an id, --topic, --key, --cause, --state or --older-than (all of a state: --state dead)"
)]
struct Everything;

/// Nothing has that id.
#[derive(Debug, thiserror::Error)]
#[error("no message with the id {id} is parked, or was")]
struct NotParked {
    id: Uuid,
}

/// None of these ids is there to be decided of.
#[derive(Debug, thiserror::Error)]
#[error(
    "none of these ids is parked now: what is published or discarded is settled, and what was never set aside is the relay's to \
     publish; `baton parked show ID` tells them apart"
)]
struct NoneParked;

fn word<W: Word>(kind: &str, text: &str, among: impl Iterator<Item = W>) -> Result<String, String> {
    let known: Vec<&str> = among.map(Word::as_str).collect();
    if known.contains(&text) {
        Ok(text.to_owned())
    } else {
        Err(format!("no such {kind}; it is one of {}", known.join(", ")))
    }
}

fn cause(text: &str) -> Result<String, String> {
    word("cause", text, Cause::ALL.iter().copied())
}

fn state(text: &str) -> Result<String, String> {
    word("state", text, State::ALL.iter().copied().filter(|state| state.is_parked()))
}

/// A topic's name, as the outbox takes it.
pub(crate) fn topic(text: &str) -> Result<String, String> {
    let takes = |c: char| c.is_ascii_alphanumeric() || ['.', '_', '-'].contains(&c);
    if (1..=249).contains(&text.len()) && text.chars().all(takes) && text != "." && text != ".." {
        Ok(text.to_owned())
    } else {
        Err("a topic has 1 to 249 letters, digits, dots, underscores and dashes".to_owned())
    }
}

/// Runs `baton parked …`.
pub(crate) async fn run(config: &Effective, act: &Act) -> Result<(), Failure> {
    match act {
        Act::List { which, limit, json } => {
            let filter = which.filter(&[]);
            let mut connection = connect(config).await?;
            let items = operate::list(&mut connection, &filter, *limit).await.map_err(Failure::failed)?;
            if *json {
                return out::json(&items);
            }
            let counts = operate::count(&mut connection, &filter).await.map_err(Failure::failed)?;
            out::text(&listed(&items, &counts))
        }
        Act::Show { id, json } => {
            let mut connection = connect(config).await?;
            let filter = Filter { ids: vec![*id], ..Filter::default() };
            let items = operate::list(&mut connection, &filter, u32::MAX).await.map_err(Failure::failed)?;
            match items.last() {
                None => Err(Failure::failed(NotParked { id: *id })),
                Some(item) if *json => out::json(item),
                Some(item) => out::text(&shown(item)),
            }
        }
        Act::Requeue { which } => {
            let (mut connection, filter, counts) = chosen(config, which).await?;
            let takes = |count: &&Count| ["retrying", "dead"].contains(&count.state.as_str());
            let meant: i64 = counts.iter().filter(takes).map(|count| count.count).sum();
            out::text(&counted(&counts))?;
            if !which.yes {
                return out::line(&format!(
                    "{meant} would be requeued; nothing has been changed: --yes does it"
                ));
            }
            let done = operate::requeue(&mut connection, &filter).await.map_err(Failure::failed)?;
            if done == 0 {
                return out::line(
                    "requeued nothing: only what is retrying or dead can be; what is blocked waits for the first of its key \
                     (`baton parked show ID` names it), and what is paused for `baton resume`",
                );
            }
            out::line(&format!(
                "requeued {done} messages: they are tried now, and what waits behind them next"
            ))
        }
        Act::Discard { which } => {
            let (mut connection, filter, counts) = chosen(config, which).await?;
            let meant: i64 = counts.iter().map(|count| count.count).sum();
            out::text(&counted(&counts))?;
            if !which.yes {
                return out::line(&format!(
                    "{meant} would be discarded, for good; nothing has been changed: --yes does it"
                ));
            }
            let done = operate::discard(&mut connection, &filter).await.map_err(Failure::failed)?;
            out::line(&format!("discarded {done} messages: they will not be published"))
        }
    }
}

/// Runs `baton pause`.
pub(crate) async fn pause(config: &Effective, topic: &str) -> Result<(), Failure> {
    let mut connection = connect(config).await?;
    match operate::pause(&mut connection, topic).await.map_err(Failure::failed)? {
        Pause::Paused => out::line(&format!(
            "paused {topic}: relays notice within two seconds, what they have handed to Kafka by then goes; its messages wait in order"
        )),
        Pause::AlreadyPaused => out::line(&format!("{topic} was paused already; nothing has been changed")),
    }
}

/// Runs `baton resume`.
pub(crate) async fn resume(config: &Effective, topic: &str) -> Result<(), Failure> {
    let mut connection = connect(config).await?;
    match operate::resume(&mut connection, topic).await.map_err(Failure::failed)? {
        Resume::Resumed { waiting } => out::line(&format!(
            "resumed {topic}: {waiting} messages that waited are published in the order of their keys, then what is new"
        )),
        Resume::NotPaused => out::line(&format!("{topic} was not paused; nothing has been changed")),
    }
}

async fn connect(config: &Effective) -> Result<PgConnection, Failure> {
    let mut connection = database::connect(&config.database_url(Side::Outbox)?).await?;
    migrate::require_current(&mut connection, Line::Outbox).await?;
    Ok(connection)
}

async fn chosen(config: &Effective, chosen: &Chosen) -> Result<(PgConnection, Filter, Vec<Count>), Failure> {
    let filter = chosen.which.filter(&chosen.ids);
    if filter.is_empty() {
        return Err(Failure::usage(Everything));
    }
    let mut connection = connect(config).await?;
    let counts = operate::count(&mut connection, &filter).await.map_err(Failure::failed)?;
    if counts.is_empty() && !chosen.ids.is_empty() {
        return Err(Failure::failed(NoneParked));
    }
    Ok((connection, filter, counts))
}

/// `3 dead (too_large), 10 blocked`.
fn counted(counts: &[Count]) -> String {
    let parts: Vec<String> = counts
        .iter()
        .map(|Count { state, cause, count, .. }| match cause {
            Some(cause) => format!("{count} {state} ({cause})"),
            None => format!("{count} {state}"),
        })
        .collect();
    if parts.is_empty() {
        "no such message is parked\n".to_owned()
    } else {
        format!("{}\n", parts.join(", "))
    }
}

fn listed(items: &[Item], counts: &[Count]) -> String {
    let mut text = counted(counts);
    if items.is_empty() {
        return text;
    }
    let absent = || "-".to_owned();
    let rows: Vec<_> = items
        .iter()
        .map(|item| {
            [
                item.id.to_string(),
                item.topic.clone(),
                item.key.as_deref().map_or_else(absent, short),
                item.state.clone(),
                item.cause.clone().unwrap_or_else(absent),
                item.attempts.to_string(),
                format!("{:.0}s", item.age_seconds),
                item.next_attempt_at.clone().unwrap_or_else(absent),
            ]
        })
        .collect();
    let columns = [
        words("id"),
        words("topic"),
        words("key"),
        words("state"),
        words("cause"),
        numbers("attempts"),
        numbers("age"),
        words("next attempt"),
    ];
    text.push('\n');
    text.push_str(&render(columns, &rows));
    text
}

/// The longest part of a key that a line shows.
const KEY_LENGTH: usize = 60;

fn short(key: &str) -> String {
    let shown: String = key.chars().take(KEY_LENGTH).collect();
    let more = if shown.len() < key.len() { "…" } else { "" };
    format!("{}{more}", shown.escape_debug())
}

fn shown(item: &Item) -> String {
    let mut text = format!(
        "{}: topic {}, {}, position {}, shard {}\n",
        item.id,
        item.topic,
        item.key.as_deref().map_or_else(|| "no key".to_owned(), |key| format!("key {}", short(key))),
        item.position,
        item.shard
    );
    let mut line = |name: &str, value: &str| text.push_str(&format!("    {name}: {value}\n"));
    line("state", &item.state);
    if let Some(transition) = &item.transition {
        line("stopped at", &format!("{transition}, under generation {}", item.generation));
    }
    if let Some(cause) = &item.cause {
        let error = item.error.as_deref().map(|error| format!(": {error}")).unwrap_or_default();
        line("cause", &format!("{cause}{error}"));
    }
    if let Some(behind) = item.behind {
        line("waits behind", &behind.to_string());
    }
    line("attempts", &item.attempts.to_string());
    line("enqueued at", &item.created_at);
    line("first failed at", &item.first_failed_at);
    for (name, at) in [("last failed at", &item.last_failed_at), ("tried next at", &item.next_attempt_at)] {
        if let Some(at) = at {
            line(name, at);
        }
    }
    line("can run again", if item.can_run_again { "yes" } else { "no" });
    if let Some(advice) = &item.advice {
        line("to do", advice);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_that_mean_nothing_are_refused_with_those_that_do() {
        assert_eq!(cause("too_large"), Ok("too_large".to_owned()));
        assert!(cause("large").unwrap_err().contains("too_large, unknown_topic"));
        assert!(state("pending").unwrap_err().starts_with("no such state; it is one of retrying, blocked"));
    }

    #[test]
    fn a_topic_is_what_the_outbox_takes_for_one() {
        assert!(topic("orders.v1_a-B").is_ok());
        for wrong in ["", ".", "..", "a b", "ä", &"x".repeat(250)] {
            assert!(topic(wrong).is_err(), "{wrong}");
        }
    }
}

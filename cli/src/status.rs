//! `baton status`: the oldest age first, then who holds what and how far each shard is.

use baton_migrations::Line;
use baton_relay::status::{self, Shard, Status, Stopped};

use crate::config::{Effective, Side};
use crate::database;
use crate::failure::Failure;
use crate::migrate;
use crate::out;
use crate::table::{numbers, render, words};

/// Prints the state of the outbox; first, where a guard stands, that nothing is published.
pub(crate) async fn run(config: &Effective, json: bool) -> Result<(), Failure> {
    let mut connection = database::connect(&config.database_url(Side::Outbox)?).await?;
    migrate::require_current(&mut connection, Line::Outbox).await?;
    let status = status::read(&mut connection).await.map_err(Failure::failed)?;
    if json { out::json(&status) } else { out::text(&for_people(&status)) }
}

fn for_people(status: &Status) -> String {
    let stopped: Vec<String> =
        status.shards.iter().filter_map(|shard| Some(stopped_line(shard, shard.stopped.as_ref()?))).collect();
    let pending = &status.pending;
    let about = if pending.exact { "" } else { "about " };
    let mut text = String::new();
    for guard in &status.guards {
        text.push_str(&format!("nothing is published: {}\n    to do: {}\n", guard.found, guard.advice));
    }
    if !stopped.is_empty() {
        text.push_str(&format!(
            "stopped shards: {} of {}, each has as many messages parked as it may (see below)\n",
            stopped.len(),
            status.shards.len()
        ));
    }
    text.push_str(&match status.oldest_pending_age_seconds {
        Some(age) => format!("oldest waiting message: {} ({about}{} waiting)\n", seconds(age), pending.count),
        None => "oldest waiting message: none waits\n".to_owned(),
    });
    text.push_str(&format!("expired leases: {}\n", status.expired_leases));
    let parked = &status.parked;
    text.push_str(&format!(
        "parked: {} retrying, {} blocked, {} dead, {} paused{}\n",
        parked.retrying,
        parked.blocked,
        parked.dead,
        parked.paused,
        parked.oldest_age_seconds.map(|age| format!(", the oldest for {}", seconds(age))).unwrap_or_default()
    ));
    if !parked.by_cause.is_empty() {
        let causes: Vec<String> =
            parked.by_cause.iter().map(|(cause, count)| format!("{count} {cause}")).collect();
        text.push_str(&format!("    causes: {} (see `baton parked list`)\n", causes.join(", ")));
    }
    if !parked.paused_topics.is_empty() {
        text.push_str(&format!("paused topics: {}\n", parked.paused_topics.join(", ")));
    }
    let relays: Vec<String> = status
        .relays
        .iter()
        .map(|relay| format!("{} ({} shards)", relay.owner, relay.shards.len()))
        .collect();
    text.push_str(&format!(
        "relays: {}\n\n",
        if relays.is_empty() { "none".to_owned() } else { relays.join(", ") }
    ));

    let absent = || "-".to_owned();
    let rows: Vec<_> = status
        .shards
        .iter()
        .map(|shard| {
            [
                shard.shard.to_string(),
                shard.owner.clone().unwrap_or_else(absent),
                shard.generation.to_string(),
                shard.lease_left_seconds.map_or_else(absent, lease_left),
                shard.cursor.position.to_string(),
                shard.lag_messages.to_string(),
                shard.lag_seconds.map_or_else(absent, seconds),
            ]
        })
        .collect();
    let columns = [
        numbers("shard"),
        words("owner"),
        numbers("generation"),
        numbers("lease left"),
        numbers("cursor"),
        numbers("lag"),
        numbers("oldest"),
    ];
    text.push_str(&render(columns, &rows));
    text.push('\n');
    text.push_str(&leaves(status));
    if !stopped.is_empty() {
        text.push_str("\nstopped shards:\n");
        text.extend(stopped);
    }
    text
}

/// Where the space of the table goes, and why it is not given back yet.
fn leaves(status: &Status) -> String {
    let rows: Vec<_> = status
        .leaves
        .iter()
        .map(|leaf| {
            let kept = match &leaf.kept {
                Some(kept) => kept.words.clone(),
                None if leaf.current => "written to now".to_owned(),
                None => "-".to_owned(),
            };
            [
                leaf.slot.to_string(),
                bytes(leaf.bytes),
                leaf.oldest_consumed_at.clone().unwrap_or_else(|| "-".to_owned()),
                kept,
            ]
        })
        .collect();
    render([numbers("leaf"), numbers("size"), words("oldest kept"), words("not truncated because")], &rows)
}

fn bytes(bytes: i64) -> String {
    match bytes {
        0..0x10_0000 => format!("{} KiB", bytes >> 10),
        _ => format!("{} MiB", bytes >> 20),
    }
}

/// How long a lease lasts, or for how long its last owner has not renewed it.
fn lease_left(left: f64) -> String {
    if left > 0.0 { seconds(left) } else { format!("expired {} ago", seconds(-left)) }
}

/// The longest part of a key that a line shows.
const KEY_LENGTH: usize = 60;

/// Which message, which transition, why, under which generation, and what to do.
fn stopped_line(shard: &Shard, stopped: &Stopped) -> String {
    let Stopped { transition, id, topic, cause, error, generation, attempts, next_attempt_at, .. } = stopped;
    let key = match &stopped.key {
        None => "no key".to_owned(),
        Some(key) => {
            let shown: String = key.chars().take(KEY_LENGTH).collect();
            let more = if shown.len() < key.len() { "…" } else { "" };
            format!("key {}{more}", shown.escape_debug())
        }
    };
    let next = match shard.lease_left_seconds {
        Some(left) if left > 0.0 && stopped.next_attempt_in_seconds > 0.0 => {
            format!("it is tried again at {next_attempt_at}")
        }
        Some(left) if left > 0.0 => format!("another try is due since {next_attempt_at}"),
        _ => "no relay holds the shard to try it again".to_owned(),
    };
    format!(
        "  shard {}: {id} (topic {topic}, {key}) stopped at {transition}: {cause}, refused {attempts} {} in {}, last under \
         generation {generation}: {error}\n    to do: {}; {next}\n",
        shard.shard,
        if *attempts == 1 { "time" } else { "times" },
        seconds(stopped.age_seconds),
        stopped.advice.unwrap_or("see the relay's log"),
    )
}

fn seconds(seconds: f64) -> String {
    format!("{seconds:.1}s")
}

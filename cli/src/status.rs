//! `baton status`: the oldest age first, then who holds what and how far each shard is.

use baton_migrations::Line;
use baton_relay::status::{self, Status};

use crate::config::{Effective, Side};
use crate::database;
use crate::failure::Failure;
use crate::migrate;
use crate::table::{numbers, render, words};

/// Prints the state of the outbox.
pub(crate) async fn run(config: &Effective, json: bool) -> Result<(), Failure> {
    let mut connection = database::connect(&config.database_url(Side::Outbox)?).await?;
    migrate::require_current(&mut connection, Line::Outbox).await?;
    let status = status::read(&mut connection).await.map_err(Failure::failed)?;
    if json {
        println!("{}", serde_json::to_string_pretty(&status).map_err(Failure::failed)?);
    } else {
        print!("{}", for_people(&status));
    }
    Ok(())
}

fn for_people(status: &Status) -> String {
    let pending = &status.pending;
    let about = if pending.exact { "" } else { "about " };
    let mut text = match status.oldest_pending_age_seconds {
        Some(age) => format!("oldest waiting message: {} ({about}{} waiting)\n", seconds(age), pending.count),
        None => "oldest waiting message: none waits\n".to_owned(),
    };
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
                shard.lease_left_seconds.map_or_else(absent, seconds),
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
    text
}

fn seconds(seconds: f64) -> String {
    format!("{seconds:.1}s")
}

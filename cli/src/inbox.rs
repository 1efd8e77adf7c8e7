//! `baton inbox`: what consumers have done, set aside and given up, and what becomes of it.
//!
//! Everything here is [`baton_consumer::operate`], read and changed in the database of the inbox; no broker is asked. The consumer
//! crate is linked for it, so that a purge is the consumers' own and a requeue keeps the rules that they keep; it brings the relay
//! nothing but two small traits of tower's. What changes something shows how many first and takes `--yes`, on a terminal or not.

mod parked;
mod purge;
mod show;

use baton_consumer::operate;
use baton_migrations::Line;
use sqlx::PgConnection;

use crate::args;
use crate::config::{Effective, Side};
use crate::database;
use crate::failure::Failure;
use crate::migrate;

impl From<operate::Error> for Failure {
    fn from(error: operate::Error) -> Self {
        Self::failed(error)
    }
}

/// Runs the command.
pub(crate) async fn run(config: &Effective, command: &args::Inbox) -> Result<(), Failure> {
    match command {
        args::Inbox::Show { key, consumer, json } => show::run(config, key, consumer.as_deref(), *json).await,
        args::Inbox::Parked { command } => parked::run(config, command).await,
        args::Inbox::Purge { consumer, older_than, dry_run } => {
            purge::run(config, consumer.as_deref(), *older_than, *dry_run).await
        }
    }
}

/// A connection to an inbox that this binary fits.
async fn connect(config: &Effective) -> Result<PgConnection, Failure> {
    let mut connection = database::connect_alone(&config.database_url(Side::Inbox)?).await?;
    migrate::require_current(&mut connection, Line::Inbox).await?;
    Ok(connection)
}

/// The longest part of a text that a table shows, in characters.
const SHOWN: usize = 60;

/// On one line, and not too long.
fn shown(text: &str) -> String {
    let begin: String = text.chars().take(SHOWN).collect();
    let more = if begin.len() < text.len() { "…" } else { "" };
    format!("{}{more}", begin.escape_debug())
}

fn or_dash(text: Option<String>) -> String {
    text.unwrap_or_else(|| "-".to_owned())
}

/// A record's key as people see it.
fn key_shown(record: &operate::parked::Parked) -> String {
    match (&record.key, &record.key_base64) {
        (Some(key), _) => shown(key),
        (None, Some(key)) => format!("base64:{}", shown(key)),
        (None, None) => "-".to_owned(),
    }
}

fn lease(left: Option<f64>) -> String {
    match left {
        None => "-".to_owned(),
        Some(left) if left > 0.0 => format!("{left:.1}s left"),
        Some(left) => format!("over since {:.1}s", -left),
    }
}

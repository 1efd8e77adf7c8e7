//! `baton inbox purge`: what is finished goes, as a consumer's own purge has it; what stays is counted with its reason.

use std::time::Duration;

use baton_consumer::inbox::Left;
use baton_consumer::operate::consumers;
use baton_consumer::operate::purge::{Outlook, outlook, run as purge};

use super::connect;
use crate::config::{Effective, Side, Span};
use crate::database;
use crate::failure::Failure;
use crate::out;

#[derive(Debug, thiserror::Error)]
enum Refused {
    #[error("the inbox has no consumer {0:?}; it has {1}")]
    NoSuchConsumer(String, String),
}

/// Purges, or says what a purge would take.
pub(crate) async fn run(
    config: &Effective,
    consumer: Option<&str>,
    older_than: Duration,
    dry_run: bool,
) -> Result<(), Failure> {
    let mut connection = connect(config).await?;
    let known = consumers(&mut connection).await?;
    let chosen = match consumer {
        None => known,
        Some(name) if known.iter().any(|known| known == name) => vec![name.to_owned()],
        Some(name) => {
            let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
            return Err(Failure::failed(Refused::NoSuchConsumer(name.to_owned(), known)));
        }
    };
    if chosen.is_empty() {
        return out::line("nothing to purge: the inbox is empty");
    }
    let pool = database::pool(&config.database_url(Side::Inbox)?)?;
    for consumer in &chosen {
        if dry_run {
            let outlook = outlook(&mut connection, consumer, older_than).await?;
            let due = |counts: &std::collections::BTreeMap<String, i64>| {
                counts.get("due").copied().unwrap_or_default()
            };
            out::line(&format!(
                "{consumer}: would purge {} rows and {} settled records that were set aside, finished longer ago than {}",
                due(&outlook.rows),
                due(&outlook.parked),
                Span(older_than)
            ))?;
            out::text(&left(&outlook, Due::Counted))?;
            continue;
        }
        let purged = purge(&pool, consumer, older_than).await?;
        out::line(&format!(
            "{consumer}: purged {} rows and {} settled records that were set aside, finished longer ago than {}",
            purged.rows,
            purged.parked,
            Span(older_than)
        ))?;
        if purged.left == Left::ToAnother {
            out::line("  another process is purging for this consumer, and goes on; the rest is left to it")?;
        }
        out::text(&left(&outlook(&mut connection, consumer, older_than).await?, Due::Left))?;
    }
    if dry_run { out::line("nothing has been changed: without --dry-run it is") } else { Ok(()) }
}

/// Whether what is due is still there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Due {
    /// And was told before.
    Counted,
    Left,
}

/// What stays, each with the reason.
fn left(outlook: &Outlook, due: Due) -> String {
    const REASONS: [(&str, &str); 7] = [
        ("recent", "finished later than that"),
        (
            "record_time_ahead",
            "with a record's time ahead of that: to purge them would refuse records that are still to come",
        ),
        ("set_aside", "whose record was set aside and is not settled"),
        ("dead", "given up: they stay, so that a repeat is not run"),
        ("in_progress", "in progress"),
        ("unsettled", "not settled: `baton inbox parked list` shows them"),
        ("due", "that became due meanwhile, or are being changed"),
    ];
    let mut text = String::new();
    for (counts, of) in [(&outlook.rows, "rows"), (&outlook.parked, "records set aside")] {
        for (why, words) in REASONS {
            if let Some(count) = counts.get(why).filter(|_| why != "due" || due == Due::Left) {
                text.push_str(&format!("  left: {count} {of} {words}\n"));
            }
        }
    }
    text
}

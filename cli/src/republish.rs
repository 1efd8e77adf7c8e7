//! `baton republish`: a range of messages that were published goes to Kafka once more.
//!
//! It says first how many there are, what of the range is left out or gone, and what the topic will do with them. `--dry-run` ends
//! there. Otherwise the audit table has a row before the first message goes, and one that says how it ended.

use std::pin::pin;

use baton_migrations::Line;
use baton_relay::republish::{Cleanup, End, Error, Found, Range, Run};
use clap::Args;
use clap::builder::ValueParser;
use time::format_description::well_known::Rfc3339;
use time::{OffsetDateTime, UtcOffset};

use crate::args::time;
use crate::config::{Effective, Side};
use crate::failure::Failure;
use crate::progress::Progress;
use crate::{database, migrate, out, parked, signals};

/// Which messages.
#[derive(Args)]
pub(crate) struct Wish {
    /// The topic
    #[arg(long, value_name = "T", value_parser = ValueParser::from(parked::topic))]
    topic: String,
    /// Only those of this key
    #[arg(long, value_name = "K")]
    key: Option<String>,
    /// Only those enqueued at or after this time, RFC 3339
    #[arg(long, value_name = "TIME", value_parser = ValueParser::from(time))]
    from: OffsetDateTime,
    /// Only those enqueued before this time, RFC 3339
    #[arg(long, value_name = "TIME", value_parser = ValueParser::from(time))]
    to: OffsetDateTime,
    /// Publish nothing; show how many there are
    #[arg(long)]
    dry_run: bool,
}

/// Nothing lies in it.
#[derive(Debug, thiserror::Error)]
#[error("--from {from} is not before --to {to}: no message was enqueued between them")]
struct Empty {
    from: String,
    to: String,
}

/// The operating system refused a signal handler.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen for SIGTERM and SIGINT")]
struct NoSignals(#[source] std::io::Error);

/// Told to end before all of it was done.
#[derive(Debug, thiserror::Error)]
#[error(
    "told to end: {sent} of {of} messages were published again, the others were not; run it again, it begins anew"
)]
struct Interrupted {
    sent: u64,
    of: u64,
}

/// Told to end while it only looked.
#[derive(Debug, thiserror::Error)]
#[error("told to end before anything was published")]
struct NotBegun;

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::failed(error)
    }
}

/// Counts a range, and publishes it.
pub(crate) async fn run(config: &Effective, wish: &Wish) -> Result<(), Failure> {
    if wish.from >= wish.to {
        return Err(Failure::usage(Empty { from: rfc3339(wish.from), to: rfc3339(wish.to) }));
    }
    let settings = config.relay_settings()?;
    let url = config.database_url(Side::Outbox)?;
    let mut stop = pin!(signals::shutdown().map_err(|source| Failure::failed(NoSignals(source)))?);
    let range = Range { topic: wish.topic.clone(), key: wish.key.clone(), from: wish.from, to: wish.to };
    let look = async {
        let mut connection = database::connect_alone(&url).await?;
        migrate::require_current(&mut connection, Line::Outbox).await?;
        let run = Run::begin(connection, settings, range).await?;
        out::text(&counted(wish, run.found()))?;
        let cleanup = run.look().await?;
        out::text(&warned(&wish.topic, &cleanup))?;
        Ok::<_, Failure>(run)
    };
    let run = tokio::select! {
        biased;
        () = &mut stop => return Err(Failure::failed(NotBegun)),
        run = look => run?,
    };
    if wish.dry_run {
        return out::line("nothing has been published: `baton republish` without --dry-run does it");
    }
    let of = run.found().published;
    let mut auditor = database::connect(&url).await?;
    let mut progress = Progress::new(of);
    let ended = run.publish(&mut auditor, &mut stop, |sent| progress.show(sent, sent)).await;
    progress.end();
    match ended? {
        (sent, End::Finished) => out::line(&format!("published {sent} messages again")),
        (sent, End::Stopped) => Err(Failure::failed(Interrupted { sent, of })),
    }
}

fn rfc3339(at: OffsetDateTime) -> String {
    at.to_offset(UtcOffset::UTC).format(&Rfc3339).unwrap_or_else(|_| at.to_string())
}

/// What there is of the range.
fn counted(wish: &Wish, found: &Found) -> String {
    let of_key = wish.key.as_deref().map(|key| format!(", key {}", key.escape_debug())).unwrap_or_default();
    let (from, to) = (rfc3339(wish.from), rfc3339(wish.to));
    let mut text = format!(
        "{} messages for {}{of_key}, enqueued from {from} to before {to}, are published\n",
        found.published, wish.topic
    );
    for (count, what) in [
        (found.waiting, "wait to be published: a relay does that"),
        (found.parked, "are parked: `baton parked list` shows them"),
        (found.discarded, "were discarded, and never published"),
    ] {
        if count > 0 {
            text.push_str(&format!("left out: {count} {what}\n"));
        }
    }
    if let Some(kept) = found.kept_from {
        text.push_str(&format!(
            "a part of the range is gone: what was published before {} has been deleted to free its space, but for what is \
             counted here; from then on all of it is kept\n",
            rfc3339(kept)
        ));
    }
    text
}

/// What whoever reads the topic will make of it.
fn warned(topic: &str, cleanup: &Cleanup) -> String {
    match cleanup {
        Cleanup::Deletes => String::new(),
        Cleanup::Compacts => format!(
            "warning: {topic} is compacted (cleanup.policy): of each key only its last record stays, and that will be one of \
             these, unless the range goes on to the newest of the key\n"
        ),
        Cleanup::Unknown(why) => format!(
            "warning: whether {topic} is compacted is not known ({why}): if it is, an old state of a key will be its last record\n"
        ),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    #[derive(clap::Parser)]
    struct Line {
        #[command(flatten)]
        wish: Wish,
    }

    fn wish(more: &[&str]) -> Wish {
        let line = ["republish", "--topic", "orders", "--from", "2026-11-30T17:00:00+01:00"];
        let line = line.iter().chain(&["--to", "2026-11-30T17:00:00Z"]).chain(more);
        Line::try_parse_from(line).unwrap_or_else(|error| panic!("{error}")).wish
    }

    #[test]
    fn what_is_left_out_and_what_is_gone_is_told_only_where_there_is_something() {
        let mut found = Found { published: 3, ..Found::default() };
        let told = counted(&wish(&[]), &found);
        assert_eq!(
            told,
            "3 messages for orders, enqueued from 2026-11-30T16:00:00Z to before 2026-11-30T17:00:00Z, are published\n"
        );
        (found.waiting, found.parked, found.discarded) = (1, 2, 4);
        found.kept_from = time("2026-11-30T16:30:00Z").ok();
        let told = counted(&wish(&["--key", "a\n"]), &found);
        assert!(told.contains("orders, key a\\n, enqueued"), "{told}");
        let lines: Vec<&str> = told.lines().skip(1).map(|line| line.get(..17).unwrap_or(line)).collect();
        assert_eq!(
            lines,
            ["left out: 1 wait ", "left out: 2 are p", "left out: 4 were ", "a part of the ran"]
        );
        assert!(told.contains("before 2026-11-30T16:30:00Z has been deleted"), "{told}");
    }

    #[test]
    fn a_compacted_topic_is_warned_of_and_so_is_one_of_which_it_is_not_known() {
        assert_eq!(warned("orders", &Cleanup::Deletes), "");
        assert!(warned("orders", &Cleanup::Compacts).contains("orders is compacted"));
        assert!(warned("orders", &Cleanup::Unknown("no".to_owned())).contains("not known (no)"));
    }
}

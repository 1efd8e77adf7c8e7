//! The command line. Only what works is offered.

use std::num::NonZeroU16;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use baton_protocol::dead_letter;
use baton_protocol::lifecycle::{Word as _, delivery};
use clap::builder::ValueParser;
use clap::{Args, Parser, Subcommand, ValueEnum};
use serde::{Serialize, Serializer};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use crate::config::Span;

/// Moves messages from Postgres to Kafka without losing, reordering or forging any.
#[derive(Parser)]
#[command(name = "baton", version, disable_help_subcommand = true)]
#[command(after_help = "Exit codes: 0 done, 1 failed, 2 usage or configuration.")]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) global: Global,
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// Flags that stand before or after any command.
#[derive(Args)]
pub(crate) struct Global {
    /// Configuration file; every key is explained in baton.example.toml [default: baton.toml, where it is]
    #[arg(long, global = true, value_name = "PATH")]
    pub(crate) config: Option<PathBuf>,
    /// Postgres URL of the outbox and of the inbox; goes before everything else that names one
    #[arg(long, global = true, value_name = "URL")]
    pub(crate) database_url: Option<String>,
    /// How log lines look; they go to stderr, RUST_LOG filters them [default: human]
    #[arg(long, global = true, value_name = "FORMAT")]
    pub(crate) log_format: Option<LogFormat>,
}

#[derive(Subcommand)]
pub(crate) enum Command {
    /// Bring a database up to date
    Migrate {
        #[command(subcommand)]
        line: Line,
    },
    /// Publish what is committed, until SIGTERM or SIGINT
    Relay {
        /// Exit 0 once everything committed and visible is published, by this relay or by others, and 1 if some is parked or dead
        /// then; serves no HTTP
        #[arg(long)]
        until_empty: bool,
    },
    /// Show each shard's owner, cursor and lag, the oldest waiting message first
    Status {
        /// Print JSON instead of tables
        #[arg(long)]
        json: bool,
    },
    /// Examine database, outbox and broker: each finding with what to do, the worst first; exit 1 if one must be mended
    Doctor {
        /// From which age on an open or prepared transaction is a finding
        #[arg(long, value_name = "DURATION", default_value = "5m", value_parser = ValueParser::from(span))]
        older_than: Duration,
        /// Print JSON instead of lines
        #[arg(long)]
        json: bool,
    },
    /// Show and settle messages that Kafka refuses, and those that wait behind them
    Parked {
        #[command(subcommand)]
        act: crate::parked::Act,
    },
    /// Stop publishing a topic; its messages wait, in order
    Pause {
        /// The topic
        #[arg(long, value_name = "TOPIC", value_parser = ValueParser::from(crate::parked::topic))]
        topic: String,
    },
    /// Publish a paused topic again, from where it was
    Resume {
        /// The topic
        #[arg(long, value_name = "TOPIC", value_parser = ValueParser::from(crate::parked::topic))]
        topic: String,
    },
    /// Publish a range of messages once more that were published already; same ids, each key in order
    Republish(crate::republish::Wish),
    /// Accept an outbox that was restored or replicated from another cluster; stop the relays first
    Rebase {
        /// Change nothing; show what would be done and how many messages may go twice
        #[arg(long)]
        dry_run: bool,
    },
    /// Show who changed what by these commands, when, and how many, newest first
    Audit {
        /// Print JSON instead of a table
        #[arg(long)]
        json: bool,
        /// How many changes to show
        #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..))]
        limit: u32,
    },
    /// Send dead letters again: chosen and counted first, then sent, then told what became of each
    Replay {
        #[command(subcommand)]
        command: crate::replay::Command,
    },
    /// Look into the consumers' side: what is known of a key, what was set aside, what may go
    Inbox {
        #[command(subcommand)]
        command: Inbox,
    },
    /// Show the effective configuration and where each value comes from, secrets masked
    Config {
        /// Print JSON instead of a table
        #[arg(long)]
        json: bool,
    },
}

#[derive(Subcommand)]
pub(crate) enum Line {
    /// The producers' side: messages, shards, cursors
    Outbox {
        /// Number of shards, 1 to 1024; fixed from the first message on [default: 8, or what the outbox has]
        #[arg(long, value_name = "N", value_parser = ValueParser::from(shards))]
        shards: Option<NonZeroU16>,
        /// How long one of the four slots takes messages, at least 1s [default: 6h, or what the outbox has]
        #[arg(long, value_name = "DURATION", value_parser = ValueParser::from(slot_period))]
        slot_period: Option<Duration>,
        /// Change nothing; exit 0 if the database is up to date, 1 if not
        #[arg(long, conflicts_with_all = ["shards", "slot_period"])]
        check: bool,
    },
    /// The consumers' side: what each has applied
    Inbox {
        /// Change nothing; exit 0 if the database is up to date, 1 if not
        #[arg(long)]
        check: bool,
    },
}

/// `baton inbox`.
#[derive(Subcommand)]
pub(crate) enum Inbox {
    /// Show what consumers know of one idempotency key: state, attempts, outcome, where it stopped and why, whether it can be run again
    Show {
        /// The idempotency key
        key: String,
        /// Of this consumer only
        #[arg(long, value_name = "NAME")]
        consumer: Option<String>,
        /// Print JSON instead of lines
        #[arg(long)]
        json: bool,
    },
    /// Records that were set aside, with their keys behind them
    Parked {
        #[command(subcommand)]
        command: InboxParked,
    },
    /// Delete what was finished long ago, and say what stays and why; a repeat of a record is then refused as too_old
    Purge {
        /// Of this consumer only
        #[arg(long, value_name = "NAME")]
        consumer: Option<String>,
        /// How long finished work stays, at least 1s: no shorter than the consumers' dedupe horizon and than the topics are kept
        #[arg(long, value_name = "DURATION", default_value = "30d", value_parser = ValueParser::from(span_from_a_second))]
        older_than: Duration,
        /// Change nothing; show how many would go
        #[arg(long)]
        dry_run: bool,
    },
}

/// `baton inbox parked`.
#[derive(Subcommand)]
pub(crate) enum InboxParked {
    /// List them in order, by default all that are not settled
    List {
        #[command(flatten)]
        filter: InboxFilter,
        /// Print JSON instead of a table
        #[arg(long)]
        json: bool,
    },
    /// Show one with its headers and its payload
    Show {
        /// Its id, from `list`
        id: i64,
        /// Print JSON instead of lines
        #[arg(long)]
        json: bool,
    },
    /// Try retrying and dead ones again, now and in the order of their keys; dead ones have all their attempts again
    Requeue {
        /// Their ids, from `list`
        #[arg(value_name = "ID")]
        ids: Vec<i64>,
        #[command(flatten)]
        filter: InboxFilter,
        /// Do it; without this only how many is shown
        #[arg(long)]
        yes: bool,
    },
    /// Give them up for good; the next of each key goes on
    Discard {
        /// Their ids, from `list`
        #[arg(value_name = "ID")]
        ids: Vec<i64>,
        #[command(flatten)]
        filter: InboxFilter,
        /// Do it; without this only how many is shown
        #[arg(long)]
        yes: bool,
    },
}

/// Which of the records that were set aside.
#[derive(Args)]
pub(crate) struct InboxFilter {
    /// Of this consumer
    #[arg(long, value_name = "NAME")]
    pub(crate) consumer: Option<String>,
    /// Of this topic
    #[arg(long, value_name = "TOPIC")]
    pub(crate) topic: Option<String>,
    /// With this record key
    #[arg(long, value_name = "KEY")]
    pub(crate) key: Option<String>,
    /// Given up for this cause: permanent, exhausted, conflict, no_identity, undecodable, unknown_type, too_old or panic
    #[arg(long, value_name = "CAUSE")]
    pub(crate) cause: Option<dead_letter::Cause>,
    /// In this state: retrying, blocked, dead, done or discarded
    #[arg(long, value_name = "STATE", value_parser = ValueParser::from(inbox_state))]
    pub(crate) state: Option<delivery::State>,
    /// That failed first longer ago than this
    #[arg(long, value_name = "DURATION", value_parser = ValueParser::from(span))]
    pub(crate) older_than: Option<Duration>,
}

fn inbox_state(text: &str) -> Result<delivery::State, String> {
    delivery::State::of_word(text)
        .filter(|state| state.is_parked())
        .ok_or_else(|| "must be retrying, blocked, dead, done or discarded".to_owned())
}

fn span_from_a_second(text: &str) -> Result<Duration, String> {
    let length = span(text)?;
    if length < Duration::from_secs(1) { Err("must be at least 1s".to_owned()) } else { Ok(length) }
}

/// How log lines look.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogFormat {
    /// For people; coloured on a terminal.
    #[default]
    Human,
    /// One JSON object a line.
    Json,
}

impl LogFormat {
    /// As it is written.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Human => "human",
            Self::Json => "json",
        }
    }
}

impl FromStr for LogFormat {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        <Self as ValueEnum>::from_str(text, false)
            .map_err(|_| format!("`{text}` is not a log format; use human or json"))
    }
}

impl Serialize for LogFormat {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}

fn shards(text: &str) -> Result<NonZeroU16, String> {
    text.parse::<NonZeroU16>()
        .ok()
        .filter(|n| n.get() <= 1024)
        .ok_or_else(|| "must be a whole number from 1 to 1024".to_owned())
}

pub(crate) fn span(text: &str) -> Result<Duration, String> {
    let Span(length) = text.parse::<Span>().map_err(|e| e.to_string())?;
    Ok(length)
}

/// A moment, with its zone.
pub(crate) fn time(text: &str) -> Result<OffsetDateTime, String> {
    OffsetDateTime::parse(text, &Rfc3339)
        .map_err(|_| "must be a time as RFC 3339 has it, such as 2026-11-30T17:00:00Z".to_owned())
}

fn slot_period(text: &str) -> Result<Duration, String> {
    let Span(period) = text.parse::<Span>().map_err(|e| e.to_string())?;
    if period < Duration::from_secs(1) {
        return Err("must be at least 1s".to_owned());
    }
    Ok(period)
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn the_command_line_is_well_formed() {
        Cli::command().debug_assert();
    }

    #[test]
    fn global_flags_stand_before_or_after_the_command() {
        for line in [["baton", "--config", "x.toml", "status"], ["baton", "status", "--config", "x.toml"]] {
            let cli = Cli::try_parse_from(line).unwrap();
            assert_eq!(cli.global.config.as_deref(), Some("x.toml".as_ref()));
        }
    }

    #[test]
    fn a_slot_period_below_a_second_is_refused() {
        assert_eq!(slot_period("999ms").unwrap_err(), "must be at least 1s");
        assert_eq!(slot_period("6h").unwrap(), Duration::from_secs(21_600));
    }

    #[test]
    fn a_time_names_its_zone() {
        assert!(time("2026-11-30T17:00:00Z").is_ok() && time("2026-11-30T17:00:00.5+01:00").is_ok());
        assert!(time("2026-11-30").is_err() && time("2026-11-30T17:00:00").is_err());
    }

    #[test]
    fn shards_go_from_1_to_1024() {
        assert!(shards("0").is_err() && shards("1025").is_err() && shards("-1").is_err());
        assert_eq!(shards("1024").unwrap().get(), 1024);
    }
}

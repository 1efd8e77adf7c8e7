//! What can be asked of `baton replay`.

use std::num::NonZeroU64;

use baton_protocol::dead_letter::Cause;
use baton_protocol::replay::{DEFAULT_LOOP_CAP, Giver, Letter};
use clap::builder::ValueParser;
use clap::{Args, Subcommand};
use time::OffsetDateTime;
use uuid::Uuid;

use crate::args::time;

/// The four commands.
#[derive(Subcommand)]
pub(crate) enum Command {
    /// Choose dead letters and freeze them as a plan in the consumer's database; sends nothing
    Plan(Wish),
    /// Send a plan's items; can be stopped and run again, and several may run at once
    Run {
        /// The plan, as `baton replay plan` printed it
        plan: Uuid,
        /// At most so many items a second, such as 50/s [default: as fast as it goes]
        #[arg(long, value_name = "N/s", value_parser = ValueParser::from(rate))]
        rate: Option<f64>,
        /// Send at most so many items, then stop
        #[arg(long, value_name = "N")]
        limit: Option<NonZeroU64>,
    },
    /// Show what became of a plan's items, as the consumer's inbox says
    Status {
        /// The plan
        plan: Uuid,
        /// Print JSON instead of a table
        #[arg(long)]
        json: bool,
    },
    /// Show all plans of this database, the newest first
    List {
        /// Print JSON instead of a table
        #[arg(long)]
        json: bool,
    },
}

/// Which dead letters, and how they are to be sent.
#[derive(Args, Clone)]
pub(crate) struct Wish {
    /// The consumer that gave the records up
    #[arg(long, value_name = "C")]
    pub(crate) consumer: String,
    /// The consumer group that gave them up, where letters name their group: Spring Kafka's do [default: the consumer's name]
    #[arg(long, value_name = "G")]
    pub(crate) group: Option<String>,
    /// The topic that they were first read from
    #[arg(long, value_name = "T")]
    pub(crate) topic: String,
    /// Only those given up for this cause
    #[arg(long, value_name = "C")]
    pub(crate) cause: Option<String>,
    /// Only those with this record key
    #[arg(long, value_name = "K")]
    pub(crate) key: Option<String>,
    /// Only those with this header; given several times, all of them
    #[arg(long = "header", value_name = "N=V", value_parser = ValueParser::from(header))]
    pub(crate) headers: Vec<(String, String)>,
    /// Only those given up at or after this time, RFC 3339
    #[arg(long, value_name = "TIME", value_parser = ValueParser::from(time))]
    pub(crate) from: Option<OffsetDateTime>,
    /// Only those given up before this time, RFC 3339
    #[arg(long, value_name = "TIME", value_parser = ValueParser::from(time))]
    pub(crate) to: Option<OffsetDateTime>,
    /// At most so many, the first of each partition of the dead-letter topic
    #[arg(long, value_name = "N")]
    pub(crate) limit: Option<NonZeroU64>,
    /// Send them as new work, each under an idempotency key of its own, instead of as the same work again
    #[arg(long)]
    pub(crate) new_key: bool,
    /// Send them to the original topic, where every consumer group reads them, instead of to the consumer's replay topic
    #[arg(long)]
    pub(crate) to_original: bool,
    /// The dead-letter topic; Spring Kafka's letters are understood [default: TOPIC.CONSUMER.dlt]
    #[arg(long, value_name = "TOPIC")]
    pub(crate) dlt: Option<String>,
    /// Take those that another plan has sent already, too
    #[arg(long)]
    pub(crate) again: bool,
    /// Leave out what has been replayed so often already
    #[arg(long, value_name = "N", default_value_t = DEFAULT_LOOP_CAP, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub(crate) loop_cap: u32,
    /// Print JSON instead of a table
    #[arg(long)]
    pub(crate) json: bool,
}

impl Wish {
    /// Whether a letter is of the consumer that was asked for. One that names nobody is taken.
    pub(crate) fn is_of_its_consumer(&self, letter: &Letter) -> bool {
        match &letter.giver {
            Some(Giver::Consumer(consumer)) => *consumer == self.consumer,
            Some(Giver::Group(group)) => group == self.group.as_ref().unwrap_or(&self.consumer),
            None => true,
        }
    }

    /// A cause that no letter of that topic can have, if that is what was asked for. Another's letters have causes of their own.
    pub(crate) fn unknown_cause(&self) -> Option<baton_protocol::dead_letter::Error> {
        let cause = self.cause.as_deref().filter(|_| self.dlt.is_none())?;
        cause.parse::<Cause>().err()
    }
}

fn rate(text: &str) -> Result<f64, String> {
    let number = text.trim().strip_suffix("/s").unwrap_or(text.trim());
    number
        .parse::<f64>()
        .ok()
        .filter(|rate| rate.is_finite() && *rate >= 0.001 && *rate <= 1e9)
        .ok_or_else(|| "must be a number of items a second, such as 50/s".to_owned())
}

fn header(text: &str) -> Result<(String, String), String> {
    let cut = text.split_once('=').filter(|(name, _)| !name.is_empty());
    let (name, value) = cut.ok_or_else(|| "must be NAME=VALUE".to_owned())?;
    Ok((name.to_owned(), value.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_a_number_a_second() {
        assert_eq!(rate("50/s"), Ok(50.0));
        assert_eq!(rate("0.5"), Ok(0.5));
        for wrong in ["0", "-1/s", "50/m", "fast", "NaN", "inf/s", ""] {
            assert!(rate(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_header_is_cut_at_its_first_equals_sign() {
        assert_eq!(header("tenant=a=b"), Ok(("tenant".to_owned(), "a=b".to_owned())));
        assert!(header("tenant").is_err() && header("=x").is_err());
    }
}

//! The command line, and how a verdict is printed for people.

use std::str::FromStr;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};
use orders::judge::Verdict;
use orders::mix::{self, Mix};

/// An example service: places orders through Baton's outbox, bills them through its inbox, and checks both
#[derive(Parser)]
#[command(name = "orders", version, disable_help_subcommand = true)]
#[command(
    after_help = "Reads DATABASE_URL and KAFKA_BROKERS. Exit codes: 0 done, 1 failed or something found, 2 usage."
)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Subcommand)]
pub(crate) enum Command {
    /// Make what is needed: both migrations, the tables, the topic; may be repeated
    Setup {
        /// Forget an earlier run first: drop the schemas outbox, inbox, orders and billing of this database, the topics
        /// orders and orders.billing.* and the group billing
        #[arg(long)]
        fresh: bool,
    },
    /// Place orders, each in one transaction with its message
    Place {
        /// How many
        #[arg(long, value_name = "N")]
        count: u64,
        /// How many a second over all writers, like 200/s [default: as fast as it goes]
        #[arg(long, value_name = "R/s")]
        rate: Option<Rate>,
        /// How many customers they are spread over; orders of one customer are kept in order
        #[arg(long, value_name = "K", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..))]
        keys: u32,
        /// How many connections place at once
        #[arg(long, value_name = "W", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=1000))]
        writers: u32,
        #[command(flatten)]
        mix: MixArgs,
    },
    /// Bill orders until SIGTERM or SIGINT
    Bill,
    /// Compare what was placed, published and billed; exit 1 if anything was lost, invented, doubled or reordered
    Check {
        /// Print JSON instead of text
        #[arg(long)]
        json: bool,
        /// While orders are neither billed nor dead-lettered, look again, for so long
        #[arg(long, value_name = "SECONDS", default_value = "0")]
        wait: Seconds,
    },
}

#[derive(Args)]
pub(crate) struct MixArgs {
    /// Fraction of orders that can never be billed, 0 to 1
    #[arg(long, value_name = "F", default_value_t = 0.0)]
    poison: f64,
    /// Fraction of orders whose first two attempts fail, 0 to 1
    #[arg(long, value_name = "F", default_value_t = 0.0)]
    flaky: f64,
}

impl MixArgs {
    pub(crate) fn mix(&self) -> Result<Mix, mix::Error> {
        Mix::new(self.poison, self.flaky)
    }
}

/// Orders a second.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Rate(pub(crate) f64);

impl FromStr for Rate {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let number = text.strip_suffix("/s").unwrap_or(text).trim();
        let rate = number.parse::<f64>().ok().filter(|rate| rate.is_finite() && *rate > 0.0);
        rate.map(Self).ok_or("must be a number above 0, like 200/s")
    }
}

/// A whole number of seconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Seconds(pub(crate) Duration);

impl FromStr for Seconds {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let number = text.strip_suffix('s').unwrap_or(text).parse::<u32>();
        number
            .map(|seconds| Self(Duration::from_secs(seconds.into())))
            .map_err(|_| "must be a whole number of seconds")
    }
}

/// What was seen, a few orders of each fault, and last the line that people and scripts look for.
pub(crate) fn print(verdict: &Verdict) {
    let summary = verdict.summary();
    println!(
        "{} placed, {} records on the topic, {} invoices",
        summary.placed, summary.published, summary.billed
    );
    println!("wire duplicates: {} (allowed; the inbox applies each order once)", summary.wire_duplicates);
    if summary.foreign > 0 {
        println!("records that are no orders: {}", summary.foreign);
    }
    let examples = &summary.examples;
    for (name, orders) in [
        ("lost", &examples.lost),
        ("phantom", &examples.phantom),
        ("doubled", &examples.doubled),
        ("published out of order", &examples.published_out_of_order),
        ("billed out of order", &examples.billed_out_of_order),
    ] {
        if !orders.is_empty() {
            let orders: Vec<String> = orders.iter().map(ToString::to_string).collect();
            println!("{name}: {}", orders.join(", "));
        }
    }
    if summary.phantom > 0 {
        println!("(a topic that another database's orders were published to has phantoms too)");
    }
    println!("{verdict}");
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
    fn a_rate_is_a_number_above_zero() {
        assert_eq!("200/s".parse(), Ok(Rate(200.0)));
        assert_eq!("0.5".parse(), Ok(Rate(0.5)));
        for text in ["0", "-1/s", "x", "inf", "NaN", ""] {
            assert!(text.parse::<Rate>().is_err(), "{text}");
        }
    }

    #[test]
    fn a_wait_is_in_seconds() {
        assert_eq!("60".parse(), Ok(Seconds(Duration::from_secs(60))));
        assert_eq!("60s".parse(), Ok(Seconds(Duration::from_secs(60))));
        assert!("1.5".parse::<Seconds>().is_err());
    }
}

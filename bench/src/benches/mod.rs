//! The benchmarks, one a module: how each side is run, and what is compared with what.

mod backlog;
mod drain;
mod enqueue_tax;
mod held_xmin;
mod idle;
mod inbox;
mod latency;
mod payloads;
mod sick_key;
mod stamps;
mod takeover;

use clap::ValueEnum;

use crate::lab::{Lab, Result};
use crate::report::Report;

/// In the order in which all are run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
pub(crate) enum Bench {
    /// A backlog through the relay, against the bare pipe
    Drain,
    /// Insert to topic at 2,000 a second, against a bare commit and a bare produce
    Latency,
    /// A drain while a transaction holds the vacuum horizon, against one without
    HeldXmin,
    /// 10 million waiting, against 100,000
    Backlog,
    /// 100 B to 1 MB, against the bare pipe
    Payloads,
    /// From the end of a relay to the next publish, against the lease and a second
    Takeover,
    /// 8 shards and nothing to do, against 1% of a core
    Idle,
    /// An insert, against one into a plain outbox
    EnqueueTax,
    /// A consumer's handler with the inbox, against the same without
    Inbox,
    /// One key of 1,000 that fails while a backlog is consumed, against none
    SickKey,
}

impl Bench {
    pub(crate) async fn run(self, lab: &Lab) -> Result<Report> {
        match self {
            Self::Drain => drain::run(lab).await,
            Self::Latency => latency::run(lab).await,
            Self::HeldXmin => held_xmin::run(lab).await,
            Self::Backlog => backlog::run(lab).await,
            Self::Payloads => payloads::run(lab).await,
            Self::Takeover => takeover::run(lab).await,
            Self::Idle => idle::run(lab).await,
            Self::EnqueueTax => enqueue_tax::run(lab).await,
            Self::Inbox => inbox::run(lab).await,
            Self::SickKey => sick_key::run(lab).await,
        }
    }
}

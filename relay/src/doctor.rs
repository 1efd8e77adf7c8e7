//! `baton doctor`: every guard and every setting that matters, each with what was found and what to do.
//!
//! ```text
//!  postgres ─┬─ reachable? its own sessions (no pooler between)? settings, connections left
//!            ├─ long and prepared transactions of the whole cluster
//!            └─ the outbox: privileges, recovery, guards, leases, what stands still ──▶ topics in use
//!  kafka ────── reachable? ─── topics in use: there? their limits against ours, what an acknowledgement is worth
//! ```
//!
//! It changes nothing, and what it costs does not depend on how much waits: of each shard it looks at a bounded number of
//! rows. One part that is away is a finding, and the others are examined all the same. Advice is what to type or to set,
//! wherever that can be known.

pub(crate) mod kafka;
mod postgres;

use std::fmt;
use std::time::Duration;

use serde::Serialize;

use crate::Settings;
use crate::database::{self, told};

/// How bad a finding is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// As it should be.
    Ok,
    /// Good to know; nothing has to be done.
    Note,
    /// It works, and costs or risks something.
    Warning,
    /// Something is not published, or would be lost or reordered.
    Error,
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Ok => "ok",
            Self::Note => "note",
            Self::Warning => "warning",
            Self::Error => "error",
        })
    }
}

/// One thing that was looked at. The field names are a public format.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Finding {
    /// What was looked at.
    pub check: &'static str,
    /// How bad it is.
    pub level: Level,
    /// What was found.
    pub found: String,
    /// What to do; null where nothing has to be done.
    pub advice: Option<String>,
}

impl Finding {
    /// All is well.
    #[must_use]
    pub fn ok(check: &'static str, found: impl Into<String>) -> Self {
        Self { check, level: Level::Ok, found: found.into(), advice: None }
    }

    /// Something that is not as it should be, or worth knowing.
    #[must_use]
    pub fn new(
        check: &'static str,
        level: Level,
        found: impl Into<String>,
        advice: impl Into<String>,
    ) -> Self {
        Self { check, level, found: found.into(), advice: Some(advice.into()) }
    }

    /// A check that could not be made. What such an error says holds its own advice, so that is kept short here.
    fn failed(check: &'static str, error: &database::Error) -> Self {
        let advice = error.advice().trim_start_matches("; ");
        let advice =
            if advice.is_empty() { "see what was found; a relay would not start either" } else { advice };
        Self::new(check, Level::Error, told(error), advice)
    }
}

/// From which age on a transaction is called long.
pub const LONG_TRANSACTION: Duration = Duration::from_secs(300);

/// Examines database and broker. The worst findings come first. An address that is empty is not asked: that it is not
/// given is for the caller to say.
pub async fn examine(settings: &Settings, long: Duration) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut topics = None;
    if !settings.database_url.is_empty() {
        topics = postgres::examine(settings, long, &mut findings).await;
    }
    if !settings.brokers.is_empty() {
        kafka::examine(settings, topics.as_deref(), &mut findings).await;
    }
    worst_first(&mut findings);
    findings
}

/// Puts the worst findings first and leaves those of one level in their order.
pub fn worst_first(findings: &mut [Finding]) {
    findings.sort_by_key(|finding| std::cmp::Reverse(finding.level));
}

/// A topic in use.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Used {
    topic: String,
    /// How many of the messages that were looked at wait for it.
    waiting: i64,
}

/// A length of time for people.
fn lasted(seconds: f64) -> String {
    if seconds < 120.0 { format!("{seconds:.0} s") } else { format!("{:.0} min", seconds / 60.0) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_worst_comes_first_and_each_level_has_its_word() {
        let mut findings = vec![
            Finding::ok("a", ""),
            Finding::new("b", Level::Note, "", ""),
            Finding::new("c", Level::Error, "", "mend it"),
            Finding::new("d", Level::Warning, "", ""),
            Finding::new("e", Level::Error, "", ""),
        ];
        worst_first(&mut findings);
        assert_eq!(findings.iter().map(|f| f.check).collect::<String>(), "cedba");
        let json = serde_json::to_value(&findings[0]).unwrap();
        let expected = serde_json::json!({"check": "c", "level": "error", "found": "", "advice": "mend it"});
        assert_eq!(json, expected);
        assert_eq!(format!("{:>8}", Level::Warning), " warning");
    }

    #[test]
    fn times_are_said_in_what_people_count() {
        assert_eq!(
            (lasted(7.4), lasted(119.0), lasted(420.0)),
            ("7 s".into(), "119 s".into(), "7 min".into())
        );
    }
}

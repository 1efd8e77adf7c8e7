//! `baton doctor`: what is wrong, or would be, each with what to do. Exit 1 if something must be mended.
//!
//! What cannot be used or is not given is a finding like others, so that the rest is still examined.

use std::time::Duration;

use baton_migrations::{Line, check};
use baton_relay::doctor::{self, Finding, Level};

use crate::config::{Effective, Side};
use crate::database;
use crate::failure::Failure;
use crate::migrate::NotCurrent;
use crate::out;

/// Something must be mended.
#[derive(Debug, thiserror::Error)]
#[error("{0} of these findings must be mended")]
struct Ill(usize);

/// Examines everything and prints it, the worst first.
pub(crate) async fn run(config: &Effective, long: Duration, json: bool) -> Result<(), Failure> {
    let mut settings = config.settings_without_addresses();
    settings.brokers = config.config.kafka.brokers.clone().unwrap_or_default();
    let mut findings = Vec::new();
    if let Err(error) = config.check_ranges() {
        findings.push(Finding::new("configuration", Level::Error, error.to_string(), "change this setting"));
    }
    match config
        .database_url(Side::Outbox)
        .map_err(|error| error.to_string())
        .and_then(|url| database::check_url(&url).map(|()| url).map_err(|error| error.to_string()))
    {
        Err(error) => findings.push(Finding::new("postgres", Level::Error, error, "name the database")),
        Ok(url) => {
            findings.extend(migrations(&url).await);
            settings.database_url = url.url;
        }
    }
    if settings.brokers.is_empty() {
        let found = "the Kafka cluster is not given";
        let advice = "set KAFKA_BROKERS, or brokers under [kafka] in baton.toml, to host:port[,host:port…]";
        findings.push(Finding::new("kafka", Level::Error, found, advice));
    }
    for finding in doctor::examine(&settings, long).await {
        // The migrations have been judged with more to say.
        if !findings.iter().any(|earlier| earlier.check == finding.check && finding.check == "migrations") {
            findings.push(finding);
        }
    }
    doctor::worst_first(&mut findings);
    if json {
        out::json(&findings)?;
    } else {
        out::text(&for_people(&findings))?;
    }
    match findings.iter().filter(|finding| finding.level == Level::Error).count() {
        0 => Ok(()),
        errors => Err(Failure::failed(Ill(errors))),
    }
}

/// Whether the database is as this binary needs it. Nothing where there is no connection: the doctor says so.
async fn migrations(url: &crate::config::DatabaseUrl) -> Option<Finding> {
    let mut connection = database::connect(url).await.ok()?;
    Some(match check(&mut connection, Line::Outbox).await {
        Ok(state) => match NotCurrent::of(Line::Outbox, state) {
            None => Finding::ok("migrations", "the outbox is up to date"),
            Some(problem) => {
                Finding::new("migrations", Level::Error, problem.to_string(), "run `baton migrate outbox`")
            }
        },
        Err(error) => {
            let found = baton_relay::database::told(&error);
            Finding::new("migrations", Level::Error, found, "run `baton migrate outbox --check`")
        }
    })
}

fn for_people(findings: &[Finding]) -> String {
    let width = findings.iter().map(|finding| finding.check.len()).max().unwrap_or_default();
    let mut text = String::new();
    for Finding { check, level, found, advice, .. } in findings {
        text.push_str(&format!("{level:7}  {check:width$}  {found}\n"));
        if let Some(advice) = advice {
            text.push_str(&format!("{:7}  {:width$}  to do: {advice}\n", "", ""));
        }
    }
    let count = |level| findings.iter().filter(|finding| finding.level == level).count();
    text.push_str(&format!("\n{} errors, {} warnings\n", count(Level::Error), count(Level::Warning)));
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_finding_is_a_line_and_its_advice_the_next() {
        let findings = [
            Finding::new("guards", Level::Error, "the sequence is behind", "run this"),
            Finding::ok("kafka", "it answers"),
        ];
        assert_eq!(
            for_people(&findings),
            "error    guards  the sequence is behind\n                 to do: run this\nok       kafka   it answers\n\n\
             1 errors, 0 warnings\n"
        );
    }
}

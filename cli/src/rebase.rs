//! `baton rebase`: accept an outbox that was restored from another cluster, and say what that means.

use baton_migrations::Line;
use baton_migrations::rebase::{Error, Mode, Outcome, Report, rebase};

use crate::config::{Effective, Side};
use crate::database;
use crate::failure::Failure;
use crate::migrate;
use crate::out;
use crate::table::{numbers, render};

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::failed(error)
    }
}

/// Runs the command and says what it did.
pub(crate) async fn run(config: &Effective, dry_run: bool) -> Result<(), Failure> {
    let mut connection = database::connect_alone(&config.database_url(Side::Outbox)?).await?;
    migrate::require_current(&mut connection, Line::Outbox).await?;
    let mode = if dry_run { Mode::DryRun } else { Mode::Apply };
    match rebase(&mut connection, mode).await? {
        Outcome::Planned(report) => {
            out::text(&for_people(&report))?;
            out::line("nothing has been changed: `baton rebase` without --dry-run does it")
        }
        Outcome::Done(report) => {
            out::text(&for_people(&report))?;
            out::line("the outbox is rebased: start the relays")
        }
        _ => out::line(
            "nothing to do: the outbox belongs to this cluster, nothing in it lies in the future, and no position was given out twice",
        ),
    }
}

fn for_people(report: &Report) -> String {
    let mut text: String = report.reasons.iter().map(|reason| format!("{reason}\n")).collect();
    let rows: Vec<_> = report
        .shards
        .iter()
        .map(|shard| {
            [
                shard.shard.to_string(),
                shard.before.map_or_else(|| "-".to_owned(), |position| position.to_string()),
                shard.after.to_string(),
                shard.waiting.to_string(),
                shard.repeats.to_string(),
            ]
        })
        .collect();
    let columns = [
        numbers("shard"),
        numbers("cursor was"),
        numbers("cursor is"),
        numbers("waiting"),
        numbers("may go twice"),
    ];
    text.push('\n');
    text.push_str(&render(columns, &rows));
    text.push_str(&format!(
        "\n{} messages wait to be published\n{} messages that are published already may go twice, with the same ids\n\
         {} messages get another transaction id\n",
        report.waiting(),
        report.repeats(),
        report.neutralised,
    ));
    if report.moved > 0 {
        text.push_str(&format!(
            "{} messages that were written here get another position, behind those that came from the other cluster\n",
            report.moved
        ));
    }
    if report.out_of_turn > 0 {
        text.push_str(&format!(
            "{} messages get another position, behind all others and in the order in which they were enqueued: the sequence had given \
             out theirs before, or in another order\n",
            report.out_of_turn
        ));
    }
    if let Some((from, to)) = report.sequence {
        text.push_str(&format!("the next position is {to} instead of {from}\n"));
    }
    text.push_str(
        "what a relay published after this copy was made is not known here, and goes again as well\n",
    );
    text
}

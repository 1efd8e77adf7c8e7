//! `baton audit`: who changed what by the commands of `baton`, newest first.
//!
//! Of the outbox and of the inbox, each from its own database; a database that has only one of them shows that one.

use baton_migrations::audit::{Entry, read};
use baton_migrations::{Line, State, check};

use crate::config::{Effective, Side};
use crate::database;
use crate::failure::Failure;
use crate::migrate::NotCurrent;
use crate::out;
use crate::table::{numbers, render, words};

/// Prints the newest changes.
pub(crate) async fn run(config: &Effective, json: bool, limit: u32) -> Result<(), Failure> {
    let mut entries = Vec::new();
    let mut is_missing = true;
    for (side, line) in [(Side::Outbox, Line::Outbox), (Side::Inbox, Line::Inbox)] {
        let mut connection = database::connect_alone(&config.database_url(side)?).await?;
        if check(&mut connection, line).await? != State::Missing {
            is_missing = false;
            entries.extend(read(&mut connection, line, limit).await?);
        }
    }
    if is_missing {
        return Err(NotCurrent::Missing(Line::Outbox).into());
    }
    // All of one form and in UTC, so they sort as text.
    entries.sort_by(|a, b| b.at.cmp(&a.at));
    entries.truncate(usize::try_from(limit).unwrap_or(usize::MAX));
    if json {
        let entries: Vec<_> =
            entries.iter().map(as_json).collect::<Result<_, _>>().map_err(Failure::failed)?;
        out::json(&entries)
    } else {
        out::text(&for_people(entries))
    }
}

fn as_json(entry: &Entry) -> Result<serde_json::Value, serde_json::Error> {
    let arguments: serde_json::Value = serde_json::from_str(&entry.arguments)?;
    let Entry { at, who, command, affected, .. } = entry;
    Ok(
        serde_json::json!({"at": at, "who": who, "command": command, "arguments": arguments, "affected": affected}),
    )
}

fn for_people(entries: Vec<Entry>) -> String {
    let rows: Vec<_> = entries
        .into_iter()
        .map(|entry| [entry.at, entry.who, entry.command, entry.affected.to_string(), entry.arguments])
        .collect();
    render([words("at"), words("who"), words("command"), numbers("affected"), words("arguments")], &rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry() -> Entry {
        Entry {
            at: "2026-11-29T23:00:00.000001Z".to_owned(),
            who: "ops".to_owned(),
            command: "rebase".to_owned(),
            arguments: r#"{"may_go_twice": 3}"#.to_owned(),
            affected: 7,
        }
    }

    #[test]
    fn arguments_are_part_of_the_json_and_not_a_text_in_it() {
        let json = as_json(&entry()).unwrap();
        assert_eq!(json["arguments"]["may_go_twice"], 3);
        assert_eq!(json["affected"], 7);
    }

    #[test]
    fn people_see_who_did_what_and_to_how_many() {
        let text = for_people(vec![entry()]);
        assert_eq!(
            text,
            "AT                           WHO  COMMAND  AFFECTED  ARGUMENTS\n\
             2026-11-29T23:00:00.000001Z  ops  rebase          7  {\"may_go_twice\": 3}\n"
        );
    }
}

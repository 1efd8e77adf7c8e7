//! `baton migrate`: bring a database up to date, or say whether it is.

use baton_migrations::{Applied, Error, Line, State, check, migrate_inbox, migrate_outbox};

use crate::args;
use crate::config::{Effective, Side, Span};
use crate::database;
use crate::failure::Failure;
use crate::out;

/// A database that is not as this binary needs it.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NotCurrent {
    #[error("the database has no {0}; run `baton migrate {0}`")]
    Missing(Line),
    #[error("the {line} is at migration {applied}, this baton needs {newest}; run `baton migrate {line}`")]
    Behind { line: Line, applied: i64, newest: i64 },
    #[error("the {line} is at migration {applied}, this baton knows {newest}; use the newer baton")]
    Ahead { line: Line, applied: i64, newest: i64 },
}

impl NotCurrent {
    /// What is wrong with a database in this state, if anything is.
    pub(crate) fn of(line: Line, state: State) -> Option<Self> {
        match state {
            State::Current => None,
            State::Missing => Some(Self::Missing(line)),
            State::Behind { applied, newest } => Some(Self::Behind { line, applied, newest }),
            State::Ahead { applied, newest } => Some(Self::Ahead { line, applied, newest }),
        }
    }
}

impl From<NotCurrent> for Failure {
    fn from(error: NotCurrent) -> Self {
        Self::failed(error)
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        match error {
            Error::TooManyShards { .. } | Error::SlotPeriod { .. } => Self::usage(error),
            _ => Self::failed(error),
        }
    }
}

/// Runs the command and says what it did.
pub(crate) async fn run(config: &Effective, line: &args::Line) -> Result<(), Failure> {
    let side = match line {
        args::Line::Outbox { .. } => Side::Outbox,
        args::Line::Inbox { .. } => Side::Inbox,
    };
    let mut connection = database::connect_alone(&config.database_url(side)?).await?;
    let applied = match line {
        args::Line::Outbox { check: true, .. } => return say_current(&mut connection, Line::Outbox).await,
        args::Line::Inbox { check: true } => return say_current(&mut connection, Line::Inbox).await,
        args::Line::Outbox { shards, slot_period, .. } => {
            migrate_outbox(&mut connection, *shards, *slot_period).await?
        }
        args::Line::Inbox { .. } => migrate_inbox(&mut connection).await?,
    };
    out::line(&report(&applied))
}

async fn say_current(connection: &mut sqlx::PgConnection, line: Line) -> Result<(), Failure> {
    require_current(connection, line).await?;
    out::line(&format!("the {line} is up to date"))
}

/// Refuses a database that this binary does not fit.
pub(crate) async fn require_current(connection: &mut sqlx::PgConnection, line: Line) -> Result<(), Failure> {
    NotCurrent::of(line, check(connection, line).await?).map_or(Ok(()), |problem| Err(problem.into()))
}

fn report(applied: &Applied) -> String {
    let Applied { line, versions, roles, settings } = applied;
    let mut text = match versions.len() {
        0 => format!("the {line} is up to date, no migration was pending"),
        1 => format!("the {line} is up to date, 1 migration applied"),
        n => format!("the {line} is up to date, {n} migrations applied"),
    };
    if !roles.is_empty() {
        text.push_str(&format!("; made or mended the roles {}", roles.join(", ")));
    }
    if let Some(settings) = settings {
        text.push_str(&format!("; {} shards, slot period {}", settings.shards, Span(settings.slot_period)));
    }
    text
}

//! What follows an attempt, how long to wait for the next one, and how loudly to say so. Decides and logs; does nothing.
//!
//! | what was seen | then |
//! |---|---|
//! | fresh, duplicate, dead | on to the next record |
//! | the handler says transient or unknown | wait by the consumer's policy; an attempt is spent |
//! | the handler says outage, the database or the dead-letter topic is away, in progress elsewhere | wait, up to 5 s at a time; no attempt is spent |
//! | leased work whose attempts are spent | a dead letter, `exhausted` |
//! | the handler says permanent, undecodable or of an unknown type; it panicked; conflict; too old | a dead letter with that cause |

use std::time::Duration;

use baton_protocol::dead_letter::Cause;
use baton_protocol::report::chain;
use baton_protocol::retry::{Delays, Policy};

use crate::inbox::{self, Once};

use crate::message::Message;
use crate::metrics::{Consumed, Retry};
use crate::{Failure, Record};

/// What follows an attempt.
#[derive(Debug)]
pub(super) enum Next {
    Advance(Met),
    Wait { reason: Reason, error: String },
    GiveUp { cause: Cause, error: String },
}

/// How a record was settled, in the words of the metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Met {
    Fresh,
    Duplicate,
    Dead,
}

impl Met {
    pub(super) fn consumed(self) -> Consumed {
        match self {
            Self::Fresh => Consumed::Fresh,
            Self::Duplicate => Consumed::Duplicate,
            Self::Dead => Consumed::Dead,
        }
    }
}

/// The rule.
pub(super) fn next(attempt: Result<Once, inbox::Error>) -> Next {
    match attempt {
        Ok(Once::Fresh(_)) => Next::Advance(Met::Fresh),
        Ok(Once::Duplicate(_)) => Next::Advance(Met::Duplicate),
        Ok(Once::Dead { .. }) => Next::Advance(Met::Dead),
        Ok(Once::InProgress) => {
            Next::Wait { reason: Reason::InProgress, error: "in progress elsewhere".to_owned() }
        }
        Ok(Once::Conflict) => Next::GiveUp {
            cause: Cause::Conflict,
            error: "its idempotency key was used with another payload".to_owned(),
        },
        // Buried like the rest: without a row its repeats would each be a dead letter again.
        Ok(Once::TooOld) => Next::GiveUp {
            cause: Cause::TooOld,
            error: "its record is as old as what was purged from the inbox, which may have held it: it may have been applied".to_owned(),
        },
        Ok(Once::Failed(failure)) => {
            let error = failure.to_string();
            match failure {
                // The rollback has settled what was unknown; with a lease the next attempt asks.
                Failure::Transient(_) | Failure::Unknown(_) => Next::Wait { reason: Reason::Handler, error },
                Failure::Outage(_) => Next::Wait { reason: Reason::Outage, error },
                Failure::Permanent(_) => Next::GiveUp { cause: Cause::Permanent, error },
                Failure::Undecodable(_) => Next::GiveUp { cause: Cause::Undecodable, error },
                Failure::UnknownType(_) => Next::GiveUp { cause: Cause::UnknownType, error },
                Failure::Panicked(error) => Next::GiveUp { cause: Cause::Panic, error },
            }
        }
        Err(error @ inbox::Error::Fenced { .. }) => {
            Next::Wait { reason: Reason::Fenced, error: chain(&error) }
        }
        // Begun, and what became of it is asked after by the next attempt.
        Err(error @ inbox::Error::Lost { .. }) => {
            Next::Wait { reason: Reason::InProgress, error: chain(&error) }
        }
        Err(error @ inbox::Error::Spent { .. }) => {
            Next::GiveUp { cause: Cause::Exhausted, error: chain(&error) }
        }
        Err(error) => Next::Wait { reason: Reason::Database, error: chain(&error) },
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reason {
    Handler,
    Outage,
    Database,
    InProgress,
    Fenced,
    DeadLetter,
}

impl Reason {
    /// Whether it is about this record alone, which may therefore be set aside.
    pub(super) fn is_the_records(self) -> bool {
        matches!(self, Self::Handler | Self::InProgress)
    }

    pub(super) fn retry(self) -> Retry {
        match self {
            Self::Handler => Retry::Handler,
            Self::Outage => Retry::Outage,
            Self::Database => Retry::Database,
            Self::InProgress => Retry::InProgress,
            Self::Fenced => Retry::Fenced,
            Self::DeadLetter => Retry::DeadLetter,
        }
    }

    fn text(self) -> &'static str {
        match self {
            Self::Handler => "the handler failed for the time being; its key waits, and it is tried again",
            Self::Outage => "the handler says that what it needs is away; everything waits",
            Self::Database => "the inbox database does not answer as it should; it is tried again",
            Self::InProgress => "the message is in progress elsewhere, or it cannot be told; its key waits",
            Self::Fenced => "the handler ended its transaction itself; mend it: its key waits",
            Self::DeadLetter => "the dead letter cannot be written; its key waits until it can be",
        }
    }
}

/// How loud a line is. What somebody must act on is said once as an error, what mends itself once as a warning; a
/// handler's failures are each worth a warning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Loud {
    Error,
    Warn,
    Quiet,
}

/// The waits of one record.
pub(super) struct Waits {
    handler: Delays,
    outage: Delays,
    said: Vec<Reason>,
}

impl Waits {
    pub(super) fn new(retry: &Policy) -> Self {
        Self { handler: retry.delays(), outage: OUTAGE.delays(), said: Vec::new() }
    }

    /// How long to wait, and says so.
    pub(super) fn wait(&mut self, at: &Position<'_>, reason: Reason, error: &str) -> Duration {
        let delay = self.next(reason);
        match self.loudness(reason) {
            Loud::Error => tracing::error!(%at, error, ?delay, "{}", reason.text()),
            Loud::Warn => tracing::warn!(%at, error, ?delay, "{}", reason.text()),
            Loud::Quiet => tracing::debug!(%at, error, ?delay, "{}", reason.text()),
        }
        delay
    }

    fn next(&mut self, reason: Reason) -> Duration {
        match reason {
            Reason::Handler => {
                self.outage.reset();
                self.handler.next_delay()
            }
            Reason::Outage | Reason::Database | Reason::InProgress | Reason::Fenced | Reason::DeadLetter => {
                self.outage.next_delay()
            }
        }
    }

    fn loudness(&mut self, reason: Reason) -> Loud {
        if reason == Reason::Handler {
            return Loud::Warn;
        }
        if self.said.contains(&reason) {
            return Loud::Quiet;
        }
        self.said.push(reason);
        match reason {
            Reason::DeadLetter | Reason::Fenced => Loud::Error,
            Reason::Handler | Reason::Outage | Reason::Database | Reason::InProgress => Loud::Warn,
        }
    }
}

/// The waits for what is not the message's fault: a database that is away, a dead-letter topic that takes nothing.
pub(super) const OUTAGE: Policy =
    Policy { base: Duration::from_millis(100), factor: 2.0, cap: Duration::from_secs(5) };

/// Where a record stands, for the log.
pub(super) struct Position<'a> {
    pub(super) record: &'a Record,
    pub(super) key: Option<&'a str>,
}

impl<'a> Position<'a> {
    pub(super) fn of(message: &'a Message) -> Self {
        Self { record: &message.record, key: Some(&message.work.key) }
    }
}

impl std::fmt::Display for Position<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}[{}]@{}", self.record.topic(), self.record.partition(), self.record.offset())?;
        self.key.map_or(Ok(()), |key| write!(f, " {key}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failed(failure: Failure) -> Result<Once, inbox::Error> {
        Ok(Once::Failed(failure))
    }

    #[test]
    fn what_is_settled_moves_on_and_what_waits_does_not() {
        assert!(matches!(next(Ok(Once::Fresh(None))), Next::Advance(Met::Fresh)));
        assert!(matches!(next(Ok(Once::Duplicate(None))), Next::Advance(Met::Duplicate)));
        let dead = Once::Dead { cause: "permanent".to_owned(), error: None };
        assert!(matches!(next(Ok(dead)), Next::Advance(Met::Dead)));
        assert!(matches!(next(Ok(Once::InProgress)), Next::Wait { reason: Reason::InProgress, .. }));
    }

    #[test]
    fn an_unknown_result_in_a_transaction_is_tried_again_like_a_transient_one() {
        assert!(matches!(
            next(failed(Failure::transient("later"))),
            Next::Wait { reason: Reason::Handler, .. }
        ));
        assert!(matches!(next(failed(Failure::unknown("lost"))), Next::Wait { reason: Reason::Handler, .. }));
    }

    #[test]
    fn a_dead_letter_names_its_cause() {
        let cause = |next| match next {
            Next::GiveUp { cause, .. } => Some(cause),
            Next::Advance(_) | Next::Wait { .. } => None,
        };
        assert_eq!(cause(next(failed(Failure::permanent("no")))), Some(Cause::Permanent));
        assert_eq!(cause(next(failed(Failure::undecodable("no")))), Some(Cause::Undecodable));
        assert_eq!(cause(next(failed(Failure::unknown_type("no")))), Some(Cause::UnknownType));
        assert_eq!(cause(next(failed(Failure::Panicked("boom".to_owned())))), Some(Cause::Panic));
        assert_eq!(cause(next(Ok(Once::Conflict))), Some(Cause::Conflict));
        assert_eq!(cause(next(Ok(Once::TooOld))), Some(Cause::TooOld));
    }

    #[test]
    fn an_outage_gives_nothing_up() {
        for error in [
            inbox::Error::Connect(sqlx::Error::PoolTimedOut),
            inbox::Error::Begin(sqlx::Error::BeginFailed),
            inbox::Error::Commit { key: "k".to_owned(), source: sqlx::Error::WorkerCrashed },
            inbox::Error::Complete { key: "k".to_owned(), source: sqlx::Error::WorkerCrashed },
        ] {
            assert!(matches!(next(Err(error)), Next::Wait { reason: Reason::Database, .. }));
        }
    }

    #[test]
    fn what_needs_somebody_is_said_once_as_an_error() {
        let mut waits = Waits::new(&OUTAGE);
        assert_eq!(waits.loudness(Reason::DeadLetter), Loud::Error);
        assert_eq!(waits.loudness(Reason::DeadLetter), Loud::Quiet);
        assert_eq!(waits.loudness(Reason::Database), Loud::Warn);
        assert_eq!(waits.loudness(Reason::Database), Loud::Quiet);
        assert_eq!(waits.loudness(Reason::Handler), Loud::Warn);
        assert_eq!(waits.loudness(Reason::Handler), Loud::Warn);
    }
}

//! What a handler says of a delivery, and what follows.
//!
//! ```text
//! Done                 effects, outcome and mark commit together; the offset moves
//! Failed(Transient)    rolled back; tried again, in memory at first, then set aside with its key; after its attempts a dead letter
//! Failed(Unknown)      in a transaction the rollback settles it; with a lease the next attempt asks first: as transient
//! Failed(Outage)       as transient, but no attempt is spent: everything waits until one attempt succeeds
//! Failed(Permanent)    rolled back; dead letter, mark, then the offset moves
//! Failed(Undecodable)  as permanent, with its own cause, as are Failed(UnknownType) and Failed(Panicked)
//! ```

use std::fmt;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::value::RawValue;

use baton_protocol::report::chain;

use crate::BoxError;

/// What became of one attempt.
#[derive(Debug)]
#[non_exhaustive]
pub enum Verdict {
    /// Applied. The outcome, if any, is stored with the mark and handed to whoever brings the same work again.
    Done(Option<Outcome>),
    /// Not applied.
    Failed(Failure),
}

impl Verdict {
    /// Applied, with nothing to remember.
    #[must_use]
    pub fn done() -> Self {
        Self::Done(None)
    }

    /// Applied, with an outcome that is stored as JSON. What cannot be serialised is a permanent failure.
    #[must_use]
    pub fn done_with<T: Serialize + ?Sized>(outcome: &T) -> Self {
        match Outcome::json(outcome) {
            Ok(outcome) => Self::Done(Some(outcome)),
            Err(error) => Self::permanent(error),
        }
    }

    /// Another attempt may succeed without anybody's doing.
    #[must_use]
    pub fn transient(error: impl Into<BoxError>) -> Self {
        Failure::transient(error).into()
    }

    /// What every message needs is away: a provider, another database.
    #[must_use]
    pub fn outage(error: impl Into<BoxError>) -> Self {
        Failure::outage(error).into()
    }

    /// No attempt will succeed: a dead letter.
    #[must_use]
    pub fn permanent(error: impl Into<BoxError>) -> Self {
        Failure::permanent(error).into()
    }

    /// It is not known whether the effect took place.
    #[must_use]
    pub fn unknown(error: impl Into<BoxError>) -> Self {
        Failure::unknown(error).into()
    }
}

/// Why an attempt failed, sorted by what helps. A function that returns `Result<_, Failure>` can use `?` on
/// [`sqlx::Error`], and turns into a [`Verdict`] by `into()`.
#[non_exhaustive]
pub enum Failure {
    /// Another attempt may succeed without anybody's doing: a lost connection, a deadlock, a service that is away.
    Transient(BoxError),
    /// No attempt will succeed: the input is wrong.
    Permanent(BoxError),
    /// It is not known whether the effect took place.
    Unknown(BoxError),
    /// What every message needs is away. Everything waits until one attempt succeeds, and no attempt is spent; many
    /// transient failures in a row come to the same.
    Outage(BoxError),
    /// The payload cannot be understood, so no attempt will succeed.
    Undecodable(BoxError),
    /// Nothing here is meant for messages of this type.
    UnknownType(BoxError),
    /// The handler panicked, with this message.
    Panicked(String),
}

impl Failure {
    /// Another attempt may succeed without anybody's doing.
    #[must_use]
    pub fn transient(error: impl Into<BoxError>) -> Self {
        Self::Transient(error.into())
    }

    /// What every message needs is away.
    #[must_use]
    pub fn outage(error: impl Into<BoxError>) -> Self {
        Self::Outage(error.into())
    }

    /// No attempt will succeed.
    #[must_use]
    pub fn permanent(error: impl Into<BoxError>) -> Self {
        Self::Permanent(error.into())
    }

    /// It is not known whether the effect took place.
    #[must_use]
    pub fn unknown(error: impl Into<BoxError>) -> Self {
        Self::Unknown(error.into())
    }

    /// The payload cannot be understood: a dead letter with cause `undecodable`. For handlers that decode by themselves; what
    /// a [`Decode`](crate::Decode) refuses becomes this.
    ///
    /// ```
    /// use baton_consumer::Failure;
    ///
    /// let read = |payload: &[u8]| std::str::from_utf8(payload).map(str::len).map_err(Failure::undecodable);
    /// assert!(matches!(read(b"\xff"), Err(Failure::Undecodable(_))));
    /// ```
    #[must_use]
    pub fn undecodable(error: impl Into<BoxError>) -> Self {
        Self::Undecodable(error.into())
    }

    /// Nothing here is meant for messages of this type: a dead letter with cause `unknown_type`. For handlers that tell types
    /// apart by themselves; [`Routes`](crate::Routes) says this of what no route takes.
    ///
    /// ```
    /// use baton_consumer::Failure;
    ///
    /// assert_eq!(Failure::unknown_type("order.lost is new to us").to_string(), "order.lost is new to us");
    /// ```
    #[must_use]
    pub fn unknown_type(error: impl Into<BoxError>) -> Self {
        Self::UnknownType(error.into())
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Transient(error)
            | Self::Permanent(error)
            | Self::Unknown(error)
            | Self::Outage(error)
            | Self::Undecodable(error)
            | Self::UnknownType(error) => f.write_str(&chain(error.as_ref())),
            Self::Panicked(message) => write!(f, "panicked: {message}"),
        }
    }
}

impl fmt::Debug for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self {
            Self::Transient(_) => "Transient",
            Self::Permanent(_) => "Permanent",
            Self::Unknown(_) => "Unknown",
            Self::Outage(_) => "Outage",
            Self::Undecodable(_) => "Undecodable",
            Self::UnknownType(_) => "UnknownType",
            Self::Panicked(_) => "Panicked",
        };
        write!(f, "{kind}({self})")
    }
}

impl From<Failure> for Verdict {
    fn from(failure: Failure) -> Self {
        Self::Failed(failure)
    }
}

impl From<sqlx::Error> for Verdict {
    fn from(error: sqlx::Error) -> Self {
        Failure::from(error).into()
    }
}

/// `Ok(())` is [`Verdict::done`].
impl<E: Into<Failure>> From<Result<(), E>> for Verdict {
    fn from(result: Result<(), E>) -> Self {
        match result {
            Ok(()) => Self::done(),
            Err(failure) => Self::Failed(failure.into()),
        }
    }
}

impl<E: Into<Failure>> From<Result<Outcome, E>> for Verdict {
    fn from(result: Result<Outcome, E>) -> Self {
        match result {
            Ok(outcome) => Self::Done(Some(outcome)),
            Err(failure) => Self::Failed(failure.into()),
        }
    }
}

/// Transient is what another time or somebody's repair of the environment cures: connections, resources, locks,
/// serialisation, time-outs, a server that shuts down or is read-only, and SQL that the database does not accept as
/// such (a migration or a grant that is missing is not the message's fault). Permanent is what the data did: values out
/// of range, violated constraints, an exception raised by a function.
impl From<sqlx::Error> for Failure {
    fn from(error: sqlx::Error) -> Self {
        if is_transient(&error) { Self::transient(error) } else { Self::permanent(error) }
    }
}

/// The payload of a handler's own making could not be written or read: no attempt will change that.
impl From<serde_json::Error> for Failure {
    fn from(error: serde_json::Error) -> Self {
        Self::permanent(error)
    }
}

pub(crate) fn is_transient(error: &sqlx::Error) -> bool {
    match error {
        sqlx::Error::Database(error) => {
            // A migration under a cached plan; the next attempt plans anew.
            let stale_plan = error.message().contains("cached plan must not change result type");
            stale_plan || error.code().is_none_or(|code| is_transient_sqlstate(&code))
        }
        sqlx::Error::Io(_)
        | sqlx::Error::Tls(_)
        | sqlx::Error::Protocol(_)
        | sqlx::Error::Configuration(_)
        | sqlx::Error::PoolTimedOut
        | sqlx::Error::PoolClosed
        | sqlx::Error::WorkerCrashed
        | sqlx::Error::BeginFailed => true,
        _ => false,
    }
}

/// By class, the first two characters: 08 connection, 25 transaction state (read-only after a fail-over, idle time-out,
/// aborted by an earlier error), 26 a prepared statement that a pooler lost, 28 and 3D and 3F and 42 the deployment,
/// 40 rollback, 53 resources, 55 locks, 57 operator, 58 system, F0 configuration file, XX internal.
fn is_transient_sqlstate(code: &str) -> bool {
    let Some(class) = code.get(..2) else { return true };
    matches!(
        class,
        "08" | "25"
            | "26"
            | "28"
            | "3D"
            | "3F"
            | "40"
            | "42"
            | "53"
            | "55"
            | "57"
            | "58"
            | "72"
            | "F0"
            | "XX"
    )
}

/// What a handler gave back, as JSON text, exactly as it was stored.
#[derive(Debug, Clone)]
pub struct Outcome(Box<RawValue>);

impl Outcome {
    /// Serialises a value.
    ///
    /// # Errors
    ///
    /// When it cannot be written as JSON.
    pub fn json<T: Serialize + ?Sized>(value: &T) -> Result<Self, serde_json::Error> {
        serde_json::value::to_raw_value(value).map(Self)
    }

    pub(crate) fn stored(text: String) -> Result<Self, serde_json::Error> {
        RawValue::from_string(text).map(Self)
    }

    /// The JSON text.
    #[must_use]
    pub fn as_json(&self) -> &str {
        self.0.get()
    }

    /// Reads it back.
    ///
    /// # Errors
    ///
    /// When it is not a `T`.
    pub fn decode<T: DeserializeOwned>(&self) -> Result<T, serde_json::Error> {
        serde_json::from_str(self.as_json())
    }
}

impl PartialEq for Outcome {
    fn eq(&self, other: &Self) -> bool {
        self.as_json() == other.as_json()
    }
}

impl Eq for Outcome {}

#[cfg(test)]
mod tests {
    use std::borrow::Cow;
    use std::error::Error as StdError;

    use sqlx::error::{DatabaseError, ErrorKind};

    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("{message}")]
    struct Answer {
        code: &'static str,
        message: &'static str,
    }

    impl DatabaseError for Answer {
        fn message(&self) -> &str {
            self.message
        }
        fn code(&self) -> Option<Cow<'_, str>> {
            Some(self.code.into())
        }
        fn as_error(&self) -> &(dyn StdError + Send + Sync + 'static) {
            self
        }
        fn as_error_mut(&mut self) -> &mut (dyn StdError + Send + Sync + 'static) {
            self
        }
        fn into_error(self: Box<Self>) -> Box<dyn StdError + Send + Sync + 'static> {
            self
        }
        fn kind(&self) -> ErrorKind {
            ErrorKind::Other
        }
    }

    fn answer(code: &'static str, message: &'static str) -> sqlx::Error {
        sqlx::Error::Database(Box::new(Answer { code, message }))
    }

    #[test]
    fn what_another_time_cures_is_transient() {
        for code in [
            "08006", "40001", "40P01", "53300", "55P03", "57014", "57P01", "57P03", "25006", "25P02",
            "25P03", "42501", "42P01",
        ] {
            assert!(matches!(Failure::from(answer(code, "")), Failure::Transient(_)), "{code}");
        }
        for error in [
            sqlx::Error::PoolTimedOut,
            sqlx::Error::Io(std::io::Error::other("reset")),
            sqlx::Error::WorkerCrashed,
        ] {
            assert!(matches!(Failure::from(error), Failure::Transient(_)));
        }
        let stale = answer("0A000", "cached plan must not change result type");
        assert!(matches!(Failure::from(stale), Failure::Transient(_)));
    }

    #[test]
    fn what_the_data_did_is_permanent() {
        for code in [
            "22001", "22P02", "22021", "23502", "23503", "23505", "23514", "P0001", "U0001", "0A000", "54001",
        ] {
            assert!(matches!(Failure::from(answer(code, "")), Failure::Permanent(_)), "{code}");
        }
        assert!(matches!(Failure::from(sqlx::Error::RowNotFound), Failure::Permanent(_)));
    }

    #[test]
    fn a_result_turns_into_a_verdict() {
        let done: Verdict = Ok::<(), sqlx::Error>(()).into();
        assert!(matches!(done, Verdict::Done(None)));
        let failed: Verdict = Err::<(), _>(sqlx::Error::PoolTimedOut).into();
        assert!(matches!(failed, Verdict::Failed(Failure::Transient(_))));
    }

    #[test]
    fn an_outcome_keeps_its_text() {
        let outcome = Outcome::stored("{\"b\": 1.0, \"a\":9007199254740993}".to_owned()).unwrap();
        assert_eq!(outcome.as_json(), "{\"b\": 1.0, \"a\":9007199254740993}");
    }
}

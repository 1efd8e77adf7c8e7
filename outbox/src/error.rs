//! What can go wrong while enqueueing.

use std::fmt;

/// Why a message was not enqueued.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The payload cannot be written as JSON. Nothing was sent.
    #[error("cannot write the payload for topic {topic:?} as json")]
    Encode {
        /// The message's topic.
        topic: String,
        /// What serde says.
        #[source]
        source: serde_json::Error,
    },
    /// A text holds a NUL character, which Postgres cannot store. Nothing was sent.
    #[error("the {field} of a message holds a NUL character, which Postgres cannot store")]
    NulCharacter {
        /// Where.
        field: Field,
    },
    /// A constraint of `outbox.message` refused the message. The transaction is aborted.
    #[error("message refused: {refusal}")]
    Refused {
        /// What is wrong with it.
        refusal: Refusal,
        /// What Postgres said.
        #[source]
        source: sqlx::Error,
    },
    /// The database has no outbox. The transaction is aborted.
    #[error("this database has no outbox; run baton migrate outbox")]
    NotMigrated {
        /// What Postgres said.
        #[source]
        source: sqlx::Error,
    },
    /// The role may not enqueue. The transaction is aborted.
    #[error("the database role may not enqueue; grant it baton_producer")]
    Denied {
        /// What Postgres said.
        #[source]
        source: sqlx::Error,
    },
    /// The statement failed for another reason: the connection, a full disk, a transaction that was already aborted.
    #[error("cannot enqueue {messages} message(s)")]
    Insert {
        /// How many the statement held.
        messages: usize,
        /// What went wrong.
        #[source]
        source: sqlx::Error,
    },
}

/// A text of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Field {
    /// The topic.
    Topic,
    /// The key.
    Key,
    /// The type.
    Type,
    /// The idempotency key.
    IdempotencyKey,
    /// The name of a header.
    HeaderName,
}

impl fmt::Display for Field {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Topic => "topic",
            Self::Key => "key",
            Self::Type => "type",
            Self::IdempotencyKey => "idempotency key",
            Self::HeaderName => "name of a header",
        })
    }
}

/// What a constraint of `outbox.message` found wrong.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Refusal {
    /// The topic is not 1 to 249 of `a-z A-Z 0-9 . _ -`, or is `.` or `..`.
    Topic,
    /// The key has more than 64 KiB.
    Key,
    /// The idempotency key is empty or has more than 1 KiB.
    IdempotencyKey,
    /// The type is empty or has more than 1 KiB.
    Type,
    /// The payload has more than 64 MiB.
    Payload,
    /// The headers have more than 256 KiB.
    HeadersSize,
    /// The headers are not an object or an array of pairs.
    HeadersShape,
    /// A header is named like something that has a column.
    HeaderName,
    /// A constraint that this crate does not know: of a newer outbox, or your own.
    Other {
        /// Its name.
        constraint: String,
    },
}

impl Refusal {
    pub(crate) fn from_constraint(name: &str) -> Self {
        match name {
            "topic_must_be_1_to_249_of_letters_digits_dot_underscore_dash" => Self::Topic,
            "key_at_most_64_kib" => Self::Key,
            "idempotency_key_from_1_byte_to_1_kib" => Self::IdempotencyKey,
            "type_from_1_byte_to_1_kib" => Self::Type,
            "payload_at_most_64_mib" => Self::Payload,
            "headers_at_most_256_kib" => Self::HeadersSize,
            "headers_must_be_an_object_or_an_array_of_pairs" => Self::HeadersShape,
            "headers_must_not_name_what_has_a_column" => Self::HeaderName,
            other => Self::Other { constraint: other.to_owned() },
        }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Topic => f.write_str("a topic is 1 to 249 of a-z A-Z 0-9 . _ - and neither . nor .."),
            Self::Key => f.write_str("a key has at most 64 KiB"),
            Self::IdempotencyKey => f.write_str("an idempotency key has 1 byte to 1 KiB"),
            Self::Type => f.write_str("a type has 1 byte to 1 KiB"),
            Self::Payload => f.write_str("a payload has at most 64 MiB"),
            Self::HeadersSize => f.write_str("headers have at most 256 KiB"),
            Self::HeadersShape => f.write_str("headers are an object or an array of pairs"),
            Self::HeaderName => {
                f.write_str("ce_id, ce_type, ce_specversion and idempotency-key are no headers: use id, type and idempotency_key")
            }
            Self::Other { constraint } => write!(f, "constraint {constraint}"),
        }
    }
}

impl Error {
    pub(crate) fn insert(messages: usize, source: sqlx::Error) -> Self {
        let Some(error) = source.as_database_error() else { return Self::Insert { messages, source } };
        match error.code().as_deref() {
            // check_violation
            Some("23514") => {
                let refusal = Refusal::from_constraint(error.constraint().unwrap_or("(unnamed)"));
                Self::Refused { refusal, source }
            }
            // invalid_schema_name, undefined_table
            Some("3F000" | "42P01") => Self::NotMigrated { source },
            // insufficient_privilege
            Some("42501") => Self::Denied { source },
            _ => Self::Insert { messages, source },
        }
    }
}

//! Messages into the caller's transaction.

use sqlx::PgConnection;
use uuid::Uuid;

use crate::headers::Header;
use crate::{Error, Field, Message};

/// Writes a message into the caller's transaction, in one round trip. Comes back with its id.
///
/// It is published after the transaction has committed, and never if it does not. Pass `&mut tx` of a
/// [`sqlx::Transaction`]; on a plain connection outside a transaction the message commits on its own.
///
/// # Errors
///
/// When the message is refused or the statement fails; see [`Error`] for which of them abort the transaction.
///
/// # Cancel safety
///
/// A dropped future leaves it open whether the row is in the transaction: roll it back.
pub async fn enqueue(tx: &mut PgConnection, message: &Message) -> Result<Uuid, Error> {
    let row = Row::new(message)?;
    message_insert(tx, &row).await.map_err(|e| Error::insert(1, e))?;
    Ok(row.id)
}

/// Writes messages into the caller's transaction, in the order given: of two with the same key the one that comes
/// first is published first. Comes back with their ids, in the same order.
///
/// One round trip, however many they are, up to 256 MiB of keys, payloads and headers; beyond that, one for each
/// 256 MiB. None is in the transaction if one is refused, because that aborts it.
///
/// # Errors
///
/// When a message is refused or a statement fails; see [`Error`] for which of them abort the transaction.
///
/// # Cancel safety
///
/// A dropped future leaves it open which rows are in the transaction: roll it back.
pub async fn enqueue_all(tx: &mut PgConnection, messages: &[Message]) -> Result<Vec<Uuid>, Error> {
    let rows = messages.iter().map(Row::new).collect::<Result<Vec<_>, _>>()?;
    for statement in statements(&rows, STATEMENT_BYTES) {
        messages_insert(tx, statement).await.map_err(|e| Error::insert(statement.len(), e))?;
    }
    Ok(rows.iter().map(|row| row.id).collect())
}

/// Well below the gigabyte that one value of a statement may have.
const STATEMENT_BYTES: usize = 256 << 20;

/// A message as its columns.
struct Row<'a> {
    message: &'a Message,
    id: Uuid,
    headers: Option<String>,
}

impl<'a> Row<'a> {
    fn new(message: &'a Message) -> Result<Self, Error> {
        #[cfg(feature = "trace-context")]
        let traced = crate::trace_context::headers(message);
        #[cfg(not(feature = "trace-context"))]
        let traced: [Header; 0] = [];
        let headers: Vec<&Header> = message.headers.iter().chain(&traced).collect();
        let texts = [
            (Field::Topic, Some(&message.topic)),
            (Field::Key, message.key.as_ref()),
            (Field::Type, message.r#type.as_ref()),
            (Field::IdempotencyKey, message.idempotency_key.as_ref()),
        ];
        let names = headers.iter().map(|(name, _)| (Field::HeaderName, Some(name)));
        for (field, text) in texts.into_iter().chain(names) {
            if text.is_some_and(|text| text.contains('\0')) {
                return Err(Error::NulCharacter { field });
            }
        }
        let headers = (!headers.is_empty()).then(|| serde_json::to_string(&headers)).transpose();
        let headers = headers.map_err(|source| Error::Encode { topic: message.topic.clone(), source })?;
        Ok(Self { message, id: message.id.unwrap_or_else(Uuid::new_v4), headers })
    }

    fn bytes(&self) -> usize {
        let message = self.message;
        message.payload.as_ref().map_or(0, Vec::len)
            + message.key.as_ref().map_or(0, String::len)
            + self.headers.as_ref().map_or(0, String::len)
    }
}

/// The rows cut into statements of at most `limit` bytes each, or of one row where that alone is more.
fn statements<'r, 'm>(rows: &'r [Row<'m>], limit: usize) -> impl Iterator<Item = &'r [Row<'m>]> {
    let mut rest = rows;
    std::iter::from_fn(move || {
        let mut bytes = rest.first()?.bytes();
        let more = rest[1..].iter().take_while(|row| {
            bytes += row.bytes();
            bytes <= limit
        });
        let (statement, after) = rest.split_at(1 + more.count());
        rest = after;
        Some(statement)
    })
}

async fn message_insert(tx: &mut PgConnection, row: &Row<'_>) -> Result<(), sqlx::Error> {
    sqlx::query(include_str!("../queries/message_insert.sql"))
        .bind(row.id)
        .bind(row.message.idempotency_key.as_deref())
        .bind(&row.message.topic)
        .bind(row.message.key.as_deref())
        .bind(row.message.r#type.as_deref())
        .bind(row.message.payload.as_deref())
        .bind(row.headers.as_deref())
        .execute(tx)
        .await
        .map(drop)
}

async fn messages_insert(tx: &mut PgConnection, rows: &[Row<'_>]) -> Result<(), sqlx::Error> {
    let texts = |of: fn(&Message) -> Option<&str>| rows.iter().map(|row| of(row.message)).collect::<Vec<_>>();
    sqlx::query(include_str!("../queries/messages_insert.sql"))
        .bind(rows.iter().map(|row| row.id).collect::<Vec<_>>())
        .bind(texts(|m| m.idempotency_key.as_deref()))
        .bind(texts(|m| Some(&m.topic)))
        .bind(texts(|m| m.key.as_deref()))
        .bind(texts(|m| m.r#type.as_deref()))
        .bind(rows.iter().map(|row| row.message.payload.as_deref()).collect::<Vec<_>>())
        .bind(rows.iter().map(|row| row.headers.as_deref()).collect::<Vec<_>>())
        .execute(tx)
        .await
        .map(drop)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn statements_hold_every_row_in_order_and_no_more_bytes_than_allowed(
            sizes in proptest::collection::vec(0_usize..20, 0..40), limit in 0_usize..40,
        ) {
            let messages: Vec<Message> = sizes.iter().map(|size| Message::builder("t").bytes(vec![0; *size])).collect();
            let rows: Vec<Row<'_>> = messages.iter().map(|message| Row::new(message).unwrap()).collect();
            let cut: Vec<Vec<usize>> =
                statements(&rows, limit).map(|statement| statement.iter().map(Row::bytes).collect()).collect();
            prop_assert_eq!(cut.concat(), sizes);
            for (n, statement) in cut.iter().enumerate() {
                let bytes = statement.iter().sum::<usize>();
                prop_assert!(bytes <= limit || statement.len() == 1);
                // As few statements as can be: the next row would not have fitted.
                let next = cut.get(n + 1).map_or(limit, |next| next[0]);
                prop_assert!(n + 1 == cut.len() || bytes + next > limit);
            }
        }
    }

    #[test]
    fn key_and_headers_count_as_bytes_too() {
        let message = Message::builder("t").key("four").header("h", "v").tombstone();
        assert_eq!(Row::new(&message).unwrap().bytes(), 4 + r#"[["h","v"]]"#.len());
    }
}

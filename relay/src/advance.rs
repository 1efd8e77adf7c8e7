//! Writes cursors: the only statement that moves one, guarded by owner, generation, expiry and the crash token.
//!
//! All shards share one connection; what is asked while a statement runs goes out with the next one. A cursor that was
//! not moved is [`Outcome::Fenced`]: its lease has expired, was taken over, or the server lost its tail in a crash.

use std::time::Duration;

use sqlx::postgres::PgConnection;
use tokio::sync::{mpsc, oneshot};
use uuid::Uuid;

use crate::cursor::{Cursor, Late};
use crate::database::{Error, answer};

/// Moves a shard's cursor to what is acknowledged.
#[derive(Debug)]
pub(crate) struct Request {
    pub shard: i16,
    pub generation: i64,
    /// The crash token that the claim remembered.
    pub token: Uuid,
    pub cursor: Cursor,
    pub reply: oneshot::Sender<Outcome>,
}

/// What became of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    Advanced,
    Fenced,
}

/// Serves requests until every sender is gone or the connection fails.
pub(crate) async fn run(
    mut connection: PgConnection,
    mut requests: mpsc::Receiver<Request>,
    owner: &str,
    patience: Duration,
) -> Result<(), Error> {
    while let Some(first) = requests.recv().await {
        let mut batch = vec![first];
        while let Ok(next) = requests.try_recv() {
            batch.push(next);
        }
        // Claims of one session see one token; a shard claimed across a crash of the server could carry another.
        let token = batch.first().map(|r| r.token);
        let (batch, other): (Vec<_>, Vec<_>) = batch.into_iter().partition(|r| Some(r.token) == token);
        for group in [batch, other] {
            write(&mut connection, group, owner, patience).await?;
        }
    }
    Ok(())
}

async fn write(
    connection: &mut PgConnection,
    batch: Vec<Request>,
    owner: &str,
    patience: Duration,
) -> Result<(), Error> {
    let Some(token) = batch.first().map(|r| r.token) else { return Ok(()) };
    let late =
        |f: fn(&Late) -> String| batch.iter().map(|r| r.cursor.late.as_ref().map(f)).collect::<Vec<_>>();
    let asked = sqlx::query_scalar(include_str!("../queries/cursor_advance.sql"))
        .bind(owner)
        .bind(token)
        .bind(batch.iter().map(|r| r.shard).collect::<Vec<_>>())
        .bind(batch.iter().map(|r| r.generation).collect::<Vec<_>>())
        .bind(batch.iter().map(|r| r.cursor.position).collect::<Vec<_>>())
        .bind(batch.iter().map(|r| r.cursor.snapshot.clone()).collect::<Vec<_>>())
        .bind(batch.iter().map(|r| r.cursor.ceiling.clone()).collect::<Vec<_>>())
        .bind(late(|l| l.snapshot.clone()))
        .bind(batch.iter().map(|r| r.cursor.late.as_ref().map(|l| l.position)).collect::<Vec<_>>())
        .fetch_all(connection);
    let moved: Vec<i16> = answer("advancing cursors", patience, asked).await?;
    for request in batch {
        let outcome = if moved.contains(&request.shard) { Outcome::Advanced } else { Outcome::Fenced };
        // A shard that has gone meanwhile needs no answer: it will read the durable cursor when it comes back.
        let _ = request.reply.send(outcome);
    }
    Ok(())
}

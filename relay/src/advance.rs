//! Writes cursors: the only statement that moves one, guarded by owner, generation, expiry and the crash token.
//!
//! All shards share one connection; what is asked while a statement runs goes out with the next one. A cursor that was
//! not moved is [`Outcome::Fenced`]: its lease has expired, was taken over, or the server lost its tail in a crash. Between
//! two statements it looks at the [`guards`]: what moves cursors must know that they mean something.
//!
//! A cursor is the newest row of a ring, so that moving it costs the same however long a snapshot is held somewhere:
//!
//! ```text
//!   number   1 … n−2·KEPT │ n−2·KEPT … n−KEPT │ n−KEPT … n−1    n
//!            deleted        deleted in one go   kept             the durable cursor
//! ```
//!
//! What a cursor passes over without its being published goes to `outbox.parked` in the same statement.
//!
//! Deleting looks at nothing twice, because deleted rows stay in the index as long as that snapshot. The first time of a
//! session it looks from the beginning, so that nothing a killed relay left stays for ever.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use baton_protocol::lifecycle::Word as _;
use baton_protocol::lifecycle::message::State;
use sqlx::Postgres;
use sqlx::postgres::{PgArguments, PgConnection};
use sqlx::query::QueryAs;
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;
use uuid::Uuid;

use crate::aside::Slated;
use crate::cursor::{Cursor, Late};
use crate::database::{Error, answer};
use crate::guards;
use crate::parked::kept;
use crate::settings::Settings;

/// Moves a shard's cursor to what is acknowledged.
#[derive(Debug)]
pub(crate) struct Request {
    pub shard: i16,
    pub generation: i64,
    /// The crash token that the claim remembered.
    pub token: Uuid,
    pub cursor: Cursor,
    /// What it passes over is set aside by the same statement.
    pub slated: Vec<Slated>,
    pub reply: oneshot::Sender<Outcome>,
}

/// What became of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    Advanced,
    Fenced,
}

/// Rows of a shard's ring that stay; as many at least are deleted in one go.
const KEPT: i64 = 200;

/// Below which number the rows of a shard are gone.
type Trimmed = HashMap<i16, i64>;

/// Serves requests until every sender is gone or the connection fails.
pub(crate) async fn run(
    mut connection: PgConnection,
    mut requests: mpsc::Receiver<Request>,
    settings: Arc<Settings>,
    patience: Duration,
) -> Result<(), Error> {
    let mut trimmed = Trimmed::new();
    #[cfg(feature = "plants")]
    let mut is_prepared = false;
    let mut look_at = Instant::now() + guards::LOOK_EVERY;
    loop {
        let first = tokio::select! {
            biased;
            () = tokio::time::sleep_until(look_at) => {
                guards::check(&mut connection, patience, None).await?;
                look_at = Instant::now() + guards::LOOK_EVERY;
                continue;
            }
            first = requests.recv() => match first {
                Some(first) => first,
                None => return Ok(()),
            },
        };
        let mut batch = vec![first];
        while let Ok(next) = requests.try_recv() {
            batch.push(next);
        }
        #[cfg(feature = "plants")]
        if let Some(hold) = &settings.hold
            && std::mem::replace(&mut is_prepared, true)
        {
            hold.gather(&mut batch, &mut requests).await;
        }
        // Claims of one session see one token; a shard claimed across a crash of the server could carry another.
        let token = batch.first().map(|r| r.token);
        let (batch, other): (Vec<_>, Vec<_>) = batch.into_iter().partition(|r| Some(r.token) == token);
        for group in [batch, other] {
            let moved = write(&mut connection, group, &settings, patience).await?;
            trim(&mut connection, &moved, &mut trimmed, patience).await?;
        }
    }
}

/// Moves the cursors, answers, and comes back with the numbers of the rows that were written.
async fn write(
    connection: &mut PgConnection,
    batch: Vec<Request>,
    settings: &Settings,
    patience: Duration,
) -> Result<Vec<(i16, i64)>, Error> {
    let Some(token) = batch.first().map(|r| r.token) else { return Ok(Vec::new()) };
    let late =
        |f: fn(&Late) -> String| batch.iter().map(|r| r.cursor.late.as_ref().map(f)).collect::<Vec<_>>();
    let slated: Vec<(&Request, &Slated)> =
        batch.iter().flat_map(|request| request.slated.iter().map(move |slated| (request, slated))).collect();
    let statement = include_str!("../queries/cursor_advance.sql");
    #[cfg(feature = "plants")]
    let statement = crate::plant::advance(settings).unwrap_or(statement);
    let statement =
        if slated.is_empty() { statement } else { include_str!("../queries/cursor_advance_parking.sql") };
    let mut asked = sqlx::query_as(statement)
        .bind(&settings.owner)
        .bind(token)
        .bind(batch.iter().map(|r| r.shard).collect::<Vec<_>>())
        .bind(batch.iter().map(|r| r.generation).collect::<Vec<_>>())
        .bind(batch.iter().map(|r| r.cursor.position).collect::<Vec<_>>())
        .bind(batch.iter().map(|r| r.cursor.snapshot.clone()).collect::<Vec<_>>())
        .bind(batch.iter().map(|r| r.cursor.ceiling.clone()).collect::<Vec<_>>())
        .bind(late(|l| l.snapshot.clone()))
        .bind(batch.iter().map(|r| r.cursor.late.as_ref().map(|l| l.position)).collect::<Vec<_>>());
    if !slated.is_empty() {
        asked = bind_slated(asked, &slated, settings);
    }
    let moved: Vec<(i16, i64)> = answer("advancing cursors", patience, asked.fetch_all(connection)).await?;
    for request in batch {
        let has_moved = moved.iter().any(|(shard, _)| *shard == request.shard);
        let outcome = if has_moved { Outcome::Advanced } else { Outcome::Fenced };
        // A shard that has gone meanwhile needs no answer: it will read the durable cursor when it comes back.
        let _ = request.reply.send(outcome);
    }
    Ok(moved)
}

type Asked<'q> = QueryAs<'q, Postgres, (i16, i64), PgArguments>;

/// The parameters of what is set aside.
fn bind_slated<'q>(asked: Asked<'q>, slated: &[(&Request, &Slated)], settings: &Settings) -> Asked<'q> {
    let texts = |f: fn(&Slated) -> Option<String>| slated.iter().map(|(_, s)| f(s)).collect::<Vec<_>>();
    let delay = |slated: &Slated| {
        (slated.state == State::Retrying)
            .then(|| i64::try_from(settings.park_policy().delay(0).as_millis()).unwrap_or(i64::MAX))
    };
    asked
        .bind(slated.iter().map(|(request, _)| request.shard).collect::<Vec<_>>())
        .bind(slated.iter().map(|(_, s)| s.position).collect::<Vec<_>>())
        .bind(slated.iter().map(|(_, s)| s.id).collect::<Vec<_>>())
        .bind(slated.iter().map(|(_, s)| s.state.as_str()).collect::<Vec<_>>())
        .bind(texts(|s| s.cause.map(|cause| cause.as_str().to_owned())))
        .bind(texts(|s| s.error.as_deref().map(kept)))
        .bind(slated.iter().map(|(_, s)| s.attempts).collect::<Vec<_>>())
        .bind(slated.iter().map(|(_, s)| delay(s)).collect::<Vec<_>>())
        .bind(slated.iter().map(|(request, _)| request.generation).collect::<Vec<_>>())
}

/// Deletes rows that lie far enough back.
async fn trim(
    connection: &mut PgConnection,
    moved: &[(i16, i64)],
    trimmed: &mut Trimmed,
    patience: Duration,
) -> Result<(), Error> {
    let from = |shard| trimmed.get(&shard).copied().unwrap_or(0);
    let due: Vec<(i16, i64, i64)> = moved
        .iter()
        .map(|(shard, number)| (*shard, from(*shard), number - KEPT))
        .filter(|(_, from, to)| to - from >= KEPT)
        .collect();
    if due.is_empty() {
        return Ok(());
    }
    let asked = sqlx::query(include_str!("../queries/advance_trim.sql"))
        .bind(due.iter().map(|d| d.0).collect::<Vec<_>>())
        .bind(due.iter().map(|d| d.1).collect::<Vec<_>>())
        .bind(due.iter().map(|d| d.2).collect::<Vec<_>>())
        .execute(connection);
    answer("trimming the cursors", patience, asked).await?;
    trimmed.extend(due.iter().map(|(shard, _, to)| (*shard, *to)));
    Ok(())
}

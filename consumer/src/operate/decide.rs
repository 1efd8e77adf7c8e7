//! What an operator decides of records that were set aside.

use std::collections::BTreeMap;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use baton_protocol::lifecycle::Word as _;
use baton_protocol::lifecycle::delivery::{Event, State};
use serde_json::json;
use sqlx::{Connection as _, PgConnection};

use super::parked::{Filter, Parked, rows};
use super::{Error, audit};

/// Keys of one transaction: each is locked until it ends.
const KEYS: usize = 100;

/// What an operator decides of a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decision {
    /// Try it again, now and in its turn. A dead one has its whole budget of attempts again.
    Requeue,
    /// Give it up for good; the next of its key goes on.
    Discard,
}

impl Decision {
    fn event(self) -> Event {
        match self {
            Self::Requeue => Event::Requeued,
            Self::Discard => Event::Discarded,
        }
    }

    fn command(self) -> &'static str {
        match self {
            Self::Requeue => "inbox parked requeue",
            Self::Discard => "inbox parked discard",
        }
    }

    /// Whether the table lets it be decided of a record in this state.
    #[must_use]
    pub fn takes(self, state: State) -> bool {
        state.next(self.event()).is_ok()
    }

    fn states(self) -> Vec<&'static str> {
        State::ALL.iter().copied().filter(|state| self.takes(*state)).map(State::as_str).collect()
    }
}

/// What became of the records that were to be changed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Decided {
    /// How many are changed.
    pub changed: usize,
    /// How many of them wait behind an earlier one of their key.
    pub blocked: usize,
    /// How many rows of the inbox were dead and may run again, or the other way round.
    pub rows: usize,
    /// How many that waited behind them are let go.
    pub unblocked: u64,
    /// Those that somebody is trying right now: nothing is changed about them.
    pub being_tried: Vec<i64>,
    /// Those that had changed, or gone, since they were looked at.
    pub changed_before: Vec<i64>,
}

/// Decides of `chosen`, which [`list`](super::parked::list) has found; `filter` is what an audit row says of why. Keys are independent of each
/// other: of each all is decided at once, in one transaction with up to 99 others.
///
/// # Errors
///
/// [`Error::Change`]: the transactions before it stand. [`Error::Read`].
///
/// # Cancel safety
///
/// Dropped half-way it has decided of some keys, of each completely. The connection must be closed then.
pub async fn decide(
    connection: &mut PgConnection,
    decision: Decision,
    chosen: &[Parked],
    filter: &Filter,
) -> Result<Decided, Error> {
    let mut decided = Decided::default();
    let mut keys: BTreeMap<(&str, &str, Place<'_>), Vec<i64>> = BTreeMap::new();
    for record in chosen {
        let place = (record.consumer.as_str(), record.topic.as_str(), Place::of(record));
        keys.entry(place).or_default().push(record.id);
    }
    let keys: Vec<_> = keys.into_iter().collect();
    for keys in keys.chunks(KEYS) {
        decide_of(connection, decision, keys, filter, &mut decided).await?;
    }
    Ok(decided)
}

/// What is in order among itself: a key, or a record without one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Place<'a> {
    Key(&'a str),
    KeyInBase64(&'a str),
    Alone(i64),
}

impl<'a> Place<'a> {
    fn of(record: &'a Parked) -> Self {
        match (&record.key, &record.key_base64) {
            (Some(key), _) => Self::Key(key),
            (None, Some(key)) => Self::KeyInBase64(key),
            (None, None) => Self::Alone(record.id),
        }
    }

    fn key(self) -> Option<Vec<u8>> {
        match self {
            Self::Key(key) => Some(key.as_bytes().to_vec()),
            Self::KeyInBase64(key) => STANDARD.decode(key).ok(),
            Self::Alone(_) => None,
        }
    }
}

type Group<'a> = ((&'a str, &'a str, Place<'a>), Vec<i64>);

/// One transaction: locks in one order, the change, what waits behind it, the trace.
async fn decide_of(
    connection: &mut PgConnection,
    decision: Decision,
    keys: &[Group<'_>],
    filter: &Filter,
    decided: &mut Decided,
) -> Result<(), Error> {
    let ids: Vec<i64> = keys.iter().flat_map(|(_, ids)| ids.iter().copied()).collect();
    let mut tx = connection
        .begin_with("BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE")
        .await
        .map_err(Error::Change)?;
    for ((consumer, topic, place), _) in keys {
        let Some(key) = place.key() else { continue };
        sqlx::query(include_str!("../../queries/parked_lock.sql"))
            .bind(consumer)
            .bind(topic)
            .bind(key)
            .execute(&mut *tx)
            .await
            .map_err(Error::Change)?;
    }
    let sql = match decision {
        Decision::Requeue => include_str!("../../queries/operate_requeue.sql"),
        Decision::Discard => include_str!("../../queries/operate_discard.sql"),
    };
    let changed: Vec<(i64, String, String, i64)> = sqlx::query_as(sql)
        .bind(&ids)
        .bind(decision.states())
        .fetch_all(&mut *tx)
        .await
        .map_err(Error::Change)?;
    let mut unblocked = 0;
    if decision == Decision::Discard {
        for ((consumer, topic, place), _) in keys {
            let Some(key) = place.key() else { continue };
            // Where dead ones hold nothing up, the consumers' sweep lets go what this leaves.
            let next = sqlx::query(include_str!("../../queries/parked_unblock.sql"))
                .bind(consumer)
                .bind(topic)
                .bind(key)
                .bind(true)
                .execute(&mut *tx)
                .await
                .map_err(Error::Change)?;
            unblocked += next.rows_affected();
        }
    }
    let mut arguments = filter.told();
    let states = changed.iter().fold(BTreeMap::<&str, usize>::new(), |mut states, (_, was, _, _)| {
        *states.entry(was).or_default() += 1;
        states
    });
    arguments["were"] = json!(states);
    audit(&mut tx, decision.command(), &arguments, changed.len() as u64).await.map_err(Error::Change)?;
    // Told from the same snapshot as what is not changed: under the locks.
    let left: Vec<i64> =
        ids.iter().copied().filter(|id| changed.iter().all(|(changed, ..)| changed != id)).collect();
    let left_as = if left.is_empty() {
        Vec::new()
    } else {
        rows(&mut tx, &Filter { ids: left.clone(), ..Filter::default() }).await?
    };
    tx.commit().await.map_err(Error::Change)?;
    decided.changed += changed.len();
    decided.blocked += changed.iter().filter(|(_, _, is, _)| is == State::Blocked.as_str()).count();
    decided.rows += changed.first().map_or(0, |(.., rows)| usize::try_from(*rows).unwrap_or_default());
    decided.unblocked += unblocked;
    for id in left {
        let is_being_tried = left_as.iter().any(|row| row.id == id && row.is_being_tried());
        if is_being_tried { &mut decided.being_tried } else { &mut decided.changed_before }.push(id);
    }
    Ok(())
}

//! `orders check`: gathers the evidence and has it judged.

use std::time::Duration;

use sqlx::PgConnection;
use tokio::time::{Instant, sleep};

use crate::judge::{Evidence, Verdict, judge};
use crate::topic::{self, Reading};
use crate::{DEAD_LETTERS, TOPIC, database};

/// How long to wait before looking again.
const PAUSE: Duration = Duration::from_secs(1);

/// A check that could not be made.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The database cannot be read.
    #[error(transparent)]
    Database(#[from] database::Error),
    /// A topic cannot be read.
    #[error(transparent)]
    Topic(#[from] topic::Error),
    /// There is nothing to check.
    #[error("topic {TOPIC} does not exist; run `orders setup`")]
    NoTopic,
    /// The thread that reads a topic is gone.
    #[error("the reader of topic {0} ended without a result")]
    Reader(&'static str),
}

/// Looks at everything and judges it. While orders are neither billed nor dead-lettered it looks again, for `wait`:
/// they may be on their way.
///
/// # Errors
/// When the database or the topics cannot be read.
pub async fn run(database_url: &str, brokers: &str, wait: Duration) -> Result<Verdict, Error> {
    let deadline = Instant::now() + wait;
    let mut connection = database::connect(&database::options(database_url)?).await?;
    loop {
        let verdict = judge(&gather(&mut connection, brokers).await?);
        if verdict.lost.is_empty() || Instant::now() >= deadline {
            return Ok(verdict);
        }
        sleep(PAUSE.min(deadline - Instant::now())).await;
    }
}

/// In this order, so that what is placed meanwhile is taken neither for lost nor for phantom.
async fn gather(connection: &mut PgConnection, brokers: &str) -> Result<Evidence, Error> {
    let placed = database::placed_read(connection).await?;
    let Reading::Records(published) = read(brokers, TOPIC).await? else { return Err(Error::NoTopic) };
    let dead_lettered = match read(brokers, DEAD_LETTERS).await? {
        Reading::Records(records) => records,
        // The consumer makes it when it first starts.
        Reading::NoTopic => Vec::new(),
    };
    let billed = database::invoices_read(connection).await?;
    let placed_by_now = database::placed_read(connection).await?;
    Ok(Evidence { placed, published, dead_lettered, billed, placed_by_now })
}

async fn read(brokers: &str, topic: &'static str) -> Result<Reading, Error> {
    let brokers = brokers.to_owned();
    let reading = tokio::task::spawn_blocking(move || topic::read(&brokers, topic)).await;
    Ok(reading.map_err(|_| Error::Reader(topic))??)
}

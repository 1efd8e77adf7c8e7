//! What the HTTP side looks up elsewhere, so that asking it a hundred times is one look.
//!
//! Each thing that is looked at has a task of its own. It answers from what it last saw while that is fresh, and looks anew
//! otherwise, one look at a time and each bounded. Who asked may go away meanwhile: the look is the task's, so an impatient
//! client neither abandons a statement nor causes another.

use std::sync::Arc;
use std::time::Duration;

use rdkafka::error::KafkaError;
use rdkafka::producer::{BaseProducer, Producer as _};
use sqlx::postgres::PgConnection;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};

use crate::database::{self, Error, told};
use crate::reach::Quiet;
use crate::settings::Settings;
use crate::status::{self, Status};

/// How long an answer is given again.
pub(super) const FRESH: Duration = Duration::from_secs(1);

/// How long reading the state of the outbox may take, connecting included. Prometheus gives up after 10 s.
const STATUS_PATIENCE: Duration = Duration::from_secs(5);

/// How long the broker may take to answer.
const BROKER_PATIENCE: Duration = Duration::from_secs(3);

/// Something that can be looked at.
pub(super) trait Look: Send + 'static {
    type Seen: Clone + Send + 'static;

    /// Looks, for a bounded time.
    fn look(&mut self) -> impl Future<Output = Self::Seen> + Send;
}

/// Asks a [`Look`], at most once in [`FRESH`].
#[derive(Debug)]
pub(super) struct Watch<Seen>(mpsc::Sender<oneshot::Sender<Seen>>);

impl<Seen: Clone + Send + 'static> Watch<Seen> {
    /// Starts its task, which `tasks` owns.
    pub(super) fn start(tasks: &mut JoinSet<()>, mut look: impl Look<Seen = Seen>) -> Self {
        let (asks, mut asked) = mpsc::channel::<oneshot::Sender<Seen>>(1);
        tasks.spawn(async move {
            let mut last: Option<(Instant, Seen)> = None;
            while let Some(reply) = asked.recv().await {
                let fresh = last.as_ref().filter(|(at, _)| at.elapsed() < FRESH);
                let seen = match fresh {
                    Some((_, seen)) => seen.clone(),
                    None => {
                        let seen = look.look().await;
                        last = Some((Instant::now(), seen.clone()));
                        seen
                    }
                };
                // Who asked may be gone.
                drop(reply.send(seen));
            }
        });
        Self(asks)
    }

    /// What was seen less than [`FRESH`] ago. `None` only while the server shuts down.
    pub(super) async fn see(&self) -> Option<Seen> {
        let (reply, seen) = oneshot::channel();
        self.0.send(reply).await.ok()?;
        seen.await.ok()
    }
}

/// The state of the outbox, over a connection of its own that is kept while it works.
pub(super) struct StatusLook {
    settings: Arc<Settings>,
    connection: Option<PgConnection>,
}

impl StatusLook {
    pub(super) fn new(settings: Arc<Settings>) -> Self {
        Self { settings, connection: None }
    }

    async fn read(&mut self) -> Result<Status, Error> {
        // Taken out, so that after an error, or an end in the middle, it is closed and not used again.
        if let Some(mut kept) = self.connection.take()
            && let Ok(status) = status::read(&mut kept).await
        {
            self.connection = Some(kept);
            return Ok(status);
        }
        let mut connection = database::connect(&self.settings, "status", STATUS_PATIENCE).await?;
        let status = status::read(&mut connection).await?;
        self.connection = Some(connection);
        Ok(status)
    }
}

impl Look for StatusLook {
    type Seen = Result<Arc<Status>, Arc<str>>;

    async fn look(&mut self) -> Self::Seen {
        let within = STATUS_PATIENCE;
        let read = timeout(within, self.read()).await;
        let read =
            read.unwrap_or(Err(Error::Silent { operation: "reading the state of the outbox", within }));
        read.map(Arc::new).map_err(|error| told(&error).into())
    }
}

/// Whether the broker answers, asked by a client that is kept.
pub(super) struct BrokerLook {
    settings: Arc<Settings>,
    client: Option<Arc<BaseProducer<Quiet>>>,
}

impl BrokerLook {
    pub(super) fn new(settings: Arc<Settings>) -> Self {
        Self { settings, client: None }
    }
}

impl Look for BrokerLook {
    type Seen = Result<(), Arc<str>>;

    async fn look(&mut self) -> Self::Seen {
        let (settings, kept) = (Arc::clone(&self.settings), self.client.clone());
        // librdkafka blocks, so it is asked on a thread that may.
        let asked = tokio::task::spawn_blocking(move || -> Result<_, KafkaError> {
            let client = match kept {
                Some(client) => client,
                None => Arc::new(settings.client_config().create_with_context(Quiet)?),
            };
            client.poll(Duration::ZERO);
            let answer = client.client().fetch_metadata(None, BROKER_PATIENCE).map(drop);
            Ok((client, answer))
        });
        let answer = match asked.await {
            Ok(Ok((client, answer))) => {
                self.client = Some(client);
                answer
            }
            Ok(Err(error)) => Err(error),
            Err(_) => Err(KafkaError::Canceled),
        };
        answer
            .map_err(|error| format!("kafka at {} does not answer: {}", self.settings.brokers, error).into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Counts the looks, each of which takes a moment.
    struct Counted(u32);

    impl Look for Counted {
        type Seen = u32;

        async fn look(&mut self) -> u32 {
            self.0 += 1;
            tokio::time::sleep(Duration::from_millis(20)).await;
            self.0
        }
    }

    #[tokio::test]
    async fn a_hundred_who_ask_at_once_are_one_look() {
        let mut tasks = JoinSet::new();
        let watch = Watch::start(&mut tasks, Counted(0));
        let seen = futures_util::future::join_all((0..100).map(|_| watch.see())).await;
        assert!(seen.iter().all(|seen| *seen == Some(1)), "{seen:?}");
    }

    #[tokio::test]
    async fn who_goes_away_neither_ends_a_look_nor_causes_another() {
        let mut tasks = JoinSet::new();
        let watch = Watch::start(&mut tasks, Counted(0));
        for _ in 0..5 {
            assert!(timeout(Duration::from_millis(1), watch.see()).await.is_err());
        }
        assert_eq!(watch.see().await, Some(1));
    }
}

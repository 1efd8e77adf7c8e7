//! `orders bill`: the consumer. Writes an invoice for each order, in the transaction in which the inbox notes it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use baton_consumer::{Consumer, Delivery, Failure, Handler, Json, Kafka, Verdict};
use sqlx::postgres::{PgConnection, PgPoolOptions};
use sqlx::{Postgres, Transaction};
use tokio::time::{MissedTickBehavior, interval, sleep};

use crate::order::{Behave, Facts, Order};
use crate::{CONSUMER, TOPIC, database};

/// One for each partition's lane, and a few for the inbox itself.
const CONNECTIONS: u32 = 10;

/// Why billing stopped.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The database cannot be used.
    #[error(transparent)]
    Database(#[from] database::Error),
    /// The consumer cannot be made.
    #[error("the consumer cannot be made")]
    Build(#[from] baton_consumer::build::Error),
    /// The consumer cannot start or go on.
    #[error("the consumer cannot go on")]
    Run(#[from] baton_consumer::run::Error),
}

/// What this process has said of orders so far. What is rolled back after it was said is said again.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Progress {
    /// Invoices written.
    pub billed: u64,
    /// Orders that can never be billed.
    pub refused: u64,
    /// Attempts that failed and are made again.
    pub again: u64,
}

#[derive(Debug, Default)]
struct Counters {
    billed: AtomicU64,
    refused: AtomicU64,
    again: AtomicU64,
}

impl Counters {
    fn progress(&self) -> Progress {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Progress { billed: of(&self.billed), refused: of(&self.refused), again: of(&self.again) }
    }
}

/// Bills orders until `shutdown` resolves; then what is in hand is finished. `tell` hears how far it is, at most once a
/// second and only of news.
///
/// # Errors
/// When the database or the brokers cannot be used at the start, or Kafka's client cannot go on.
pub async fn run(
    database_url: &str,
    brokers: &str,
    shutdown: impl Future<Output = ()> + Send,
    mut tell: impl FnMut(Progress),
) -> Result<Progress, Error> {
    let options = database::options(database_url)?.application_name("orders bill");
    let mut connection = database::connect(&options).await?;
    // Without the table every order would wait for it, politely and for ever.
    invoices_exist(&mut connection)
        .await
        .map_err(|source| database::Error::statement("find billing.invoice", source))?;
    drop(connection);
    let pool = PgPoolOptions::new().max_connections(CONNECTIONS).connect_lazy_with(options);

    let counters = Arc::new(Counters::default());
    // A killed member's partitions wait for so long; librdkafka's 45 s are tedious in an example that is there to be killed.
    let kafka = Kafka::new(brokers).property("session.timeout.ms", "10000");
    let consumer = Consumer::builder(CONSUMER, pool, kafka)
        .topics([TOPIC])
        .transactional(Billing { counters: Arc::clone(&counters) })
        .build()?;
    let mut running = std::pin::pin!(consumer.run(shutdown));
    let mut ticks = interval(Duration::from_secs(1));
    ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
    let mut told = Progress::default();
    loop {
        tokio::select! {
            ended = &mut running => return Ok(ended.map(|()| counters.progress())?),
            _ = ticks.tick() => {
                let progress = counters.progress();
                if progress != told {
                    told = progress;
                    tell(progress);
                }
            }
        }
    }
}

struct Billing {
    counters: Arc<Counters>,
}

impl Handler for Billing {
    type Payload = Json<Order>;

    async fn handle(&self, delivery: &Delivery<Json<Order>>, tx: &mut Transaction<'_, Postgres>) -> Verdict {
        let Json(order) = delivery.payload();
        let result = bill(order, delivery.attempt(), tx).await;
        let counter = match &result {
            Ok(()) => &self.counters.billed,
            Err(Failure::Permanent(_)) => &self.counters.refused,
            Err(_) => &self.counters.again,
        };
        counter.fetch_add(1, Ordering::Relaxed);
        result.into()
    }
}

async fn bill(order: &Order, attempt: u32, tx: &mut PgConnection) -> Result<(), Failure> {
    match order.behave {
        Behave::Ok => {}
        Behave::Poison => return Err(Failure::permanent("this order is poison")),
        Behave::Flaky(attempts) if attempt <= attempts => {
            return Err(Failure::transient(format!("attempt {attempt} of a flaky order fails")));
        }
        Behave::Flaky(_) => {}
        Behave::Slow(pause) => sleep(pause).await,
    }
    invoice_insert(tx, &order.facts).await?;
    Ok(())
}

async fn invoice_insert(tx: &mut PgConnection, facts: &Facts) -> Result<(), sqlx::Error> {
    sqlx::query(include_str!("../queries/invoice_insert.sql"))
        .bind(facts.order_id)
        .bind(&facts.customer)
        .bind(facts.seq)
        .bind(facts.amount_cents)
        .execute(tx)
        .await
        .map(drop)
}

async fn invoices_exist(connection: &mut PgConnection) -> Result<(), sqlx::Error> {
    sqlx::query(include_str!("../queries/invoices_exist.sql")).execute(connection).await.map(drop)
}

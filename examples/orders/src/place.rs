//! `orders place`: several writers, each order in one transaction with its message.
//!
//! A writer that loses its connection gets another and goes on with a new order. Whether the order that was being
//! committed then exists is for the database to say, so the count it prints is of confirmed orders, and `check` reads the
//! table.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use baton_outbox::Message;
use baton_protocol::retry;
use sqlx::Connection as _;
use sqlx::postgres::{PgConnectOptions, PgConnection};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep, sleep_until};
use uuid::Uuid;

use crate::mix::Mix;
use crate::order::{Behave, Facts, Order};
use crate::{TOPIC, database};

/// For how long a writer tries to get through to a database that it has reached before.
const PATIENCE: Duration = Duration::from_secs(120);

/// What to place.
#[derive(Debug, Clone)]
pub struct Load {
    /// How many orders.
    pub count: u64,
    /// Orders a second over all writers; `None` is as fast as it goes.
    pub rate: Option<f64>,
    /// How many customers they are spread over, at least 1.
    pub customers: u32,
    /// How many connections place at once.
    pub writers: u32,
    /// Which of them go wrong.
    pub mix: Mix,
}

/// How far a run is, or got.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// Orders whose commit was confirmed.
    pub placed: u64,
    /// Orders whose commit was asked for and neither confirmed nor refused, because the connection was lost.
    pub unknown: u64,
}

/// Why placing stopped.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The database cannot be used.
    #[error(transparent)]
    Database(#[from] database::Error),
    /// The message was not accepted.
    #[error("cannot enqueue the message of an order")]
    Enqueue(#[from] baton_outbox::Error),
    /// The commit did not come back with success.
    #[error("cannot commit an order")]
    Commit(#[source] sqlx::Error),
    /// A writer is gone without a word.
    #[error("a writer ended without a result")]
    Writer,
}

impl Error {
    fn passes(&self) -> bool {
        match self {
            Self::Database(error) => error.passes(),
            Self::Enqueue(baton_outbox::Error::Insert { source, .. }) => database::passes(source),
            Self::Enqueue(_) | Self::Writer => false,
            Self::Commit(error) => database::passes(error),
        }
    }
}

/// What the writers share.
struct Run {
    options: PgConnectOptions,
    load: Load,
    began: Instant,
    next: AtomicU64,
    placed: AtomicU64,
    unknown: AtomicU64,
    stop: watch::Receiver<bool>,
}

impl Run {
    fn progress(&self) -> Progress {
        Progress {
            placed: self.placed.load(Ordering::Relaxed),
            unknown: self.unknown.load(Ordering::Relaxed),
        }
    }
}

/// Places orders until all are placed or `shutdown` resolves; then each writer finishes the order in hand. `tell` hears
/// once a second how far it is.
///
/// # Errors
/// When the database cannot be used at the start, or not for two minutes later on, or refuses an order for its own sake.
pub async fn run(
    database_url: &str,
    load: Load,
    shutdown: impl Future<Output = ()>,
    mut tell: impl FnMut(Progress),
) -> Result<Progress, Error> {
    let options = database::options(database_url)?.application_name("orders place");
    // What is wrong at the start is said at once, instead of being taken for an outage.
    database::connect(&options).await?.close().await.ok();
    let (stop, stopped) = watch::channel(false);
    let writers = load.writers;
    let run = Arc::new(Run {
        options,
        load,
        began: Instant::now(),
        next: AtomicU64::new(0),
        placed: AtomicU64::new(0),
        unknown: AtomicU64::new(0),
        stop: stopped,
    });
    let mut tasks = JoinSet::new();
    for _ in 0..writers {
        tasks.spawn(write(Arc::clone(&run)));
    }

    let mut ticks = interval(Duration::from_secs(1));
    ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
    ticks.tick().await;
    let mut shutdown = std::pin::pin!(shutdown);
    loop {
        tokio::select! {
            ended = tasks.join_next() => match ended {
                Some(ended) => ended.map_err(|_| Error::Writer)??,
                None => return Ok(run.progress()),
            },
            _ = ticks.tick() => tell(run.progress()),
            () = &mut shutdown, if !*stop.borrow() => {
                stop.send_replace(true);
            }
        }
    }
}

/// One writer: takes numbers until there are none left.
async fn write(run: Arc<Run>) -> Result<(), Error> {
    let mut stop = run.stop.clone();
    let mut connection = None;
    let mut delays =
        retry::Policy { base: Duration::from_millis(100), factor: 2.0, cap: Duration::from_secs(2) }.delays();
    loop {
        let number = run.next.fetch_add(1, Ordering::Relaxed);
        if number >= run.load.count || !wait_for_turn(&run, number, &mut stop).await {
            return Ok(());
        }
        let behave = run.load.mix.behaviour(number);
        let trying = Instant::now();
        while let Err(error) = place(&run, &mut connection, behave).await {
            if !error.passes() || trying.elapsed() >= PATIENCE {
                return Err(error);
            }
            // A connection on which something failed may be in the middle of anything.
            connection = None;
            if matches!(error, Error::Commit(_)) {
                run.unknown.fetch_add(1, Ordering::Relaxed);
            }
            if *stop.borrow() {
                return Ok(());
            }
            sleep(delays.next_delay()).await;
        }
        delays.reset();
        run.placed.fetch_add(1, Ordering::Relaxed);
    }
}

/// Waits until the order with this number is due. False when the run is to stop.
async fn wait_for_turn(run: &Run, number: u64, stop: &mut watch::Receiver<bool>) -> bool {
    if let Some(rate) = run.load.rate {
        #[expect(clippy::cast_precision_loss, reason = "counts are far below 2^52")]
        let due = run.began + Duration::from_secs_f64(number as f64 / rate);
        tokio::select! {
            () = sleep_until(due) => {}
            _ = stop.changed() => {}
        }
    }
    !*stop.borrow()
}

/// One order, in one transaction: the customer's lock and next number, the row, the message.
async fn place(run: &Run, connection: &mut Option<PgConnection>, behave: Behave) -> Result<(), Error> {
    let connection = match connection {
        Some(connection) => connection,
        None => connection.insert(database::connect(&run.options).await?),
    };
    let order_id = Uuid::new_v4();
    let (which, _, _, amount) = order_id.as_fields();
    let customer = format!("customer-{}", which % run.load.customers);
    let amount_cents = i64::from(amount[7]) * 100 + i64::from(amount[6] % 100) + 1;

    let failed = |operation| move |source| database::Error::statement(operation, source);
    let mut tx = connection.begin().await.map_err(failed("begin a transaction"))?;
    let seq = customer_next_seq(&mut tx, &customer).await.map_err(failed("lock the customer"))?;
    let order = Order { facts: Facts { order_id, customer, seq, amount_cents }, behave };
    order_insert(&mut tx, &order.facts).await.map_err(failed("insert the order"))?;
    let message = Message::builder(TOPIC)
        .key(&order.facts.customer)
        .r#type("order.placed")
        .idempotency_key(order.facts.idempotency_key())
        .json(&order)?;
    baton_outbox::enqueue(&mut tx, &message).await?;
    tx.commit().await.map_err(Error::Commit)
}

async fn customer_next_seq(tx: &mut PgConnection, customer: &str) -> Result<i64, sqlx::Error> {
    sqlx::query_scalar(include_str!("../queries/customer_next_seq.sql")).bind(customer).fetch_one(tx).await
}

async fn order_insert(tx: &mut PgConnection, facts: &Facts) -> Result<(), sqlx::Error> {
    sqlx::query(include_str!("../queries/order_insert.sql"))
        .bind(facts.order_id)
        .bind(&facts.customer)
        .bind(facts.seq)
        .bind(facts.amount_cents)
        .execute(tx)
        .await
        .map(drop)
}

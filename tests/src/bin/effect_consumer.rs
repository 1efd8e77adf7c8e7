//! A consumer whose effects can be counted.
//!
//! `effect_consumer TOPIC GROUP`, with `DATABASE_URL` and `KAFKA_BROKERS`. Its consumer is named `effects`. It runs until
//! SIGTERM; most tests end it by SIGKILL. Each message is a row in `effect`, on purpose without a unique constraint.
//!
//! | variable | means |
//! |---|---|
//! | `EFFECTS_NAME` | its name to Postgres and Kafka; with it a lease lasts 2 s, and a record that fails is soon set aside |
//! | `EFFECTS_STALL` | what ends its transactions, in seconds; 3 |
//! | `EFFECTS_PLANT` | a bug, one of those in `consumer/src/plant.rs` |
//! | `EFFECTS_MENDED` | what `behave` asks for is not done any more: the bug is mended |
//! | `EFFECTS_SERVICE` | `host:port`: the effects go there, under a lease, instead of to the table |
//! | `EFFECTS_BLOCK` | a dead letter holds its key up |
//! | `EFFECTS_SPRING` | dead letters are written as Spring Kafka writes them |
//! | `EFFECTS_ATTEMPTS` | how many a record gets; 10 |
//! | `EFFECTS_INSTANCE` | its name for life, as a static member |
//! | `EFFECTS_LEASE` | how long a lease lasts, in seconds |
//! | `EFFECTS_PARK` | a record that fails is set aside at once |
//!
//! A payload whose `behave` is `poison` is refused for good, and one whose `behave` is `panic` makes the handler panic; `sick` is
//! refused, and `tired` fails for the time being, until there is a table `well`.
//!
//! A payload whose `hold` is `before` or `after` stands still there, before or after its effect, for as long as somebody has
//! the advisory lock 1.

use std::env;
use std::process::ExitCode;
use std::time::Duration;

use baton_consumer::inbox::{Lease, Reconcile, Reconciled};
use baton_consumer::{
    AfterDeadLetter, Consumer, DeadLetterFormat, Delivery, Handler, Json, Kafka, LeasedHandler,
    Outcome as Receipt, Policy, Verdict,
};
use baton_tests::{Failure, Outcome, http};
use serde_json::value::RawValue;
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{PgConnection, PgPool, Postgres, Transaction};
use tokio::signal::unix::{SignalKind, signal};

/// Waits while somebody else has the lock exclusively.
const HOLD: &str = "SELECT pg_advisory_xact_lock_shared(1)";

type Payload = Json<serde_json::Value>;

fn is_held(delivery: &Delivery<Payload>, at: &str) -> bool {
    delivery.payload().0["hold"] == at
}

/// Why it does not succeed, if it is not to.
async fn failure(
    delivery: &Delivery<Payload>,
    database: &mut PgConnection,
) -> Result<Option<Verdict>, sqlx::Error> {
    if env::var_os("EFFECTS_MENDED").is_some() {
        return Ok(None);
    }
    let behave = delivery.payload().0["behave"].as_str().unwrap_or_default();
    let verdict = match behave {
        "poison" => Verdict::permanent("poison"),
        "sick" => Verdict::permanent("sick"),
        "tired" => Verdict::transient("tired"),
        "panic" => panic!("the handler fell over"),
        _ => return Ok(None),
    };
    let is_well = sqlx::query_scalar("SELECT to_regclass('well') IS NOT NULL");
    if behave != "poison" && is_well.fetch_one(&mut *database).await? {
        return Ok(None);
    }
    if is_held(delivery, "before") {
        sqlx::query(HOLD).execute(database).await?;
    }
    Ok(Some(verdict))
}

struct Effects;

impl Effects {
    async fn apply(
        &self,
        delivery: &Delivery<Payload>,
        tx: &mut Transaction<'_, Postgres>,
    ) -> Result<(), sqlx::Error> {
        if is_held(delivery, "before") {
            sqlx::query(HOLD).execute(&mut **tx).await?;
        }
        sqlx::query("INSERT INTO effect (key, content, partition) VALUES ($1, $2, $3)")
            .bind(delivery.idempotency_key())
            .bind(delivery.raw().map(|bytes| bytes.to_vec()))
            .bind(delivery.partition())
            .execute(&mut **tx)
            .await?;
        if is_held(delivery, "after") {
            sqlx::query(HOLD).execute(&mut **tx).await?;
        }
        Ok(())
    }
}

impl Handler for Effects {
    type Payload = Payload;

    async fn handle(
        &self,
        delivery: &Delivery<Self::Payload>,
        tx: &mut Transaction<'_, Postgres>,
    ) -> Verdict {
        match failure(delivery, tx).await {
            Ok(None) => self.apply(delivery, tx).await.into(),
            Ok(Some(verdict)) => verdict,
            Err(error) => error.into(),
        }
    }
}

/// Effects that are calls to a service.
struct Calls {
    service: String,
    name: String,
    pool: PgPool,
}

impl Calls {
    async fn call(&self, delivery: &Delivery<Payload>, lease: &mut Lease<'_>) -> Outcome<Receipt> {
        if is_held(delivery, "before") {
            sqlx::query(HOLD).execute(&self.pool).await?;
        }
        // Whose lease it is no more must not call.
        lease.progress().await?;
        let lane = delivery.partition().to_string();
        let headers =
            [("Idempotency-Key", lease.idempotency_key()), ("X-Who", &self.name), ("X-Lane", &lane)];
        let content = delivery.raw().map(|bytes| bytes.to_vec()).unwrap_or_default();
        let answer = http::send(&self.service, "POST", "/effects", &headers, &content).await?;
        if answer.code != 200 {
            baton_tests::fail!("it answers {}", answer.code);
        }
        if is_held(delivery, "after") {
            sqlx::query(HOLD).execute(&self.pool).await?;
        }
        receipt(&answer.body)
    }
}

/// As the service writes it, to the byte.
fn receipt(body: &str) -> Outcome<Receipt> {
    Ok(Receipt::json(&RawValue::from_string(body.to_owned())?)?)
}

impl Reconcile for Calls {
    async fn lookup(&self, key: &str) -> Reconciled {
        let path = format!("/effects/{key}");
        let answer = http::send(&self.service, "GET", &path, &[("X-Who", &self.name)], &[]).await;
        match answer {
            Ok(answer) if answer.code == 404 => Reconciled::NotApplied,
            Ok(answer) if answer.code == 200 => match receipt(&answer.body) {
                Ok(receipt) => Reconciled::Applied(Some(receipt)),
                Err(_) => Reconciled::StillUnknown,
            },
            _ => Reconciled::StillUnknown,
        }
    }
}

impl LeasedHandler for Calls {
    type Payload = Payload;

    async fn handle(&self, delivery: &Delivery<Self::Payload>, lease: &mut Lease<'_>) -> Verdict {
        let mut database = match self.pool.acquire().await {
            Ok(database) => database,
            Err(error) => return error.into(),
        };
        match failure(delivery, &mut database).await {
            Ok(None) => drop(database),
            Ok(Some(verdict)) => return verdict,
            Err(error) => return error.into(),
        }
        match self.call(delivery, lease).await {
            Ok(receipt) => Verdict::Done(Some(receipt)),
            Err(failure) => Verdict::unknown(failure.to_string()),
        }
    }
}

#[tokio::main]
async fn main() -> ExitCode {
    tracing_subscriber::fmt().with_writer(std::io::stderr).with_ansi(false).init();
    match run().await {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("{failure}");
            ExitCode::FAILURE
        }
    }
}

async fn run() -> Outcome {
    let argument = |n| env::args().nth(n).ok_or_else(|| Failure::new("usage: effect_consumer TOPIC GROUP"));
    let variable = |name: &str| env::var(name).map_err(|error| Failure::from(error).during(name));
    let name = env::var("EFFECTS_NAME").ok();
    let options: PgConnectOptions = variable("DATABASE_URL")?.parse()?;
    let options = options.application_name(name.as_deref().unwrap_or("effects"));
    let pool = PgPoolOptions::new().max_connections(8).connect_with(options).await?;
    // The shortest that a broker takes by default: a killed member's partitions are free soon.
    let kafka = Kafka::new(variable("KAFKA_BROKERS")?).property("session.timeout.ms", "6000");
    let kafka = match &name {
        Some(name) => kafka.property("client.id", name).property("heartbeat.interval.ms", "500"),
        None => kafka,
    };
    let mut terminated = signal(SignalKind::terminate())?;
    let builder =
        Consumer::builder("effects", pool.clone(), kafka).topics([argument(1)?]).group(argument(2)?);
    let builder = match &name {
        Some(_) => builder
            .stall_timeout(Duration::from_secs(env::var("EFFECTS_STALL").map_or(Ok(3), |text| text.parse())?))
            .lease_ttl(Duration::from_secs(2))
            .park_after(Duration::from_millis(500))
            .retry(Policy { base: Duration::from_millis(100), factor: 2.0, cap: Duration::from_secs(1) }),
        None => builder,
    };
    let builder = match env::var("EFFECTS_BLOCK") {
        Ok(_) => builder.after_dead_letter(AfterDeadLetter::Block),
        Err(_) => builder,
    };
    let builder = match env::var("EFFECTS_SPRING") {
        Ok(_) => builder.dead_letter_format(DeadLetterFormat::Spring),
        Err(_) => builder,
    };
    let builder = match env::var("EFFECTS_ATTEMPTS") {
        Ok(attempts) => builder.attempts(attempts.parse()?),
        Err(_) => builder,
    };
    let builder = match env::var("EFFECTS_INSTANCE") {
        Ok(name) => builder.instance(name),
        Err(_) => builder,
    };
    let builder = match env::var("EFFECTS_LEASE") {
        Ok(seconds) => builder.lease_ttl(Duration::from_secs(seconds.parse()?)),
        Err(_) => builder,
    };
    let builder = match env::var("EFFECTS_PARK") {
        Ok(_) => builder.park_after(Duration::ZERO),
        Err(_) => builder,
    };
    let builder = match env::var("EFFECTS_PLANT") {
        Ok(plant) => builder.plant(plant.parse().map_err(Failure::new)?),
        Err(_) => builder,
    };
    let built = match env::var("EFFECTS_SERVICE") {
        Ok(service) => builder.leased(Calls { service, name: name.unwrap_or_default(), pool }),
        Err(_) => builder.transactional(Effects),
    };
    built
        .build()?
        .run(async move {
            terminated.recv().await;
        })
        .await?;
    Ok(())
}

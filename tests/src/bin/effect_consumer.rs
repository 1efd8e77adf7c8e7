//! A consumer whose effects can be counted: each message is a row in `effect`, on purpose without a unique constraint.
//!
//! `effect_consumer TOPIC GROUP`, with `DATABASE_URL` and `KAFKA_BROKERS`. Its consumer is named `effects`. It runs until
//! SIGTERM; most tests end it by SIGKILL.

use std::env;
use std::process::ExitCode;

use baton_consumer::{Consumer, Delivery, Handler, Json, Kafka, Verdict};
use baton_tests::{Failure, Outcome};
use sqlx::postgres::PgPoolOptions;
use sqlx::{Postgres, Transaction};
use tokio::signal::unix::{SignalKind, signal};

struct Effects;

impl Handler for Effects {
    type Payload = Json<serde_json::Value>;

    async fn handle(
        &self,
        delivery: &Delivery<Self::Payload>,
        tx: &mut Transaction<'_, Postgres>,
    ) -> Verdict {
        if delivery.payload().0["behave"] == "poison" {
            return Verdict::permanent("poison");
        }
        let effect = sqlx::query("INSERT INTO effect (key, content, partition) VALUES ($1, $2, $3)")
            .bind(delivery.idempotency_key())
            .bind(delivery.raw().map(|bytes| bytes.to_vec()))
            .bind(delivery.partition());
        match effect.execute(&mut **tx).await {
            Ok(_) => Verdict::done(),
            Err(error) => error.into(),
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
    let pool = PgPoolOptions::new().max_connections(8).connect(&variable("DATABASE_URL")?).await?;
    // The shortest that a broker takes by default: a killed member's partitions are free soon.
    let kafka = Kafka::new(variable("KAFKA_BROKERS")?).property("session.timeout.ms", "6000");
    let mut terminated = signal(SignalKind::terminate())?;
    Consumer::builder("effects", pool, kafka)
        .topics([argument(1)?])
        .group(argument(2)?)
        .transactional(Effects)
        .build()?
        .run(async move {
            terminated.recv().await;
        })
        .await?;
    Ok(())
}

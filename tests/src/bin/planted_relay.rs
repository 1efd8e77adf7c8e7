//! A relay with a bug in it, so that the checkers of the test suite prove that they would find it.
//!
//! `planted_relay naive-cursor|finite-message-timeout`, with `DATABASE_URL`, `KAFKA_BROKERS` and `BATON_RELAY__OWNER` as
//! for `baton relay`. No shipped program contains a plant.

use std::env;
use std::process::ExitCode;
use std::time::Duration;

use baton_relay::plant::Plant;
use baton_relay::{Settings, Until};
use baton_tests::{Failure, Outcome};
use tokio::signal::unix::{SignalKind, signal};

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
    let plant = match env::args().nth(1).as_deref() {
        Some("naive-cursor") => Plant::NaiveCursor,
        Some("finite-message-timeout") => Plant::FiniteMessageTimeout,
        other => baton_tests::fail!("no such plant: {other:?}"),
    };
    let variable = |name: &str| env::var(name).map_err(|error| Failure::from(error).during(name));
    let settings = Settings {
        database_url: variable("DATABASE_URL")?,
        brokers: variable("KAFKA_BROKERS")?,
        owner: variable("BATON_RELAY__OWNER")?,
        lease_ttl: Duration::from_secs(3),
        lease_margin: Duration::from_millis(600),
        plant: Some(plant),
        ..Settings::default()
    };
    let mut terminated = signal(SignalKind::terminate())?;
    baton_relay::run(settings, Until::Shutdown, async move {
        terminated.recv().await;
    })
    .await?;
    Ok(())
}

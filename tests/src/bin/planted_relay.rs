//! A relay with a bug in it, so that the checkers of the test suite prove that they would find it.
//!
//! `planted_relay PLANT`, with `DATABASE_URL`, `KAFKA_BROKERS` and `BATON_RELAY__OWNER` as for `baton relay`; the plant is
//! one of those in `relay/src/plant.rs`, or `none`, which has no bug. `planted_relay [PLANT] hold P3 FILE` stands still
//! at that point until the file is there, has a lease of 2 s and hands over at most 100 rows; a second after lease and
//! drain may both have ended it counts as not alive. No shipped program contains a plant.

use std::env;
use std::num::NonZeroUsize;
use std::process::ExitCode;
use std::time::Duration;

use baton_relay::hold::Hold;
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
    let arguments: Vec<String> = env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let usual = Settings {
        lease_ttl: Duration::from_secs(3),
        lease_margin: Duration::from_millis(600),
        // A broker that comes back is found at once, before a message with a finite time-out would expire.
        kafka_properties: [("reconnect.backoff.max.ms".to_owned(), "200".to_owned())].into(),
        ..Settings::default()
    };
    let (plant, rest): (Option<Plant>, &[&str]) = match &arguments[..] {
        ["none", rest @ ..] => (None, rest),
        ["hold", ..] => (None, &arguments),
        [plant, rest @ ..] => (Some(plant.parse().map_err(Failure::new)?), rest),
        [] => baton_tests::fail!("which plant?"),
    };
    let usual = Settings { plant, ..usual };
    let settings = match rest {
        [] => usual,
        ["hold", point, until] => {
            let rows = NonZeroUsize::new(100).unwrap_or(NonZeroUsize::MIN);
            Settings {
                lease_ttl: Duration::from_secs(2),
                lease_margin: Duration::from_millis(400),
                page_rows: rows,
                in_flight_rows: rows,
                still_slack: Some(Duration::from_secs(1)),
                hold: Some(Hold { point: point.parse().map_err(Failure::new)?, until: until.into() }),
                ..usual
            }
        }
        _ => baton_tests::fail!("cannot understand {rest:?}"),
    };
    let variable = |name: &str| env::var(name).map_err(|error| Failure::from(error).during(name));
    let listen = env::var("BATON_HTTP__LISTEN");
    let settings = Settings {
        database_url: variable("DATABASE_URL")?,
        brokers: variable("KAFKA_BROKERS")?,
        owner: variable("BATON_RELAY__OWNER")?,
        http_listen: listen.unwrap_or_else(|_| "off".to_owned()).parse().map_err(Failure::new)?,
        ..settings
    };
    let mut terminated = signal(SignalKind::terminate())?;
    baton_relay::run(settings, Until::Shutdown, async move {
        terminated.recv().await;
    })
    .await?;
    Ok(())
}

//! `baton relay`: publish until told to stop, or until the outbox is empty.

use baton_relay::{Error, SetAside, Summary, Until, database};

use crate::config::{Effective, Side};
use crate::failure::Failure;
use crate::out;
use crate::signals;

/// A run that ended with messages left.
#[derive(Debug, thiserror::Error)]
#[error("{count} shard(s) have as many messages parked as they may, and wait: {which}", count = .stopped.len(), which = .stopped.join("; "))]
struct Stopped {
    stopped: Vec<String>,
}

/// Everything else is published.
#[derive(Debug, thiserror::Error)]
#[error("{parked} messages are parked and {dead} are dead; look at `baton parked list`")]
struct Aside {
    parked: i64,
    dead: i64,
}

/// `--until-empty` was told to end before.
#[derive(Debug, thiserror::Error)]
#[error(
    "told to end with messages left, or not yet known not to be; run it again, or look at `baton status`"
)]
struct Interrupted;

/// The operating system refused a signal handler.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen for SIGTERM and SIGINT")]
struct NoSignals {
    source: std::io::Error,
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        match error {
            Error::Settings(_) | Error::Database(database::Error::Url) => Self::usage(error),
            Error::Http(ref unheard) if unheard.is_setting() => Self::usage(error),
            _ => Self::failed(error),
        }
    }
}

/// Runs a relay to its end.
pub(crate) async fn run(config: &Effective, until_empty: bool) -> Result<(), Failure> {
    let until = if until_empty { Until::Empty } else { Until::Shutdown };
    let settings = config.relay_settings()?;
    crate::database::check_url(&config.database_url(Side::Outbox)?)?;
    let shutdown = signals::shutdown().map_err(|source| Failure::failed(NoSignals { source }))?;
    let Summary { published, stopped, set_aside, is_interrupted, .. } =
        baton_relay::run(settings, until, shutdown).await?;
    if until_empty {
        out::line(&format!("published {published} messages"))?;
    } else {
        // A service's last line belongs to its log.
        tracing::info!(published, "the relay has ended");
    }
    if until_empty && is_interrupted {
        return Err(Failure::failed(Interrupted));
    }
    if stopped.is_empty() && set_aside.is_none() {
        return Ok(());
    }
    if stopped.is_empty() {
        let SetAside { parked, dead, .. } = set_aside;
        return Err(Failure::failed(Aside { parked, dead }));
    }
    let stopped = stopped
        .iter()
        .map(|(shard, stopped)| {
            let baton_relay::Stopped { id, topic, cause, advice, .. } = stopped;
            format!("shard {shard}: {id} for topic {topic} ({cause}): {advice}")
        })
        .collect();
    Err(Failure::failed(Stopped { stopped }))
}

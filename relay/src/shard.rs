//! One shard, from the claim of its lease until it is let go: one producer after another.
//!
//! ```text
//!   claimed ─▶ publishing ──failed──▶ waiting ─▶ publishing (new producer, from the durable cursor)
//!                  │                     │
//!                  └─ drained │ fenced │ trust ended │ abandoned ─▶ let go
//! ```
//!
//! A message that Kafka refuses for its own sake goes aside, with what follows of its key (`aside`, `care`); the rest flows. What is
//! aside is tried again beside all this (`retrier`). Only when as much is aside as may be (`park.rows`), the shard stops: an ERROR
//! says so, and it goes on once there is room. The ERROR comes at the first time, when the cause is another, and at every
//! doubling; an INFO when the shard flows again. Nothing is skipped.

use std::sync::Arc;
use std::time::Duration;

use baton_protocol::lifecycle::message::Cause;
use baton_protocol::retry;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::aside::Aside;
use crate::care::{Care, Sure};
use crate::cursor::Cursor;
use crate::database;
use crate::links::{Ended, Links, Order};
use crate::parked;
use crate::pipeline::{Failed, Full, Pipeline, Stop, Which};
use crate::publish::{Failure, Publisher};
use crate::refusal;
use crate::retrier;
use crate::stopped::{self, Report, Say};

/// How soon a retrier that let go is started once more.
const RETRIED_AGAIN: Duration = Duration::from_secs(1);

/// Publishes a shard until it is let go, and tries what it has set aside.
pub(crate) async fn run(
    mut links: Links,
    cursor: Cursor,
    has_parked: bool,
) -> Result<Ended, database::Error> {
    if has_parked {
        // However long it takes, the session renews the lease meanwhile.
        // Nothing may be handed over before the keys that wait are known.
        let loaded = tokio::select! {
            biased;
            loaded = parked::load(&links.settings, links.shard) => loaded?,
            ended = let_go(&links) => return Ok(ended),
        };
        links.aside = Aside::new(&loaded);
    }
    let (end, over) = watch::channel(false);
    let publishing = async {
        let ended = publish(&links, cursor).await;
        end.send_replace(true);
        ended
    };
    let (ended, retried) = tokio::join!(publishing, retry(&links, over));
    retried?;
    ended
}

/// Tries what is set aside for as long as the shard is published. The retrier lets go when the lease is not trusted; where the pipeline
/// did not see that, in the middle of replacing a producer, and the lease was renewed, it goes on as well.
async fn retry(links: &Links, mut over: watch::Receiver<bool>) -> Result<(), database::Error> {
    loop {
        retrier::run(links, over.clone()).await?;
        if tokio::time::timeout(RETRIED_AGAIN, over.wait_for(|over| *over)).await.is_ok() {
            return Ok(());
        }
    }
}

async fn publish(links: &Links, mut cursor: Cursor) -> Result<Ended, database::Error> {
    let mut broken =
        retry::Policy { base: Duration::from_millis(200), factor: 2.0, cap: Duration::from_secs(5) }.delays();
    let mut stops =
        retry::Policy { base: Duration::from_secs(1), factor: 2.0, cap: Duration::from_secs(5) }.delays();
    let mut care = Care::default();
    loop {
        let publisher = match Publisher::new(&links.settings, Arc::clone(&links.envelope)) {
            Ok(publisher) => publisher,
            Err(error) => {
                tracing::error!(shard = links.shard, "cannot make a kafka producer: {error}");
                match wait(links, broken.next_delay()).await {
                    Some(ended) => return Ok(ended),
                    None => continue,
                }
            }
        };
        let (stop, durable) = Pipeline::new(links, publisher, cursor.clone(), &mut care).run().await?;
        if durable != cursor {
            cursor = durable;
            broken.reset();
            stops.reset();
        }
        let delay = match stop {
            Stop::Ended(ended) => {
                stopped::forget(&links.stopped, links.shard);
                return Ok(ended);
            }
            Stop::Failed(Failed { failure: Failure::Broken { error }, .. }) => {
                links.metrics.producer_broke();
                links.topics.forget_all();
                tracing::warn!(shard = links.shard, "the kafka producer failed and is replaced: {error}");
                broken.next_delay()
            }
            Stop::Failed(Failed {
                failure: Failure::Refused { topic, cause, error },
                which,
                refused,
                sure,
            }) => {
                let error = refusal::in_full(links, &topic, cause, error).await;
                match cause {
                    // The broker is asked, which decides.
                    Cause::UnknownTopic => {
                        links.topics.forget(&topic);
                        tracing::warn!(shard = links.shard, topic, "{error}: the broker is asked about it");
                        broken.next_delay()
                    }
                    Cause::NotAuthorized | Cause::InvalidTopic => {
                        links.topics.denied(&topic, cause, error);
                        Duration::ZERO
                    }
                    _ => {
                        let mut refused: Vec<i64> =
                            refused.iter().chain(&which).map(|w| w.position).collect();
                        refused.sort_unstable();
                        refused.dedup();
                        if sure == Sure::Among {
                            tracing::warn!(
                                shard = links.shard,
                                rows = refused.len(),
                                "kafka refused a batch, its messages go again in smaller ones: {error}"
                            );
                        }
                        care.refused(&refused, sure, cause, &error);
                        // Whoever it was, it is not known to be in flight: as if the producer had broken.
                        if refused.is_empty() { broken.next_delay() } else { Duration::ZERO }
                    }
                }
            }
            Stop::Full(full) => {
                let delay = stops.next_delay();
                say_what_stops(links, full, delay);
                delay
            }
        };
        if let Some(ended) = wait(links, delay).await {
            stopped::forget(&links.stopped, links.shard);
            return Ok(ended);
        }
    }
}

/// Says that the shard stops for want of room, and before which message: in the log, and in the database for `baton status`.
fn say_what_stops(links: &Links, full: Full, delay: Duration) {
    let Full { which: Which { id, position }, topic, cause } = full;
    let error = format!(
        "the shard has {} messages parked, as many as park.rows allows: requeue or discard some (`baton parked`), or raise it",
        links.settings.park_rows
    );
    let (stopped, say) = stopped::remember(&links.stopped, links.shard, id, position, topic, cause);
    if say == Say::Aloud {
        tracing::error!(
            shard = links.shard, %id, position, topic = stopped.topic, cause = stopped.cause, attempts = stopped.attempts,
            "a message has to be parked and there is no room for it, its shard waits and looks again: {error}"
        );
    }
    let Links { shard, generation, token, .. } = *links;
    let report = Report { shard, generation, token, position, cause, error, delay };
    if links.stops.try_send(report).is_err() {
        tracing::debug!(shard, "why the shard stands still is written down the next time");
    }
}

/// Waits, unless the shard is let go meanwhile.
async fn wait(links: &Links, delay: Duration) -> Option<Ended> {
    tokio::time::timeout(delay, let_go(links)).await.ok()
}

/// Returns when the shard is let go. Nothing is in flight here, so a drain ends at once.
async fn let_go(links: &Links) -> Ended {
    /// Long enough to cost nothing, and often enough to be seen to live.
    const BEAT_EVERY: Duration = Duration::from_secs(1);
    let (mut order, mut trust) = (links.order.clone(), links.trust.clone());
    loop {
        let trusted_until = *trust.borrow_and_update();
        match *order.borrow_and_update() {
            Order::Run => {}
            Order::Drain => return Ended::Drained,
            Order::Let(ended) => return ended,
        }
        let now = Instant::now();
        if now >= trusted_until {
            return Ended::Distrusted;
        }
        links.beat.at(now);
        tokio::select! {
            () = tokio::time::sleep_until(trusted_until.min(now + BEAT_EVERY)) => {}
            changed = order.changed() => if changed.is_err() { return Ended::Abandoned },
            changed = trust.changed() => if changed.is_err() { return Ended::Abandoned },
        }
    }
}

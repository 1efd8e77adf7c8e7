//! One shard, from the claim of its lease until it is let go: one producer after another.
//!
//! ```text
//!   claimed ─▶ publishing ──failed──▶ waiting ─▶ publishing (new producer, from the durable cursor)
//!                  │                     │
//!                  └─ drained │ fenced │ trust ended │ abandoned ─▶ let go
//! ```
//!
//! A message that Kafka refuses for its own sake stops its shard: an ERROR says which and what to do, and it is tried
//! again with growing delays, so that the shard flows once the operator has mended the cause. Nothing is skipped. The ERROR comes
//! at the first refusal, when the cause is another, and at every doubling of the attempts; an INFO when the shard flows again.

use std::sync::Arc;
use std::time::Duration;

use baton_protocol::lifecycle::message::Cause;
use baton_protocol::retry;
use tokio::time::Instant;

use crate::cursor::Cursor;
use crate::database;
use crate::links::{Ended, Links, Order};
use crate::pipeline::{Pipeline, Stop, Which};
use crate::publish::{Failure, Publisher};
use crate::refusal;
use crate::stopped::{self, Report, Say};

/// Publishes a shard until it is let go.
pub(crate) async fn run(links: Links, mut cursor: Cursor) -> Result<Ended, database::Error> {
    let mut broken =
        retry::Policy { base: Duration::from_millis(200), factor: 2.0, cap: Duration::from_secs(5) }.delays();
    let mut refusals =
        retry::Policy { base: Duration::from_secs(1), factor: 2.0, cap: Duration::from_secs(30) }.delays();
    let mut careful = 0;
    loop {
        let publisher = match Publisher::new(&links.settings, Arc::clone(&links.envelope)) {
            Ok(publisher) => publisher,
            Err(error) => {
                tracing::error!(shard = links.shard, "cannot make a kafka producer: {error}");
                match wait(&links, broken.next_delay()).await {
                    Some(ended) => return Ok(ended),
                    None => continue,
                }
            }
        };
        let (stop, durable) = Pipeline::new(&links, publisher, cursor.clone(), careful).run().await?;
        if durable != cursor {
            cursor = durable;
            broken.reset();
            refusals.reset();
        }
        let (failure, which, unacked) = match stop {
            Stop::Ended(ended) => {
                stopped::forget(&links.stopped, links.shard);
                return Ok(ended);
            }
            Stop::Failed { failure, which, unacked } => (failure, which, unacked),
        };
        links.metrics.publish_failed(&failure);
        let delay = match failure {
            Failure::Refused { cause: Cause::TooLarge | Cause::InvalidRecord, .. } if unacked > 1 => {
                // The broker refuses whole batches, and its limit counts the batch. What was in flight goes again one by one.
                careful = unacked;
                tracing::warn!(
                    shard = links.shard,
                    rows = unacked,
                    "kafka refused a batch, its messages go again one by one"
                );
                Duration::ZERO
            }
            Failure::Refused { topic, cause, error } => {
                careful = 1;
                links.topics.forget(&topic);
                let delay = refusals.next_delay();
                say_what_stops(&links, which, topic, cause, error, delay).await;
                delay
            }
            Failure::Broken { error } => {
                careful = 0;
                links.topics.forget_all();
                tracing::warn!(shard = links.shard, "the kafka producer failed and is replaced: {error}");
                broken.next_delay()
            }
        };
        if let Some(ended) = wait(&links, delay).await {
            stopped::forget(&links.stopped, links.shard);
            return Ok(ended);
        }
    }
}

/// Says which message stops the shard, and why: in the log, and in the database for `baton status`.
async fn say_what_stops(
    links: &Links,
    which: Option<Which>,
    topic: String,
    cause: Cause,
    mut error: String,
    delay: Duration,
) {
    let id = which.map(|w| w.id).unwrap_or_default();
    let position = which.map_or(0, |w| w.position);
    if cause == Cause::TooLarge {
        error = format!("{error}; {}", refusal::allowed(&links.settings, &topic, &links.destroying).await);
    }
    let (stopped, say) = stopped::remember(&links.stopped, links.shard, id, position, topic, cause);
    if say == Say::Aloud {
        tracing::error!(
            shard = links.shard, %id, position, topic = stopped.topic, cause = stopped.cause, attempts = stopped.attempts,
            "kafka does not take a message, its shard waits and tries again: {error}; {}", stopped.advice
        );
    }
    let report = Report {
        shard: links.shard,
        generation: links.generation,
        token: links.token,
        position,
        cause,
        error,
        delay,
    };
    if which.is_some() && links.stops.try_send(report).is_err() {
        tracing::debug!(
            shard = links.shard,
            "why the shard stands still is written down at the next attempt"
        );
    }
}

/// Waits, unless the shard is let go meanwhile. Nothing is in flight here, so a drain ends at once.
async fn wait(links: &Links, delay: Duration) -> Option<Ended> {
    let (mut order, mut trust) = (links.order.clone(), links.trust.clone());
    let until = Instant::now() + delay;
    loop {
        let trusted_until = *trust.borrow_and_update();
        match *order.borrow_and_update() {
            Order::Run => {}
            Order::Drain => return Some(Ended::Drained),
            Order::Let(ended) => return Some(ended),
        }
        if Instant::now() >= trusted_until {
            return Some(Ended::Distrusted);
        }
        links.beat.at(Instant::now());
        if Instant::now() >= until {
            return None;
        }
        tokio::select! {
            () = tokio::time::sleep_until(until.min(trusted_until)) => {}
            changed = order.changed() => if changed.is_err() { return Some(Ended::Abandoned) },
            changed = trust.changed() => if changed.is_err() { return Some(Ended::Abandoned) },
        }
    }
}

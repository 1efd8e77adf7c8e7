//! From runs to figures: by sorting, nothing cleverer.

use std::time::Duration;

use tokio::time::{Instant, sleep};

use crate::arena::Arena;
use crate::broker::between;
use crate::lab::{Lab, Result};
use crate::process::{self, Relay, Told};

/// What several runs of one thing gave.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Spread {
    pub(crate) median: f64,
    pub(crate) min: f64,
    pub(crate) max: f64,
}

impl Spread {
    /// None without runs.
    pub(crate) fn of(runs: &[f64]) -> Option<Self> {
        let mut sorted = runs.to_vec();
        sorted.sort_by(f64::total_cmp);
        let (min, max) = (*sorted.first()?, *sorted.last()?);
        let middle = sorted.len() / 2;
        let median = if sorted.len().is_multiple_of(2) {
            f64::midpoint(*sorted.get(middle - 1)?, *sorted.get(middle)?)
        } else {
            *sorted.get(middle)?
        };
        Some(Self { median, min, max })
    }
}

/// The value below which this part of the samples lies. Sorts them.
pub(crate) fn quantile(samples: &mut [f64], part: f64) -> Result<f64> {
    samples.sort_by(f64::total_cmp);
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "an index below the number of samples"
    )]
    let rank = (samples.len() as f64 * part) as usize;
    let last = samples.len().checked_sub(1).ok_or("there are no samples")?;
    Ok(samples[rank.min(last)])
}

/// The quotients of runs that were made as pairs.
pub(crate) fn ratios(of: &[f64], by: &[f64]) -> Vec<f64> {
    of.iter().zip(by).map(|(of, by)| of / by).collect()
}

/// One run of something that publishes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Run {
    /// Records a second, between the first and the last append by the broker's clock.
    pub(crate) rate: f64,
    /// CPU seconds of the process that published, from its start.
    pub(crate) cpu: f64,
    pub(crate) postgres_cpu: Option<f64>,
    pub(crate) broker_cpu: Option<f64>,
    /// The most memory that process had resident.
    pub(crate) peak: f64,
}

#[expect(clippy::cast_precision_loss, reason = "counts of a benchmark")]
pub(crate) fn float(count: i64) -> f64 {
    count as f64
}

/// Starts a relay on what waits, and ends it when that many records have come.
pub(crate) async fn relay_run(lab: &Lab, arena: &Arena, messages: i64) -> Result<Run> {
    let (from, servers) = (arena.broker.ends(&arena.topic)?, lab.servers.cpu());
    let mut relay = Relay::start(lab, arena, "relay", &[])?;
    let to = published(arena, &from, messages, &mut relay).await?;
    let (cpu, servers, peak) = (relay.cpu_seconds()?, lab.servers.cpu().since(servers), relay.memory()?.peak);
    relay.terminate().await?;
    let span = arena.broker.append_span(&arena.topic, &from, &to)?;
    Ok(Run {
        rate: float(between(&from, &to)) * 1000.0 / span,
        cpu,
        postgres_cpu: servers.postgres,
        broker_cpu: servers.broker,
        peak,
    })
}

/// Runs one of the limits that publish.
pub(crate) async fn limit_run(lab: &Lab, arena: &Arena, messages: i64, args: &[&str]) -> Result<Run> {
    let (from, servers) = (arena.broker.ends(&arena.topic)?, lab.servers.cpu());
    let Told { cpu, peak, .. } = process::limit(arena, args).await?;
    let (to, servers) = (arena.broker.ends(&arena.topic)?, lab.servers.cpu().since(servers));
    let arrived = between(&from, &to);
    if arrived != messages {
        return Err(format!("{arrived} records arrived instead of {messages}").into());
    }
    let span = arena.broker.append_span(&arena.topic, &from, &to)?;
    Ok(Run {
        rate: float(arrived) * 1000.0 / span,
        cpu,
        postgres_cpu: servers.postgres,
        broker_cpu: servers.broker,
        peak,
    })
}

/// Waits until so many records have come, and says where the topic ends then.
pub(crate) async fn published(
    arena: &Arena,
    from: &Vec<i64>,
    messages: i64,
    relay: &mut Relay,
) -> Result<Vec<i64>> {
    // Slower than this is no measurement.
    #[expect(clippy::cast_sign_loss, reason = "a count")]
    let patience = Duration::from_secs(60) + Duration::from_millis(messages as u64 / 5);
    let started = Instant::now();
    loop {
        let to = arena.broker.ends(&arena.topic)?;
        if between(from, &to) >= messages {
            return Ok(to);
        }
        relay.must_run()?;
        if started.elapsed() > patience {
            let came = between(from, &to);
            return Err(format!("after {patience:?} {came} records of {messages} had come").into());
        }
        sleep(Duration::from_millis(20)).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_the_middle_one_or_lies_between_two() {
        assert_eq!(Spread::of(&[3.0, 1.0, 2.0]), Some(Spread { median: 2.0, min: 1.0, max: 3.0 }));
        assert_eq!(Spread::of(&[4.0, 1.0, 2.0, 3.0]).unwrap().median, 2.5);
        assert_eq!(Spread::of(&[]), None);
    }

    #[test]
    fn a_quantile_is_one_of_the_samples() {
        let mut samples: Vec<f64> = (1..=100).rev().map(f64::from).collect();
        assert_eq!(quantile(&mut samples, 0.5).unwrap(), 51.0);
        assert_eq!(quantile(&mut samples, 0.99).unwrap(), 100.0);
        assert_eq!(quantile(&mut samples, 1.0).unwrap(), 100.0);
        assert!(quantile(&mut [], 0.5).is_err());
    }
}

//! How long nobody publishes a shard when its relay dies, and when it is asked to end: must show 7.
//!
//! Measured where it counts, on the topic: from the signal to the broker's own time of the next owner's first record of
//! the same shard. Relay, broker and the clock that the signal is timed by are on one machine.

use std::time::Duration;

use baton_tests::{Harness, Load, Outcome, Process, Record, Site, eventually, fail, figure, test, workload};
use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval};

use crate::leases::shares;

const PATIENCE: Duration = Duration::from_secs(30);
const TTL: Duration = Duration::from_secs(2);
const OWNERS: [&str; 2] = ["even", "odd"];

#[test]
fn after_a_kill_the_next_publish_of_a_shard_comes_within_its_lease_and_a_second_and_after_sigterm_within_one()
{
    test(Duration::from_secs(900), Load::Alone, async |harness: &mut Harness| {
        let full = std::env::var("BATON_TIER").is_ok_and(|tier| tier == "full");
        let times = if full { 20 } else { 2 };
        let site = harness.site().await?;
        let topic = site.topic_with("takeover", 8, &[("message.timestamp.type", "LogAppendTime")]).await?;
        let keys = site.key_of_each_shard().await?;
        let (stop, stopped) = watch::channel(false);
        let load = tokio::spawn(trickle(site.clone(), topic.clone(), keys.clone(), stopped));

        let mut relays = Relays::start(&site).await?;
        let mut ends = Vec::new();
        for round in 0..times * 2 {
            let fault = if round < times { Fault::Kill } else { Fault::Terminate };
            ends.push(relays.lose(&site, round % 2, fault).await?);
        }
        stop.send_replace(true);
        load.await??;
        site.emptied().await?;

        let records = site.kafka().records(&topic).await?;
        for (fault, most) in
            [(Fault::Kill, TTL + Duration::from_secs(1)), (Fault::Terminate, Duration::from_secs(1))]
        {
            let mut gaps: Vec<i64> = Vec::new();
            for end in ends.iter().filter(|end| end.fault == fault) {
                for shard in &end.shards {
                    gaps.push(end.gap(&records, &keys[usize::try_from(*shard)?])?);
                }
            }
            gaps.sort_unstable();
            let [least, middle, worst] = [gaps[0], gaps[gaps.len() / 2], gaps[gaps.len() - 1]];
            figure(&format!(
                "must show 7: {fault:?} to the next publish of the same shard, {times} times, {} shards: min {least} ms, \
                 median {middle} ms, max {worst} ms (ttl {TTL:?}, at most {most:?})",
                gaps.len()
            ));
            assert!(u128::try_from(worst)? <= most.as_millis(), "{fault:?}: {gaps:?}");
        }
        let (findings, _) = workload::judge(&workload::truth(&site, &topic).await?, &records);
        assert!(findings.wire_is_right(), "{findings}");
        Ok(())
    });
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    Kill,
    Terminate,
}

/// A relay that was made to end.
struct End {
    fault: Fault,
    /// By the broker's clock, in milliseconds, just before the signal.
    at: i64,
    /// What it held.
    shards: Vec<i16>,
    /// The `ce_source` of the relay that stayed.
    heir: String,
}

impl End {
    /// Milliseconds until the heir's first record of this key.
    fn gap(&self, records: &[Record], key: &str) -> Outcome<i64> {
        let first = records
            .iter()
            .filter(|record| record.key_text() == Some(key) && record.header("ce_source") == Some(&self.heir))
            .filter_map(|record| record.timestamp_ms)
            .filter(|at| *at >= self.at)
            .min();
        match first {
            Some(first) => Ok(first - self.at),
            None => fail!("{} has published nothing of {key} since {}", self.heir, self.at),
        }
    }
}

/// Two relays that share the shards. Each process has a source of its own, so that records name who published them.
struct Relays {
    processes: [Process; 2],
    sources: [String; 2],
    started: usize,
}

impl Relays {
    async fn start(site: &Site) -> Outcome<Self> {
        let first = relay(site, 0, "/0")?;
        let second = relay(site, 1, "/1")?;
        let relays =
            Self { processes: [first, second], sources: ["/0".to_owned(), "/1".to_owned()], started: 2 };
        relays.at_rest(site).await?;
        Ok(relays)
    }

    async fn at_rest(&self, site: &Site) -> Outcome {
        eventually("fair shares", PATIENCE, async || shares(site, &[4, 4]).await).await
    }

    /// Ends one of them, waits until the other has everything, and starts it again.
    async fn lose(&mut self, site: &Site, which: usize, fault: Fault) -> Outcome<End> {
        let shards: Vec<i16> =
            sqlx::query_scalar("SELECT shard FROM outbox.shard WHERE owner = $1 ORDER BY shard")
                .bind(OWNERS[which])
                .fetch_all(site.pool())
                .await?;
        let at: i64 =
            sqlx::query_scalar("SELECT floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint")
                .fetch_one(site.pool())
                .await?;
        match fault {
            Fault::Kill => self.processes[which].kill().await?,
            Fault::Terminate => assert!(self.processes[which].terminate(PATIENCE).await?.success()),
        }
        // Else the next one could take a shard back of which this owner had not yet published anything.
        eventually("the other to have published all", PATIENCE, async || {
            shares(site, &[8]).await?;
            let published: i64 = sqlx::query_scalar(
                "SELECT count(*) FROM outbox.shard s WHERE shard = ANY ($1) AND EXISTS (
                     SELECT FROM outbox.advance a WHERE a.shard = s.shard AND a.generation = s.generation)",
            )
            .bind(&shards)
            .fetch_one(site.pool())
            .await?;
            if usize::try_from(published)? == shards.len() { Ok(()) } else { fail!("{published} shards are") }
        })
        .await?;
        let end = End { fault, at, shards, heir: self.sources[1 - which].clone() };
        self.sources[which] = format!("/{}", self.started);
        self.processes[which] = relay(site, which, &self.sources[which])?;
        self.started += 1;
        self.at_rest(site).await?;
        Ok(end)
    }
}

fn relay(site: &Site, which: usize, source: &str) -> Outcome<Process> {
    site.relay(OWNERS[which])?.env("BATON_LEASE__TTL", "2s").env("BATON_RELAY__SOURCE", source).start()
}

/// A message of every shard forty times a second.
async fn trickle(site: Site, topic: String, keys: Vec<String>, stopped: watch::Receiver<bool>) -> Outcome {
    let mut connection = site.connect().await?;
    let mut tick = interval(Duration::from_millis(25));
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut seq = 0_i64;
    while !*stopped.borrow() {
        tick.tick().await;
        seq += 1;
        sqlx::query(
            r#"INSERT INTO outbox.message (topic, key, payload)
               SELECT $1, key, convert_to(format('{"seq":%s}', $3::bigint), 'UTF8') FROM unnest($2::text[]) key"#,
        )
        .bind(&topic)
        .bind(&keys)
        .bind(seq)
        .execute(&mut connection)
        .await?;
    }
    Ok(())
}

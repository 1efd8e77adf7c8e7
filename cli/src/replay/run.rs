//! `baton replay run`: sends what is left of a plan, a few items at a time, until all of it is sent or somebody says stop.

use std::collections::{BTreeSet, HashMap};
use std::num::NonZeroU64;
use std::time::Duration;

use baton_protocol::replay::{Item, Stamp};
use serde_json::json;
use sqlx::PgConnection;
use tokio::task::spawn_blocking;
use tokio::time::{Instant, sleep_until};
use uuid::Uuid;

use super::letters::{Cluster, Full, Reader};
use super::pace;
use super::send::{Sender, Sent, remedy};
use super::store::{self, Claimed, Claims, LEASE, Plan};
use super::{Error, connect, groups, kafka};
use crate::config::Effective;
use crate::failure::Failure;
use crate::progress::Progress;
use crate::{out, signals};

/// How often is looked whether what another run has claimed is sent, or free again.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// How often is looked how far the plan is: other runs send of it too.
const SHOW_EVERY: Duration = Duration::from_millis(500);

/// What is read after this is not handed over any more: its claim could be over before it is acknowledged.
const TRUST: Duration = Duration::from_secs(LEASE.as_secs() * 2 / 5);

/// Why a run ended, other than by an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Finished,
    Limit,
    Stopped,
}

impl End {
    fn as_str(self) -> &'static str {
        match self {
            Self::Finished => "finished",
            Self::Limit => "limit",
            Self::Stopped => "stopped",
        }
    }
}

/// Sends a plan and says how many items that were.
pub(super) async fn run(
    config: &Effective,
    id: Uuid,
    rate: Option<f64>,
    limit: Option<NonZeroU64>,
) -> Result<(), Failure> {
    let cluster = kafka(config)?;
    let mut connection = connect(config).await?;
    let plan = store::read(&mut connection, id).await?;
    let left = store::left(&mut connection, id).await?;
    if left.waiting + left.sending == 0 {
        return out::line(&format!(
            "plan {id} is finished: nothing of its {} items is left to send; `baton replay status {id}` says what became of them",
            plan.items
        ));
    }
    let stop = signals::shutdown().map_err(Error::Signals)?;
    let (looked_at, asked) = (cluster.clone(), plan.clone());
    let told = spawn_blocking(move || look(&looked_at, &asked)).await.map_err(|_| Error::Task)??;
    if let Some(told) = told {
        out::line(&told)?;
    }
    let arguments = json!({"plan": id, "rate": rate, "limit": limit});
    let begun = left.waiting + left.sending;
    store::audit(
        &mut connection,
        "replay run",
        &with(&arguments, &json!({"event": "begun", "left": begun})),
        0,
    )
    .await?;

    let sender = Sender::new(&cluster)?;
    let mut run = Run {
        id,
        owner: format!("baton-replay/{}/{}", std::process::id(), Uuid::new_v4().simple()),
        reader: Some(cluster.reader()?),
        progress: Progress::new(u64::try_from(plan.items).unwrap_or_default()),
        plan,
        sender: &sender,
        own: 0,
        left_out: 0,
        gone: Vec::new(),
    };
    let ended = run.go(&mut connection, rate, limit, stop).await;
    run.progress.end();
    let Run { own, left_out, gone, reader, plan, .. } = run;
    drop(spawn_blocking(move || drop(reader)).await);
    sender.close().await;
    let how = ended.as_ref().map_or("failed", |end| end.as_str());
    let affected = i64::try_from(own).unwrap_or(i64::MAX);
    let audited =
        store::audit(&mut connection, "replay run", &with(&arguments, &json!({"event": how})), affected)
            .await;
    let end = ended?;
    audited?;
    let left = store::left(&mut connection, id).await?;
    let left = left.waiting + left.sending;
    out::line(&match end {
        End::Finished if gone.is_empty() => format!("sent {own} items; plan {id} is finished"),
        End::Finished => format!("sent {own} items; {left} are left, whose dead letters are gone"),
        End::Limit => format!("sent {own} items, as many as --limit allows; {left} are left"),
        End::Stopped => {
            format!("stopped in order: sent {own} items, {left} are left; `baton replay run {id}` goes on")
        }
    })?;
    if left_out > 0 {
        out::line(&format!(
            "left out: {left_out}, because another plan has sent them meanwhile; they count as duplicates; plan them with --again \
             to have them done once more"
        ))?;
    }
    if gone.is_empty() {
        Ok(())
    } else {
        Err(Error::Gone { topic: plan.dead_letters, items: gone.len() }.into())
    }
}

fn with(arguments: &serde_json::Value, more: &serde_json::Value) -> serde_json::Value {
    let mut all = arguments.as_object().cloned().unwrap_or_default();
    all.extend(more.as_object().cloned().unwrap_or_default());
    all.retain(|_, value| !value.is_null());
    all.into()
}

/// Whether there is a topic to send to, and whom it reaches where it is the original one. Blocks.
fn look(cluster: &Cluster, plan: &Plan) -> Result<Option<String>, Error> {
    let reader = cluster.reader()?;
    let extent =
        reader.extent(&plan.target)?.ok_or_else(|| Error::NoTarget { topic: plan.target.clone() })?;
    if plan.target != plan.topic {
        return Ok(None);
    }
    let partitions: Vec<i32> = extent.iter().map(|stretch| stretch.partition).collect();
    let groups = groups::of(cluster, &plan.topic, &partitions)?;
    Ok(Some(groups.sentence(&plan.topic)))
}

/// One run.
struct Run<'s> {
    id: Uuid,
    /// New for each run: nothing can act by an earlier one's claims.
    owner: String,
    plan: Plan,
    /// Lent to a thread while it reads.
    reader: Option<Reader>,
    sender: &'s Sender,
    progress: Progress,
    /// Acknowledged in this run.
    own: u64,
    /// Settled unsent: another plan has sent their records.
    left_out: u64,
    /// Items whose letters are not on the topic any more.
    gone: Vec<i64>,
}

impl Run<'_> {
    /// Until it is finished, or told to stop, which is asked for between two batches: none is cut.
    async fn go(
        &mut self,
        connection: &mut PgConnection,
        rate: Option<f64>,
        limit: Option<NonZeroU64>,
        stop: impl Future<Output = ()>,
    ) -> Result<End, Error> {
        let mut stop = std::pin::pin!(stop);
        let mut next = Instant::now();
        let mut before: Option<Instant> = None;
        let mut show = next;
        loop {
            let allowed = limit.map_or(u64::MAX, |limit| limit.get().saturating_sub(self.own));
            if allowed == 0 {
                return Ok(End::Limit);
            }
            tokio::select! {
                biased;
                () = &mut stop => return Ok(End::Stopped),
                () = sleep_until(next) => {}
            }
            let asked = Instant::now();
            let most = pace::items(rate, before.map(|before| asked - before))
                .min(u32::try_from(allowed).unwrap_or(u32::MAX));
            before = Some(asked);
            let Claims { claimed, left_out } =
                store::claim(connection, (self.id, &self.plan), &self.owner, most, &self.gone).await?;
            self.left_out += left_out;
            if claimed.is_empty() && left_out > 0 {
                continue;
            }
            if claimed.is_empty() {
                let left = store::left(connection, self.id).await?;
                let gone = i64::try_from(self.gone.len()).unwrap_or(i64::MAX);
                if left.sending == 0 && left.waiting <= gone {
                    return Ok(End::Finished);
                }
                // Another run is at it, or was: its claims end.
                next = Instant::now() + LOOK_EVERY;
                continue;
            }
            self.batch(connection, &claimed, asked).await?;
            if Instant::now() >= show {
                show = Instant::now() + SHOW_EVERY;
                let left = store::left(connection, self.id).await?;
                let sent = u64::try_from(self.plan.items - left.waiting - left.sending).unwrap_or_default();
                self.progress.show(sent, self.own);
            }
            next = asked + pace::pause(rate);
        }
    }

    /// Reads, sends and marks what was claimed.
    async fn batch(
        &mut self,
        connection: &mut PgConnection,
        claimed: &[Claimed],
        asked: Instant,
    ) -> Result<(), Error> {
        let read = self.read(claimed).await;
        let letters = match read {
            Ok(letters) => letters,
            Err(error) => {
                // Nothing was handed over. Where that cannot be said the claims lapse.
                let unsent: Vec<_> = claimed.iter().map(|claimed| (claimed, None)).collect();
                drop(store::release(connection, self.id, &self.owner, &unsent).await);
                return Err(error);
            }
        };
        let there = |claimed: &&Claimed| letters.contains_key(&(claimed.partition, claimed.offset));
        let (found, missing): (Vec<&Claimed>, Vec<&Claimed>) = claimed.iter().partition(there);
        if !missing.is_empty() {
            self.gone.extend(missing.iter().map(|claimed| claimed.item));
            let why = Some(format!("its dead letter is no longer on {}", self.plan.dead_letters));
            let unsent: Vec<_> = missing.into_iter().map(|claimed| (claimed, why.clone())).collect();
            store::release(connection, self.id, &self.owner, &unsent).await?;
        }
        if asked.elapsed() > TRUST {
            let unsent: Vec<_> = found.into_iter().map(|claimed| (claimed, None)).collect();
            return store::release(connection, self.id, &self.owner, &unsent).await;
        }
        let records: Vec<(&Full, Stamp<'_>)> = found
            .iter()
            .filter_map(|claimed| {
                let full = letters.get(&(claimed.partition, claimed.offset))?;
                let key = claimed.idempotency_key.as_deref().filter(|_| self.plan.new_key);
                let stamp = Stamp {
                    item: Item { plan: self.id, number: claimed.item },
                    round: u32::try_from(claimed.round).unwrap_or(u32::MAX),
                    original_timestamp_ms: claimed.original_time_ms,
                    new_key: key,
                };
                Some((full, stamp))
            })
            .collect();
        let told = self.sender.send(&self.plan.target, &records).await;
        self.settle(connection, &found, told).await
    }

    /// Writes down what became of records that were handed over. One that may be there keeps its claim, which lapses.
    async fn settle(
        &mut self,
        connection: &mut PgConnection,
        claimed: &[&Claimed],
        told: Vec<Sent>,
    ) -> Result<(), Error> {
        let (mut acknowledged, mut refused, mut unknown) = (Vec::new(), Vec::new(), Vec::new());
        for (claimed, sent) in claimed.iter().zip(told) {
            match sent {
                Sent::Acknowledged => acknowledged.push(*claimed),
                Sent::Refused(error) => refused.push((*claimed, error)),
                Sent::Unknown(error) => unknown.push(error),
            }
        }
        self.own += u64::try_from(acknowledged.len()).unwrap_or_default();
        if !acknowledged.is_empty() {
            store::sent(connection, self.id, &self.owner, &acknowledged).await?;
        }
        if !refused.is_empty() {
            let unsent: Vec<_> =
                refused.iter().map(|(claimed, error)| (*claimed, Some(error.to_string()))).collect();
            store::release(connection, self.id, &self.owner, &unsent).await?;
        }
        let topic = || self.plan.target.clone();
        if let Some((claimed, source)) = refused.into_iter().next() {
            let what_to_do = remedy(&source);
            return Err(Error::Refused {
                topic: topic(),
                item: claimed.item,
                what_to_do,
                source: Box::new(source),
            });
        }
        let items = unknown.len();
        match unknown.into_iter().next() {
            Some(source) => Err(Error::Unacknowledged { topic: topic(), items, source: Box::new(source) }),
            None => Ok(()),
        }
    }

    /// The letters of these items, as far as they are there.
    async fn read(&mut self, claimed: &[Claimed]) -> Result<HashMap<(i32, i64), Full>, Error> {
        let places: BTreeSet<(i32, i64)> =
            claimed.iter().map(|claimed| (claimed.partition, claimed.offset)).collect();
        let topic = self.plan.dead_letters.clone();
        let reader = self.reader.take().ok_or(Error::Task)?;
        let reading = spawn_blocking(move || {
            let letters = there(&reader, &topic, &places);
            (reader, letters)
        });
        let (reader, letters) = reading.await.map_err(|_| Error::Task)?;
        self.reader = Some(reader);
        letters
    }
}

/// Reads what has not been deleted. Blocks.
fn there(
    reader: &Reader,
    topic: &str,
    places: &BTreeSet<(i32, i64)>,
) -> Result<HashMap<(i32, i64), Full>, Error> {
    let extent = reader.extent(topic)?.ok_or_else(|| Error::NoTopic { topic: topic.to_owned() })?;
    let kept = |&(partition, offset): &(i32, i64)| {
        extent.iter().any(|held| held.partition == partition && (held.from..held.to).contains(&offset))
    };
    reader.full(topic, &places.iter().copied().filter(kept).collect())
}

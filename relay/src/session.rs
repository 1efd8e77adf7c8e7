//! One session: four connections, the leases won through them, and the shards published under these leases.
//!
//! ```text
//!            ┌─ renewer ── every TTL/3, its own connection ──▶ trust of each shard
//!  session ──┼─ reader ─── pages for all shards
//!            ├─ advancer ─ cursors of all shards
//!            ├─ parked ─── what is set aside, a connection once there is something
//!            ├─ retention ─ leaves in turn, a connection when one is due
//!            └─ this task: overview four times a second, and when another's lease ends ─▶ claim │ drain ─▶ release
//! ```
//!
//! When a connection fails or goes silent the whole session ends: every shard is told to let go, purges, and all that was
//! read ahead is gone. The next session claims anew, its own shards at once (the lease still names this process), and
//! starts from the durable cursors.

use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;

use baton_protocol::envelope::Envelope;
use baton_protocol::lease::share::Decision;
use sqlx::postgres::PgConnection;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior};
use uuid::Uuid;

use crate::aside::Aside;
use crate::budget::Budget;
use crate::database::{self, Error, Outbox};
use crate::fenced::{Fences, Operation};
use crate::health::{Beat, Health};
use crate::lease::{self, Claimed, Free, Released};
use crate::links::{Destroying, Ended, Links, Order, Paused};
use crate::metrics::Metrics;
use crate::namesake::Namesake;
use crate::settings::Settings;
use crate::stopped::{self, Stopped, StoppedShards};
use crate::tail::Confirmed;
use crate::topics::Topics;
use crate::until_empty::{Progress, SetAside, Target};
use crate::{advance, parked, read, retention, shard, status};

/// How often to look for shards to take or to give; sooner where a lease of another relay is about to run out.
const OVERVIEW_EVERY: Duration = Duration::from_millis(250);

/// How often to look for topics that were paused or resumed.
const PAUSED_EVERY: Duration = Duration::from_secs(1);

/// How long after the end of a lease to look: the leases that one renewal extended end within it.
const JUST_AFTER: Duration = Duration::from_millis(10);

/// The longest a page read may take: a page of every shard, from a disk that is busy.
const READ_PATIENCE: Duration = Duration::from_secs(30);

/// The longest a cursor write may take. Longer than a lease request may: a late one is fenced by the database.
const ADVANCE_PATIENCE: Duration = Duration::from_secs(10);

/// What outlives a session.
pub(crate) struct Process {
    pub settings: Arc<Settings>,
    /// The generations this process holds, or held when its connection went: what lets it claim its own shards at once.
    pub generations: BTreeMap<i16, i64>,
    /// Who else runs under this relay's name.
    pub namesake: Namesake,
    pub metrics: Arc<Metrics>,
    pub health: Arc<Health>,
    /// The main loop's sign of movement.
    pub beat: Beat,
    pub stopped: StoppedShards,
    pub fences: Arc<Fences>,
    /// What the database has confirmed, to tell when it has lost it.
    pub confirmed: Arc<Confirmed>,
    /// Whether the last session got as far as claiming: then the database was of use.
    pub claimed: bool,
    pub topics: Arc<Topics>,
    /// What `--until-empty` waits for, once it is known.
    pub target: Option<Target>,
    pub until_empty: bool,
}

/// How a session ended without an error.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Closed {
    /// Asked to stop, and everything was handed back.
    Shutdown,
    /// Everything that had to be published is, or is set aside: so much of the outbox's.
    Emptied(SetAside),
    /// Only shards that these refused messages have stopped are left.
    OnlyStopped(BTreeMap<i16, Stopped>),
}

/// A shard that this session publishes.
struct Held {
    generation: i64,
    /// The crash token that the claim remembered.
    token: Uuid,
    order: watch::Sender<Order>,
    trust: watch::Sender<Instant>,
}

/// Whether this relay has said farewell. Locked during a heartbeat, so that none comes after it: the others would leave half
/// of the shards to a relay that is gone, until that heartbeat runs out.
type HasLeft = Arc<tokio::sync::Mutex<bool>>;

type HeldShards = Arc<Mutex<BTreeMap<i16, Held>>>;

fn lock(held: &HeldShards) -> MutexGuard<'_, BTreeMap<i16, Held>> {
    held.lock().unwrap_or_else(PoisonError::into_inner)
}

/// How long a statement about leases may take: it must fail before the trust ends.
pub(crate) fn patience(settings: &Settings) -> Duration {
    (settings.terms().trust(Duration::ZERO).until() / 3).max(Duration::from_millis(250))
}

struct Session<'a> {
    process: &'a mut Process,
    outbox: Outbox,
    envelope: Arc<Envelope>,
    connection: PgConnection,
    patience: Duration,
    held: HeldShards,
    shards: JoinSet<(i16, Result<Ended, Error>)>,
    destroying: Arc<Destroying>,
    has_left: HasLeft,
    reads: mpsc::Sender<read::Request>,
    advances: mpsc::Sender<advance::Request>,
    /// What stops a shard, to be written down through this session's connection.
    stops: (mpsc::Sender<stopped::Report>, mpsc::Receiver<stopped::Report>),
    parked: mpsc::Sender<parked::Request>,
    paused: Paused,
    paused_looked: Instant,
    closing: Option<Closed>,
}

/// Runs one session.
pub(crate) async fn run<S>(process: &mut Process, shutdown: Pin<&mut S>) -> Result<Closed, Error>
where
    S: Future<Output = ()> + Send,
{
    let settings = Arc::clone(&process.settings);
    let patience = patience(&settings);
    process.claimed = false;
    let mut connection = database::connect(&settings, "leases", patience).await?;
    let outbox = database::inspect(&mut connection, patience).await?;
    process.health.found();
    // The first that needs to write, so the last that is asked of a database that is read-only for a while.
    lease::ensure_token(&mut connection, patience).await?;
    let mut renewing = database::connect(&settings, "renewal", patience).await?;
    database::own_sessions(&settings, &mut connection, &mut renewing, patience).await?;
    let reading = database::connect(&settings, "reader", READ_PATIENCE).await?;
    process.beat.at(Instant::now());
    let advancing = database::connect(&settings, "cursor", ADVANCE_PATIENCE).await?;

    let (reads, read_requests) = mpsc::channel(usize::from(outbox.shards.unsigned_abs()).max(1));
    let (advances, advance_requests) = mpsc::channel(usize::from(outbox.shards.unsigned_abs()).max(1));
    let stops = mpsc::channel(usize::from(outbox.shards.unsigned_abs()).max(1));
    let held = HeldShards::default();
    let has_left = HasLeft::default();
    let mut services = JoinSet::new();
    services.spawn(renew(
        renewing,
        Arc::clone(&held),
        Arc::clone(&settings),
        Arc::clone(&process.fences),
        Arc::clone(&has_left),
        process.health.watch("the renewal of leases"),
    ));
    let pace = read::Pace {
        floor: settings.poll_floor,
        ceiling: settings.poll_ceiling,
        patience: READ_PATIENCE,
        #[cfg(feature = "plants")]
        plant: settings.plant,
    };
    services.spawn(read::run(
        reading,
        read_requests,
        Budget::new(settings.in_flight_bytes_total.get(), usize::from(outbox.shards.unsigned_abs())),
        pace,
    ));
    services.spawn(advance::run(advancing, advance_requests, Arc::clone(&settings), ADVANCE_PATIENCE));
    let (parked, parked_requests) = mpsc::channel(usize::from(outbox.shards.unsigned_abs()).max(1));
    services.spawn(parked::run(parked_requests, Arc::clone(&settings)));
    services.spawn(retention::run(Arc::clone(&settings), Arc::clone(&process.metrics)));

    // Before the first row is read.
    let paused = Paused::new(RwLock::new(parked::paused(&mut connection, patience).await?));
    let source = settings.source.clone().unwrap_or_else(|| format!("/{}", outbox.database));
    let envelope = Arc::new(Envelope::cloud_events(&source, &settings.content_type, settings.ce_time));
    let mut session = Session {
        process,
        outbox,
        envelope,
        connection,
        patience,
        held,
        shards: JoinSet::new(),
        destroying: Arc::default(),
        has_left,
        reads,
        advances,
        stops,
        parked,
        paused,
        paused_looked: Instant::now(),
        closing: None,
    };
    let ended = session.follow(&mut services, shutdown).await;
    session.let_go(ended.is_err()).await;
    services.shutdown().await;
    ended
}

impl Session<'_> {
    async fn follow<S>(
        &mut self,
        services: &mut JoinSet<Result<(), Error>>,
        mut shutdown: Pin<&mut S>,
    ) -> Result<Closed, Error>
    where
        S: Future<Output = ()> + Send,
    {
        self.reclaim().await?;
        let mut look_at = Instant::now();
        loop {
            self.process.beat.at(Instant::now());
            if let Some(closed) = &self.closing
                && self.shards.is_empty()
            {
                let closed = closed.clone();
                lease::leave(&mut self.connection, &self.process.settings.owner, self.patience).await?;
                return Ok(closed);
            }
            tokio::select! {
                Some(ended) = services.join_next() => return Err(service_error(ended)),
                Some(ended) = self.shards.join_next() => match ended {
                    Ok((shard, ended)) => self.shard_ended(shard, ended?).await?,
                    Err(panic) => return Err(Error::Answer { operation: "publishing a shard", what: panic.to_string() }),
                },
                Some(report) = self.stops.1.recv() => self.write_stop(&report).await?,
                () = shutdown.as_mut(), if self.closing.is_none() => self.close(Closed::Shutdown).await?,
                () = tokio::time::sleep_until(look_at), if self.closing.is_none() => {
                    self.look_at_paused().await?;
                    let next_expiry = self.share().await?;
                    look_at = Instant::now()
                        + next_expiry.map_or(OVERVIEW_EVERY, |left| OVERVIEW_EVERY.min(left + JUST_AFTER));
                    self.process.claimed = true;
                    self.process.health.looked(Instant::now());
                    if let Some(closed) = self.emptied().await? {
                        self.close(closed).await?;
                    }
                }
            }
        }
    }

    /// Asks every shard to finish what is in flight, and tells the other relays that each is theirs once it has.
    async fn close(&mut self, closed: Closed) -> Result<(), Error> {
        self.closing = Some(closed);
        self.process.health.ends();
        for held in lock(&self.held).values() {
            held.order.send_replace(Order::Drain);
        }
        *self.has_left.lock().await = true;
        lease::say_farewell(&mut self.connection, &self.process.settings.owner, self.patience).await
    }

    /// Looks, once a second, at which topics operators have paused.
    async fn look_at_paused(&mut self) -> Result<(), Error> {
        let now = Instant::now();
        if now.saturating_duration_since(self.paused_looked) < PAUSED_EVERY {
            return Ok(());
        }
        self.paused_looked = now;
        let paused = parked::paused(&mut self.connection, self.patience).await?;
        let mut known = self.paused.write().unwrap_or_else(PoisonError::into_inner);
        if *known != paused {
            tracing::info!(?paused, "the topics that are paused have changed");
            *known = paused;
        }
        Ok(())
    }

    /// Takes back the shards that the lease table still gives to this process.
    async fn reclaim(&mut self) -> Result<(), Error> {
        for (shard, generation) in self.process.generations.clone() {
            self.claim(&Free { shard, expired_owner: None }, Some(generation)).await?;
        }
        Ok(())
    }

    /// Takes or gives shards towards the fair share. Returned: until the first lease of another relay runs out.
    async fn share(&mut self) -> Result<Option<Duration>, Error> {
        let owner = self.process.settings.owner.clone();
        let overview = lease::overview(&mut self.connection, &owner, self.patience).await?;
        let by_name = overview.holdings.iter().find(|(name, _)| *name == owner).map_or(0, |(_, held)| *held);
        let ours = self.process.generations.len();
        if self.process.namesake.look(Instant::now(), by_name, ours, self.process.settings.lease_ttl) {
            tracing::warn!(
                owner,
                "another relay runs under this name and holds {} shards: to the others the two are one, and this one gets no \
                 share of its own; give each a [relay] owner of its own, or none",
                by_name - ours
            );
        }
        match overview.decide(&owner, self.outbox.shards) {
            Decision::Keep => {}
            Decision::Release(many) => {
                let held = lock(&self.held);
                let (draining, running): (Vec<_>, Vec<_>) =
                    held.iter().rev().partition(|(_, held)| *held.order.borrow() == Order::Drain);
                for (shard, held) in running.into_iter().take(many.saturating_sub(draining.len())) {
                    tracing::info!(shard, generation = held.generation, "handing the shard to another relay");
                    held.order.send_replace(Order::Drain);
                }
            }
            Decision::Claim(many) => {
                lease::ensure_token(&mut self.connection, self.patience).await?;
                // Relays that start together look at the free shards from different ends.
                let from =
                    owner.bytes().fold(0usize, |sum, b| sum.wrapping_mul(31).wrapping_add(usize::from(b)));
                let free: Vec<_> =
                    overview.free.iter().filter(|f| !lock(&self.held).contains_key(&f.shard)).collect();
                let mut left = many;
                for n in 0..free.len() {
                    let Some(free) = free.get((from + n) % free.len()) else { break };
                    let mine = self.process.generations.get(&free.shard).copied();
                    if left > 0 && self.claim(free, mine).await? {
                        left -= 1;
                    }
                }
            }
        }
        Ok(overview.next_expiry)
    }

    /// Claims one shard and begins to publish it. False: somebody else was faster.
    async fn claim(&mut self, free: &Free, held_by: Option<i64>) -> Result<bool, Error> {
        let settings = Arc::clone(&self.process.settings);
        #[cfg(feature = "plants")]
        if let Some(hold) = &settings.hold {
            hold.at(crate::hold::Point::P0, free.shard).await;
        }
        let asked = Instant::now();
        self.process.beat.at(asked);
        let claimed = lease::claim(
            &mut self.connection,
            free.shard,
            &settings.owner,
            held_by,
            settings.lease_ttl,
            self.patience,
        )
        .await?;
        let Some(Claimed { generation, token }) = claimed else {
            // Without a generation of our own nothing is lost: another relay was faster.
            if let Some(held_by) = held_by {
                self.process.generations.remove(&free.shard);
                self.process.fences.note(free.shard, held_by, Operation::Claim);
            }
            return Ok(false);
        };
        // Before the cursor is read: should that fail, the next session may take back what this one has just won.
        self.process.generations.insert(free.shard, generation);
        let cursor = lease::durable_cursor(&mut self.connection, free.shard, self.patience).await?;
        let has_parked = parked::any(&mut self.connection, free.shard, self.patience).await?;
        #[cfg(feature = "plants")]
        let cursor = crate::plant::recalled(&settings, free.shard, cursor);
        if free.expired_owner.is_some() {
            self.process.metrics.took_over();
        }
        match &free.expired_owner {
            Some(from) => tracing::info!(
                shard = free.shard,
                generation,
                from,
                "took the shard over, its lease had run out"
            ),
            None => tracing::info!(shard = free.shard, generation, "holds the shard"),
        }
        self.process.confirmed.claimed(free.shard, token, cursor.position);
        let (order, order_seen) = watch::channel(Order::Run);
        let (trust, trust_seen) = watch::channel(trusted_until(asked, &settings));
        let links = Links {
            settings,
            envelope: Arc::clone(&self.envelope),
            shard: free.shard,
            generation,
            token,
            reads: self.reads.clone(),
            advances: self.advances.clone(),
            stops: self.stops.0.clone(),
            parked: self.parked.clone(),
            aside: Aside::default(),
            paused: Arc::clone(&self.paused),
            fences: Arc::clone(&self.process.fences),
            destroying: Arc::clone(&self.destroying),
            confirmed: Arc::clone(&self.process.confirmed),
            order: order_seen,
            trust: trust_seen,
            topics: Arc::clone(&self.process.topics),
            stopped: Arc::clone(&self.process.stopped),
            metrics: Arc::clone(&self.process.metrics),
            beat: self.process.health.watch(format!("shard {}", free.shard)),
        };
        lock(&self.held).insert(free.shard, Held { generation, token, order, trust });
        let shard = free.shard;
        self.shards.spawn(async move { (shard, shard::run(links, cursor, has_parked).await) });
        Ok(true)
    }

    /// A shard's task has ended: release its lease if it is still ours.
    async fn shard_ended(&mut self, shard: i16, ended: Ended) -> Result<(), Error> {
        let Some(held) = lock(&self.held).remove(&shard) else { return Ok(()) };
        let generation = held.generation;
        match ended {
            Ended::Drained => self.release(shard, generation).await?,
            // Noted where it was refused.
            Ended::Fenced => _ = self.process.generations.remove(&shard),
            Ended::Distrusted => {
                tracing::warn!(
                    shard,
                    generation,
                    "the lease was not renewed in time, the shard is let go until it is won again"
                );
                if self.closing.is_some() {
                    self.release(shard, generation).await?;
                } else {
                    // By generation, so that a process that only slept does not stall its shard until the lease's end;
                    // where it slept too long, this is where it learns that the lease is lost.
                    self.claim(&Free { shard, expired_owner: None }, Some(generation)).await?;
                }
            }
            Ended::Abandoned => {}
        }
        Ok(())
    }

    /// Hands a lease back, under the generation it was held by.
    async fn release(&mut self, shard: i16, generation: i64) -> Result<(), Error> {
        self.process.generations.remove(&shard);
        let owner = &self.process.settings.owner;
        match lease::release(&mut self.connection, shard, owner, generation, self.patience).await? {
            Released::Done => tracing::info!(shard, generation, "released the shard"),
            Released::Fenced => self.process.fences.note(shard, generation, Operation::Release),
        }
        Ok(())
    }

    /// Writes down what stops a shard, under the generation that met it.
    async fn write_stop(&mut self, report: &stopped::Report) -> Result<(), Error> {
        let owner = &self.process.settings.owner;
        match stopped::write(&mut self.connection, owner, report, self.patience).await? {
            stopped::Outcome::Written { attempts } => {
                tracing::debug!(shard = report.shard, attempts, "wrote down what stops the shard");
            }
            stopped::Outcome::Gone => {}
            stopped::Outcome::Fenced => {
                self.process.fences.note(report.shard, report.generation, Operation::Stop);
                if let Some(held) =
                    lock(&self.held).get(&report.shard).filter(|h| h.generation == report.generation)
                {
                    held.order.send_replace(Order::Let(Ended::Fenced));
                }
            }
        }
        Ok(())
    }

    async fn emptied(&mut self) -> Result<Option<Closed>, Error> {
        if !self.process.until_empty {
            return Ok(None);
        }
        if self.process.target.is_none() {
            self.process.target = Some(Target::now(&mut self.connection, self.patience).await?);
        }
        let Some(target) = &self.process.target else { return Ok(None) };
        let ours = &self.process.generations;
        let mut stopped = stopped::elsewhere(&mut self.connection, ours, self.patience).await?;
        stopped.extend(self.process.stopped.lock().unwrap_or_else(PoisonError::into_inner).clone());
        let shards: Vec<i16> = stopped.keys().copied().collect();
        Ok(match target.progress(&mut self.connection, &shards, self.patience).await? {
            Progress::Empty => {
                Some(Closed::Emptied(SetAside::of(&status::parked(&mut self.connection).await?)))
            }
            Progress::OnlyStopped => Some(Closed::OnlyStopped(stopped)),
            Progress::Waiting => None,
        })
    }

    /// Waits for the shards' tasks; at a lost connection tells them to let go first.
    async fn let_go(&mut self, lost: bool) {
        if lost {
            for held in lock(&self.held).values() {
                held.order.send_replace(Order::Let(Ended::Abandoned));
            }
        }
        while self.shards.join_next().await.is_some() {
            self.process.beat.at(Instant::now());
        }
        self.destroying.end().await;
    }
}

/// Locally a lease is trusted for less time than the database grants, from before the request was sent.
fn trusted_until(asked: Instant, settings: &Settings) -> Instant {
    asked + settings.terms().trust(Duration::ZERO).until()
}

/// Renews the leases of all held shards until the connection fails. On its own connection, so that no work delays it.
async fn renew(
    mut connection: PgConnection,
    held: HeldShards,
    settings: Arc<Settings>,
    fences: Arc<Fences>,
    has_left: HasLeft,
    beat: Beat,
) -> Result<(), Error> {
    let patience = patience(&settings);
    let mut tick = tokio::time::interval(settings.terms().renew_every());
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tick.tick().await;
        beat.at(Instant::now());
        let has_left = has_left.lock().await;
        if !*has_left {
            lease::heartbeat(&mut connection, &settings.owner, settings.lease_ttl, patience).await?;
        }
        drop(has_left);
        let asked_for: Vec<(i16, i64, Uuid)> =
            lock(&held).iter().map(|(shard, h)| (*shard, h.generation, h.token)).collect();
        let asked = Instant::now();
        let renewed =
            lease::renew(&mut connection, &settings.owner, &asked_for, settings.lease_ttl, patience).await?;
        let held = lock(&held);
        for (shard, generation, _) in asked_for {
            let Some(lease) = held.get(&shard).filter(|h| h.generation == generation) else { continue };
            if renewed.contains(&shard) {
                lease.trust.send_replace(trusted_until(asked, &settings));
            } else {
                fences.note(shard, generation, Operation::Renew);
                lease.order.send_replace(Order::Let(Ended::Fenced));
            }
        }
    }
}

fn service_error(ended: Result<Result<(), Error>, tokio::task::JoinError>) -> Error {
    match ended {
        Ok(Err(error)) => error,
        Ok(Ok(())) => {
            Error::Answer { operation: "a session", what: "one of its tasks ended early".to_owned() }
        }
        Err(panic) => Error::Answer { operation: "a session", what: panic.to_string() },
    }
}

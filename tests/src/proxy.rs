//! A TCP proxy that a test puts between a program and a server, to do to the network what networks do.
//!
//! ```text
//!  client ══ There ═▶ queue ─ delay ─ bandwidth ─ passage ═▶ server
//!         ◀═ Back ═══════════════ the same ═══════════════
//! ```
//!
//! Every rule holds from the call on, for connections that are there and for new ones, until [`Proxy::heal`] or another
//! call replaces it. [`Proxy::only`] limits delay, bandwidth and cuts to connections whose client begins with a certain
//! text: Postgres clients send their `application_name` first, so one of the relay's connections can be cut alone.
//!
//! | call | what the two ends see |
//! |---|---|
//! | [`delay`](Proxy::delay) | bytes arrive so much later, in order; nothing is slower than that |
//! | [`bandwidth`](Proxy::bandwidth) | all connections share so many bytes a second, a direction |
//! | [`hold`](Proxy::hold) | silence, sockets stay open; what was sent arrives once it heals, as TCP sends lost packets again |
//! | [`swallow`](Proxy::swallow) | silence, sockets stay open; what was sent is gone for good |
//! | [`rename`](Proxy::rename) | the server is asked for another thing of the same length, and its answer names the right one |
//! | [`refuse`](Proxy::refuse) | new connections are reset as soon as they are made |
//! | [`reset_all`](Proxy::reset_all) | every connection that is there ends with a reset |
//!
//! A stream out of which bytes were swallowed would be garbage after the gap: nothing of it is ever passed on again, and
//! [`heal`](Proxy::heal) resets such connections. A connection made during a cut is accepted by the proxy's kernel, so its
//! client meets the silence at its first question and not while it connects.
//!
//! Kafka's clients leave the address they were given for the one that the broker advertises: see
//! [`OwnStack::kafka_proxy`](crate::OwnStack::kafka_proxy). For Postgres: [`Proxy::before_postgres`].

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{ReadHalf, WriteHalf};
use tokio::net::{TcpListener, TcpSocket, TcpStream, lookup_host};
use tokio::sync::{mpsc, watch};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{Instant, sleep_until};

use crate::failure::{Failure, Outcome};
use crate::place::Place;

/// Bytes read at once, the grain of a bandwidth.
const CHUNK: usize = 16 << 10;

/// Chunks under way in a direction. With the sockets' own buffers this is what the "wire" holds.
const QUEUE: usize = 64;

/// The proxy's sockets buffer little, so that a slow wire is felt by its sender soon.
const SOCKET_BUFFER: u32 = 64 << 10;

/// How much of what a client says first is looked at by [`Proxy::only`].
const GREETING: usize = 1 << 10;

/// A direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// From the client to the server: questions.
    There,
    /// From the server to the client: answers.
    Back,
    /// Both.
    Both,
}

/// A listening port of ours before some server. Dropping it closes the port and every connection.
#[derive(Debug)]
pub struct Proxy {
    address: SocketAddr,
    shared: Arc<Shared>,
    task: JoinHandle<()>,
}

impl Proxy {
    /// On a free loopback port, before `server` (`host:port`).
    ///
    /// # Errors
    ///
    /// When there is no such host or no free port.
    pub async fn before(server: &str) -> Outcome<Self> {
        Self::at(0, server).await
    }

    /// On this loopback port, before `server`.
    ///
    /// # Errors
    ///
    /// When there is no such host, or somebody listens there.
    pub async fn at(port: u16, server: &str) -> Outcome<Self> {
        let server = lookup_host(server)
            .await
            .map_err(|error| Failure::from(error).during(format!("look up {server}")))?
            .next()
            .ok_or_else(|| Failure::new(format!("{server} has no address")))?;
        let socket = TcpSocket::new_v4()?;
        socket.set_reuseaddr(true)?;
        // Accepted sockets inherit it.
        socket.set_recv_buffer_size(SOCKET_BUFFER)?;
        socket
            .bind((Ipv4Addr::LOCALHOST, port).into())
            .map_err(|error| Failure::from(error).during(format!("listen on port {port}")))?;
        let listener = socket.listen(1024)?;
        let address = listener.local_addr()?;
        let shared = Arc::new(Shared {
            rules: watch::Sender::new(Rules::default()),
            server,
            free_at: Mutex::new([Instant::now(); 2]),
            alive: AtomicUsize::new(0),
            passed: [AtomicU64::new(0), AtomicU64::new(0)],
            swallowed: [AtomicU64::new(0), AtomicU64::new(0)],
        });
        let task = tokio::spawn(accept(listener, Arc::clone(&shared)));
        Ok(Self { address, shared, task })
    }

    /// Before the Postgres of `place`; also returned is that place seen through the proxy.
    ///
    /// # Errors
    ///
    /// When its URL names no host and port.
    pub async fn before_postgres(place: &Place) -> Outcome<(Self, Place)> {
        let proxy = Self::before(place.postgres_address()?).await?;
        let place = place.with_postgres_address(&proxy.address())?;
        Ok((proxy, place))
    }

    /// `127.0.0.1:port`.
    #[must_use]
    pub fn address(&self) -> String {
        self.address.to_string()
    }

    /// Bytes arrive so much later.
    pub fn delay(&self, way: Way, delay: Duration) {
        self.change(way, |lane| lane.delay = delay);
    }

    /// All connections together pass so many bytes a second in this direction; in both, so many each.
    pub fn bandwidth(&self, way: Way, bytes_per_second: NonZeroU32) {
        self.change(way, |lane| lane.bandwidth = Some(bytes_per_second));
    }

    /// Nothing passes, nothing is lost: what is sent meanwhile arrives once it heals.
    pub fn hold(&self, way: Way) {
        self.change(way, |lane| lane.passage = Passage::Held);
    }

    /// Nothing passes and what is sent is gone.
    pub fn swallow(&self, way: Way) {
        self.change(way, |lane| lane.passage = Passage::Swallowing);
    }

    /// From now on delay, bandwidth and cuts are only for connections whose client has this text among the first thousand
    /// bytes it sends, like `baton cursor` for the relay's connection of that name.
    pub fn only(&self, text: &str) {
        self.shared.rules.send_modify(|rules| rules.only = Some(text.as_bytes().to_vec()));
    }

    /// Questions that contain the text `from` are passed on with `to` in its place, answers the other way round: a broker
    /// asked for a topic of that other name says that the topic does not exist. Text that is cut in two between two reads
    /// passes as it is.
    ///
    /// # Panics
    ///
    /// When the two are not of one length: the lengths in the protocol stay what they are.
    pub fn rename(&self, from: &str, to: &str) {
        assert_eq!(from.len(), to.len());
        self.shared
            .rules
            .send_modify(|rules| rules.renames = Some([from, to].map(|text| text.as_bytes().to_vec())));
    }

    /// New connections end with a reset at once.
    pub fn refuse(&self) {
        self.shared.rules.send_modify(|rules| rules.refuses = true);
    }

    /// Every connection that is there now ends with a reset, on both sides.
    pub fn reset_all(&self) {
        self.shared.rules.send_modify(|rules| rules.resets += 1);
    }

    /// Takes every rule back. Connections that lost bytes are reset, all others go on.
    pub fn heal(&self) {
        *self.shared.free_at.lock().unwrap_or_else(PoisonError::into_inner) = [Instant::now(); 2];
        self.shared.rules.send_modify(|rules| {
            let (resets, heals) = (rules.resets, rules.heals + 1);
            *rules = Rules { resets, heals, ..Rules::default() };
        });
    }

    /// How many connections there are.
    #[must_use]
    pub fn connections(&self) -> usize {
        self.shared.alive.load(Ordering::Relaxed)
    }

    /// Bytes passed on so far.
    #[must_use]
    pub fn passed(&self, way: Way) -> u64 {
        sum(&self.shared.passed, way)
    }

    /// Bytes swallowed so far.
    #[must_use]
    pub fn swallowed(&self, way: Way) -> u64 {
        sum(&self.shared.swallowed, way)
    }

    fn change(&self, way: Way, change: impl Fn(&mut Lane)) {
        self.shared.rules.send_modify(|rules| indexes(way).iter().for_each(|i| change(&mut rules.lanes[*i])));
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.task.abort();
    }
}

const THERE: usize = 0;
const BACK: usize = 1;

fn indexes(way: Way) -> &'static [usize] {
    match way {
        Way::There => &[THERE],
        Way::Back => &[BACK],
        Way::Both => &[THERE, BACK],
    }
}

fn sum(counters: &[AtomicU64; 2], way: Way) -> u64 {
    indexes(way).iter().map(|i| counters[*i].load(Ordering::Relaxed)).sum()
}

/// What one direction does with bytes.
#[derive(Debug, Clone, Copy, Default)]
struct Lane {
    delay: Duration,
    bandwidth: Option<NonZeroU32>,
    passage: Passage,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Passage {
    #[default]
    Open,
    Held,
    Swallowing,
}

#[derive(Debug, Clone, Default)]
struct Rules {
    lanes: [Lane; 2],
    only: Option<Vec<u8>>,
    refuses: bool,
    /// What is replaced on its way to the server, and by what.
    renames: Option<[Vec<u8>; 2]>,
    /// Counts: whoever sees it rise is reset.
    resets: u64,
    /// Counts: whoever sees it rise and has lost bytes is reset.
    heals: u64,
}

#[derive(Debug)]
struct Shared {
    rules: watch::Sender<Rules>,
    server: SocketAddr,
    /// When each direction's wire has sent what it was given.
    free_at: Mutex<[Instant; 2]>,
    alive: AtomicUsize,
    passed: [AtomicU64; 2],
    swallowed: [AtomicU64; 2],
}

impl Shared {
    /// When so many bytes, begun now or when the wire is free, will have been sent.
    fn sent_at(&self, way: usize, bytes: usize, bandwidth: NonZeroU32) -> Instant {
        let mut free_at = self.free_at.lock().unwrap_or_else(PoisonError::into_inner);
        let takes = Duration::from_secs_f64(bytes as f64 / f64::from(bandwidth.get()));
        free_at[way] = free_at[way].max(Instant::now()) + takes;
        free_at[way]
    }
}

/// What both directions of a connection know of it.
#[derive(Debug, Default)]
struct Life {
    greeting: Mutex<Vec<u8>>,
    lost_bytes: [AtomicBool; 2],
}

impl Life {
    fn greet(&self, bytes: &[u8]) {
        let mut greeting = self.greeting.lock().unwrap_or_else(PoisonError::into_inner);
        let room = GREETING.saturating_sub(greeting.len()).min(bytes.len());
        greeting.extend_from_slice(&bytes[..room]);
    }

    fn lane(&self, rules: &Rules, way: usize) -> Lane {
        let meant = rules.only.as_ref().is_none_or(|text| {
            let greeting = self.greeting.lock().unwrap_or_else(PoisonError::into_inner);
            greeting.windows(text.len().max(1)).any(|window| window == text)
        });
        let mut lane = if meant { rules.lanes[way] } else { Lane::default() };
        if self.lost_bytes[way].load(Ordering::Relaxed) {
            lane.passage = Passage::Swallowing;
        }
        lane
    }
}

async fn accept(listener: TcpListener, shared: Arc<Shared>) {
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((client, _)) => drop(connections.spawn(connection(client, Arc::clone(&shared)))),
                // One that was reset before it was accepted.
                Err(_) => tokio::task::yield_now().await,
            },
            Some(_) = connections.join_next() => {}
        }
    }
}

async fn connection(mut client: TcpStream, shared: Arc<Shared>) {
    let rules = shared.rules.subscribe();
    let refuses = rules.borrow().refuses;
    let server = if refuses { None } else { connect(shared.server).await.ok() };
    let Some(mut server) = server else {
        // No answer is wanted of a socket that is going to be reset.
        client.set_zero_linger().ok();
        return;
    };
    client.set_nodelay(true).ok();
    shared.alive.fetch_add(1, Ordering::Relaxed);
    let life = Life::default();
    let ended = {
        let ((client_reads, client_writes), (server_reads, server_writes)) = (client.split(), server.split());
        tokio::select! {
            biased;
            // First: what is held when a connection is reset is gone, also where all heals in the same moment.
            () = reset(rules, &life) => Err(io::ErrorKind::ConnectionReset.into()),
            ended = async {
                tokio::try_join!(
                    pump(THERE, client_reads, server_writes, &shared, &life),
                    pump(BACK, server_reads, client_writes, &shared, &life),
                )
            } => ended.map(drop),
        }
    };
    if ended.is_err() {
        // What happened to one end happens to the other.
        client.set_zero_linger().ok();
        server.set_zero_linger().ok();
    }
    shared.alive.fetch_sub(1, Ordering::Relaxed);
}

async fn connect(server: SocketAddr) -> io::Result<TcpStream> {
    let socket = if server.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    socket.set_recv_buffer_size(SOCKET_BUFFER)?;
    let stream = socket.connect(server).await?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// Returns when this connection is to be reset.
async fn reset(mut rules: watch::Receiver<Rules>, life: &Life) {
    let (resets, heals) = {
        let rules = rules.borrow_and_update();
        (rules.resets, rules.heals)
    };
    while rules.changed().await.is_ok() {
        let now = rules.borrow_and_update();
        let lost = life.lost_bytes.iter().any(|lost| lost.load(Ordering::Relaxed));
        if now.resets > resets || (lost && now.heals > heals) {
            return;
        }
    }
}

/// One direction of one connection, until its sender has closed it and all it sent is passed on.
async fn pump(
    way: usize,
    mut from: ReadHalf<'_>,
    mut to: WriteHalf<'_>,
    shared: &Shared,
    life: &Life,
) -> io::Result<()> {
    let (queue, mut queued) = mpsc::channel::<(Instant, Vec<u8>)>(QUEUE);
    let reads = async move {
        loop {
            let mut bytes = vec![0; CHUNK];
            let count = from.read(&mut bytes).await?;
            if count == 0 {
                return Ok(());
            }
            bytes.truncate(count);
            if way == THERE {
                life.greet(&bytes);
            }
            if queue.send((Instant::now(), bytes)).await.is_err() {
                return Ok(());
            }
        }
    };
    let writes = async {
        let mut rules = shared.rules.subscribe();
        while let Some((read_at, mut bytes)) = queued.recv().await {
            if passes(way, read_at, bytes.len(), shared, life, &mut rules).await {
                rename(way, &mut bytes, &rules.borrow());
                to.write_all(&bytes).await?;
                shared.passed[way].fetch_add(bytes.len() as u64, Ordering::Relaxed);
            } else {
                shared.swallowed[way].fetch_add(bytes.len() as u64, Ordering::Relaxed);
            }
        }
        // The end of a stream is as lost in a cut as its bytes.
        while !passes(way, Instant::now(), 0, shared, life, &mut rules).await {
            if rules.changed().await.is_err() {
                break;
            }
        }
        to.shutdown().await
    };
    tokio::try_join!(reads, writes).map(drop)
}

/// Replaces a text by another of its length.
fn rename(way: usize, bytes: &mut [u8], rules: &Rules) {
    let Some([from, to]) = &rules.renames else { return };
    let (from, to) = if way == THERE { (from, to) } else { (to, from) };
    for at in 0..(bytes.len() + 1).saturating_sub(from.len()) {
        if bytes[at..].starts_with(from) {
            bytes[at..at + to.len()].copy_from_slice(to);
        }
    }
}

/// Waits until these bytes may be passed on. False: they are swallowed.
async fn passes(
    way: usize,
    read_at: Instant,
    bytes: usize,
    shared: &Shared,
    life: &Life,
    rules: &mut watch::Receiver<Rules>,
) -> bool {
    loop {
        let lane = life.lane(&rules.borrow_and_update(), way);
        let until = match lane.passage {
            Passage::Swallowing => {
                life.lost_bytes[way].store(true, Ordering::Relaxed);
                return false;
            }
            Passage::Held => None,
            Passage::Open => {
                let arrives = read_at + lane.delay;
                let sent = lane.bandwidth.map(|bandwidth| shared.sent_at(way, bytes, bandwidth));
                let until = sent.map_or(arrives, |sent| arrives.max(sent));
                if until <= Instant::now() {
                    return true;
                }
                Some(until)
            }
        };
        tokio::select! {
            () = async {
                match until {
                    Some(until) => sleep_until(until).await,
                    None => std::future::pending().await,
                }
            } => return true,
            // Under other rules it may have to wait for less, or for more.
            changed = rules.changed() => if changed.is_err() { return true },
        }
    }
}

#[cfg(test)]
mod tests;

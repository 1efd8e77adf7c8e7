//! Who is served over HTTP, and who makes room.
//!
//! ```text
//!  accepted ─▶ room? ── yes ─▶ served ─▶ gone: answered, out of patience, or sent away
//!                └───── no ──▶ waits until one is gone; once the oldest has had its second, that one is sent away
//! ```
//!
//! At most [`ROOM`] connections are open at a time. A client that sends nothing, sends a byte now and then, or does not read its
//! answer takes a place like any other, but no longer than a second once somebody else wants it: so a probe of `/livez` behind
//! `n` such clients is answered after about `n / ROOM` seconds, whatever they do. While there is room nobody is sent away.

use std::collections::VecDeque;
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{Instant, sleep, sleep_until};

/// Connections served at a time.
const ROOM: usize = 128;

/// How long a connection keeps its place while another one waits for it: long for an answer, which takes milliseconds.
const TURN: Duration = Duration::from_secs(1);

/// Accepts for ever, and has `serve` serve each connection in a task of its own.
pub(super) async fn accept<F>(listener: TcpListener, serve: impl Fn(TcpStream) -> F)
where
    F: Future<Output = ()> + Send + 'static,
{
    let mut guests = Guests::default();
    let mut waiting: Option<TcpStream> = None;
    loop {
        if let Some(stream) = waiting.take_if(|_| guests.tasks.len() < ROOM) {
            guests.admit(serve(stream));
        }
        let send_away_at = waiting.as_ref().and_then(|_| guests.turn_ends());
        tokio::select! {
            accepted = listener.accept(), if waiting.is_none() => match accepted {
                Ok((stream, _)) => waiting = Some(stream),
                Err(error) => {
                    // Out of file descriptors, perhaps: accepting again at once would spin.
                    tracing::debug!("cannot accept an http connection: {error}");
                    sleep(Duration::from_millis(100)).await;
                }
            },
            Some(_) = guests.tasks.join_next() => {}
            () = until(send_away_at) => guests.send_oldest_away(),
        }
    }
}

/// Those who are served, and in which order they came.
#[derive(Default)]
struct Guests {
    tasks: JoinSet<()>,
    came: VecDeque<(Instant, AbortHandle)>,
}

impl Guests {
    fn admit(&mut self, served: impl Future<Output = ()> + Send + 'static) {
        self.came.retain(|(_, guest)| !guest.is_finished());
        let guest = self.tasks.spawn(served);
        self.came.push_back((Instant::now(), guest));
    }

    /// When the oldest of them has had its turn.
    fn turn_ends(&mut self) -> Option<Instant> {
        self.came.retain(|(_, guest)| !guest.is_finished());
        self.came.front().map(|(came, _)| *came + TURN)
    }

    fn send_oldest_away(&mut self) {
        if let Some((_, guest)) = self.came.pop_front() {
            tracing::debug!("an http connection makes room for another");
            guest.abort();
        }
    }
}

async fn until(instant: Option<Instant>) {
    match instant {
        Some(instant) => sleep_until(instant).await,
        None => std::future::pending().await,
    }
}

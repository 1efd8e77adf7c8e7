//! Points at which a relay can be made to stand still, so that tests hurt it there.
//!
//! Compiled only with the feature `plants`, and reachable only through [`Settings::hold`](crate::Settings::hold), which no
//! configuration key sets.
//!
//! ```text
//!  P0 ─claim─▶ P1 ─read─▶ P2 ─hand over─▶ P3 ─acknowledged─▶ P4 ─▶ P5 ─cursor written─▶ P6
//! ```
//!
//! And of what is set aside: K1 ─written─▶ K2, then K3 (acknowledged) ─settled─▶ K4.
//!
//! A shard that reaches the armed point says so in one line of standard error, `held at P3 shard 4`, and waits until a
//! file is there. Everything else goes on: renewal, the other connections, the other shards until they reach the same
//! point. A file, because it is there for whoever looks, also for a process that was stopped while it appeared. Once it
//! is there, nothing holds any more.
//!
//! Points that time alone would pass are made certain: at P3 half of the first page is handed over, and its reports are
//! awaited; at P3 and P4 the cursor is not written before, as if it were never due; P4 comes only when as much is
//! handed over as ever may be without a durable cursor. At P5 the cursors of all shards that ask meanwhile go out in
//! one statement after the release: what is done to the network before it hits all of them. It is not the first one of its
//! connection, because that one is prepared, which is a question and an answer of its own.

use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use tokio::sync::mpsc;

use crate::advance;
use crate::links::Links;

/// Between two looks for the file.
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// A moment in the life of a shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Point {
    /// Before the lease is claimed.
    P0,
    /// Lease held, before the read.
    P1,
    /// A page is read, nothing of it handed over.
    P2,
    /// Some of it is acknowledged, the rest not handed over.
    P3,
    /// All that was handed over is acknowledged, the cursor not written.
    P4,
    /// Before the cursor's statement is sent.
    P5,
    /// After its reply.
    P6,
    /// Messages are to be set aside; the statement is not sent.
    K1,
    /// After its reply, or a later cursor's.
    K2,
    /// A message that was set aside is acknowledged, and not settled.
    K3,
    /// After it is settled.
    K4,
}

impl FromStr for Point {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        use Point::{K1, K2, K3, K4, P0, P1, P2, P3, P4, P5, P6};
        [P0, P1, P2, P3, P4, P5, P6, K1, K2, K3, K4]
            .into_iter()
            .find(|point| format!("{point:?}") == text)
            .ok_or_else(|| format!("no such point: {text}"))
    }
}

/// Where, and until when.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hold {
    /// Where.
    pub point: Point,
    /// Until this file is there.
    pub until: PathBuf,
}

/// How far a shard is with the page it has in hand.
#[derive(Debug, Clone, Copy)]
pub(crate) struct InPage {
    pub handed_over: usize,
    pub in_hand: usize,
}

impl Hold {
    fn is_armed(&self, point: Point) -> bool {
        self.point == point && !self.until.exists()
    }

    /// Holds here if this is the point.
    pub(crate) async fn at(&self, point: Point, shard: i16) {
        if self.is_armed(point) {
            self.say(shard);
            self.released().await;
        }
    }

    /// Holds the statement that writes cursors, and gathers those of all shards that want one meanwhile.
    pub(crate) async fn gather(
        &self,
        batch: &mut Vec<advance::Request>,
        requests: &mut mpsc::Receiver<advance::Request>,
    ) {
        if !self.is_armed(Point::P5) {
            return;
        }
        batch.iter().for_each(|request| self.say(request.shard));
        loop {
            tokio::select! {
                () = self.released() => return,
                Some(request) = requests.recv() => {
                    self.say(request.shard);
                    batch.push(request);
                }
            }
        }
    }

    fn say(&self, shard: i16) {
        eprintln!("held at {:?} shard {shard}", self.point);
    }

    async fn released(&self) {
        while !self.until.exists() {
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }
}

impl Links {
    fn holds(&self, point: Point) -> bool {
        self.settings.hold.as_ref().is_some_and(|hold| hold.is_armed(point))
    }

    pub(crate) async fn hold(&self, point: Point) {
        if let Some(hold) = &self.settings.hold {
            hold.at(point, self.shard).await;
        }
    }

    /// Before rows are handed over: P2 and P3.
    pub(crate) async fn hold_in(&self, page: InPage, unacked: usize) {
        if page.in_hand == 0 {
            return;
        }
        if page.handed_over == 0 {
            self.hold(Point::P2).await;
        } else if unacked == 0 && self.holds_rest_of(page) {
            self.hold(Point::P3).await;
        }
    }

    /// Whether no more of this page may be handed over.
    pub(crate) fn holds_rest_of(&self, page: InPage) -> bool {
        page.handed_over > 0 && page.handed_over >= page.in_hand && self.holds(Point::P3)
    }

    /// Whether the cursor is not to be written yet.
    pub(crate) fn holds_cursor(&self) -> bool {
        self.holds(Point::P3) || self.holds(Point::P4)
    }
}

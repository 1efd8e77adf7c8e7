//! Bugs that people have shipped, planted so that the checkers of the test suite prove that they would be found.
//!
//! Compiled only with the feature `plants`, and reachable only through [`Settings::plant`](crate::Settings::plant), which
//! no configuration key sets. What a plant does wrong stands here or in a statement `queries/planted_….sql`; the
//! modules that it spoils have a line or two that ask.
//!
//! | plant | does | so that |
//! |---|---|---|
//! | `naive-cursor` | reads by position alone | what commits late is lost |
//! | `horizon-cursor` | reads by position below the horizon | what lay above the horizon is lost |
//! | `xid-order` | reads in order of transaction ids | a key's messages change places |
//! | `advance-before-report` | moves the cursor at hand-over | a crash in an outage loses |
//! | `unfenced-cursor` | moves the cursor of whoever asks | a stale owner moves it back |
//! | `stale-generation` | compares owners, not generations | a stale namesake moves it back |
//! | `cursor-in-memory` | goes on where it was, not where the database says | after a lost tail what is new is lost |
//! | `finite-message-timeout` | gives messages up after a while | later ones of their keys overtake them |

use std::collections::BTreeMap;
use std::str::FromStr;
use std::sync::{Mutex, PoisonError};

use crate::cursor::Cursor;
use crate::links::Links;
use crate::publish::Failure;
use crate::read::Pace;
use crate::settings::Settings;
use crate::window::Window;

/// A bug.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Plant {
    /// Reads `position > cursor` and nothing else: what commits late is never read.
    NaiveCursor,
    /// Reads `position > cursor` of what nobody can commit before any more: what was above that horizon while a later
    /// position was below it is never read.
    HorizonCursor,
    /// Reads what lies between two horizons, ordered by transaction id.
    XidOrder,
    /// Takes what was handed over for acknowledged when it writes the cursor.
    AdvanceBeforeReport,
    /// Writes the cursor without looking at owner, generation, expiry and token.
    UnfencedCursor,
    /// Writes the cursor under an owner's name whatever the generation.
    StaleGeneration,
    /// A new session goes on from the cursor that the last one had, under the new claim's generation and token.
    CursorInMemory,
    /// `message.timeout.ms` of 4 s, and what expired is noticed only once a later message was acknowledged.
    FiniteMessageTimeout,
}

const NAMES: [(&str, Plant); 8] = [
    ("naive-cursor", Plant::NaiveCursor),
    ("horizon-cursor", Plant::HorizonCursor),
    ("xid-order", Plant::XidOrder),
    ("advance-before-report", Plant::AdvanceBeforeReport),
    ("unfenced-cursor", Plant::UnfencedCursor),
    ("stale-generation", Plant::StaleGeneration),
    ("cursor-in-memory", Plant::CursorInMemory),
    ("finite-message-timeout", Plant::FiniteMessageTimeout),
];

impl FromStr for Plant {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        let found = NAMES.iter().find(|(known, _)| *known == name);
        found.map(|(_, plant)| *plant).ok_or_else(|| format!("no such plant: {name}"))
    }
}

impl Pace {
    /// The statement that reads pages instead.
    pub(crate) fn planted_read(&self) -> Option<&'static str> {
        match self.plant? {
            Plant::NaiveCursor => Some(include_str!("../queries/planted_page_naive.sql")),
            Plant::HorizonCursor => Some(include_str!("../queries/planted_page_horizon.sql")),
            Plant::XidOrder => Some(include_str!("../queries/planted_page_xid_order.sql")),
            _ => None,
        }
    }

    /// Whether a page stays in the order it was read in.
    pub(crate) fn keeps_order(&self) -> bool {
        self.plant == Some(Plant::XidOrder)
    }
}

/// The statement that moves cursors instead.
pub(crate) fn advance(settings: &Settings) -> Option<&'static str> {
    match settings.plant? {
        Plant::UnfencedCursor => Some(include_str!("../queries/planted_advance_unfenced.sql")),
        Plant::StaleGeneration => Some(include_str!("../queries/planted_advance_any_generation.sql")),
        _ => None,
    }
}

/// Where each shard was when its cursor moved last, whatever has become of the database since.
static REMEMBERED: Mutex<BTreeMap<i16, Cursor>> = Mutex::new(BTreeMap::new());

/// Where the shard goes on after a claim that has read this cursor.
pub(crate) fn recalled(settings: &Settings, shard: i16, cursor: Cursor) -> Cursor {
    if settings.plant != Some(Plant::CursorInMemory) {
        return cursor;
    }
    let remembered = REMEMBERED.lock().unwrap_or_else(PoisonError::into_inner);
    remembered.get(&shard).cloned().unwrap_or(cursor)
}

impl Links {
    /// The cursor has moved here.
    pub(crate) fn remember(&self, cursor: &Cursor) {
        let mut remembered = REMEMBERED.lock().unwrap_or_else(PoisonError::into_inner);
        remembered.insert(self.shard, cursor.clone());
    }

    /// Where the next page is asked from.
    pub(crate) fn planted_from(&self, cursor: Cursor) -> Cursor {
        match self.settings.plant {
            // Its progress is the snapshot alone, and below every position nothing counts as late.
            Some(Plant::XidOrder) => Cursor { position: -1, late: None, ..cursor },
            _ => cursor,
        }
    }

    /// How much may be written to the cursor, when this much is acknowledged.
    pub(crate) fn planted_progress(&self, prefix: u64, window: &Window<Failure>) -> u64 {
        match self.settings.plant {
            Some(Plant::AdvanceBeforeReport) => window.prefix() + window.in_flight() as u64,
            _ => prefix,
        }
    }

    /// Whether this failure goes unnoticed for now.
    pub(crate) fn overlooks(&self, number: u64, window: &Window<Failure>) -> bool {
        self.settings.plant == Some(Plant::FiniteMessageTimeout)
            && window.last_acked().is_none_or(|last| last < number)
    }
}

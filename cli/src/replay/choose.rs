//! Which letters become items of a plan. Pure: it is shown one letter after the other and remembers what it needs.
//!
//! | of the letters about one record | then |
//! |---|---|
//! | another consumer gave the record up (a topic of Spring Kafka's is shared) | none |
//! | it stands there twice (a crash between letter and mark) | one item |
//! | it died, was replayed and died again | the letter of the latest death speaks for it |
//!
//! That letter is an item if it fits the filters, its rounds are not used up, and no other plan has sent it.

use std::collections::BTreeMap;
use std::collections::HashMap;

use baton_protocol::envelope::identity;
use baton_protocol::replay::{Letter, next_round};
use time::OffsetDateTime;

use super::args::Wish;

/// A record's headers, in order.
pub(super) type SeenHeaders<'a> = Vec<(&'a str, Option<&'a [u8]>)>;

/// One record of the dead-letter topic, as it is read.
#[derive(Debug, Clone)]
pub(super) struct Seen<'a> {
    pub(super) partition: i32,
    pub(super) offset: i64,
    pub(super) timestamp_ms: Option<i64>,
    pub(super) key: Option<&'a [u8]>,
    /// None where a header's name is not text.
    pub(super) headers: Option<SeenHeaders<'a>>,
}

/// A letter that speaks for its record.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Chosen {
    pub(super) partition: i32,
    pub(super) offset: i64,
    pub(super) subject: [u8; 32],
    /// What the replayed record will carry.
    pub(super) round: u32,
    pub(super) idempotency_key: Option<String>,
    pub(super) letter: Letter,
}

/// What was left out.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Skipped {
    /// Another plan has sent it.
    pub(super) already_replayed: u64,
    /// It has been replayed as often as it may be.
    pub(super) loop_cap: u64,
    /// It is another topic's letter.
    pub(super) other_topic: u64,
    /// Another consumer has given the record up: how many, by its name or its group's.
    pub(super) other_consumers: BTreeMap<String, u64>,
    /// Nothing in it tells of a death: it is no letter, as far as can be seen.
    pub(super) no_letter: u64,
    /// A header's name is not text, so nothing of it can be read.
    pub(super) unreadable: u64,
}

/// The choice as it grows.
pub(super) struct Choice<'w> {
    wish: &'w Wish,
    dead_letters: &'w str,
    /// By subject: the latest letter, and whether it fits.
    latest: HashMap<[u8; 32], (Fits, Chosen)>,
    skipped: Skipped,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fits {
    Yes,
    No,
}

impl<'w> Choice<'w> {
    pub(super) fn new(wish: &'w Wish, dead_letters: &'w str) -> Self {
        Self { wish, dead_letters, latest: HashMap::new(), skipped: Skipped::default() }
    }

    /// One letter more, in any order of partitions.
    pub(super) fn see(&mut self, seen: &Seen<'_>) {
        let Some(headers) = &seen.headers else {
            self.skipped.unreadable += 1;
            return;
        };
        let mut letter = Letter::read(headers.iter().copied());
        if letter.is_silent() {
            self.skipped.no_letter += 1;
            return;
        }
        if letter.topic.as_ref().is_some_and(|topic| *topic != self.wish.topic) {
            self.skipped.other_topic += 1;
            return;
        }
        if let Some(giver) = letter.giver.as_ref().filter(|_| !self.wish.is_of_its_consumer(&letter)) {
            *self.skipped.other_consumers.entry(giver.name().to_owned()).or_default() += 1;
            return;
        }
        let subject = letter.subject((self.dead_letters, seen.partition, seen.offset));
        // A letter keeps its record's timestamp.
        letter.timestamp_ms = letter.timestamp_ms.or(seen.timestamp_ms);
        let is_older = self
            .latest
            .get(&subject)
            .is_some_and(|(_, known)| (known.letter.round, known.offset) > (letter.round, seen.offset));
        if is_older {
            return;
        }
        let fits = if self.fits(seen, headers, &letter) { Fits::Yes } else { Fits::No };
        let chosen = Chosen {
            partition: seen.partition,
            offset: seen.offset,
            subject,
            round: letter.round.saturating_add(1),
            idempotency_key: identity(headers.iter().copied()).map(|identity| identity.key),
            letter,
        };
        self.latest.insert(subject, (fits, chosen));
    }

    fn fits(&self, seen: &Seen<'_>, headers: &[(&str, Option<&[u8]>)], letter: &Letter) -> bool {
        let wish = self.wish;
        let failed_at = letter.failed_at.or_else(|| from_millis(seen.timestamp_ms?));
        let has = |(name, value): &(String, String)| {
            headers.iter().any(|(given, bytes)| given == name && *bytes == Some(value.as_bytes()))
        };
        wish.cause.as_ref().is_none_or(|cause| letter.cause.as_ref() == Some(cause))
            && wish.key.as_ref().is_none_or(|key| seen.key == Some(key.as_bytes()))
            && wish.headers.iter().all(has)
            && wish.from.is_none_or(|from| failed_at.is_some_and(|at| at >= from))
            && wish.to.is_none_or(|to| failed_at.is_some_and(|at| at < to))
    }

    /// The letters that fit and whose rounds are not used up, in the order of the dead-letter topic.
    pub(super) fn fitting(self) -> (Vec<Chosen>, Skipped) {
        let Self { wish, latest, mut skipped, .. } = self;
        let mut chosen = Vec::new();
        for (fits, letter) in latest.into_values() {
            match (fits, next_round(letter.letter.round, wish.loop_cap)) {
                (Fits::No, _) => {}
                (Fits::Yes, None) => skipped.loop_cap += 1,
                (Fits::Yes, Some(_)) => chosen.push(letter),
            }
        }
        chosen.sort_by_key(|letter| (letter.partition, letter.offset));
        (chosen, skipped)
    }
}

/// Leaves out what other plans have sent, unless it is wanted, and what is above the limit. `sent` is the highest round that was sent, by
/// subject.
pub(super) fn keep(
    wish: &Wish,
    chosen: Vec<Chosen>,
    sent: &HashMap<Vec<u8>, i32>,
    skipped: &mut Skipped,
) -> Vec<Chosen> {
    let mut kept = Vec::new();
    let limit = wish.limit.map_or(usize::MAX, |limit| usize::try_from(limit.get()).unwrap_or(usize::MAX));
    for letter in chosen {
        let was_sent = sent
            .get(letter.subject.as_slice())
            .is_some_and(|round| i64::from(*round) >= i64::from(letter.round));
        if was_sent && !wish.again {
            skipped.already_replayed += 1;
        } else if kept.len() < limit {
            kept.push(letter);
        }
    }
    kept
}

/// How many there are of each cause; a letter that names none is `unknown`.
pub(super) fn by_cause<'a>(chosen: impl IntoIterator<Item = &'a Chosen>) -> BTreeMap<String, u64> {
    let mut counts = BTreeMap::new();
    for letter in chosen {
        let cause = letter.letter.cause.clone().unwrap_or_else(|| "unknown".to_owned());
        *counts.entry(cause).or_default() += 1;
    }
    counts
}

fn from_millis(ms: i64) -> Option<OffsetDateTime> {
    OffsetDateTime::from_unix_timestamp_nanos(i128::from(ms) * 1_000_000).ok()
}

#[cfg(test)]
mod tests;

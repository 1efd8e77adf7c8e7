//! How many shards a relay should hold: fairly many, with as little movement as possible.
//!
//! With `n` shards and `r` live relays every relay holds `⌊n/r⌋` or `⌈n/r⌉`. Those that hold most keep the larger
//! share, the name breaks ties, so a fair distribution never moves again and an unfair one moves by the fewest shards.
//!
//! Each relay decides for itself, from what it read, and may have read something old. That is safe, because claiming
//! and releasing are conditional statements of their own (R4), and it settles: nobody claims beyond its share, nobody
//! releases below it, and the shares of all relays add up to `n`. A shard of a relay that died is free once its lease
//! has run out; until then the dead one counts as live and its share is kept for it.

/// What a relay should do about its number of shards.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decision {
    /// Claim up to so many of the free shards, at least one.
    Claim(usize),
    /// Drain and release so many of its shards, at least one.
    Release(usize),
    /// Nothing: it holds its share, or nothing is free yet.
    Keep,
}

/// Decides for the relay `me`.
///
/// `holdings` says how many shards each live relay holds, those with none included; `me` counts as live even if it is
/// not listed. `free` is the number of shards that nobody holds or whose lease has run out, out of `shards` in all.
#[must_use]
pub fn decide<S: AsRef<str>>(me: &str, holdings: &[(S, usize)], shards: usize, free: usize) -> Decision {
    let held = holdings.iter().find(|(owner, _)| owner.as_ref() == me).map_or(0, |(_, held)| *held);
    let others =
        || holdings.iter().map(|(owner, held)| (owner.as_ref(), *held)).filter(|(owner, _)| *owner != me);
    let relays = others().count() + 1;
    let ahead = others().filter(|(owner, theirs)| *theirs > held || (*theirs == held && *owner < me)).count();
    let share = shards / relays + usize::from(ahead < shards % relays);

    if held > share {
        return Decision::Release(held - share);
    }
    match free.min(share - held) {
        0 => Decision::Keep,
        claim => Decision::Claim(claim),
    }
}

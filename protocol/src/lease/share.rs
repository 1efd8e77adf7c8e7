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

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;
    use proptest::sample::Index;

    use super::*;

    /// Live relays with what they hold, and how many shards are free.
    fn cluster() -> impl Strategy<Value = (Vec<(String, usize)>, usize)> {
        proptest::collection::vec(0_usize..20, 1..12).prop_flat_map(|held| {
            let relays = held
                .into_iter()
                .enumerate()
                .map(|(n, held)| (format!("relay-{n}"), held))
                .collect::<Vec<_>>();
            (Just(relays).prop_shuffle(), 0_usize..20)
        })
    }

    fn total((relays, free): &(Vec<(String, usize)>, usize)) -> usize {
        relays.iter().map(|(_, held)| held).sum::<usize>() + free
    }

    /// What a relay would hold if it could do at once what it decides.
    fn wanted(decision: Decision, held: usize) -> usize {
        match decision {
            Decision::Claim(n) => held + n,
            Decision::Release(n) => held - n,
            Decision::Keep => held,
        }
    }

    proptest! {
        #[test]
        fn shares_are_fair_and_add_up(cluster in cluster()) {
            let (relays, shards) = (&cluster.0, total(&cluster));
            // With every shard free to be claimed, what each relay wants is its whole share.
            let shares: Vec<usize> =
                relays.iter().map(|(me, held)| wanted(decide(me, relays, shards, shards), *held)).collect();
            prop_assert_eq!(shares.iter().sum::<usize>(), shards);
            let fair = shards / relays.len()..=shards.div_ceil(relays.len());
            prop_assert!(shares.iter().all(|share| fair.contains(share)), "{shares:?}");
        }

        #[test]
        fn no_more_shards_move_than_must(cluster in cluster()) {
            let (relays, shards) = (&cluster.0, total(&cluster));
            let released: usize = relays
                .iter()
                .map(|(me, held)| held.saturating_sub(wanted(decide(me, relays, shards, cluster.1), *held)))
                .sum();
            // The fewest possible: what is above the floor, but for one of each relay that may hold one more.
            let floor = shards / relays.len();
            let above = relays.iter().map(|(_, held)| held.saturating_sub(floor)).sum::<usize>();
            let may_keep = relays.iter().filter(|(_, held)| *held > floor).count().min(shards % relays.len());
            prop_assert_eq!(released, above - may_keep);
        }

        #[test]
        fn a_decision_follows_from_what_is_held_and_not_from_how_it_is_listed(cluster in cluster(), me in any::<Index>()) {
            let (relays, shards) = (&cluster.0, total(&cluster));
            let (me, held) = me.get(relays);
            let decision = decide(me, relays, shards, cluster.1);
            let sorted: BTreeMap<_, _> = relays.iter().cloned().collect();
            let sorted: Vec<_> = sorted.into_iter().collect();
            prop_assert_eq!(decision, decide(me, &sorted, shards, cluster.1));
            if *held == 0 {
                let others: Vec<_> = sorted.into_iter().filter(|(owner, _)| owner != me).collect();
                prop_assert_eq!(decision, decide(me, &others, shards, cluster.1));
            }
        }

        #[test]
        fn nobody_claims_more_than_is_free_or_decides_to_move_nothing(cluster in cluster(), me in any::<Index>()) {
            let (relays, shards) = (&cluster.0, total(&cluster));
            match decide(&me.get(relays).0, relays, shards, cluster.1) {
                Decision::Claim(n) => prop_assert!((1..=cluster.1).contains(&n)),
                Decision::Release(n) => prop_assert!((1..=me.get(relays).1).contains(&n)),
                Decision::Keep => {}
            }
        }

        #[test]
        fn relays_that_come_and_go_and_read_old_news_settle_on_a_fair_distribution(
            shards in 1_usize..64,
            events in proptest::collection::vec((any::<Index>(), 0_u8..6), 0..120),
            lock_step in any::<bool>(),
        ) {
            let mut world = World::new(shards);
            for (which, event) in events {
                world.happen(&which, event);
            }
            let releases_before = world.releases;
            let most = world.must_release();
            let rounds = world.settle(lock_step);
            prop_assert!(rounds <= 4, "took {rounds} rounds");
            prop_assert!(world.releases - releases_before <= most, "moved more than must");
            prop_assert_eq!(world.free(), 0);
            let fair = shards / world.live.len()..=shards.div_ceil(world.live.len());
            prop_assert!(world.live.values().all(|held| fair.contains(held)), "{:?}", world.live);
            // Once fair, it never moves again.
            prop_assert_eq!(world.settle(lock_step), 0);
        }
    }

    /// A database and the relays on it. A relay acts on what it read last, which may be old.
    struct World {
        shards: usize,
        live: BTreeMap<String, usize>,
        read: BTreeMap<String, (Vec<(String, usize)>, usize)>,
        born: usize,
        releases: usize,
    }

    impl World {
        fn new(shards: usize) -> Self {
            let mut world =
                Self { shards, live: BTreeMap::new(), read: BTreeMap::new(), born: 0, releases: 0 };
            world.join();
            world
        }

        fn free(&self) -> usize {
            self.shards - self.live.values().sum::<usize>()
        }

        fn join(&mut self) {
            self.born += 1;
            // Names that do not sort by age.
            self.live.insert(format!("relay-{}", self.born * 7 % 10), 0);
        }

        fn happen(&mut self, which: &Index, event: u8) {
            let relay = which.get(&self.live.keys().cloned().collect::<Vec<_>>()).clone();
            match event {
                0 => self.join(),
                // Its lease ran out: what it held is free.
                1 if self.live.len() > 1 => drop(self.live.remove(&relay)),
                2 | 3 => self.look(&relay),
                _ => self.act(&relay),
            }
        }

        fn look(&mut self, relay: &str) {
            let holdings = self.live.iter().map(|(owner, held)| (owner.clone(), *held)).collect();
            self.read.insert(relay.to_owned(), (holdings, self.free()));
        }

        /// Claims and releases as the database lets it: never more than there is.
        fn act(&mut self, relay: &str) {
            let Some((holdings, free)) = self.read.get(relay) else { return };
            let decision = decide(relay, holdings, self.shards, *free);
            let free = self.free();
            let held = self.live.get_mut(relay).expect("only live relays act");
            match decision {
                Decision::Claim(n) => *held += n.min(free),
                Decision::Release(n) => {
                    let n = n.min(*held);
                    *held -= n;
                    self.releases += n;
                }
                Decision::Keep => {}
            }
        }

        fn must_release(&self) -> usize {
            let floor = self.shards / self.live.len();
            let above = self.live.values().map(|held| held.saturating_sub(floor)).sum::<usize>();
            above
                - self.live.values().filter(|held| **held > floor).count().min(self.shards % self.live.len())
        }

        /// Rounds in which every relay looks and acts, all at once or one after the other, until nobody moves.
        fn settle(&mut self, lock_step: bool) -> usize {
            let relays: Vec<String> = self.live.keys().cloned().collect();
            for round in 0..100 {
                let before = self.live.clone();
                if lock_step {
                    relays.iter().for_each(|relay| self.look(relay));
                    relays.iter().for_each(|relay| self.act(relay));
                } else {
                    for relay in &relays {
                        self.look(relay);
                        self.act(relay);
                    }
                }
                if self.live == before {
                    return round;
                }
            }
            100
        }
    }
}

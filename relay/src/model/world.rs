//! A database, a topic, a network and two relays: what can be, and what can happen next.

use std::time::Duration;

use baton_protocol::lease::Terms;
use baton_protocol::lease::ownership::{Claim, Holder, Lease};

use crate::window::Window;

const MESSAGES: u8 = 3;
const TICK: Duration = Duration::from_secs(1);
/// It always is this moment: instead of time passing, what lies in it comes nearer.
const NOW: Duration = Duration::from_secs(100);

fn terms() -> Terms {
    Terms::new(2 * TICK, Some(TICK)).expect("lengths that fit")
}

/// By what the relays act, and what is held against them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Rules {
    pub(super) plant: Plant,
    pub(super) judge: Judge,
}

/// The product's rules, or those with a bug.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Plant {
    Nothing,
    /// The advance asks nobody.
    UnfencedAdvance,
    /// What was handed over counts as acknowledged.
    AdvanceBeforeTheReport,
    /// The advance asks for owner and expiry only.
    StaleGenerationAccepted,
    /// The advance asks for owner and generation only.
    ExpiredLeaseAccepted,
    /// A session that follows a lost one goes on where that one was, instead of at the durable cursor.
    CursorKeptInMemory,
    /// A lease lasts until its owner gives it back.
    LeaseWithoutEnd,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Judge {
    /// Whatever moves the cursor must hold the lease.
    Strict,
    /// Only what comes of it counts: a cursor that goes back or too far, disorder on the topic.
    ByConsequences,
}

/// A broken promise.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wrong {
    CursorWentBack,
    PassedWhatIsNotThere,
    StaleAdvance,
    OutOfOrder,
}

/// What happens; the number is the relay's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Deed {
    Claim(usize),
    HearOfClaim(usize),
    LoseReplyToClaim(usize),
    LookAtClock(usize),
    HandOver(usize),
    Append(usize),
    Report(usize, u8),
    AskToAdvance(usize),
    Advance(usize),
    Renew(usize),
    LetGoAtEndOfTrust(usize),
    Release(usize),
    /// A reply is lost, or the connection: the session ends, what it sent is on its way.
    Cut(usize),
    Crash(usize),
    AppendStray,
    LoseStrayRecords,
    AdvanceStray,
    LoseStrayAdvance,
    Tick,
}

impl Deed {
    pub(super) fn is_fault(self) -> bool {
        use Deed::{Crash, Cut, LoseReplyToClaim, LoseStrayAdvance, LoseStrayRecords};
        matches!(self, LoseReplyToClaim(_) | Cut(_) | Crash(_) | LoseStrayRecords | LoseStrayAdvance)
    }
}

pub(super) struct Step {
    pub(super) deed: Deed,
    pub(super) after: Result<World, Wrong>,
}

/// The state of everything. Messages are 0, 1, 2; a number of messages is also the first one that is not among them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct World {
    lease: Lease<usize>,
    /// The durable cursor.
    cursor: u8,
    /// First occurrences on the topic, which are in order or else the search is over.
    topic: u8,
    relays: [Relay; 2],
    /// Records that a dead session's producer had sent and that may still arrive, in their order: from, to.
    stray_records: Option<(u8, u8)>,
    /// An advance that a dead session had asked for and that may still be carried out.
    stray_advance: Option<(Holder<usize>, u8)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Relay {
    /// No session, or one without the shard.
    Idle {
        held_by: Option<i64>,
        remembered: Option<u8>,
    },
    /// The database has granted a claim that it asked for at `asked`, and read it the cursor.
    Claiming {
        holder: Holder<usize>,
        asked: Duration,
        cursor: u8,
    },
    Holding(Session),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Session {
    holder: Holder<usize>,
    /// When it asked for the last claim or renewal that it heard of.
    asked: Duration,
    /// The cursor it began at. Its records are numbered from here.
    base: u8,
    /// It has looked at the clock and hands the next one over, however much later.
    poised: bool,
    handed: u8,
    /// How many of them the broker has.
    appended: u8,
    /// Which of those it has told of, as bits: reports come in any order.
    reported: u8,
    /// What it knows to be durable.
    durable: u8,
    /// The advance that it waits for.
    waits_for: Option<u8>,
}

impl Session {
    fn trust_left(&self) -> Option<Duration> {
        terms().trust(self.asked).left(NOW)
    }

    fn acknowledged(&self, rules: Rules) -> u8 {
        if rules.plant == Plant::AdvanceBeforeTheReport {
            return self.base + self.handed;
        }
        let mut window = Window::<()>::new();
        for _ in 0..self.handed {
            window.hand_over();
        }
        for number in (0..self.handed).filter(|number| self.reported & (1 << number) != 0) {
            window.ack(u64::from(number));
        }
        self.base + u8::try_from(window.prefix()).expect("at most three")
    }

    fn is_drained(&self, rules: Rules) -> bool {
        let all = self.base + self.handed;
        !self.poised && self.waits_for.is_none() && self.durable == all && self.acknowledged(rules) == all
    }
}

impl World {
    pub(super) fn start() -> Self {
        let idle = Relay::Idle { held_by: None, remembered: None };
        Self {
            lease: Lease::default(),
            cursor: 0,
            topic: 0,
            relays: [idle; 2],
            stray_records: None,
            stray_advance: None,
        }
        .told_apart()
    }

    pub(super) fn is_ended(&self) -> bool {
        (self.topic, self.cursor) == (MESSAGES, MESSAGES)
    }

    /// Everything that can happen next.
    pub(super) fn steps(&self, rules: Rules) -> Vec<Step> {
        let mut steps = Vec::with_capacity(16);
        let mut can = |deed, change: &dyn Fn(&mut Self) -> Result<(), Wrong>| {
            let mut after = *self;
            let after = change(&mut after).map(|()| after.told_apart());
            if after != Ok(*self) {
                steps.push(Step { deed, after });
            }
        };
        for i in [0, 1] {
            match self.relays[i] {
                Relay::Idle { held_by, remembered } => {
                    can(Deed::Claim(i), &|world| {
                        if let Claim::Won { holder, .. } = world.lease.claim(i, held_by, NOW, terms()) {
                            let cursor = remembered.unwrap_or(world.cursor);
                            world.relays[i] = Relay::Claiming { holder, asked: NOW, cursor };
                        }
                        Ok(())
                    });
                }
                Relay::Claiming { holder, asked, cursor } => {
                    can(Deed::HearOfClaim(i), &|world| {
                        world.relays[i] = Relay::Holding(Session {
                            holder,
                            asked,
                            base: cursor,
                            poised: false,
                            handed: 0,
                            appended: 0,
                            reported: 0,
                            durable: cursor,
                            waits_for: None,
                        });
                        Ok(())
                    });
                    can(Deed::LoseReplyToClaim(i), &|world| world.leave(i, None, None));
                }
                Relay::Holding(session) => self.session_steps(i, session, rules, &mut can),
            }
            can(Deed::Crash(i), &|world| world.leave(i, None, None));
        }
        if let Some((from, to)) = self.stray_records {
            can(Deed::AppendStray, &|world| {
                world.stray_records = Some((from + 1, to));
                world.append(from)
            });
            can(Deed::LoseStrayRecords, &|world| {
                world.stray_records = None;
                Ok(())
            });
        }
        if let Some((holder, to)) = self.stray_advance {
            can(Deed::AdvanceStray, &|world| {
                world.stray_advance = None;
                world.advance(&holder, to, rules).map(drop)
            });
            can(Deed::LoseStrayAdvance, &|world| {
                world.stray_advance = None;
                Ok(())
            });
        }
        can(Deed::Tick, &|world| {
            world.pass_time(rules);
            Ok(())
        });
        steps
    }

    fn session_steps(
        &self,
        i: usize,
        session: Session,
        rules: Rules,
        can: &mut impl FnMut(Deed, &dyn Fn(&mut Self) -> Result<(), Wrong>),
    ) {
        let mut becomes = |deed, next: Session| {
            can(deed, &|world| {
                world.relays[i] = Relay::Holding(next);
                Ok(())
            });
        };
        let generation = session.holder.generation;
        if !session.poised && session.base + session.handed < MESSAGES && session.trust_left().is_some() {
            becomes(Deed::LookAtClock(i), Session { poised: true, ..session });
        }
        if session.poised {
            becomes(Deed::HandOver(i), Session { poised: false, handed: session.handed + 1, ..session });
        }
        for number in (0..session.appended).filter(|number| session.reported & (1 << number) == 0) {
            let reported = session.reported | 1 << number;
            becomes(Deed::Report(i, session.base + number), Session { reported, ..session });
        }
        let acknowledged = session.acknowledged(rules);
        if session.waits_for.is_none() && acknowledged > session.durable {
            becomes(Deed::AskToAdvance(i), Session { waits_for: Some(acknowledged), ..session });
        }
        if session.appended < session.handed {
            can(Deed::Append(i), &|world| {
                world.relays[i] = Relay::Holding(Session { appended: session.appended + 1, ..session });
                world.append(session.base + session.appended)
            });
        }
        if let Some(to) = session.waits_for {
            can(Deed::Advance(i), &|world| {
                let next = Session { waits_for: None, durable: to, ..session };
                world.relays[i] = Relay::Holding(next);
                match world.advance(&session.holder, to, rules)? {
                    Advanced::Moved => Ok(()),
                    Advanced::Fenced => world.leave(i, None, None),
                }
            });
        }
        can(Deed::Renew(i), &|world| match world.lease.renew(&session.holder, NOW, terms()) {
            Ok(_) => {
                world.relays[i] = Relay::Holding(Session { asked: NOW, ..session });
                Ok(())
            }
            Err(_) => world.leave(i, None, None),
        });
        if session.trust_left().is_none() {
            can(Deed::LetGoAtEndOfTrust(i), &|world| world.leave(i, Some(generation), None));
        }
        if session.is_drained(rules) {
            can(Deed::Release(i), &|world| {
                // Fenced or not, it is without the shard then.
                let _ = world.lease.release(&session.holder, NOW);
                world.leave(i, None, None)
            });
        }
        let remembered = (rules.plant == Plant::CursorKeptInMemory).then_some(session.base + session.handed);
        can(Deed::Cut(i), &|world| world.leave(i, Some(generation), remembered));
    }

    /// The session is over. What it had sent and not heard of stays on its way.
    fn leave(&mut self, i: usize, held_by: Option<i64>, remembered: Option<u8>) -> Result<(), Wrong> {
        if let Relay::Holding(session) = self.relays[i] {
            if session.appended < session.handed {
                self.stray_records = Some((session.base + session.appended, session.base + session.handed));
            }
            if let Some(to) = session.waits_for {
                self.stray_advance = Some((session.holder, to));
            }
        }
        self.relays[i] = Relay::Idle { held_by, remembered };
        Ok(())
    }

    fn append(&mut self, message: u8) -> Result<(), Wrong> {
        if message > self.topic {
            return Err(Wrong::OutOfOrder);
        }
        self.topic = self.topic.max(message + 1);
        Ok(())
    }

    /// `cursor_advance.sql`. What is judged here asks neither the rule nor the bug.
    fn advance(&mut self, holder: &Holder<usize>, to: u8, rules: Rules) -> Result<Advanced, Wrong> {
        let current = self.lease.held.filter(|(owner, _)| *owner == holder.owner);
        let permitted = match rules.plant {
            Plant::UnfencedAdvance => true,
            Plant::StaleGenerationAccepted => current.is_some_and(|(_, until)| NOW < until),
            Plant::ExpiredLeaseAccepted => current.is_some() && self.lease.generation == holder.generation,
            Plant::Nothing
            | Plant::AdvanceBeforeTheReport
            | Plant::CursorKeptInMemory
            | Plant::LeaseWithoutEnd => self.lease.permits(holder, NOW).is_ok(),
        };
        if !permitted {
            return Ok(Advanced::Fenced);
        }
        if to < self.cursor {
            return Err(Wrong::CursorWentBack);
        }
        if to > self.topic {
            return Err(Wrong::PassedWhatIsNotThere);
        }
        let holds =
            current.is_some_and(|(_, until)| NOW < until) && self.lease.generation == holder.generation;
        if rules.judge == Judge::Strict && !holds {
            return Err(Wrong::StaleAdvance);
        }
        self.cursor = to;
        Ok(Advanced::Moved)
    }

    fn pass_time(&mut self, rules: Rules) {
        if let Some((_, until)) = &mut self.lease.held
            && rules.plant != Plant::LeaseWithoutEnd
        {
            *until -= TICK;
        }
        for relay in &mut self.relays {
            match relay {
                Relay::Idle { .. } => {}
                Relay::Claiming { asked, .. } | Relay::Holding(Session { asked, .. }) => *asked -= TICK,
            }
        }
    }

    /// The same for everything that the rules can tell apart: how long ago a time is past, by how much generations
    /// differ and which relay is called 0 makes no difference.
    fn told_apart(mut self) -> Self {
        if let Some((_, until)) = &mut self.lease.held {
            *until = (*until).max(NOW);
        }
        let current = self.lease.generation;
        for relay in &mut self.relays {
            match relay {
                Relay::Idle { held_by, .. } => *held_by = held_by.filter(|generation| *generation == current),
                Relay::Claiming { asked, .. } | Relay::Holding(Session { asked, .. }) => {
                    *asked = (*asked).max(NOW - TICK);
                }
            }
        }
        // A repeat is nothing new on the topic.
        self.stray_records =
            self.stray_records.map(|(from, to)| (from.max(self.topic), to)).filter(|(from, to)| from < to);

        let mut order: Vec<i64> = Vec::with_capacity(4);
        self.each_generation(|generation| order.push(*generation));
        order.sort_unstable();
        order.dedup();
        self.each_generation(|generation| {
            *generation =
                (1..).zip(&order).find(|(_, known)| *known == generation).map_or(0, |(rank, _)| rank);
        });
        let swapped = self.swapped();
        self.min(swapped)
    }

    fn each_generation(&mut self, mut see: impl FnMut(&mut i64)) {
        see(&mut self.lease.generation);
        for relay in &mut self.relays {
            match relay {
                Relay::Idle { held_by, .. } => held_by.iter_mut().for_each(&mut see),
                Relay::Claiming { holder, .. } | Relay::Holding(Session { holder, .. }) => {
                    see(&mut holder.generation);
                }
            }
        }
        if let Some((holder, _)) = &mut self.stray_advance {
            see(&mut holder.generation);
        }
    }

    fn swapped(mut self) -> Self {
        self.relays.reverse();
        for relay in &mut self.relays {
            match relay {
                Relay::Idle { .. } => {}
                Relay::Claiming { holder, .. } | Relay::Holding(Session { holder, .. }) => {
                    holder.owner = 1 - holder.owner;
                }
            }
        }
        if let Some((owner, _)) = &mut self.lease.held {
            *owner = 1 - *owner;
        }
        if let Some((holder, _)) = &mut self.stray_advance {
            holder.owner = 1 - holder.owner;
        }
        self
    }
}

enum Advanced {
    Moved,
    Fenced,
}

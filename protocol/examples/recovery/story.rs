//! The story itself: told by the example beside it and by the test `recovery`, which includes this file.

use std::collections::BTreeSet;
use std::fmt::Display;
use std::num::NonZeroU32;
use std::time::Duration;

use baton_protocol::fingerprint::Fingerprint;
use baton_protocol::lease::Terms;
use baton_protocol::lease::ownership::Holder;
use baton_protocol::lease::work::{Claim, Work};

/// How often work is run before it is dead.
const BUDGET: NonZeroU32 = NonZeroU32::MIN.saturating_add(2);

/// Checks and whether each came out as it must.
#[derive(Debug, Default)]
pub(crate) struct Told {
    lines: Vec<(String, bool)>,
}

impl Told {
    /// One check: what was seen, and what must be seen.
    pub(crate) fn check(&mut self, name: &str, seen: impl Display, expected: impl Display) {
        let (seen, expected) = (seen.to_string(), expected.to_string());
        let right = seen == expected;
        let complaint = if right { String::new() } else { format!(" (must be {expected})") };
        self.lines.push((format!("{name}: {seen}{complaint}"), right));
    }

    /// Whether there were checks and all of them came out as they must.
    pub(crate) fn holds(&self) -> bool {
        !self.lines.is_empty() && self.lines.iter().all(|(_, right)| *right)
    }

    /// What is printed.
    pub(crate) fn text(&self) -> String {
        let mut text: String = self.lines.iter().map(|(line, _)| format!("{line}\n")).collect();
        text.push_str(if self.holds() { "assertions: PASS" } else { "assertions: FAIL" });
        text
    }
}

/// A lease of 10 s: claimed at 0 it ends at 10, unless renewed.
fn terms() -> Terms {
    Terms::default()
}

fn at(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// The work of the story: charge an order once.
struct Charge {
    work: Work<&'static str>,
    payload: &'static [u8],
}

impl Charge {
    fn new() -> Self {
        let payload = br#"{"order":17,"cents":4200}"#;
        Self { work: Work::new(Fingerprint::exact(Some(payload))), payload }
    }

    fn claim(&mut self, owner: &str, now: Duration) -> Claim<&'static str> {
        self.work.claim(owner, &Fingerprint::exact(Some(self.payload)), BUDGET, now, terms())
    }

    /// The holder and the attempt, or nothing where the claim did not give the work.
    fn claimed(&mut self, owner: &str, now: Duration) -> Option<(Holder, u32)> {
        match self.claim(owner, now) {
            Claim::Claimed { holder, attempt } => Some((holder, attempt)),
            _ => None,
        }
    }
}

/// A service elsewhere that keeps what it did, and, where it is given an idempotency key, does each key once.
#[derive(Default)]
struct Service {
    effects: u32,
    keys: BTreeSet<String>,
}

impl Service {
    fn charge(&mut self, key: Option<&str>) {
        if key.is_none_or(|key| self.keys.insert(key.to_owned())) {
            self.effects += 1;
        }
    }
}

fn word<R: std::fmt::Debug>(claim: &Claim<R>) -> &'static str {
    match claim {
        Claim::Claimed { .. } => "claimed",
        Claim::Held { .. } | Claim::Conflict => "refused",
        Claim::Duplicate(_) => "duplicate",
        Claim::Dead { .. } => "dead",
    }
}

fn accepted<T, E>(answer: &Result<T, E>) -> &'static str {
    if answer.is_ok() { "accepted" } else { "refused" }
}

/// Tells the whole story.
pub(crate) fn tell() -> Told {
    let mut told = Told::default();
    takeover(&mut told);
    spent_budget(&mut told);
    heartbeats_and_the_boundary(&mut told);
    effects(&mut told);
    told
}

/// worker-a claims and stops; worker-b takes over; worker-a wakes.
fn takeover(told: &mut Told) {
    let mut charge = Charge::new();
    let first = charge.claimed("worker-a", at(0));
    told.check("claim before expiry", word(&charge.claim("worker-b", at(9))), "refused");

    let second = charge.claimed("worker-b", at(11));
    told.check("takeover attempt", second.as_ref().map_or(0, |(_, attempt)| *attempt), 2);
    let (Some((first, _)), Some((second, _))) = (first, second) else {
        return told.check("workers that claimed", "missing", "two");
    };
    told.check(
        "stale completion",
        accepted(&charge.work.complete(&first, "charged by worker-a", at(12))),
        "refused",
    );
    let completed = charge.work.complete(&second, "charged by worker-b", at(13));
    told.check("current completion", accepted(&completed), "accepted");
    let owner = charge.work.completed_by().map_or("nobody", |holder| holder.owner.as_str());
    told.check("result owner", owner, "worker-b");
    let stored = match charge.claim("worker-c", at(14)) {
        Claim::Duplicate(result) => result,
        other => word(&other),
    };
    told.check("stored result", stored, "charged by worker-b");

    // The same once more, with the second attempt still running when the first one's heartbeat arrives.
    let mut charge = Charge::new();
    let first = charge.claimed("worker-a", at(0));
    let second = charge.claimed("worker-b", at(11));
    if let (Some((first, _)), Some(_)) = (first, second) {
        told.check("old heartbeat", accepted(&charge.work.renew(&first, at(12), terms())), "refused");
    }
}

/// Three workers die one after the other; the fourth does not run it again.
fn spent_budget(told: &mut Told) {
    let mut charge = Charge::new();
    for attempt in 0..3 {
        charge.claim("worker-a", at(attempt * 10));
    }
    told.check("attempts spent", charge.work.attempts(), 3);
    told.check("claim after three spent attempts", word(&charge.claim("worker-b", at(30))), "dead");
}

/// Progress keeps the work however long it takes; the last moment of a lease is not part of it.
fn heartbeats_and_the_boundary(told: &mut Told) {
    let mut charge = Charge::new();
    if let Some((holder, _)) = charge.claimed("worker-a", at(0)) {
        let renewed = charge.work.renew(&holder, at(9), terms());
        let beside = charge.claim("worker-b", at(15));
        let kept = renewed.is_ok() && matches!(beside, Claim::Held { .. });
        told.check(
            "heartbeat in time",
            if kept { "keeps ownership" } else { "loses ownership" },
            "keeps ownership",
        );
        let completed = charge.work.complete(&holder, "charged", at(18));
        told.check("completion after a heartbeat", accepted(&completed), "accepted");
    }
    let mut charge = Charge::new();
    if let Some((holder, _)) = charge.claimed("worker-a", at(0)) {
        let completed = charge.work.complete(&holder, "charged", at(10));
        told.check("completion at exactly the expiry", accepted(&completed), "refused");
    }
}

/// The first worker dies after its effect and before its mark, so the effect is asked for twice.
fn effects(told: &mut Told) {
    for (name, key, expected) in
        [("effects without key", None, 2), ("effects with key", Some("charge:order-17"), 1)]
    {
        let (mut charge, mut service) = (Charge::new(), Service::default());
        for (worker, now) in [("worker-a", at(0)), ("worker-b", at(11))] {
            if let Some((holder, _)) = charge.claimed(worker, now) {
                service.charge(key);
                if worker == "worker-b" {
                    told.check(
                        &format!("completion {}", if key.is_some() { "with key" } else { "without key" }),
                        accepted(&charge.work.complete(&holder, "charged", now)),
                        "accepted",
                    );
                }
            }
        }
        told.check(name, service.effects, expected);
    }
    let mut charge = Charge::new();
    charge.claim("worker-a", at(0));
    charge.payload = br#"{"order":17,"cents":9900}"#;
    told.check("same key with another payload", word(&charge.claim("worker-b", at(11))), "refused");
}

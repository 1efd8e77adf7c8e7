//! Bugs that people have shipped, planted so that the checkers of the test suite prove that they would be found.
//!
//! Compiled only with the feature `plants`, and reachable only through [`Builder::plant`](crate::Builder::plant).
//!
//! | plant | does | so that |
//! |---|---|---|
//! | `offset-before-effect` | reports a record as settled before it is handled | what a crash interrupts is lost |
//! | `unclaimed` | handles without claim and mark | what is read twice takes effect twice |
//! | `no-look-up` | runs what was left behind without asking | a call is repeated unasked |
//! | `stale-generation` | lets any earlier owner complete | an owner that woke settles what another one is at |
//! | `fingerprint-skipped` | compares no payload with what was left behind | another payload runs under the key |
//! | `attempts-forgotten` | takes each try of what was set aside for the first | what fails for ever is tried for ever |
//! | `parked-keys-forgotten` | asks nobody which keys wait when it is given a partition | a later record overtakes one that was set aside |

use std::str::FromStr;

/// A bug.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Plant {
    /// The offset may be committed as soon as the record is in hand.
    OffsetBeforeEffect,
    /// A transactional handler runs whatever the inbox says.
    Unclaimed,
    /// A takeover runs the action at once.
    NoLookUp,
    /// A completion names neither owner, generation nor expiry.
    StaleGeneration,
    /// A claim on what a lease holds or has left behind compares no fingerprint.
    FingerprintSkipped,
    /// Attempts on what was set aside are counted from nothing by each owner.
    AttemptsForgotten,
    /// A new owner of a partition knows of no key that waits.
    ParkedKeysForgotten,
}

const NAMES: [(&str, Plant); 7] = [
    ("offset-before-effect", Plant::OffsetBeforeEffect),
    ("unclaimed", Plant::Unclaimed),
    ("no-look-up", Plant::NoLookUp),
    ("stale-generation", Plant::StaleGeneration),
    ("fingerprint-skipped", Plant::FingerprintSkipped),
    ("attempts-forgotten", Plant::AttemptsForgotten),
    ("parked-keys-forgotten", Plant::ParkedKeysForgotten),
];

impl FromStr for Plant {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        let found = NAMES.iter().find(|(known, _)| *known == name);
        found.map(|(_, plant)| *plant).ok_or_else(|| format!("no such plant: {name}"))
    }
}

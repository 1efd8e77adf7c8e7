//! An order, as the message carries it.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// The payload of an `order.placed` message.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Order {
    /// What was placed.
    #[serde(flatten)]
    pub facts: Facts,
    /// How billing it goes.
    pub behave: Behave,
}

/// What the ledger, the message and the invoice must agree on.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Facts {
    /// Identifies the order.
    pub order_id: Uuid,
    /// Who placed it: the message's key, within which order counts.
    pub customer: String,
    /// Counts up from 1 per customer.
    pub seq: i64,
    /// The amount, in hundredths.
    pub amount_cents: i64,
}

impl Facts {
    /// The idempotency key under which the order is published and billed.
    #[must_use]
    pub fn idempotency_key(&self) -> String {
        format!("{KEY_PREFIX}{}", self.order_id)
    }
}

const KEY_PREFIX: &str = "placed:";

/// The order that an idempotency key names.
#[must_use]
pub fn order_of_key(key: &str) -> Option<Uuid> {
    key.strip_prefix(KEY_PREFIX)?.parse().ok()
}

/// How billing an order goes, so that every path of a consumer can be seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub enum Behave {
    /// It is billed: `ok`.
    Ok,
    /// It can never be billed: `poison`.
    Poison,
    /// The first so many attempts fail, then it is billed: `flaky:2`.
    Flaky(u32),
    /// It is billed after this long: `slow:500`, in milliseconds.
    Slow(Duration),
}

/// A behaviour that is none of the four.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a behaviour; use ok, poison, flaky:ATTEMPTS or slow:MILLISECONDS")]
pub struct UnknownBehaviour(String);

impl FromStr for Behave {
    type Err = UnknownBehaviour;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let behave = match text.split_once(':') {
            None if text == "ok" => Some(Self::Ok),
            None if text == "poison" => Some(Self::Poison),
            Some(("flaky", attempts)) => attempts.parse().ok().map(Self::Flaky),
            Some(("slow", millis)) => {
                millis.parse().ok().map(|millis| Self::Slow(Duration::from_millis(millis)))
            }
            _ => None,
        };
        behave.ok_or_else(|| UnknownBehaviour(text.to_owned()))
    }
}

impl fmt::Display for Behave {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ok => f.write_str("ok"),
            Self::Poison => f.write_str("poison"),
            Self::Flaky(attempts) => write!(f, "flaky:{attempts}"),
            Self::Slow(pause) => write!(f, "slow:{}", pause.as_millis()),
        }
    }
}

impl From<Behave> for String {
    fn from(behave: Behave) -> Self {
        behave.to_string()
    }
}

impl TryFrom<String> for Behave {
    type Error = UnknownBehaviour;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_payload_has_the_published_form() {
        let facts = Facts { order_id: Uuid::nil(), customer: "c-7".into(), seq: 3, amount_cents: 1250 };
        let text = serde_json::to_string(&Order { facts, behave: Behave::Flaky(2) }).unwrap();
        assert_eq!(
            text,
            r#"{"order_id":"00000000-0000-0000-0000-000000000000","customer":"c-7","seq":3,"amount_cents":1250,"behave":"flaky:2"}"#
        );
        assert_eq!(serde_json::from_str::<Order>(&text).unwrap().behave, Behave::Flaky(2));
    }

    #[test]
    fn every_behaviour_reads_back_as_it_is_written() {
        for text in ["ok", "poison", "flaky:2", "slow:500"] {
            assert_eq!(text.parse::<Behave>().unwrap().to_string(), text);
        }
        for text in ["", "flaky", "flaky:x", "slow:-1", "OK", "poison:1"] {
            text.parse::<Behave>().unwrap_err();
        }
    }

    #[test]
    fn a_key_names_its_order() {
        let facts = Facts { order_id: Uuid::from_u128(7), customer: String::new(), seq: 1, amount_cents: 1 };
        assert_eq!(order_of_key(&facts.idempotency_key()), Some(facts.order_id));
        assert_eq!(order_of_key("cancelled:1"), None);
    }
}

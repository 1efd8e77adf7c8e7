//! What makes two payloads the same: a versioned digest, compared wherever an idempotency key is met again.
//!
//! `v1:sha256:<hex>` is SHA-256 over one byte that says whether there is a payload (`01`) or none (`00`), followed by
//! the payload. So a tombstone and an empty payload differ, and no payload can be made to look like a tombstone:
//!
//! ```sh
//! (printf '\001'; cat payload) | sha256sum
//! ```
//!
//! The version stands in the text, so a later algorithm is told from this one and never mistaken for another payload.
//! Text and algorithm are a public format: inbox rows keep them for as long as the horizon is.

use std::fmt;

use sha2::{Digest, Sha256};

/// The digest of one payload. Two are equal when algorithm, version and digest are.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Fingerprint(String);

impl Fingerprint {
    /// The exact bytes of a record's value; `None` is a tombstone.
    #[must_use]
    pub fn exact(payload: Option<&[u8]>) -> Self {
        let mut digest = Sha256::new();
        digest.update([u8::from(payload.is_some())]);
        digest.update(payload.unwrap_or_default());
        Self(hex("v1:sha256:", &digest.finalize()))
    }

    /// As it is stored and compared: `v1:sha256:` and 64 hexadecimal digits in lower case.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Fingerprint({})", self.0)
    }
}

fn hex(prefix: &str, bytes: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let mut text = String::with_capacity(prefix.len() + 2 * bytes.len());
    text.push_str(prefix);
    for byte in bytes {
        text.push(char::from(DIGITS[usize::from(byte >> 4)]));
        text.push(char::from(DIGITS[usize::from(byte & 15)]));
    }
    text
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_fingerprint_is_what_it_always_was() {
        for (payload, text) in [
            (None, "v1:sha256:6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d"),
            (
                Some(b"".as_slice()),
                "v1:sha256:4bf5122f344554c53bde2ebb8cd2b7e3d1600ad631c385a5d7cce23c7785459a",
            ),
            (
                Some(br#"{"order_id":17}"#.as_slice()),
                "v1:sha256:4c3dcc64bc1cb861db6a283dfce0c27edaad36301999fc087d084e1a0e487bab",
            ),
        ] {
            assert_eq!(Fingerprint::exact(payload).as_str(), text);
            assert_eq!(Fingerprint::exact(payload).to_string(), text);
        }
    }

    proptest! {
        #[test]
        fn two_payloads_have_one_fingerprint_only_if_they_are_equal(
            a in proptest::option::of(proptest::collection::vec(0_u8..3, 0..4)),
            b in proptest::option::of(proptest::collection::vec(0_u8..3, 0..4)),
        ) {
            let same = Fingerprint::exact(a.as_deref()) == Fingerprint::exact(b.as_deref());
            prop_assert_eq!(same, a == b);
        }
    }
}

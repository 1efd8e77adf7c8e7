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

//! What makes two payloads the same: a versioned digest, compared wherever an idempotency key is met again.
//!
//! | text | two are equal when |
//! |---|---|
//! | `v1:sha256:<hex>` | the bytes are; the default |
//! | `v1:jsonsha256:<hex>` | the JSON values are: order of members, whitespace and spelling do not count |
//! | `v1:sha256headers:<hex>`, `v1:jsonsha256headers:<hex>` | the payloads are, as above, and the chosen headers too |
//!
//! `v1:sha256:<hex>` is SHA-256 over one byte that says whether there is a payload (`01`) or none (`00`), followed by
//! the payload. So a tombstone and an empty payload differ, and no payload can be made to look like a tombstone:
//!
//! ```sh
//! (printf '\001'; cat payload) | sha256sum
//! ```
//!
//! `v1:jsonsha256:<hex>` is the same over the payload's one canonical spelling ([`canonical_json`]). With headers the digest
//! is over the text of the payload's fingerprint and then, for each chosen name in order: the name's length, the name, how
//! many such headers there are, and for each of them `00` for null or `01`, the value's length and the value. Lengths and
//! counts are 8 bytes, big-endian, so nothing can be shifted from one place to the next.
//!
//! Version and algorithm stand in the text, so that two algorithms' digests are never equal. Text and algorithm are a public
//! format: inbox rows keep them for as long as the horizon is.

mod json;

use std::fmt;

use sha2::{Digest, Sha256};

pub use json::{DEEPEST, Error, canonical_json};

const VERSION: &str = "v1";

/// What of a payload is compared.
///
/// ```
/// use baton_protocol::fingerprint::Compare;
///
/// let of = |compare: Compare, payload: &str| compare.fingerprint(Some(payload.as_bytes()));
/// let (stored, given) = (r#"{"id": 17, "cents": 100}"#, r#"{"cents": 1e2, "id": 17}"#);
///
/// assert_ne!(of(Compare::ExactBytes, stored)?, of(Compare::ExactBytes, given)?);
/// assert_eq!(of(Compare::CanonicalJson, stored)?, of(Compare::CanonicalJson, given)?);
/// # Ok::<(), baton_protocol::fingerprint::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Compare {
    /// Every byte. The default: a producer that sends again sends what it stored.
    #[default]
    ExactBytes,
    /// The JSON value, for producers that write it anew each time: the order of members, whitespace and the spelling of
    /// strings and numbers do not count. Numbers are compared as exact decimals, so `1.0` is `1`, and 9007199254740993 is
    /// not 9007199254740992. What is no JSON is refused.
    CanonicalJson,
}

impl Compare {
    /// The fingerprint of a payload; `None` is a tombstone, which only another tombstone equals.
    ///
    /// # Errors
    ///
    /// [`enum@Error`], and only for [`Compare::CanonicalJson`]: the payload cannot be compared, now or later.
    pub fn fingerprint(self, payload: Option<&[u8]>) -> Result<Fingerprint, Error> {
        match self {
            Self::ExactBytes => Ok(Fingerprint::exact(payload)),
            Self::CanonicalJson => Fingerprint::canonical_json(payload),
        }
    }
}

/// The digest of one payload. Two are equal when algorithm, version and digest are.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Fingerprint(String);

impl Fingerprint {
    /// The exact bytes of a record's value; `None` is a tombstone.
    ///
    /// ```
    /// use baton_protocol::fingerprint::Fingerprint;
    ///
    /// assert_ne!(Fingerprint::exact(Some(b"{}")), Fingerprint::exact(Some(b"{ }")));
    /// assert_ne!(Fingerprint::exact(Some(b"")), Fingerprint::exact(None));
    /// ```
    #[must_use]
    pub fn exact(payload: Option<&[u8]>) -> Self {
        Self::of("sha256", payload)
    }

    /// The value that a JSON payload stands for; `None` is a tombstone, which a payload of `null` is not.
    ///
    /// ```
    /// use baton_protocol::fingerprint::Fingerprint;
    ///
    /// let of = |payload: &str| Fingerprint::canonical_json(Some(payload.as_bytes()));
    /// assert_eq!(of(r#"{"a": 1.0, "b": "\u00e9"}"#)?, of(r#"{"b":"é","a":1}"#)?);
    /// assert_ne!(of("[1, 2]")?, of("[2, 1]")?);
    /// assert!(of("no JSON").is_err());
    /// # Ok::<(), baton_protocol::fingerprint::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As [`canonical_json`].
    pub fn canonical_json(payload: Option<&[u8]>) -> Result<Self, Error> {
        let text = payload.map(canonical_json).transpose()?;
        Ok(Self::of("jsonsha256", text.as_ref().map(String::as_bytes)))
    }

    /// The same payload's fingerprint with the headers of these names in it. A header that is not there differs from one
    /// that is null, and that from an empty one; one that is repeated counts each time, in the record's order. Names are
    /// compared exactly. Without names it is the payload's alone.
    ///
    /// ```
    /// use baton_protocol::fingerprint::Fingerprint;
    ///
    /// let pay = Fingerprint::exact(Some(b"100"));
    /// let of = |tenant: &[u8]| pay.clone().with_headers(&["tenant"], &[("tenant", Some(tenant)), ("trace", None)]);
    /// assert_ne!(of(b"eu"), of(b"us"));
    /// ```
    #[must_use]
    pub fn with_headers(self, names: &[impl AsRef<str>], headers: &[(&str, Option<&[u8]>)]) -> Self {
        let Some((algorithm, _)) = self.0.rsplit_once(':').filter(|_| !names.is_empty()) else { return self };
        let mut digest = Sha256::new();
        digest.update(&self.0);
        for name in names.iter().map(AsRef::as_ref) {
            let values = || headers.iter().filter(|(given, _)| *given == name).map(|(_, value)| value);
            digest.update(length(name.len()));
            digest.update(name);
            digest.update(length(values().count()));
            for value in values() {
                digest.update([u8::from(value.is_some())]);
                if let Some(value) = value {
                    digest.update(length(value.len()));
                    digest.update(value);
                }
            }
        }
        Self(hex(format!("{algorithm}headers:"), &digest.finalize()))
    }

    fn of(algorithm: &str, payload: Option<&[u8]>) -> Self {
        let mut digest = Sha256::new();
        digest.update([u8::from(payload.is_some())]);
        digest.update(payload.unwrap_or_default());
        Self(hex(format!("{VERSION}:{algorithm}:"), &digest.finalize()))
    }

    /// As it is stored and compared: version, algorithm and 64 hexadecimal digits in lower case.
    ///
    /// ```
    /// use baton_protocol::fingerprint::Fingerprint;
    ///
    /// assert!(Fingerprint::exact(None).as_str().starts_with("v1:sha256:6e340b9c"));
    /// ```
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

fn length(count: usize) -> [u8; 8] {
    (count as u64).to_be_bytes()
}

fn hex(mut text: String, bytes: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    text.reserve_exact(2 * bytes.len());
    for byte in bytes {
        text.push(char::from(DIGITS[usize::from(byte >> 4)]));
        text.push(char::from(DIGITS[usize::from(byte & 15)]));
    }
    text
}

#[cfg(test)]
mod tests;

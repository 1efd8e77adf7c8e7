//! What makes a second record under one idempotency key the same message, and not another one that is refused.
//!
//! By default every byte of the payload counts and no header does. What canonical JSON refuses has a fingerprint all the same, that
//! of its bytes, so that its row and its dead letter stand for it like any other's: it is never equal to one of JSON.

use std::sync::Arc;

use baton_protocol::dead_letter;
use baton_protocol::fingerprint::{Compare, Fingerprint};
use baton_protocol::replay;
use baton_protocol::report::chain;
use bytes::Bytes;

use crate::Record;

/// What of a record is compared when its idempotency key is met again. Default: the exact bytes of its payload.
///
/// Stored with every inbox row. What was settled under another setting and comes again is a conflict, which is safe and
/// ends as a dead letter: change it together with the consumer's name, or when nothing comes again.
///
/// ```
/// use baton_consumer::{Compare, Fingerprints};
///
/// let by_value = Fingerprints::of(Compare::CanonicalJson);
/// let by_value_and_tenant = by_value.with_headers(["tenant"]);
/// # let _ = by_value_and_tenant;
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Fingerprints {
    compare: Compare,
    headers: Arc<[String]>,
}

impl Fingerprints {
    /// The payload alone. What [`Compare::CanonicalJson`] refuses is dead-lettered with cause `undecodable`.
    ///
    /// ```
    /// use baton_consumer::{Compare, Fingerprints};
    ///
    /// assert_eq!(Fingerprints::of(Compare::ExactBytes), Fingerprints::default());
    /// ```
    #[must_use]
    pub fn of(compare: Compare) -> Self {
        Self { compare, headers: Arc::default() }
    }

    /// The headers of these names as well: whether each is there, how often, and its values. Replaces what was given before;
    /// names are compared exactly, and their order belongs to the setting. Choose what says what the message means (a
    /// tenant, say) and what its producer writes the same each time: a trace or the time of sending is not that.
    ///
    /// ```
    /// use baton_consumer::{Compare, Fingerprints};
    ///
    /// let fingerprints = Fingerprints::default().with_headers(["tenant", "currency"]);
    /// assert_ne!(fingerprints, Fingerprints::default().with_headers(["currency", "tenant"]));
    /// ```
    #[must_use]
    pub fn with_headers<T: Into<String>>(mut self, names: impl IntoIterator<Item = T>) -> Self {
        self.headers = names.into_iter().map(Into::into).collect();
        self
    }

    /// A chosen header that does not stay the same on the way through the dead-letter topic and back.
    pub(crate) fn unsteady_header(&self) -> Option<&str> {
        self.headers
            .iter()
            .map(String::as_str)
            .find(|name| dead_letter::is_of_a_death(name) || replay::is_own(name))
    }

    /// A record's fingerprint, and why it cannot be compared as set, if that is so.
    pub(crate) fn take(&self, record: &Record) -> (Fingerprint, Option<String>) {
        let headers = if self.headers.is_empty() { Vec::new() } else { record.headers().collect() };
        self.take_of(record.payload().map(Bytes::as_ref), &headers)
    }

    fn take_of(
        &self,
        payload: Option<&[u8]>,
        headers: &[(&str, Option<&[u8]>)],
    ) -> (Fingerprint, Option<String>) {
        let (fingerprint, refused) = match self.compare.fingerprint(payload) {
            Ok(fingerprint) => (fingerprint, None),
            Err(error) => (Fingerprint::exact(payload), Some(chain(&error))),
        };
        (fingerprint.with_headers(&self.headers, headers), refused)
    }
}

impl From<Compare> for Fingerprints {
    fn from(compare: Compare) -> Self {
        Self::of(compare)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn taken(
        fingerprints: &Fingerprints,
        payload: &str,
        headers: &[(&str, Option<&[u8]>)],
    ) -> (String, Option<String>) {
        let (fingerprint, refused) = fingerprints.take_of(Some(payload.as_bytes()), headers);
        (fingerprint.to_string(), refused)
    }

    #[test]
    fn by_default_every_byte_counts_and_no_header_does() {
        let default = Fingerprints::default();
        assert_eq!(taken(&default, "1.0", &[]), taken(&default, "1.0", &[("tenant", Some(b"eu"))]));
        assert_ne!(taken(&default, "1.0", &[]), taken(&default, "1", &[]));
        assert_eq!(taken(&default, "1.0", &[]).0, Fingerprint::exact(Some(b"1.0")).as_str());
    }

    #[test]
    fn chosen_headers_count_whatever_is_compared_of_the_payload() {
        for compare in [Compare::ExactBytes, Compare::CanonicalJson] {
            let by_tenant = Fingerprints::of(compare).with_headers(["tenant"]);
            let of = |tenant| taken(&by_tenant, "1", &[("tenant", Some(tenant)), ("trace", Some(tenant))]);
            assert_ne!(of(b"eu"), of(b"us"));
            assert_eq!(
                of(b"eu"),
                taken(&by_tenant, "1", &[("trace", None), ("tenant", Some(b"eu"))]),
                "no other header counts"
            );
        }
    }

    #[test]
    fn what_is_no_json_has_the_fingerprint_of_its_bytes_and_is_told_apart() {
        let by_value = Fingerprints::from(Compare::CanonicalJson);
        let (fingerprint, refused) = taken(&by_value, "{", &[]);
        assert_eq!(fingerprint, Fingerprint::exact(Some(b"{")).as_str());
        assert!(refused.unwrap().starts_with("payload is no JSON, so it cannot be compared as JSON: EOF"));
        assert_eq!(taken(&by_value, "{}", &[]).1, None);
    }

    #[test]
    fn a_header_that_changes_with_each_death_is_found() {
        let chosen = |name: &str| Fingerprints::default().with_headers(["tenant", name]);
        assert_eq!(chosen("dlt-attempts").unsteady_header(), Some("dlt-attempts"));
        assert_eq!(chosen("replay-round").unsteady_header(), Some("replay-round"));
        assert_eq!(chosen("currency").unsteady_header(), None);
    }
}

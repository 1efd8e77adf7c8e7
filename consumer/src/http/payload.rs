//! What makes a second request the same request: the bytes that are fingerprinted.
//!
//! Method, path and query, every `Content-Type` and `Content-Encoding` (they say what the body's bytes mean), the exact body.
//! Each part is led by its length and each list by its count, so that no part can be shifted into another. What a proxy or
//! a repeated try changes is left out: other headers, the host, the version of HTTP.
//!
//! The path is the one that the layer sees. A router that strips a prefix before the layer makes `/a/pay` and `/b/pay` the
//! same: put the layer outside.

use http::header::{CONTENT_ENCODING, CONTENT_TYPE};
use http::request::Parts;

/// The payload of one request, to be fingerprinted, never stored.
pub(super) fn of(parts: &Parts, body: &[u8]) -> Vec<u8> {
    let mut payload = Delimited::default();
    payload.put(parts.method.as_str().as_bytes());
    // Of `*` or an authority alone there is no path.
    payload.put(parts.uri.path_and_query().map_or_else(|| parts.uri.path(), |path| path.as_str()).as_bytes());
    for name in [CONTENT_TYPE, CONTENT_ENCODING] {
        let values: Vec<&[u8]> = parts.headers.get_all(name).iter().map(|value| value.as_bytes()).collect();
        payload.count(values.len());
        for value in values {
            payload.put(value);
        }
    }
    payload.put(body);
    payload.0
}

/// Parts that can be told apart, whatever they hold.
#[derive(Default)]
pub(super) struct Delimited(pub(super) Vec<u8>);

impl Delimited {
    pub(super) fn put(&mut self, part: &[u8]) {
        self.count(part.len());
        self.0.extend_from_slice(part);
    }

    fn count(&mut self, count: usize) {
        self.0.extend_from_slice(&u64::try_from(count).unwrap_or(u64::MAX).to_be_bytes());
    }
}

#[cfg(test)]
mod tests {
    use http::{HeaderValue, Request};
    use proptest::prelude::*;

    use super::*;

    type Case = (String, String, Vec<String>, Vec<String>, Vec<u8>);

    fn payload((method, uri, types, encodings, body): &Case) -> Vec<u8> {
        let mut request = Request::builder().method(method.as_str()).uri(uri.as_str()).body(()).unwrap();
        for (name, values) in [(CONTENT_TYPE, types), (CONTENT_ENCODING, encodings)] {
            for value in values {
                request.headers_mut().append(&name, HeaderValue::from_str(value).unwrap());
            }
        }
        of(&request.into_parts().0, body)
    }

    fn case() -> impl Strategy<Value = Case> {
        let values = || prop::collection::vec("[ab]{0,2}", 0..3);
        ("P|PA|PAT", "/[ab/]{0,2}(\\?[ab]{0,2})?", values(), values(), prop::collection::vec(97..99_u8, 0..3))
    }

    proptest! {
        #[test]
        fn two_requests_have_one_payload_only_if_all_their_parts_are_equal(one in case(), other in case()) {
            prop_assert_eq!(one == other, payload(&one) == payload(&other), "{:?} {:?}", one, other);
        }
    }

    #[test]
    fn what_was_stored_by_an_earlier_version_is_still_the_same_request() {
        let case =
            ("POST".into(), "/pay?a=1".into(), vec!["application/json".into()], vec![], b"{}".to_vec());
        let mut expected = Vec::new();
        for part in [&b"\0\0\0\0\0\0\0\x04POST\0\0\0\0\0\0\0\x08/pay?a=1"[..], b"\0\0\0\0\0\0\0\x01"] {
            expected.extend_from_slice(part);
        }
        expected.extend_from_slice(b"\0\0\0\0\0\0\0\x10application/json\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\x02{}");
        assert_eq!(payload(&case), expected);
    }
}

//! The key of a request: what the header holds, and whose it is.
//!
//! `"abc"`, a string of a structured field (RFC 8941), and `abc` are one key. Anything else is refused rather than guessed at:
//! two clients, or two proxies, that read one header differently would charge twice.

use std::fmt;
use std::sync::Arc;

use baton_protocol::fingerprint::Fingerprint;
use http::HeaderMap;
use http::request::Parts;

use super::IDEMPOTENCY_KEY;
use super::payload::Delimited;
use super::problem::Problem;
use crate::inbox::KEY_LIMIT;

/// The longest name of a caller, in bytes.
pub const CALLER_LIMIT: usize = 1024;

/// The key in the header, or none.
pub(super) fn in_headers(headers: &HeaderMap) -> Result<Option<String>, Problem> {
    let mut given = headers.get_all(IDEMPOTENCY_KEY).iter();
    match (given.next(), given.next()) {
        (None, _) => Ok(None),
        (Some(value), None) => parse(value.as_bytes()).map(Some).map_err(Problem::KeyMalformed),
        (Some(_), Some(_)) => Err(Problem::KeyMalformed("the header is there more than once")),
    }
}

/// An error says what is wrong.
fn parse(value: &[u8]) -> Result<String, &'static str> {
    let value = value.trim_ascii();
    let key = match value.strip_prefix(b"\"") {
        Some(quoted) => unquoted(quoted)?,
        None => bare(value)?,
    };
    match key.len() {
        0 => Err("it is empty"),
        1..=KEY_LIMIT => Ok(key),
        _ => Err("it is longer than 1024 bytes"),
    }
}

/// The rest of a string after its first quote.
fn unquoted(quoted: &[u8]) -> Result<String, &'static str> {
    let mut key = String::new();
    let mut bytes = quoted.iter();
    while let Some(byte) = bytes.next() {
        match byte {
            b'"' if bytes.as_slice().is_empty() => return Ok(key),
            b'"' => return Err("something follows its closing quote"),
            b'\\' => match bytes.next() {
                Some(escaped @ (b'"' | b'\\')) => key.push(char::from(*escaped)),
                _ => return Err("in quotes a backslash stands before a quote or a backslash only"),
            },
            b' '..=b'~' => key.push(char::from(*byte)),
            _ => return Err("it holds something other than printable ASCII"),
        }
    }
    Err("its closing quote is missing")
}

/// A key without quotes. A comma would be the seam of two headers that a proxy has joined.
fn bare(value: &[u8]) -> Result<String, &'static str> {
    value
        .iter()
        .map(|byte| match byte {
            b' ' | b',' | b'"' | b'\\' => {
                Err("without quotes it holds no space, comma, quote or backslash; put it in quotes")
            }
            b'!'..=b'~' => Ok(char::from(*byte)),
            _ => Err("it holds something other than printable ASCII"),
        })
        .collect()
}

/// Whose keys are whose. The caller is part of a key's scope: two callers that choose the same key never meet, so none gets
/// the other's answer. It is as fine as the right to see an answer: a tenant, an account, a user.
#[derive(Clone)]
pub struct Caller(Kind);

type Of = dyn Fn(&Parts) -> Option<String> + Send + Sync;

#[derive(Clone)]
enum Kind {
    Shared,
    Of(Arc<Of>),
}

impl Caller {
    /// The caller of a request, such as the tenant that authentication has put into its extensions (so that goes outside of
    /// this layer). `None`, an empty name, one over [`CALLER_LIMIT`] bytes and one with a NUL are answered by a 400.
    ///
    /// It must be something that the client cannot choose.
    pub fn from_fn(of: impl Fn(&Parts) -> Option<String> + Send + Sync + 'static) -> Self {
        Self(Kind::Of(Arc::new(of)))
    }

    /// One caller, or several that may have each other's answers: whoever sends a key of another's with the same request gets
    /// what the other got.
    #[must_use]
    pub fn shared() -> Self {
        Self(Kind::Shared)
    }

    /// `None` where all are one.
    pub(super) fn of(&self, parts: &Parts) -> Result<Option<String>, Problem> {
        match &self.0 {
            Kind::Shared => Ok(None),
            Kind::Of(of) => of(parts)
                .filter(|caller| (1..=CALLER_LIMIT).contains(&caller.len()) && !caller.contains('\0'))
                .map(Some)
                .ok_or(Problem::CallerUnknown),
        }
    }
}

impl fmt::Debug for Caller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            Kind::Shared => "Caller::shared",
            Kind::Of(_) => "Caller::from_fn",
        })
    }
}

/// The key of one request and whose it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IdempotencyKey(Arc<Key>);

#[derive(Debug, PartialEq, Eq)]
struct Key {
    given: String,
    caller: Option<String>,
    scope: String,
    for_effects: String,
}

impl IdempotencyKey {
    pub(super) fn new(consumer: &str, caller: Option<String>, given: String) -> Self {
        // No topic holds a colon, so that no scope of the consumer's is one of these.
        let scope = match &caller {
            None => "http:shared".to_owned(),
            Some(caller) => format!("http:of/{caller}"),
        };
        let mut whole = Delimited::default();
        for part in [consumer, &scope, &given] {
            whole.put(part.as_bytes());
        }
        let digest = Fingerprint::exact(Some(&whole.0));
        let for_effects = digest.as_str().rsplit(':').next().unwrap_or_default().to_owned();
        Self(Arc::new(Key { given, caller, scope, for_effects }))
    }

    /// As the client sent it, without quotes. Other callers may have the same one.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0.given
    }

    /// Whose it is; `None` with [`Caller::shared`].
    #[must_use]
    pub fn caller(&self) -> Option<&str> {
        self.0.caller.as_deref()
    }

    /// What to give to the services that take the effects: 64 hexadecimal digits made from consumer, caller and key, the same
    /// on every repeat. Two tenants' keys are two of these, also where they are equal.
    #[must_use]
    pub fn for_effects(&self) -> &str {
        &self.0.for_effects
    }

    pub(super) fn scope(&self) -> &str {
        &self.0.scope
    }
}

#[cfg(test)]
mod tests {
    use http::{HeaderValue, Request};
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_key_in_quotes_comes_out_as_it_went_in(key in "[ -~]{1,40}") {
            let quoted = format!("\"{}\"", key.replace('\\', "\\\\").replace('"', "\\\""));
            prop_assert_eq!(parse(quoted.as_bytes()), Ok(key));
        }

        #[test]
        fn a_key_is_the_same_with_and_without_quotes(key in "[!#-+.-Z\\[\\]^-~-]{1,40}") {
            prop_assert_eq!(parse(key.as_bytes()), Ok(key.clone()));
            prop_assert_eq!(parse(format!("\"{key}\"").as_bytes()), Ok(key));
        }

        #[test]
        fn whatever_is_sent_a_key_is_printable_and_fits_or_is_refused(
            value in prop::collection::vec(prop_oneof![Just(b'"'), Just(b'\\'), any::<u8>()], 0..12),
        ) {
            if let Ok(key) = parse(&value) {
                prop_assert!((1..=KEY_LIMIT).contains(&key.len()));
                prop_assert!(key.bytes().all(|byte| (b' '..=b'~').contains(&byte)));
            }
        }
    }

    #[test]
    fn what_is_wrong_with_a_key_is_said() {
        let (longest, too_long) = ("k".repeat(1024), "k".repeat(1025));
        assert_eq!(parse(longest.as_bytes()), Ok(longest.clone()));
        assert_eq!(parse(format!("\"{longest}\"").as_bytes()), Ok(longest));
        for (value, words) in [
            ("", "empty"),
            ("  ", "empty"),
            ("\"\"", "empty"),
            ("\"", "closing quote is missing"),
            ("\"abc", "closing quote is missing"),
            ("\"abc\\\"", "closing quote is missing"),
            ("abc\"", "without quotes"),
            ("a b", "without quotes"),
            ("abc, abc", "without quotes"),
            ("abc,abc", "without quotes"),
            ("\"abc\", \"abc\"", "follows its closing quote"),
            ("\"abc\";v=1", "follows its closing quote"),
            ("\"a\\nb\"", "backslash"),
            ("\"é\"", "printable"),
            ("a\tb", "printable"),
            ("schlüssel", "printable"),
            (too_long.as_str(), "1024"),
        ] {
            let said = parse(value.as_bytes()).expect_err(value);
            assert!(said.contains(words), "{value}: {said}");
        }
    }

    #[test]
    fn a_header_that_is_there_twice_is_refused_even_if_it_says_the_same() {
        let mut headers = HeaderMap::new();
        assert_eq!(in_headers(&headers), Ok(None));
        headers.append(IDEMPOTENCY_KEY, HeaderValue::from_static("abc"));
        assert_eq!(in_headers(&headers), Ok(Some("abc".to_owned())));
        headers.append(IDEMPOTENCY_KEY, HeaderValue::from_static("abc"));
        assert!(matches!(in_headers(&headers), Err(Problem::KeyMalformed(_))));
    }

    #[test]
    fn a_caller_that_cannot_be_told_is_refused_and_never_taken_for_another() {
        let (parts, ()) = Request::new(()).into_parts();
        assert_eq!(Caller::shared().of(&parts), Ok(None));
        let fits = "t".repeat(CALLER_LIMIT);
        for caller in ["shared", "", "a\0b", &fits, &format!("{fits}t")] {
            let named = Caller::from_fn({
                let caller = caller.to_owned();
                move |_| Some(caller.clone())
            });
            let is_fine = caller == "shared" || caller == fits;
            assert_eq!(named.of(&parts).is_ok(), is_fine, "{caller:?}");
        }
        assert_eq!(Caller::from_fn(|_| None).of(&parts), Err(Problem::CallerUnknown));
    }

    #[test]
    fn no_two_consumers_callers_or_keys_give_one_key_for_effects() {
        let key = |consumer: &str, caller: Option<&str>, given: &str| {
            IdempotencyKey::new(consumer, caller.map(str::to_owned), given.to_owned())
        };
        let keys = [
            key("payments", None, "k"),
            key("payments", Some("shared"), "k"),
            key("payments", Some("acme"), "k"),
            key("payments", Some("acm"), "ek"),
            key("refunds", Some("acme"), "k"),
        ];
        for (at, one) in keys.iter().enumerate() {
            assert_eq!(one.for_effects().len(), 64);
            for other in &keys[at + 1..] {
                assert_ne!(one.for_effects(), other.for_effects(), "{one:?} {other:?}");
            }
        }
        // A provider has it on file: another version must not make another one.
        let whole = b"\0\0\0\0\0\0\0\x08payments\0\0\0\0\0\0\0\x0chttp:of/acme\0\0\0\0\0\0\0\x01k";
        assert_eq!(Fingerprint::exact(Some(whole)).as_str(), format!("v1:sha256:{}", keys[2].for_effects()));
    }
}

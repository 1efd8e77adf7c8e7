//! Answers: what is kept of them with the mark, and what a repeat gets.
//!
//! Kept is the status, the headers on a list, and the body, as JSON that an operator can read: `{"format": "http-answer-v1",
//! "status": 201, "headers": [["content-type", "application/json"]], "body": "…"}`. What is not text, or holds a NUL, is
//! `{"base64": "…"}`. Of an answer larger than the limit the body is null: the work is done all the same, and a repeat is told
//! so, not run.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use http::header::{CONTENT_TYPE, HeaderName};
use http::{HeaderMap, HeaderValue, Response, StatusCode};
use serde::{Deserialize, Serialize};

use super::IDEMPOTENCY_REPLAYED;
use super::body::Body;
use crate::Outcome;

/// An answer that can be given again: what [`Reconcile`](super::Reconcile) says of work that took effect without its answer
/// being kept. It should be what the handler would have answered.
///
/// ```
/// use baton_consumer::http::Answer;
/// use http::{HeaderValue, StatusCode, header};
///
/// let answer = Answer::json(StatusCode::CREATED, &["pay-7"])?
///     .header(header::LOCATION, HeaderValue::from_static("/payments/pay-7"));
/// assert_eq!(answer.status(), 201);
/// assert_eq!(answer.headers()["content-type"], "application/json");
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    status: StatusCode,
    headers: HeaderMap,
    body: Bytes,
}

impl Answer {
    /// Without headers and body.
    #[must_use]
    pub fn new(status: StatusCode) -> Self {
        Self { status, headers: HeaderMap::new(), body: Bytes::new() }
    }

    /// With a body of JSON, and a `Content-Type` that says so.
    ///
    /// # Errors
    ///
    /// When the value cannot be written as JSON.
    pub fn json<T: Serialize + ?Sized>(status: StatusCode, value: &T) -> Result<Self, serde_json::Error> {
        let json = HeaderValue::from_static("application/json");
        Ok(Self::new(status).header(CONTENT_TYPE, json).body(serde_json::to_vec(value)?))
    }

    /// One header more. It is kept whatever the layer's list says.
    #[must_use]
    pub fn header(mut self, name: HeaderName, value: HeaderValue) -> Self {
        self.headers.append(name, value);
        self
    }

    /// Its body.
    #[must_use]
    pub fn body(mut self, body: impl Into<Bytes>) -> Self {
        self.body = body.into();
        self
    }

    /// Its status.
    #[must_use]
    pub fn status(&self) -> StatusCode {
        self.status
    }

    /// Its headers.
    #[must_use]
    pub fn headers(&self) -> &HeaderMap {
        &self.headers
    }

    /// What to keep of the head of a response.
    pub(super) fn head<B>(response: &Response<B>, kept: &[HeaderName]) -> Self {
        let mut head = Self::new(response.status());
        for (name, value) in response.headers().iter().filter(|(name, _)| kept.contains(name)) {
            head.headers.append(name, value.clone());
        }
        head
    }

    /// As it is stored: without its body, and if need be without its headers, where it is larger than `limit` bytes.
    pub(super) fn to_stored(&self, limit: usize) -> Result<Outcome, serde_json::Error> {
        if self.headers_size().saturating_add(self.body.len()) > limit {
            return self.to_stub(limit);
        }
        Outcome::json(&Stored { body: Some(Text::of(&self.body)), ..self.stored_head() })
    }

    /// As it is stored when its body is too large to keep.
    pub(super) fn to_stub(&self, limit: usize) -> Result<Outcome, serde_json::Error> {
        let head = self.stored_head();
        if self.headers_size() > limit {
            return Outcome::json(&Stored { headers: Vec::new(), ..head });
        }
        Outcome::json(&head)
    }

    fn stored_head(&self) -> Stored {
        let headers = self.headers.iter();
        Stored {
            format: FORMAT.to_owned(),
            status: self.status.as_u16(),
            headers: headers
                .map(|(name, value)| (name.as_str().to_owned(), Text::of(value.as_bytes())))
                .collect(),
            body: None,
        }
    }

    fn headers_size(&self) -> usize {
        self.headers.iter().map(|(name, value)| name.as_str().len() + value.len()).sum()
    }

    fn again<B>(self) -> Response<Body<B>> {
        replayed(Response::from(self).map(Body::whole))
    }
}

/// For a handler that makes up its answer as the look-up does.
impl From<Answer> for Response<Bytes> {
    fn from(answer: Answer) -> Self {
        let mut response = Self::new(answer.body);
        *response.status_mut() = answer.status;
        *response.headers_mut() = answer.headers;
        response
    }
}

/// Says that it is not the first time.
pub(super) fn replayed<B>(mut response: Response<B>) -> Response<B> {
    response.headers_mut().insert(IDEMPOTENCY_REPLAYED, HeaderValue::from_static("true"));
    response
}

/// What was found with the mark.
pub(super) enum Kept<B> {
    Whole(Response<Body<B>>),
    /// Only that it was answered, with this status and these headers.
    Stub(StatusCode, HeaderMap),
    /// Not an answer, or not one that this version can read.
    Unreadable,
}

/// Reads back what [`Answer::to_stored`] wrote.
pub(super) fn read<B>(outcome: Option<&Outcome>) -> Kept<B> {
    let stored = outcome.and_then(|outcome| outcome.decode::<Stored>().ok());
    let Some(answer) = stored.and_then(Stored::into_answer) else { return Kept::Unreadable };
    match answer {
        (answer, Some(body)) => Kept::Whole(answer.body(body).again()),
        (answer, None) => Kept::Stub(answer.status, answer.headers),
    }
}

const FORMAT: &str = "http-answer-v1";

/// A public format: inbox rows keep it.
#[derive(Serialize, Deserialize)]
struct Stored {
    format: String,
    status: u16,
    headers: Vec<(String, Text)>,
    /// `null` when it was too large to keep.
    body: Option<Text>,
}

impl Stored {
    fn into_answer(self) -> Option<(Answer, Option<Vec<u8>>)> {
        if self.format != FORMAT {
            return None;
        }
        let mut answer = Answer::new(StatusCode::from_u16(self.status).ok()?);
        for (name, value) in self.headers {
            answer = answer.header(name.parse().ok()?, HeaderValue::from_bytes(&value.into_bytes()?).ok()?);
        }
        let body = match self.body {
            Some(body) => Some(body.into_bytes()?),
            None => None,
        };
        Some((answer, body))
    }
}

#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum Text {
    Plain(String),
    Base64 { base64: String },
}

impl Text {
    fn of(bytes: &[u8]) -> Self {
        match std::str::from_utf8(bytes) {
            Ok(text) if !text.contains('\0') => Self::Plain(text.to_owned()),
            _ => Self::Base64 { base64: STANDARD.encode(bytes) },
        }
    }

    fn into_bytes(self) -> Option<Vec<u8>> {
        match self {
            Self::Plain(text) => Some(text.into_bytes()),
            Self::Base64 { base64 } => STANDARD.decode(base64).ok(),
        }
    }
}

#[cfg(test)]
mod tests {
    use http::header::{LOCATION, SET_COOKIE};
    use proptest::prelude::*;

    use super::*;

    fn read_back(outcome: &Outcome) -> Kept<()> {
        read(Some(outcome))
    }

    proptest! {
        #[test]
        fn an_answer_comes_back_as_it_was(
            status in 200_u16..500,
            values in prop::collection::vec(prop::collection::vec(prop_oneof![32..127_u8, 128..=255_u8], 0..9), 0..4),
            body in prop::collection::vec(any::<u8>(), 0..40),
        ) {
            let mut answer = Answer::new(StatusCode::from_u16(status).unwrap()).body(body);
            for value in values {
                answer = answer.header(LOCATION, HeaderValue::from_bytes(&value).unwrap());
            }
            let Kept::Whole(response) = read_back(&answer.to_stored(1024).unwrap()) else {
                panic!("it is whole")
            };
            prop_assert_eq!(response.status(), answer.status);
            let mut headers = answer.headers.clone();
            headers.insert(IDEMPOTENCY_REPLAYED, HeaderValue::from_static("true"));
            prop_assert_eq!(response.headers(), &headers);
            prop_assert_eq!(format!("{:?}", response.body()), format!("{:?}", Body::<()>::whole(answer.body)));
        }
    }

    #[test]
    fn what_is_stored_can_be_read_by_an_operator_and_by_later_versions() {
        let answer = Answer::json(StatusCode::CREATED, "paid").unwrap();
        let stored = answer.to_stored(1024).unwrap();
        let text = r#"{"format":"http-answer-v1","status":201,"headers":[["content-type","application/json"]],"body":"\"paid\""}"#;
        assert_eq!(stored.as_json(), text);
        let stored = Answer::new(StatusCode::OK).body("a\0b").to_stored(1024).unwrap();
        assert!(stored.as_json().ends_with(r#""body":{"base64":"YQBi"}}"#), "{}", stored.as_json());
    }

    #[test]
    fn of_an_answer_over_the_limit_the_head_is_kept() {
        let location = HeaderValue::from_static("/payments/7");
        let head = Answer::new(StatusCode::CREATED).header(LOCATION, location.clone());
        let fits = head.clone().body(vec![b'a'; 81]);
        assert!(matches!(read_back(&fits.to_stored(100).unwrap()), Kept::Whole(_)), "8 + 11 + 81 bytes");
        let over = head.body(vec![b'a'; 82]).to_stored(100).unwrap();
        let Kept::Stub(status, headers) = read_back(&over) else { panic!("it is a stub") };
        assert_eq!((status, &headers[LOCATION]), (StatusCode::CREATED, &location));
        let headers_over = fits.to_stored(18).unwrap();
        assert!(
            matches!(read_back(&headers_over), Kept::Stub(StatusCode::CREATED, headers) if headers.is_empty())
        );
    }

    #[test]
    fn only_headers_on_the_list_are_kept() {
        let response = Response::builder().header(LOCATION, "/7").header(SET_COOKIE, "session=1").body(());
        let head = Answer::head(&response.unwrap(), &[LOCATION]);
        assert_eq!(head.headers.keys().collect::<Vec<_>>(), [LOCATION]);
    }

    #[test]
    fn what_is_not_an_answer_is_not_given_as_one() {
        assert!(matches!(read::<()>(None), Kept::Unreadable));
        for text in [
            "\"paid\"",
            r#"{"format":"http-answer-v2","status":200,"headers":[],"body":""}"#,
            r#"{"format":"http-answer-v1","status":7,"headers":[],"body":""}"#,
            r#"{"format":"http-answer-v1","status":200,"headers":[["a b","c"]],"body":""}"#,
            r#"{"format":"http-answer-v1","status":200,"headers":[],"body":{"base64":"?"}}"#,
        ] {
            let outcome = Outcome::stored(text.to_owned()).unwrap();
            assert!(matches!(read_back(&outcome), Kept::Unreadable), "{text}");
        }
    }
}

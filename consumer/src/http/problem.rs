//! What the layer says instead of an answer, as `application/problem+json` (RFC 9457). Types and statuses are a public format; the
//! page of [`http`](super) has them as a table.

use std::time::Duration;

use bytes::Bytes;
use http::header::{CONTENT_TYPE, RETRY_AFTER};
use http::{HeaderValue, Response, StatusCode};
use serde::Serialize;

use super::body::Body;
use super::key::CALLER_LIMIT;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Problem {
    KeyMissing,
    /// What is wrong with it.
    KeyMalformed(&'static str),
    CallerUnknown,
    BodyUnreadable,
    BodyTooLarge {
        limit: usize,
    },
    InProgress,
    PayloadDiffers,
    Unavailable,
    OutcomeUnknown,
    Failed,
    GivenUp,
    AnswerNotKept {
        status: Option<StatusCode>,
    },
}

/// The members of the body.
#[derive(Serialize)]
struct Details {
    r#type: String,
    title: &'static str,
    status: u16,
    detail: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    answer_status: Option<u16>,
}

impl Problem {
    /// Status, the end of `type`, title.
    fn kind(self) -> (StatusCode, &'static str, &'static str) {
        match self {
            Self::KeyMissing => (StatusCode::BAD_REQUEST, "key-missing", "Idempotency-Key is missing"),
            Self::KeyMalformed(_) => {
                (StatusCode::BAD_REQUEST, "key-malformed", "Idempotency-Key is malformed")
            }
            Self::CallerUnknown => {
                (StatusCode::BAD_REQUEST, "caller-unknown", "The request does not say whose it is")
            }
            Self::BodyUnreadable => {
                (StatusCode::BAD_REQUEST, "body-unreadable", "The request's body broke off")
            }
            Self::BodyTooLarge { .. } => {
                (StatusCode::PAYLOAD_TOO_LARGE, "body-too-large", "The request's body is too large")
            }
            Self::InProgress => (StatusCode::CONFLICT, "in-progress", "The request is in progress"),
            Self::PayloadDiffers => (
                StatusCode::UNPROCESSABLE_ENTITY,
                "payload-differs",
                "Idempotency-Key was used for another request",
            ),
            Self::Unavailable => {
                (StatusCode::SERVICE_UNAVAILABLE, "unavailable", "Requests cannot be taken now")
            }
            Self::OutcomeUnknown => {
                (StatusCode::SERVICE_UNAVAILABLE, "outcome-unknown", "The outcome was not recorded")
            }
            Self::Failed => (StatusCode::INTERNAL_SERVER_ERROR, "failed", "The request failed half-way"),
            Self::GivenUp => (StatusCode::INTERNAL_SERVER_ERROR, "given-up", "The request was given up"),
            Self::AnswerNotKept { .. } => (StatusCode::GONE, "answer-not-kept", "The answer was not kept"),
        }
    }

    fn detail(self) -> String {
        let text = match self {
            Self::KeyMissing => {
                "send a key of your own making, new for each piece of work, the same on every repeat"
            }
            Self::KeyMalformed(what) => what,
            Self::CallerUnknown => {
                return format!(
                    "keys belong to callers, and none is named by this request, or not in 1 to {CALLER_LIMIT} bytes without NUL"
                );
            }
            Self::BodyUnreadable => "nothing ran; repeat the request with the same key",
            Self::BodyTooLarge { limit } => {
                return format!("at most {limit} bytes are taken with an Idempotency-Key; nothing ran");
            }
            Self::InProgress => {
                "it is being worked on, or what became of it cannot be told yet; repeat it with the same key"
            }
            Self::PayloadDiffers => {
                "method, path, query, content type, encoding or body are not those that came with this key first; nothing ran; use a new key for a new request"
            }
            Self::Unavailable => "nothing ran; repeat the request with the same key",
            Self::OutcomeUnknown => {
                "it ran, and what became of it is found out when it is repeated with the same key"
            }
            Self::Failed => "what became of it is found out when it is repeated with the same key",
            Self::GivenUp => {
                "its attempts are spent, and it is not run again; whether it took effect must be found out before anything is sent with a new key"
            }
            Self::AnswerNotKept { .. } => {
                "the request took effect when it came first; its answer was too large to keep or cannot be read; it is not run again"
            }
        };
        text.to_owned()
    }

    pub(super) fn response<B>(self, retry_after: Duration) -> Response<Body<B>> {
        let (status, kind, title) = self.kind();
        let answer_status = match self {
            Self::AnswerNotKept { status } => status.map(|status| status.as_u16()),
            _ => None,
        };
        let r#type = format!("urn:baton:idempotency:{kind}");
        let details =
            Details { r#type, title, status: status.as_u16(), detail: self.detail(), answer_status };
        // Texts and numbers can be written.
        let body = serde_json::to_vec(&details).unwrap_or_default();
        let mut response = Response::new(Body::whole(Bytes::from(body)));
        *response.status_mut() = status;
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
        if matches!(self, Self::InProgress | Self::Unavailable | Self::OutcomeUnknown) {
            // Whole seconds: rounded up, and never "at once".
            let seconds = retry_after.as_secs() + u64::from(retry_after.subsec_nanos() > 0);
            headers.insert(RETRY_AFTER, seconds.max(1).into());
        }
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [Problem; 12] = [
        Problem::KeyMissing,
        Problem::KeyMalformed("what is wrong"),
        Problem::CallerUnknown,
        Problem::BodyUnreadable,
        Problem::BodyTooLarge { limit: 7 },
        Problem::InProgress,
        Problem::PayloadDiffers,
        Problem::Unavailable,
        Problem::OutcomeUnknown,
        Problem::Failed,
        Problem::GivenUp,
        Problem::AnswerNotKept { status: Some(StatusCode::CREATED) },
    ];

    #[test]
    fn every_problem_stands_in_the_table_with_its_status() {
        let page = include_str!("../http.rs");
        let lines: Vec<&str> = page.lines().filter(|line| line.starts_with("//! | `")).collect();
        for problem in ALL {
            let (status, kind, _) = problem.kind();
            let named = format!("`{kind}`");
            let line = lines.iter().find(|line| line.contains(&named)).unwrap_or_else(|| panic!("{kind}"));
            assert!(line.contains(&format!("| {}", status.as_u16())), "{line}");
            let asks = problem.response::<()>(Duration::ZERO).headers().contains_key(RETRY_AFTER);
            assert_eq!(line.contains("`Retry-After`"), asks, "{line}");
        }
    }

    #[test]
    fn retry_after_is_whole_seconds_and_never_none() {
        for (given, said) in [(0, "1"), (1, "1"), (1000, "1"), (1001, "2"), (30_000, "30")] {
            let response = Problem::InProgress.response::<()>(Duration::from_millis(given));
            assert_eq!(response.headers()[RETRY_AFTER], said);
        }
    }
}

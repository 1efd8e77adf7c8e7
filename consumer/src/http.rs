//! A `tower` layer for the header `Idempotency-Key`: a request is run once, and whoever repeats it gets the first answer.
//!
//! Over the leased inbox ([`Inbox::run_leased`]), because a payment is an effect elsewhere:
//!
//! ```text
//! key, caller, body ─┬─ one is bad ─────────────────────────────▶ 400, 413: nothing was claimed
//!                    └─▶ claim ─┬─ ours ─▶ service ─┬─ final answer ──────▶ stored with the mark, then given
//!                               │                   ├─ answer not final ──▶ given; the key is free
//!                               │                   └─ error, panic ──────▶ error, 500; the key is free
//!                               ├─ left behind, or free again ─▶ lookup ─┬─ applied ────────▶ its answer, stored
//!                               │                                        ├─ not applied ────▶ service, as above
//!                               │                                        └─ still unknown ──▶ 409, Retry-After
//!                               ├─ done ────────────▶ the stored answer, Idempotency-Replayed: true
//!                               ├─ in progress ─────▶ 409, Retry-After
//!                               ├─ another payload ─▶ 422, whatever the state
//!                               ├─ attempts spent ──▶ 500
//!                               └─ no database ─────▶ 503, Retry-After: nothing ran
//! ```
//!
//! The row of `inbox.message` is authoritative, and a final answer is given only once it is stored: two repeats never get two
//! answers. An answer is kept until its row is purged. Nothing purges by itself here: the service calls [`Inbox::purge`], with a horizon
//! longer than any client repeats. After that a repeat is a first attempt: it runs, and [`Reconcile::lookup`] is *not* asked. Dead and
//! unfinished keys are never purged.
//!
//! **The same request** is the same caller, key, method, path with query, `Content-Type`, `Content-Encoding` and exact body.
//! The caller is part of the scope ([`Caller`]), the rest is compared: one key at two endpoints, or with the JSON written in
//! another order, is a 422. Two layers that share a consumer's inbox share its keys.
//!
//! **Final** is an answer that a repeat should get too: by default ([`is_final`]) everything below 500 except 401, 408, 409, 423,
//! 425 and 429, which say "not now" or nothing about the work. What is not final spends an attempt
//! ([`Inbox::attempts`]) and frees the key, and the next request with it asks [`Reconcile::lookup`] before it runs anything:
//! a 500 may come after the charge.
//!
//! **Large answers.** A final answer is collected before its first byte goes out, up to [`Builder::answer_limit`]. A larger
//! one, a streamed one too, is given to its client in full, but kept only as status and headers: the work is done, so it
//! is marked as done, and a repeat gets a 410 that says so. It is never run again for the sake of its answer. It is marked
//! when the limit is passed: a handler makes its effects before it answers, not while its body is read. A body that breaks
//! off below the limit is no answer: 500, and the next one asks.
//!
//! **Clients that hang up.** Once the body is there the work runs in a task of its own, which the client's going does not end; its
//! answer waits for the repeat. Who shuts down waits for these tasks: [`IdempotencyLayer::running`]. A process that is
//! killed leaves the lease, which runs out after [`Inbox::lease_ttl`]; work that takes longer says that it moves on, by
//! [`Idempotency::progress`]. Task-local values do not reach the service; extensions and the current tracing span do.
//!
//! **Problems.** What the layer says itself is `application/problem+json` (RFC 9457), told apart by `type`:
//!
//! | `urn:baton:idempotency:` | status | ran here | the client |
//! |---|---|---|---|
//! | `key-missing`, `key-malformed`, `caller-unknown`, `body-unreadable` | 400 | no | mends the request |
//! | `body-too-large` | 413 | no | sends less |
//! | `in-progress` | 409, `Retry-After` | no | repeats with the same key |
//! | `payload-differs` | 422 | no | takes a new key: this one stands for another request |
//! | `unavailable` | 503, `Retry-After` | no | repeats with the same key |
//! | `outcome-unknown` | 503, `Retry-After` | yes, unmarked | repeats with the same key |
//! | `failed` | 500 | yes, half-way | repeats with the same key |
//! | `given-up` | 500 | no | asks a human, *not* with a new key: whether it took effect is not known |
//! | `answer-not-kept` | 410 | before | is done: it took effect; `answer_status` says with which status |
//!
//! **Where it goes.** Inside authentication (or the caller is not known) and inside compression (or compressed answers are kept);
//! outside of routers that strip a prefix. A time-out outside of it ends the waiting, not the work; one inside of it drops
//! the handler half-way, and its 408 is not final. Trailers are dropped.
//!
//! ```no_run
//! use baton_consumer::Inbox;
//! use baton_consumer::http::{Answer, Caller, Idempotency, IdempotencyLayer, Question, Reconciled};
//! use http::StatusCode;
//!
//! # #[derive(Clone)] struct Tenant(String);
//! # async fn find_charge(key: &str) -> Result<Option<String>, std::io::Error> { Ok(Some(key.to_owned())) }
//! # async fn charge(key: &str) -> Result<String, std::io::Error> { Ok(key.to_owned()) }
//! # fn example(pool: sqlx::PgPool) -> Result<(), baton_consumer::inbox::Error> {
//! let caller = Caller::from_fn(|parts| parts.extensions.get::<Tenant>().map(|tenant| tenant.0.clone()));
//! // Asked before anything runs a second time: the provider, by the key that it was given.
//! let lookup = |question: Question| async move {
//!     match find_charge(question.key().for_effects()).await {
//!         Ok(Some(id)) => Answer::json(StatusCode::CREATED, &id).map_or(Reconciled::StillUnknown, Reconciled::Applied),
//!         Ok(None) => Reconciled::NotApplied,
//!         Err(_) => Reconciled::StillUnknown,
//!     }
//! };
//! let layer = IdempotencyLayer::builder(Inbox::new("payments", pool)?, caller, lookup).build();
//!
//! // In a handler, where axum has it as `Extension<Idempotency>`:
//! async fn pay(request: http::Request<Vec<u8>>) -> Result<String, std::io::Error> {
//!     let Some(idempotency) = request.extensions().get::<Idempotency>() else { return Ok("no key".to_owned()) };
//!     charge(idempotency.key().for_effects()).await
//! }
//! # Ok(())
//! # }
//! ```

mod answer;
mod attempt;
mod body;
mod key;
mod lookup;
mod payload;
mod problem;
mod running;
mod service;

pub use answer::Answer;
pub use attempt::Idempotency;
pub use body::Body;
pub use key::{CALLER_LIMIT, Caller, IdempotencyKey};
pub use lookup::{Question, Reconcile, Reconciled};
pub use running::Running;
pub use service::IdempotencyService;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use http::header::{self, HeaderName};
use http::{Method, StatusCode};
use tower_layer::Layer;

use crate::Inbox;
use running::Count;

/// The header of a request.
pub const IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");

/// The header of an answer that was given before.
pub const IDEMPOTENCY_REPLAYED: HeaderName = HeaderName::from_static("idempotency-replayed");

/// The headers of an answer that are kept unless set otherwise: what describes the body, and where the thing is. Never a cookie.
pub const KEPT_HEADERS: [HeaderName; 10] = [
    header::CACHE_CONTROL,
    header::CONTENT_DISPOSITION,
    header::CONTENT_ENCODING,
    header::CONTENT_LANGUAGE,
    header::CONTENT_LOCATION,
    header::CONTENT_TYPE,
    header::ETAG,
    header::LAST_MODIFIED,
    header::LINK,
    header::LOCATION,
];

/// Whether an answer is final unless set otherwise: below 500, and none of 401, 408, 409, 423, 425, 429.
///
/// Those six say "not now", or nothing about the work at all: who came without a valid token may come again with one. A 400, 402,
/// 404 or 422 is an answer to this very request, and a repeat gets it too.
#[must_use]
pub fn is_final(status: StatusCode) -> bool {
    let is_for_now = matches!(
        status,
        StatusCode::UNAUTHORIZED
            | StatusCode::REQUEST_TIMEOUT
            | StatusCode::CONFLICT
            | StatusCode::LOCKED
            | StatusCode::TOO_EARLY
            | StatusCode::TOO_MANY_REQUESTS
    );
    (200..500).contains(&status.as_u16()) && !is_for_now
}

/// Runs a request with an `Idempotency-Key` once. See the [module](self).
pub struct IdempotencyLayer<R>(Arc<Settings<R>>);

/// Settings of an [`IdempotencyLayer`].
#[must_use]
pub struct Builder<R>(Settings<R>);

type IsFinal = dyn Fn(StatusCode) -> bool + Send + Sync;

struct Settings<R> {
    inbox: Inbox,
    caller: Caller,
    reconcile: R,
    methods: Vec<Method>,
    without_key: WithoutKey,
    request_limit: usize,
    answer_limit: usize,
    kept_headers: Vec<HeaderName>,
    is_final: Box<IsFinal>,
    retry_after: Duration,
    running: Count,
}

enum WithoutKey {
    Refused,
    PassedOn,
}

impl<R: Reconcile> IdempotencyLayer<R> {
    /// With the inbox of the service's own consumer name (which sets the lease and the attempts), who a request is from, and
    /// who is asked before anything runs again.
    ///
    /// A name belongs to this layer or to a Kafka consumer, not to both.
    pub fn builder(inbox: Inbox, caller: Caller, reconcile: R) -> Builder<R> {
        Builder(Settings {
            inbox,
            caller,
            reconcile,
            methods: vec![Method::POST, Method::PATCH],
            without_key: WithoutKey::Refused,
            request_limit: Builder::<R>::DEFAULT_REQUEST_LIMIT,
            answer_limit: Builder::<R>::DEFAULT_ANSWER_LIMIT,
            kept_headers: KEPT_HEADERS.to_vec(),
            is_final: Box::new(is_final),
            retry_after: Builder::<R>::DEFAULT_RETRY_AFTER,
            running: Count::default(),
        })
    }
}

impl<R> IdempotencyLayer<R> {
    /// What is being run, to be waited for before the process ends.
    #[must_use]
    pub fn running(&self) -> Running {
        self.0.running.watch()
    }
}

impl<R> Builder<R> {
    /// The longest body of a request, unless set otherwise.
    pub const DEFAULT_REQUEST_LIMIT: usize = 1024 * 1024;

    /// The largest answer that is kept, unless set otherwise.
    pub const DEFAULT_ANSWER_LIMIT: usize = 256 * 1024;

    /// When a client is told to come again, unless set otherwise.
    pub const DEFAULT_RETRY_AFTER: Duration = Duration::from_secs(1);

    /// The methods that it is for; default POST and PATCH. Requests by others pass through untouched, key or not.
    pub fn methods(mut self, methods: impl IntoIterator<Item = Method>) -> Self {
        self.0.methods = methods.into_iter().collect();
        self
    }

    /// Lets a request without a key through untouched, run as often as it comes; by default it is a 400. A key that is
    /// malformed is always one.
    pub fn optional(mut self) -> Self {
        self.0.without_key = WithoutKey::PassedOn;
        self
    }

    /// The longest body of a request, in bytes; default [`DEFAULT_REQUEST_LIMIT`](Self::DEFAULT_REQUEST_LIMIT), 1 MiB. It is
    /// held in memory for as long as the request runs. A longer one is a 413 before anything runs.
    pub fn request_limit(mut self, bytes: usize) -> Self {
        self.0.request_limit = bytes;
        self
    }

    /// The largest answer that is kept, its kept headers and its body together, in bytes; default
    /// [`DEFAULT_ANSWER_LIMIT`](Self::DEFAULT_ANSWER_LIMIT), 256 KiB. Of a larger one a repeat learns only that it took effect.
    pub fn answer_limit(mut self, bytes: usize) -> Self {
        self.0.answer_limit = bytes;
        self
    }

    /// The headers of an answer that a repeat gets too; default [`KEPT_HEADERS`]. They lie in the database for as long as the row
    /// does: no secrets.
    pub fn kept_headers(mut self, names: impl IntoIterator<Item = HeaderName>) -> Self {
        self.0.kept_headers = names.into_iter().collect();
        self
    }

    /// Which answers are stored and given again; default [`is_final`]. All others free the key.
    pub fn final_if(mut self, is_final: impl Fn(StatusCode) -> bool + Send + Sync + 'static) -> Self {
        self.0.is_final = Box::new(is_final);
        self
    }

    /// When a client is told to come again: in whole seconds, rounded up, at least one. Default
    /// [`DEFAULT_RETRY_AFTER`](Self::DEFAULT_RETRY_AFTER), 1 s.
    pub fn retry_after(mut self, after: Duration) -> Self {
        self.0.retry_after = after;
        self
    }

    /// The layer.
    #[must_use]
    pub fn build(self) -> IdempotencyLayer<R> {
        IdempotencyLayer(Arc::new(self.0))
    }
}

impl<S, R> Layer<S> for IdempotencyLayer<R> {
    type Service = IdempotencyService<S, R>;

    fn layer(&self, inner: S) -> Self::Service {
        IdempotencyService::new(inner, Arc::clone(&self.0))
    }
}

impl<R> Clone for IdempotencyLayer<R> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<R> fmt::Debug for IdempotencyLayer<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt_as("IdempotencyLayer", f)
    }
}

impl<R> fmt::Debug for Builder<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt_as("Builder", f)
    }
}

impl<R> Settings<R> {
    fn fmt_as(&self, name: &str, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut fields = f.debug_struct(name);
        fields.field("inbox", &self.inbox).field("caller", &self.caller).field("methods", &self.methods);
        fields.finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_says_not_now_is_not_final() {
        let all = (100..600).filter_map(|status| StatusCode::from_u16(status).ok());
        let not_final: Vec<u16> =
            all.filter(|status| !is_final(*status)).map(|status| status.as_u16()).collect();
        let expected: Vec<u16> = (100..200).chain([401, 408, 409, 423, 425, 429]).chain(500..600).collect();
        assert_eq!(not_final, expected);
    }
}

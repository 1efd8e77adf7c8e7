//! One request through the layer: admitted, claimed, run in a task of its own, answered.

use std::fmt;
use std::mem;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use baton_protocol::report::chain;
use bytes::Bytes;
use http::request::Parts;
use http::{Request, Response};
use http_body::Body as HttpBody;
use tower_service::Service;
use tracing::Instrument as _;

use super::answer::{self, Answer, Kept};
use super::attempt;
use super::body::{self, Body, Read};
use super::key::{self, IdempotencyKey};
use super::lookup::{Asked, Reconcile};
use super::payload;
use super::problem::Problem;
use super::{Settings, WithoutKey};
use crate::inbox::{Error, Lease};
use crate::{BoxError, Failure, Once, Outcome, Verdict};

/// What an [`IdempotencyLayer`](super::IdempotencyLayer) makes of a service.
///
/// Its errors are the service's own. It has to be called within a tokio runtime.
pub struct IdempotencyService<S, R> {
    inner: S,
    settings: Arc<Settings<R>>,
}

impl<S, R> IdempotencyService<S, R> {
    pub(super) fn new(inner: S, settings: Arc<Settings<R>>) -> Self {
        Self { inner, settings }
    }
}

impl<S: Clone, R> Clone for IdempotencyService<S, R> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), settings: Arc::clone(&self.settings) }
    }
}

impl<S, R> fmt::Debug for IdempotencyService<S, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.settings.fmt_as("IdempotencyService", f)
    }
}

/// What comes of one call.
type Answered<P, E> = Result<Response<Body<P>>, E>;

impl<S, R, Q, P> Service<Request<Q>> for IdempotencyService<S, R>
where
    S: Service<Request<Body<Q>>, Response = Response<P>> + Clone + Send + 'static,
    S::Future: Send,
    S::Error: Send + 'static,
    R: Reconcile + 'static,
    Q: HttpBody<Data = Bytes> + Send + 'static,
    Q::Error: Into<BoxError>,
    P: HttpBody<Data = Bytes> + Send + 'static,
    P::Error: Into<BoxError>,
{
    type Response = Response<Body<P>>;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Answered<P, S::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<Q>) -> Self::Future {
        // The one that is ready is used, its clone stays.
        let clone = self.inner.clone();
        let inner = mem::replace(&mut self.inner, clone);
        Box::pin(answer(Arc::clone(&self.settings), inner, request))
    }
}

/// Dropped before the body is there, nothing has happened; dropped later, the work goes on.
async fn answer<S, R, Q, P>(
    settings: Arc<Settings<R>>,
    mut inner: S,
    request: Request<Q>,
) -> Answered<P, S::Error>
where
    S: Service<Request<Body<Q>>, Response = Response<P>> + Send + 'static,
    S::Future: Send,
    S::Error: Send + 'static,
    R: Reconcile + 'static,
    Q: HttpBody<Data = Bytes> + Send + 'static,
    Q::Error: Into<BoxError>,
    P: HttpBody<Data = Bytes> + Send + 'static,
    P::Error: Into<BoxError>,
{
    let retry_after = settings.retry_after;
    let (parts, body) = request.into_parts();
    let admitted = match settings.admit(&parts) {
        Ok(Admitted::ToPass) => {
            let passed = inner.call(Request::from_parts(parts, Body::untouched(body))).await?;
            return Ok(passed.map(Body::untouched));
        }
        Ok(Admitted::By(key)) => settings.receive(body).await.map(|body| Admission { key, parts, body }),
        Err(problem) => Err(problem),
    };
    let admission = match admitted {
        Ok(admission) => admission,
        Err(problem) => return Ok(problem.response(retry_after)),
    };
    let begun = settings.running.begin();
    let work = async move {
        let answered = run(&settings, inner, &admission).await;
        drop(begun);
        answered
    };
    match tokio::spawn(work.in_current_span()).await {
        Ok(answered) => answered,
        // It panicked outside of the service, or the runtime is going: the lease is left to run out.
        Err(error) => {
            tracing::error!(%error, "a request's task ended before its work did");
            Ok(Problem::OutcomeUnknown.response(retry_after))
        }
    }
}

enum Admitted {
    /// It is none of the layer's business.
    ToPass,
    By(IdempotencyKey),
}

/// A request that may be claimed.
struct Admission {
    key: IdempotencyKey,
    parts: Parts,
    body: Bytes,
}

impl<R> Settings<R> {
    fn admit(&self, parts: &Parts) -> Result<Admitted, Problem> {
        if !self.methods.contains(&parts.method) {
            return Ok(Admitted::ToPass);
        }
        let given = match (key::in_headers(&parts.headers)?, &self.without_key) {
            (Some(given), _) => given,
            (None, WithoutKey::PassedOn) => return Ok(Admitted::ToPass),
            (None, WithoutKey::Refused) => return Err(Problem::KeyMissing),
        };
        let caller = self.caller.of(parts)?;
        Ok(Admitted::By(IdempotencyKey::new(self.inbox.consumer(), caller, given)))
    }

    async fn receive<Q>(&self, body: Q) -> Result<Bytes, Problem>
    where
        Q: HttpBody<Data = Bytes>,
        Q::Error: Into<BoxError>,
    {
        match body::read(body, self.request_limit).await {
            Ok(Read::Whole(bytes)) => Ok(bytes),
            Ok(Read::TooLong(_)) => Err(Problem::BodyTooLarge { limit: self.request_limit }),
            Err(error) => {
                tracing::debug!(error = chain(error.into().as_ref()), "a request's body broke off");
                Err(Problem::BodyUnreadable)
            }
        }
    }
}

/// Claims, runs and marks, and says what to answer.
async fn run<S, R, Q, P>(settings: &Settings<R>, mut inner: S, admission: &Admission) -> Answered<P, S::Error>
where
    S: Service<Request<Body<Q>>, Response = Response<P>> + Send + 'static,
    S::Future: Send,
    S::Error: Send + 'static,
    R: Reconcile + 'static,
    Q: Send + 'static,
    P: HttpBody<Data = Bytes> + Send + 'static,
    P::Error: Into<BoxError>,
{
    let Admission { key, parts, body } = admission;
    let asked =
        Asked { reconcile: &settings.reconcile, key, parts, body, answer_limit: settings.answer_limit };
    let mut has_run = false;
    let mut answered = None;
    let action = async |lease: &mut Lease<'_>| {
        has_run = true;
        let (verdict, answer) = attempt::under(lease, key.clone(), |idempotency| async {
            let mut parts = parts.clone();
            parts.extensions.insert(idempotency);
            let request = Request::from_parts(parts, Body::whole(body.clone()));
            match inner.call(request).await {
                Ok(response) => {
                    let (verdict, response) = settings.judge(response).await;
                    (verdict, response.map(Ok))
                }
                Err(error) => (Verdict::unknown("the service failed"), Some(Err(error))),
            }
        })
        .await;
        answered = answer;
        verdict
    };
    let payload = payload::of(parts, body);
    let once = settings.inbox.run_leased(key.scope(), key.as_str(), &payload, &asked, action).await;
    let problem = match once {
        Ok(Once::Fresh(_)) => match answered {
            Some(answered) => return answered,
            None => Problem::OutcomeUnknown,
        },
        Ok(Once::Duplicate(outcome)) => return Ok(settings.repeat(key, outcome.as_ref())),
        // Only a record is too old, by its time; a request has none.
        Ok(Once::InProgress | Once::TooOld) => Problem::InProgress,
        Ok(Once::Conflict) => Problem::PayloadDiffers,
        Ok(Once::Dead { cause, error }) => {
            tracing::warn!(key = key.as_str(), caller = key.caller(), cause, error, "a dead key was used");
            Problem::GivenUp
        }
        Ok(Once::Failed(failure)) => {
            told(key, &failure);
            match answered {
                Some(answered) => return answered,
                None => Problem::Failed,
            }
        }
        // An answer that may not be stored is not given: another owner may have stored another one.
        Err(error) => {
            unavailable(key, &error);
            if has_run { Problem::OutcomeUnknown } else { Problem::Unavailable }
        }
    };
    Ok(problem.response(settings.retry_after))
}

fn told(key: &IdempotencyKey, failure: &Failure) {
    let (key, caller) = (key.as_str(), key.caller());
    match failure {
        Failure::Panicked(panic) => tracing::error!(key, caller, panic, "a request panicked"),
        failure => tracing::warn!(key, caller, %failure, "a request was not done; its key is free"),
    }
}

fn unavailable(key: &IdempotencyKey, error: &Error) {
    let (key, caller, error) = (key.as_str(), key.caller(), chain(error));
    tracing::warn!(key, caller, error, "the inbox did not take a request, or not its answer");
}

impl<R> Settings<R> {
    /// What an answer means for the key, and what of it goes out. None: it broke off.
    async fn judge<P>(&self, response: Response<P>) -> (Verdict, Option<Response<Body<P>>>)
    where
        P: HttpBody<Data = Bytes>,
        P::Error: Into<BoxError>,
    {
        let status = response.status();
        if !(self.is_final)(status) {
            let verdict = Verdict::unknown(format!("it answered {status}, which is not final"));
            return (verdict, Some(response.map(Body::untouched)));
        }
        let head = Answer::head(&response, &self.kept_headers);
        let (parts, body) = response.into_parts();
        let (stored, body) = match body::read(body, self.answer_limit).await {
            Ok(Read::Whole(bytes)) => {
                (head.body(bytes.clone()).to_stored(self.answer_limit), Body::whole(bytes))
            }
            Ok(Read::TooLong(body)) => (head.to_stub(self.answer_limit), body),
            Err(error) => return (Verdict::unknown(error), None),
        };
        let verdict = match stored {
            Ok(outcome) => Verdict::Done(Some(outcome)),
            Err(error) => Verdict::unknown(error),
        };
        (verdict, Some(Response::from_parts(parts, body)))
    }

    /// The answer to a request that took effect before.
    fn repeat<P>(&self, key: &IdempotencyKey, outcome: Option<&Outcome>) -> Response<Body<P>> {
        let (status, kept) = match answer::read(outcome) {
            Kept::Whole(response) => return response,
            Kept::Stub(status, kept) => (Some(status), kept),
            Kept::Unreadable => {
                tracing::error!(
                    key = key.as_str(),
                    caller = key.caller(),
                    "what is stored for this key is not an answer that this version can read"
                );
                (None, http::HeaderMap::new())
            }
        };
        let mut response = Problem::AnswerNotKept { status }.response(self.retry_after);
        // Where the thing is may be all that the client needs.
        if let Some(location) = kept.get(http::header::LOCATION) {
            response.headers_mut().insert(http::header::LOCATION, location.clone());
        }
        answer::replayed(response)
    }
}

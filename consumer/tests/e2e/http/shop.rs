//! A service that charges at a provider, and does before and after that what a test tells it to.

use std::collections::{HashMap, VecDeque};
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};

use baton_consumer::http::{
    Answer, Body, Builder, Caller, Idempotency, IdempotencyLayer, IdempotencyService, Question, Reconcile,
    Reconciled, Running,
};
use baton_consumer::{BoxError, Inbox};
use bytes::Bytes;
use http::{HeaderMap, Request, Response, StatusCode, header};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use tokio::sync::Semaphore;
use tower_layer::Layer;
use tower_service::Service;

pub(super) type Bytestream = UnsyncBoxBody<Bytes, BoxError>;

/// A body that comes at once and says how long it is.
pub(super) fn whole(bytes: impl Into<Bytes>) -> Bytestream {
    Full::new(bytes.into()).map_err(|never| match never {}).boxed_unsync()
}

/// A body that comes in pieces and does not say how long it is, or breaks off.
pub(super) fn pieces(pieces: impl IntoIterator<Item = Result<&'static str, &'static str>>) -> Bytestream {
    let pieces: Vec<_> = pieces
        .into_iter()
        .map(|piece| piece.map(|data| http_body::Frame::data(data.into())).map_err(BoxError::from))
        .collect();
    StreamBody::new(futures_util::stream::iter(pieces)).boxed_unsync()
}

/// What it does next, instead of charging and answering 201.
pub(super) enum Does {
    /// Charges, and answers.
    Charges(Response<Bytestream>),
    /// Answers without having charged.
    Answers(Response<Bytestream>),
    /// Charges and panics.
    Panics,
    /// Charges and has no answer.
    Errs,
    /// Waits for [`Shop::gate`], charges, answers 201.
    Waits,
    /// Charges, and never comes to an end.
    ChargesAndHangs,
    /// Says until then that it moves on, charges, answers 201.
    MovesOnUntil(Arc<AtomicBool>),
}

#[derive(Clone, Default)]
pub(super) struct Shop(Arc<State>);

struct State {
    next: Mutex<VecDeque<Does>>,
    /// By the keys for effects: how often.
    charged: Mutex<HashMap<String, u32>>,
    attempts: Mutex<Vec<u32>>,
    asked: AtomicU32,
    /// What the provider says; by default, what is so.
    says: Mutex<Option<fn() -> Reconciled>>,
    entered: Semaphore,
    gate: Semaphore,
}

impl Default for State {
    fn default() -> Self {
        Self {
            next: Mutex::default(),
            charged: Mutex::default(),
            attempts: Mutex::default(),
            asked: AtomicU32::new(0),
            says: Mutex::new(None),
            entered: Semaphore::new(0),
            gate: Semaphore::new(0),
        }
    }
}

impl Shop {
    pub(super) fn next(&self, does: impl IntoIterator<Item = Does>) {
        self.0.next.lock().unwrap().extend(does);
    }

    pub(super) fn provider_says(&self, what: fn() -> Reconciled) {
        *self.0.says.lock().unwrap() = Some(what);
    }

    /// Charges in all, and by how many keys.
    pub(super) fn charged(&self) -> (u32, usize) {
        let charged = self.0.charged.lock().unwrap();
        (charged.values().sum(), charged.len())
    }

    /// The attempts that were made, with their numbers.
    pub(super) fn attempts(&self) -> Vec<u32> {
        self.0.attempts.lock().unwrap().clone()
    }

    pub(super) fn asked(&self) -> u32 {
        self.0.asked.load(Ordering::SeqCst)
    }

    /// Waits until one more call waits at the gate.
    pub(super) async fn entered(&self) {
        self.0.entered.acquire().await.unwrap().forget();
    }

    /// Lets one through.
    pub(super) fn open(&self) {
        self.0.gate.add_permits(1);
    }

    fn charge(&self, idempotency: Option<&Idempotency>) {
        let key = idempotency.map_or("none", |idempotency| idempotency.key().for_effects());
        *self.0.charged.lock().unwrap().entry(key.to_owned()).or_default() += 1;
    }

    async fn serve(self, request: Request<Body<Bytestream>>) -> Result<Response<Bytestream>, BoxError> {
        let (parts, body) = request.into_parts();
        let idempotency = parts.extensions.get::<Idempotency>();
        if let Some(idempotency) = idempotency {
            self.0.attempts.lock().unwrap().push(idempotency.attempt());
        }
        let body = body.collect().await?.to_bytes();
        let next = self.0.next.lock().unwrap().pop_front();
        match next {
            Some(Does::Charges(response)) => {
                self.charge(idempotency);
                return Ok(response);
            }
            Some(Does::Answers(response)) => return Ok(response),
            Some(Does::Panics) => {
                self.charge(idempotency);
                panic!("the service fell over");
            }
            Some(Does::Errs) => {
                self.charge(idempotency);
                return Err("the service has no answer".into());
            }
            Some(Does::Waits) => {
                self.0.entered.add_permits(1);
                self.0.gate.acquire().await?.forget();
            }
            Some(Does::ChargesAndHangs) => {
                self.charge(idempotency);
                self.0.entered.add_permits(1);
                std::future::pending::<()>().await;
            }
            Some(Does::MovesOnUntil(done)) => {
                while !done.load(Ordering::SeqCst) {
                    idempotency.unwrap().progress().await?;
                }
            }
            None => {}
        }
        self.charge(idempotency);
        let (nr, _) = self.charged();
        Ok(Response::builder()
            .status(StatusCode::CREATED)
            .header(header::LOCATION, format!("/payments/{nr}"))
            .header(header::SET_COOKIE, "session=1")
            .body(whole(format!("payment {nr} of {} bytes", body.len())))?)
    }
}

impl Service<Request<Body<Bytestream>>> for Shop {
    type Response = Response<Bytestream>;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, BoxError>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body<Bytestream>>) -> Self::Future {
        Box::pin(self.clone().serve(request))
    }
}

impl Reconcile for Shop {
    async fn lookup(&self, question: Question) -> Reconciled {
        self.0.asked.fetch_add(1, Ordering::SeqCst);
        let says = *self.0.says.lock().unwrap();
        if let Some(says) = says {
            return says();
        }
        match self.0.charged.lock().unwrap().get(question.key().for_effects()) {
            Some(_) => Reconciled::Applied(Answer::new(StatusCode::CREATED).body("looked up")),
            None => Reconciled::NotApplied,
        }
    }
}

/// A shop behind the layer.
#[derive(Clone)]
pub(super) struct Front {
    service: IdempotencyService<Shop, Shop>,
    pub(super) running: Running,
}

/// The answer to a request, read whole.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Reply {
    pub(super) status: u16,
    pub(super) headers: HeaderMap,
    pub(super) body: String,
}

impl Reply {
    pub(super) fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(|value| value.to_str().unwrap())
    }

    pub(super) fn is_replayed(&self) -> bool {
        self.header("idempotency-replayed") == Some("true")
    }

    /// That it is this problem.
    #[track_caller]
    pub(super) fn expect(&self, status: u16, problem: &str) {
        assert_eq!(self.header("content-type"), Some("application/problem+json"), "{self:?}");
        let body: serde_json::Value = serde_json::from_str(&self.body).unwrap();
        let kind = format!("urn:baton:idempotency:{problem}");
        assert_eq!((self.status, body["type"].as_str()), (status, Some(kind.as_str())), "{self:?}");
        assert_eq!(body["status"], status, "{self:?}");
        for text in ["title", "detail"] {
            assert!(body[text].as_str().is_some_and(|text| !text.is_empty()), "{self:?}");
        }
        assert!(!self.body.contains("fell over"), "what a panic says is not the client's business");
        let says_when = self.header("retry-after").is_some_and(|after| after.parse::<u64>().unwrap() > 0);
        assert_eq!(says_when, [409, 503].contains(&status), "{self:?}");
    }

    /// That it is the shop's own.
    #[track_caller]
    pub(super) fn expect_payment(&self, nr: u32) {
        assert_eq!(self.status, 201, "{self:?}");
        assert!(self.body.starts_with(&format!("payment {nr} ")), "{self:?}");
        assert_eq!(self.header("location"), Some(format!("/payments/{nr}").as_str()));
    }
}

impl Front {
    /// Callers are told apart by the header `tenant`.
    pub(super) fn new(shop: &Shop, inbox: Inbox) -> Self {
        Self::with(shop, inbox, |builder| builder)
    }

    pub(super) fn with(
        shop: &Shop,
        inbox: Inbox,
        settings: impl FnOnce(Builder<Shop>) -> Builder<Shop>,
    ) -> Self {
        let caller = Caller::from_fn(|parts| Some(parts.headers.get("tenant")?.to_str().ok()?.to_owned()));
        let layer = settings(IdempotencyLayer::builder(inbox, caller, shop.clone())).build();
        Self { service: layer.layer(shop.clone()), running: layer.running() }
    }

    pub(super) async fn try_send(&self, request: Request<Bytestream>) -> Result<Reply, BoxError> {
        let mut service = self.service.clone();
        std::future::poll_fn(|context| service.poll_ready(context)).await?;
        let (head, body) = service.call(request).await?.into_parts();
        let body = body.collect().await?.to_bytes();
        let body = String::from_utf8(body.into()).unwrap();
        Ok(Reply { status: head.status.as_u16(), headers: head.headers, body })
    }

    pub(super) async fn send(&self, request: Request<Bytestream>) -> Reply {
        self.try_send(request).await.unwrap()
    }

    /// `POST /payments` of tenant `acme` with this key and body.
    pub(super) async fn pay(&self, key: &str, body: &'static str) -> Reply {
        self.send(post(key, whole(body))).await
    }
}

pub(super) fn post(key: &str, body: Bytestream) -> Request<Bytestream> {
    request("POST", "/payments", &[("tenant", "acme"), ("idempotency-key", key)], body)
}

pub(super) fn request(
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: Bytestream,
) -> Request<Bytestream> {
    let mut request = Request::builder().method(method).uri(path);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    request.body(body).unwrap()
}

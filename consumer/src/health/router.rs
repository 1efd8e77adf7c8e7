//! The pages, as a `tower` service.

use std::convert::Infallible;
use std::fmt::{self, Write as _};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use futures_util::future::BoxFuture;
use http::header::{ALLOW, CACHE_CONTROL, CONTENT_TYPE, HeaderValue};
use http::{Method, Request, Response, StatusCode};
use http_body::{Body, Frame, SizeHint};
use tower_service::Service;

use super::{Check, Health};

const TEXT: &str = "text/plain; charset=utf-8";
const PROMETHEUS: &str = "text/plain; version=0.0.4; charset=utf-8";

type Render = dyn Fn() -> String + Send + Sync;

/// `/livez`, `/readyz`, `/metrics`; from [`Health::router`].
#[derive(Clone)]
pub struct Router {
    health: Health,
    render: Option<Arc<Render>>,
}

/// The body of an answer, which is there at once.
#[derive(Debug, Default)]
pub struct Text(Option<Bytes>);

type Page = (StatusCode, &'static str, String);

impl Router {
    pub(super) fn new(health: Health) -> Self {
        Self { health, render: None }
    }

    /// `/metrics` answers what this gives: the text of the exporter that the service has installed (see [`metrics`](crate::metrics)).
    /// Called for each request, on the task that serves it.
    #[must_use]
    pub fn metrics(mut self, render: impl Fn() -> String + Send + Sync + 'static) -> Self {
        self.render = Some(Arc::new(render));
        self
    }

    async fn page(&self, method: &Method, path: &str) -> Page {
        let is_reading = matches!(*method, Method::GET | Method::HEAD);
        match (path, &self.render) {
            ("/livez" | "/readyz", _) | ("/metrics", Some(_)) if !is_reading => {
                (StatusCode::METHOD_NOT_ALLOWED, TEXT, "only GET and HEAD\n".to_owned())
            }
            ("/livez", _) => live(&self.health.alive()),
            ("/readyz", _) => ready(&self.health.ready().await),
            ("/metrics", Some(render)) => (StatusCode::OK, PROMETHEUS, render()),
            _ => (StatusCode::NOT_FOUND, TEXT, "no such page\n".to_owned()),
        }
    }
}

impl<B> Service<Request<B>> for Router {
    type Response = Response<Text>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Response<Text>, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let (router, method, path) =
            (self.clone(), request.method().clone(), request.uri().path().to_owned());
        Box::pin(async move { Ok(response(router.page(&method, &path).await, &method)) })
    }
}

fn live(alive: &Check) -> Page {
    match alive {
        Ok(()) => (StatusCode::OK, TEXT, "ok\n".to_owned()),
        Err(why) => (StatusCode::SERVICE_UNAVAILABLE, TEXT, format!("{why}\n")),
    }
}

/// A line a check: its name, then `ok` or what is wrong.
fn ready(checks: &[(&str, Check)]) -> Page {
    let mut text = String::new();
    for (name, check) in checks {
        // Writing to a string cannot fail.
        _ = match check {
            Ok(()) => writeln!(text, "{name}: ok"),
            Err(why) => writeln!(text, "{name}: failed: {why}"),
        };
    }
    let fails = checks.iter().any(|(_, check)| check.is_err());
    (if fails { StatusCode::SERVICE_UNAVAILABLE } else { StatusCode::OK }, TEXT, text)
}

fn response((status, content_type, text): Page, method: &Method) -> Response<Text> {
    let body = if method == Method::HEAD { Text(None) } else { Text(Some(text.into())) };
    let mut response = Response::new(body);
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    if status == StatusCode::METHOD_NOT_ALLOWED {
        headers.insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
    }
    response
}

impl Body for Text {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        Poll::Ready(self.get_mut().0.take().map(|text| Ok(Frame::data(text))))
    }

    fn is_end_stream(&self) -> bool {
        self.0.is_none()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.0.as_ref().map_or(0, |text| text.len() as u64))
    }
}

impl fmt::Debug for Router {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Router").field("health", &self.health).finish_non_exhaustive()
    }
}

//! The relay seen from outside: five pages over HTTP, which change nothing.
//!
//! | path | answers |
//! |---|---|
//! | `/livez` | 200 while the process moves, also while database or broker is away; 503 names the task that stands still |
//! | `/readyz` | 200 when migrations, database, leases and broker are as they must be; 503 says which is not, and why |
//! | `/metrics` | Prometheus' text format; what the process counted always, what the database knows while it answers |
//! | `/api/status` | the JSON of `baton status --json`; 503 while the database does not answer |
//! | `/` | links to these |
//!
//! Anything but GET and HEAD is refused with 405. Nothing asked here reaches into the relay's own work: the database is
//! read over one more connection, at most once a second and for 5 s, the broker by one more client. How many connections
//! are served at a time, and for how long each, stands in `http/guests`: nobody who sends nothing, sends slowly, or does not
//! read keeps the next one waiting. The server is a task of the relay and ends with it.

mod guests;
mod watch;

use std::convert::Infallible;
use std::fmt::Write as _;
use std::io::ErrorKind;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::header::{ALLOW, CACHE_CONTROL, CONTENT_TYPE, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

use crate::health::{Check, Health, JUDGE_EVERY};
use crate::metrics::{self, Metrics};
use crate::settings::{Listen, Settings};
use crate::status::Status;
use watch::{BrokerLook, StatusLook, Watch};

/// How long a client may take for the head of its request, however it spreads its bytes.
const HEAD_PATIENCE: Duration = Duration::from_secs(2);

/// How long one connection may take, from its first byte to its last: also when its client does not read the answer.
const CONNECTION_PATIENCE: Duration = Duration::from_secs(15);

/// The longest head of a request, in bytes.
const HEAD_BYTES: usize = 16 * 1024;

const TEXT: &str = "text/plain; charset=utf-8";
const HTML: &str = "text/html; charset=utf-8";
const JSON: &str = "application/json";

const INDEX: &str = r#"<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>baton relay</title>
<h1>baton relay</h1>
<ul>
<li><a href="/livez">/livez</a>: whether the process moves
<li><a href="/readyz">/readyz</a>: whether migrations, database, leases and broker are as they must be
<li><a href="/metrics">/metrics</a>: for Prometheus
<li><a href="/api/status">/api/status</a>: what waits, who holds what, how far each shard is, as JSON
</ul>
</html>
"#;

/// The address cannot be had.
#[derive(Debug, thiserror::Error)]
#[error("cannot serve HTTP on {address}, which http.listen names: {}", self.advice())]
pub struct Error {
    /// What was to be listened on.
    pub address: String,
    /// What the system said.
    #[source]
    pub source: std::io::Error,
}

impl Error {
    /// Whether it is the setting that cannot be used, not the state of things: no address of this machine, or none at all.
    #[must_use]
    pub fn is_setting(&self) -> bool {
        // A name that cannot be resolved is no error of the system's, and has no number.
        self.source.raw_os_error().is_none() || self.source.kind() == ErrorKind::AddrNotAvailable
    }

    fn advice(&self) -> &'static str {
        match self.source.kind() {
            ErrorKind::AddrInUse => {
                "another process has it; set http.listen or BATON_HTTP__LISTEN to another port, to port 0 for any free one, or to \
                 \"off\""
            }
            ErrorKind::PermissionDenied => {
                "this user may not listen there; set http.listen or BATON_HTTP__LISTEN to a port from 1024 on, to port 0 for any \
                 free one, or to \"off\""
            }
            _ if self.is_setting() => {
                "that is no address of this machine; set http.listen or BATON_HTTP__LISTEN to one, like 127.0.0.1:9464 for this \
                 machine only or 0.0.0.0:9464 for everybody, or to \"off\""
            }
            _ => "set http.listen or BATON_HTTP__LISTEN to another address, or to \"off\"",
        }
    }
}

/// The server's tasks. They end when this is dropped.
#[derive(Debug)]
pub(crate) struct Server(JoinSet<()>);

impl Server {
    /// Listens and serves, unless told not to.
    pub(crate) async fn start(
        settings: &Arc<Settings>,
        health: &Arc<Health>,
        metrics: &Arc<Metrics>,
    ) -> Result<Self, Error> {
        let mut tasks = JoinSet::new();
        let Listen::At(address) = &settings.http_listen else { return Ok(Self(tasks)) };
        let refused = |source| Error { address: address.clone(), source };
        let listener = TcpListener::bind(address.as_str()).await.map_err(refused)?;
        let bound: SocketAddr = listener.local_addr().map_err(refused)?;
        tracing::info!("serves http://{bound}/ (livez, readyz, metrics, api/status)");
        let views = Views {
            health: Arc::clone(health),
            metrics: Arc::clone(metrics),
            status: Watch::start(&mut tasks, StatusLook::new(Arc::clone(settings))),
            broker: Watch::start(&mut tasks, BrokerLook::new(Arc::clone(settings))),
        };
        let views = Arc::new(views);
        tasks.spawn(guests::accept(listener, move |stream| serve(stream, Arc::clone(&views))));
        tasks.spawn(judge(Arc::clone(health)));
        Ok(Self(tasks))
    }

    /// Ends all of it, also in the middle of an answer.
    pub(crate) async fn stop(mut self) {
        self.0.shutdown().await;
    }
}

/// Notices when the whole process has not run for a while, so that no task of it is blamed for that.
async fn judge(health: Arc<Health>) {
    loop {
        health.turns(Instant::now());
        sleep(JUDGE_EVERY).await;
    }
}

/// One connection, one request.
async fn serve(stream: TcpStream, views: Arc<Views>) {
    let answer = service_fn(|request| views.answer(request));
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_PATIENCE)
        .max_buf_size(HEAD_BYTES)
        .keep_alive(false)
        .serve_connection(TokioIo::new(stream), answer);
    if let Ok(Err(error)) = timeout(CONNECTION_PATIENCE, connection).await {
        tracing::debug!("an http connection ended badly: {error}");
    }
}

/// An answer before it is one of HTTP's.
type Page = (StatusCode, &'static str, String);

/// What the pages show.
struct Views {
    health: Arc<Health>,
    metrics: Arc<Metrics>,
    status: Watch<Result<Arc<Status>, Arc<str>>>,
    broker: Watch<Result<(), Arc<str>>>,
}

impl Views {
    async fn answer(&self, request: Request<Incoming>) -> Result<Response<Full<Bytes>>, Infallible> {
        if request.method() != Method::GET && request.method() != Method::HEAD {
            let page = (
                StatusCode::METHOD_NOT_ALLOWED,
                TEXT,
                "only GET and HEAD: nothing here changes anything\n".to_owned(),
            );
            let mut refusal = response(page);
            refusal.headers_mut().insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
            return Ok(refusal);
        }
        Ok(response(match request.uri().path() {
            "/" => (StatusCode::OK, HTML, INDEX.to_owned()),
            "/livez" => live(&self.health.still(Instant::now())),
            "/readyz" => self.ready().await,
            "/metrics" => self.metrics().await,
            "/api/status" => self.status().await,
            _ => (StatusCode::NOT_FOUND, TEXT, "no such page; / lists them\n".to_owned()),
        }))
    }

    async fn ready(&self) -> Page {
        let mut checks = self.health.checks(Instant::now());
        let broker = self.broker.see().await.unwrap_or_else(|| Err("the relay is shutting down".into()));
        checks.push(("broker", broker.map_err(|why| why.to_string())));
        ready(&checks)
    }

    async fn metrics(&self) -> Page {
        let status = self.status.see().await.and_then(Result::ok);
        match self.metrics.text(status.as_deref()) {
            Ok(text) => (StatusCode::OK, metrics::CONTENT_TYPE, text),
            Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, TEXT, format!("{error}\n")),
        }
    }

    async fn status(&self) -> Page {
        let status = self.status.see().await.unwrap_or_else(|| Err("the relay is shutting down".into()));
        let json = match &status {
            Ok(status) => serde_json::to_string_pretty(status.as_ref()),
            Err(why) => serde_json::to_string_pretty(&serde_json::json!({ "error": why.as_ref() })),
        };
        let code = if status.is_ok() { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
        match json {
            Ok(json) => (code, JSON, json + "\n"),
            Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, TEXT, format!("{error}\n")),
        }
    }
}

fn live(still: &[String]) -> Page {
    if still.is_empty() {
        return (StatusCode::OK, TEXT, "ok\n".to_owned());
    }
    (StatusCode::SERVICE_UNAVAILABLE, TEXT, still.join("\n") + "\n")
}

/// A line a check: its name, then `ok` or what is wrong.
fn ready(checks: &[Check]) -> Page {
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

fn response((status, content_type, body): Page) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(Bytes::from(body)));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_failing_check_makes_the_relay_unready_and_is_named() {
        let broker = Err("kafka at b:1 does not answer".to_owned());
        let (code, _, text) = ready(&[("database", Ok(())), ("broker", broker)]);
        assert_eq!(code, StatusCode::SERVICE_UNAVAILABLE);
        assert_eq!(text, "database: ok\nbroker: failed: kafka at b:1 does not answer\n");
        assert_eq!(ready(&[("database", Ok(()))]).0, StatusCode::OK);
    }

    #[test]
    fn a_task_that_stands_still_makes_the_process_unalive_and_is_named() {
        assert_eq!(live(&[]).0, StatusCode::OK);
        let (code, _, text) = live(&["shard 3 has not moved for 80 s (at most 75 s)".to_owned()]);
        assert_eq!(code, StatusCode::SERVICE_UNAVAILABLE);
        assert!(text.starts_with("shard 3 has not moved"), "{text}");
    }
}

//! A service outside the database, such as handlers call: it takes an effect once for each key, and writes a journal.
//!
//! | request | does |
//! |---|---|
//! | `POST /effects`, headers `Idempotency-Key`, `X-Lane`, `X-Who` | takes effect at the first call with the key; answers every call with its receipt |
//! | `GET /effects/KEY`, header `X-Who` | the receipt, or 404 |
//!
//! It runs in the test's own process, so that no fault under test reaches it.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::failure::Outcome;

/// What was asked of the service.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Asked {
    /// For an effect.
    Call,
    /// Whether there is one.
    Look,
}

/// One line of the journal.
#[derive(Debug, Clone)]
pub struct Entry {
    /// What was asked.
    pub asked: Asked,
    /// The idempotency key.
    pub key: String,
    /// The name of the process that asked.
    pub who: String,
    /// The partition, as the caller says; empty at a look.
    pub lane: String,
    /// What the call brought; empty at a look.
    pub content: Vec<u8>,
}

/// A running service; dropped, it is gone.
#[derive(Debug)]
pub struct Service {
    address: String,
    state: Arc<State>,
    gate: watch::Sender<Gate>,
    _task: JoinSet<()>,
}

#[derive(Debug, Default)]
struct State {
    book: Mutex<Book>,
}

#[derive(Debug, Default)]
struct Book {
    journal: Vec<Entry>,
    receipts: BTreeMap<String, String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Gate {
    Open,
    Shut,
}

impl Service {
    /// Serves at a free port.
    ///
    /// # Errors
    ///
    /// When there is none.
    pub async fn start() -> Outcome<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?.to_string();
        let (gate, opened) = watch::channel(Gate::Open);
        let state = Arc::new(State::default());
        let mut task = JoinSet::new();
        task.spawn(serve(listener, Arc::clone(&state), opened));
        Ok(Self { address, state, gate, _task: task })
    }

    /// `host:port`.
    #[must_use]
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Everything that was asked so far, in order.
    #[must_use]
    pub fn journal(&self) -> Vec<Entry> {
        self.state.book().journal.clone()
    }

    /// The receipt of each key that took effect, as JSON text.
    #[must_use]
    pub fn receipts(&self) -> BTreeMap<String, String> {
        self.state.book().receipts.clone()
    }

    /// Looks are written down, but not answered until [`answer_looks`](Self::answer_looks).
    pub fn hold_looks(&self) {
        self.gate.send_replace(Gate::Shut);
    }

    /// Looks are answered again.
    pub fn answer_looks(&self) {
        self.gate.send_replace(Gate::Open);
    }
}

impl State {
    fn book(&self) -> MutexGuard<'_, Book> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One effect a key, and its receipt for every call.
    fn call(&self, entry: Entry) -> String {
        let mut book = self.book();
        let number = book.receipts.len();
        let key = entry.key.clone();
        let receipt = format!(r#"{{"receipt":"{number}","who":"{}"}}"#, entry.who);
        book.journal.push(entry);
        book.receipts.entry(key).or_insert(receipt).clone()
    }

    fn look(&self, key: &str) -> Option<String> {
        self.book().receipts.get(key).cloned()
    }
}

async fn serve(listener: TcpListener, state: Arc<State>, gate: watch::Receiver<Gate>) {
    let mut connections = JoinSet::new();
    while let Ok((stream, _)) = listener.accept().await {
        let (state, gate) = (Arc::clone(&state), gate.clone());
        connections.spawn(async move {
            let answer = service_fn(|request| answer(request, &state, gate.clone()));
            // Whoever asks may die meanwhile.
            http1::Builder::new().serve_connection(TokioIo::new(stream), answer).await.ok();
        });
        while connections.try_join_next().is_some() {}
    }
}

async fn answer(
    request: Request<Incoming>,
    state: &State,
    mut gate: watch::Receiver<Gate>,
) -> Result<Response<Full<Bytes>>, Infallible> {
    let header = |name: &str| {
        let value = request.headers().get(name).and_then(|value| value.to_str().ok());
        value.unwrap_or_default().to_owned()
    };
    let (who, lane, key) = (header("x-who"), header("x-lane"), header("idempotency-key"));
    let looked = request.uri().path().strip_prefix("/effects/").map(str::to_owned);
    let receipt = match (request.method().clone(), looked) {
        (Method::POST, None) => {
            // A caller that dies before all of it has come has not called.
            match request.into_body().collect().await {
                Ok(body) => {
                    let content = body.to_bytes().to_vec();
                    Some(state.call(Entry { asked: Asked::Call, key, who, lane, content }))
                }
                Err(_) => None,
            }
        }
        (Method::GET, Some(key)) => {
            let entry =
                Entry { asked: Asked::Look, key: key.clone(), who, lane: String::new(), content: Vec::new() };
            state.book().journal.push(entry);
            gate.wait_for(|gate| *gate == Gate::Open).await.ok();
            state.look(&key)
        }
        _ => None,
    };
    let (code, body) = match receipt {
        Some(receipt) => (StatusCode::OK, receipt),
        None => (StatusCode::NOT_FOUND, String::new()),
    };
    let mut response = Response::new(Full::new(Bytes::from(body)));
    *response.status_mut() = code;
    Ok(response)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http;

    #[tokio::test]
    async fn a_key_takes_effect_once_and_every_call_and_look_is_written_down() {
        let service = Service::start().await.unwrap();
        let look = async || http::get(service.address(), "/effects/k:1").await.unwrap();
        let call = async |who: &str| {
            let headers = [("Idempotency-Key", "k:1"), ("X-Who", who), ("X-Lane", "3")];
            http::send(service.address(), "POST", "/effects", &headers, b"content").await.unwrap()
        };
        assert_eq!(look().await.code, 404);
        let first = call("a").await;
        assert_eq!(call("b").await.body, first.body);
        assert_eq!(look().await.body, first.body);
        assert_eq!(service.receipts()["k:1"], first.body);
        let journal = service.journal();
        let asked: Vec<(Asked, &str)> =
            journal.iter().map(|entry| (entry.asked, entry.who.as_str())).collect();
        assert_eq!(asked, [(Asked::Look, ""), (Asked::Call, "a"), (Asked::Call, "b"), (Asked::Look, "")]);
        assert_eq!((journal[1].lane.as_str(), &journal[1].content[..]), ("3", &b"content"[..]));
    }
}

//! A TCP proxy in front of Postgres that can lose or hold one reply: the server has done what it was told, and the client
//! never hears of it, or later.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use sqlx::PgPool;
use sqlx::postgres::{PgConnectOptions, PgPoolOptions, PgSslMode};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;

pub(crate) struct Proxy {
    options: PgConnectOptions,
    state: Arc<State>,
}

#[derive(Default)]
struct State {
    /// The text whose reply is lost, once.
    armed: Mutex<Option<&'static str>>,
    lost: AtomicBool,
    /// The text whose reply is held, once.
    held: Mutex<Option<&'static str>>,
    holding: Notify,
    release: Notify,
}

impl Proxy {
    pub(crate) async fn start(to: &PgConnectOptions) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let options = to
            .clone()
            .host("127.0.0.1")
            .port(listener.local_addr().unwrap().port())
            .ssl_mode(PgSslMode::Disable);
        let server = (to.get_host().to_owned(), to.get_port());
        let state = Arc::new(State::default());
        let shared = Arc::clone(&state);
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let server = TcpStream::connect(server.clone()).await.unwrap();
                tokio::spawn(carry(client, server, Arc::clone(&shared)));
            }
        });
        Self { options, state }
    }

    pub(crate) async fn pool(&self, connections: u32) -> PgPool {
        PgPoolOptions::new().max_connections(connections).connect_with(self.options.clone()).await.unwrap()
    }

    /// The next time a client sends this text, the server gets it, its reply is dropped and the connection is cut.
    pub(crate) fn lose_reply_to(&self, text: &'static str) {
        *self.state.armed.lock().unwrap() = Some(text);
    }

    /// The next time a client sends this text, the server gets it, and its reply waits for [`release`](Self::release).
    pub(crate) fn hold_reply_to(&self, text: &'static str) {
        *self.state.held.lock().unwrap() = Some(text);
    }

    /// Waits until a reply is held.
    pub(crate) async fn holding(&self) {
        self.state.holding.notified().await;
    }

    pub(crate) fn release(&self) {
        self.state.release.notify_one();
    }

    pub(crate) fn has_lost(&self) -> bool {
        self.state.lost.load(Ordering::SeqCst)
    }
}

async fn carry(mut client: TcpStream, mut server: TcpStream, state: Arc<State>) {
    let (mut from_client, mut from_server) = ([0; 16384], [0; 16384]);
    loop {
        tokio::select! {
            read = client.read(&mut from_client) => match read {
                Ok(0) | Err(_) => return,
                Ok(length) => {
                    let sent = &from_client[..length];
                    let lose = state.armed.lock().unwrap().take_if(|text| holds(sent, text)).is_some();
                    let hold = state.held.lock().unwrap().take_if(|text| holds(sent, text)).is_some();
                    if server.write_all(sent).await.is_err() {
                        return;
                    }
                    if hold {
                        state.holding.notify_one();
                        state.release.notified().await;
                    }
                    if lose {
                        // The reply says that it is done; only then is the connection cut.
                        let _ = server.read(&mut from_server).await;
                        state.lost.store(true, Ordering::SeqCst);
                        return;
                    }
                }
            },
            read = server.read(&mut from_server) => match read {
                Ok(0) | Err(_) => return,
                Ok(length) => if client.write_all(&from_server[..length]).await.is_err() { return },
            },
        }
    }
}

fn holds(bytes: &[u8], text: &str) -> bool {
    bytes.windows(text.len()).any(|window| window == text.as_bytes())
}

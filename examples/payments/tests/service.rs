//! The service on a port, spoken to over TCP; `DATABASE_URL` says where Postgres is.

#![expect(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

use std::future::Future;
use std::net::SocketAddr;
use std::time::Duration;

use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{AssertSqlSafe, Connection, Executor, PgConnection, PgPool};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};

const LIMIT: Duration = Duration::from_secs(60);

/// A database and a service of one test's own.
struct World {
    pool: PgPool,
    address: SocketAddr,
    stop: oneshot::Sender<()>,
    service: JoinHandle<Result<(), payments::Error>>,
}

struct Reply {
    head: String,
    body: String,
}

impl Reply {
    fn status(&self) -> u16 {
        self.head.split(' ').nth(1).unwrap().parse().unwrap()
    }

    fn header(&self, name: &str) -> Option<&str> {
        self.head.lines().find_map(|line| {
            let (given, value) = line.split_once(": ")?;
            given.eq_ignore_ascii_case(name).then_some(value)
        })
    }

    fn is_replayed(&self) -> bool {
        self.header("idempotency-replayed") == Some("true")
    }
}

async fn in_world<F: Future<Output = World>>(test: impl FnOnce(World) -> F) {
    let url = std::env::var("DATABASE_URL").expect("DATABASE_URL says where Postgres is");
    let name = format!("payments_{}", uuid::Uuid::new_v4().simple());
    let mut admin = PgConnection::connect(&url).await.unwrap();
    admin.execute(AssertSqlSafe(format!("CREATE DATABASE {name}"))).await.unwrap();
    let options = url.parse::<PgConnectOptions>().unwrap().database(&name);
    let pool = PgPoolOptions::new().max_connections(8).connect_with(options).await.unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (stop, stopped) = oneshot::channel();
    let service = tokio::spawn(payments::serve(listener, pool.clone(), async { drop(stopped.await) }));
    let tested = timeout(LIMIT, async {
        let world = test(World { pool, address, stop, service }).await;
        drop(world.stop);
        world.service.await.unwrap().unwrap();
    });
    let tested = tested.await;
    admin.execute(AssertSqlSafe(format!("DROP DATABASE {name} WITH (FORCE)"))).await.unwrap();
    tested.expect("the test took longer than its hard time-out");
}

impl World {
    async fn open(&self, request: &str) -> TcpStream {
        let mut stream = TcpStream::connect(self.address).await.unwrap();
        stream.write_all(request.as_bytes()).await.unwrap();
        stream
    }

    async fn send(&self, request: &str) -> Reply {
        let mut stream = self.open(request).await;
        let mut text = String::new();
        stream.read_to_string(&mut text).await.unwrap();
        let (head, body) = text.split_once("\r\n\r\n").expect(&text);
        Reply { head: head.to_owned(), body: body.to_owned() }
    }

    async fn pay(&self, tenant: &str, key: &str, body: &str) -> Reply {
        self.send(&request(tenant, key, body)).await
    }

    async fn charges(&self) -> i64 {
        sqlx::query_scalar("SELECT count(*) FROM provider_charge").fetch_one(&self.pool).await.unwrap()
    }
}

fn request(tenant: &str, key: &str, body: &str) -> String {
    let length = body.len();
    format!(
        "POST /payments HTTP/1.1\r\nhost: test\r\nconnection: close\r\ncontent-type: application/json\r\n\
         x-tenant: {tenant}\r\nidempotency-key: {key}\r\ncontent-length: {length}\r\n\r\n{body}"
    )
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_payment_is_made_once_and_its_answer_given_again() {
    in_world(async |world: World| {
        let first = world.pay("acme", "\"order-7\"", "{\"cents\":100}").await;
        assert_eq!((first.status(), first.is_replayed()), (201, false), "{}", first.head);
        assert_eq!(first.header("location"), Some("/payments/1"));
        let again = world.pay("acme", "order-7", "{\"cents\":100}").await;
        assert_eq!((again.status(), again.is_replayed()), (201, true), "{}", again.head);
        assert_eq!((&again.body, again.header("location")), (&first.body, first.header("location")));
        assert_eq!(again.header("content-type"), Some("application/json"));

        let other = world.pay("acme", "order-7", "{\"cents\":101}").await;
        assert_eq!((other.status(), other.header("content-type")), (422, Some("application/problem+json")));
        let globex = world.pay("globex", "order-7", "{\"cents\":100}").await;
        assert_eq!((globex.status(), globex.header("location")), (201, Some("/payments/2")));
        let show = world.send("GET /payments/1 HTTP/1.1\r\nhost: test\r\nconnection: close\r\n\r\n").await;
        assert_eq!((show.status(), show.body), (200, first.body));
        assert_eq!(world.charges().await, 2);
        world
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bad_requests_are_refused_and_charge_nothing() {
    in_world(async |world: World| {
        let bare = "POST /payments HTTP/1.1\r\nhost: test\r\nconnection: close\r\nx-tenant: acme\r\ncontent-length: 0\r\n\r\n";
        let missing = world.send(bare).await;
        assert_eq!((missing.status(), missing.header("content-type")), (400, Some("application/problem+json")));
        let chunk = "x".repeat(1024 * 1024 + 1);
        let chunked = format!(
            "POST /payments HTTP/1.1\r\nhost: test\r\nconnection: close\r\nx-tenant: acme\r\nidempotency-key: k\r\n\
             transfer-encoding: chunked\r\n\r\n{:x}\r\n{chunk}\r\n0\r\n\r\n",
            chunk.len()
        );
        assert_eq!(world.send(&chunked).await.status(), 413);
        // An answer like any other, and a repeat gets it.
        let none = world.pay("acme", "none", "{\"cents\":0}").await;
        let again = world.pay("acme", "none", "{\"cents\":0}").await;
        assert_eq!((none.status(), again.status(), again.is_replayed()), (422, 422, true));
        assert_eq!(world.charges().await, 0);
        world
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_hangs_up_has_paid_once_and_so_has_a_service_that_is_told_to_stop() {
    in_world(async |world: World| {
        // A first one, so that the table is surely there. Then the provider takes its time.
        world.pay("acme", "first", "{\"cents\":1}").await;
        let mut slow = world.pool.begin().await.unwrap();
        slow.execute("LOCK TABLE provider_charge IN SHARE MODE").await.unwrap();
        let client = world.open(&request("acme", "order-7", "{\"cents\":100}")).await;
        waits_for_a_lock(&world.pool).await;
        drop(client);
        assert_eq!(world.pay("acme", "order-7", "{\"cents\":100}").await.status(), 409);

        let World { pool, address, stop, service } = world;
        drop(stop);
        // Its listener goes first. What has begun is waited for.
        let deadline = Instant::now() + LIMIT;
        while TcpStream::connect(address).await.is_ok() {
            assert!(Instant::now() < deadline, "it still listens");
            tokio::task::yield_now().await;
        }
        assert!(!service.is_finished(), "a payment is being made");
        slow.commit().await.unwrap();
        service.await.unwrap().unwrap();

        // Another process finds it done.
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (stop, stopped) = oneshot::channel();
        let service = tokio::spawn(payments::serve(listener, pool.clone(), async { drop(stopped.await) }));
        let world = World { pool, address, stop, service };
        let again = world.pay("acme", "order-7", "{\"cents\":100}").await;
        assert_eq!((again.status(), again.is_replayed(), world.charges().await), (201, true, 2));
        world
    })
    .await;
}

async fn waits_for_a_lock(pool: &PgPool) {
    let deadline = Instant::now() + LIMIT;
    loop {
        let waits: bool = sqlx::query_scalar(
            "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock')",
        )
        .fetch_one(pool)
        .await
        .unwrap();
        if waits {
            return;
        }
        assert!(Instant::now() < deadline, "nothing waits for the provider");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

use http::{Method, Request, StatusCode};
use http_body_util::BodyExt as _;
use tower_service::Service as _;

use super::*;

fn health() -> Health {
    let pool = PgPool::connect_lazy("postgres://127.0.0.1:1/none").unwrap();
    Health::new(pool, Duration::from_secs(20))
}

async fn ask(router: &Router, method: Method, path: &str) -> (StatusCode, String) {
    let request = Request::builder().method(method).uri(path).body(()).unwrap();
    let answer = router.clone().call(request).await.unwrap();
    let status = answer.status();
    assert_eq!(status == StatusCode::METHOD_NOT_ALLOWED, answer.headers().contains_key("allow"));
    let body = answer.into_body().collect().await.unwrap().to_bytes();
    (status, String::from_utf8(body.to_vec()).unwrap())
}

async fn get(router: &Router, path: &str) -> (u16, String) {
    let (status, text) = ask(router, Method::GET, path).await;
    (status.as_u16(), text)
}

#[tokio::test]
async fn it_is_alive_while_the_poll_thread_comes_round_and_not_after_the_end() {
    let health = health();
    let router = health.router();
    let in_s = |seconds| Instant::now() + Duration::from_secs(seconds);
    assert_eq!(health.alive_at(in_s(1000)), Ok(()), "nothing can stand still yet");
    let ends = health.until_dropped();
    health.polls();
    assert_eq!(get(&router, "/livez").await, (200, "ok\n".to_owned()));
    assert_eq!(health.alive_at(in_s(79)), Ok(()), "it may drain for 20 s and ask for a minute");
    let stuck = health.alive_at(in_s(90)).unwrap_err();
    assert!(stuck.starts_with("the poll thread has stood still for"), "{stuck}");
    drop(ends);
    health.joined();
    assert_eq!(get(&router, "/livez").await, (503, "the consumer has ended\n".to_owned()));
}

#[tokio::test]
async fn without_a_database_or_a_group_it_is_not_ready_and_says_which() {
    let health = health();
    let router = health.router();
    let (status, text) = get(&router, "/readyz").await;
    assert_eq!(status, 503);
    assert!(text.starts_with("inbox: failed: cannot connect to the inbox database"), "{text}");
    assert!(text.ends_with("group: failed: not started\n"), "{text}");
    health.polls();
    assert!(get(&router, "/readyz").await.1.ends_with("group: failed: not a member of its group (yet)\n"));
    health.joined();
    assert!(get(&router, "/readyz").await.1.ends_with("group: ok\n"));
    health.lost();
    assert!(get(&router, "/readyz").await.1.ends_with("group: failed: not a member of its group (yet)\n"));
}

#[tokio::test]
async fn what_is_no_page_is_not_found_and_only_reading_is_allowed() {
    let router = health().router();
    for path in ["/", "/livez/", "/metrics", "/livezz"] {
        assert_eq!(get(&router, path).await.0, 404, "{path}");
        assert_eq!(ask(&router, Method::POST, path).await.0, 404, "{path}");
    }
    assert_eq!(ask(&router, Method::POST, "/livez").await.0, 405);
    assert_eq!(ask(&router, Method::DELETE, "/readyz").await.0, 405);
    assert_eq!(ask(&router, Method::HEAD, "/livez").await, (StatusCode::OK, String::new()));
    let metered = router.metrics(|| "baton_consumed_total 1\n".to_owned());
    assert_eq!(get(&metered, "/metrics").await, (200, "baton_consumed_total 1\n".to_owned()));
    assert_eq!(ask(&metered, Method::PUT, "/metrics").await.0, 405);
}

#[tokio::test]
async fn many_who_ask_cost_one_look() {
    let database = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = database.local_addr().unwrap();
    let looks = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&looks);
    let accepting = tokio::spawn(async move {
        // No database: whoever comes is hung up on.
        while let Ok((connection, _)) = database.accept().await {
            counted.fetch_add(1, Ordering::SeqCst);
            drop(connection);
        }
    });
    let pool = PgPool::connect_lazy(&format!("postgres://{address}/none?sslmode=disable")).unwrap();
    let router = Health::new(pool, Duration::from_secs(20)).router();
    let asked = (0..50).map(|_| get(&router, "/readyz"));
    let answers = futures_util::future::join_all(asked).await;
    assert!(answers.iter().all(|(status, _)| *status == 503), "{answers:?}");
    assert_eq!(looks.load(Ordering::SeqCst), 1);
    accepting.abort();
}

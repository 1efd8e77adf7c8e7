//! Whether a consumer moves and is of use, asked as an orchestrator asks.

use axum::body::Body;
use baton_consumer::health::Router;
use http::{Request, StatusCode};
use http_body_util::BodyExt as _;
use sqlx::Executor;
use tower_service::Service as _;

use crate::fixture::{Probe, Running, eventually, in_world};

/// Mounted as a service mounts it: below a path, and as what answers where nothing else does.
async fn ask(health: &Router, path: &str) -> (StatusCode, String) {
    let mut app =
        axum::Router::new().nest_service("/consumer", health.clone()).fallback_service(health.clone());
    let request = Request::builder().uri(path).body(Body::empty()).unwrap();
    let answer = app.call(request).await.unwrap();
    let status = answer.status();
    let body = answer.into_body().collect().await.unwrap().to_bytes();
    (status, String::from_utf8(body.to_vec()).unwrap())
}

async fn eventually_answers(health: &Router, path: &str, expected: StatusCode, line: &str) {
    eventually(&format!("{path} answers {expected} with {line:?}"), || async {
        let (status, text) = ask(health, path).await;
        if status == expected && text.contains(line) { Ok(()) } else { Err(format!("{status} {text}")) }
    })
    .await;
}

#[test]
fn a_consumer_is_ready_once_it_is_a_member_with_an_inbox_and_alive_until_it_ends() {
    in_world(1, |world| async move {
        let consumer = || world.builder().transactional(Probe::new()).build().unwrap();
        let (first, second) = (consumer(), consumer());
        let (health, standby) = (first.health().router(), second.health().router());
        let early = ask(&health, "/readyz").await;
        assert_eq!(
            early,
            (StatusCode::SERVICE_UNAVAILABLE, "inbox: ok\ngroup: failed: not started\n".to_owned())
        );
        assert_eq!(ask(&health, "/livez").await.0, StatusCode::OK);

        let first = Running::start(first);
        eventually_answers(&health, "/consumer/readyz", StatusCode::OK, "group: ok").await;
        let second = Running::start(second);
        eventually_answers(&standby, "/readyz", StatusCode::OK, "group: ok").await;
        assert_eq!(ask(&health, "/consumer/livez").await, (StatusCode::OK, "ok\n".to_owned()));
        assert_eq!(ask(&health, "/metrics").await.0, StatusCode::NOT_FOUND);

        world.pool.execute("ALTER SCHEMA inbox RENAME TO away").await.unwrap();
        eventually_answers(
            &health,
            "/readyz",
            StatusCode::SERVICE_UNAVAILABLE,
            "inbox: failed: the database has no inbox",
        )
        .await;
        assert_eq!(ask(&health, "/livez").await.0, StatusCode::OK, "an outage is ridden out");
        world.pool.execute("ALTER SCHEMA away RENAME TO inbox").await.unwrap();
        eventually_answers(&health, "/readyz", StatusCode::OK, "inbox: ok").await;

        first.stop().await.unwrap();
        second.stop().await.unwrap();
        let ended = ask(&health, "/livez").await;
        assert_eq!(ended, (StatusCode::SERVICE_UNAVAILABLE, "the consumer has ended\n".to_owned()));
        assert_eq!(ask(&standby, "/readyz").await.0, StatusCode::SERVICE_UNAVAILABLE);
    });
}

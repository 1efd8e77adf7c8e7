//! Requests with an `Idempotency-Key` through the layer, on a real inbox.

mod shop;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use baton_consumer::http::{Answer, Reconciled};
use baton_consumer::inbox::{Lease, Reconciled as Told};
use baton_consumer::{Inbox, Verdict};
use futures_util::future::join_all;
use http::{Response, StatusCode};
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use tokio::time::Instant;

use crate::fixture::{World, eventually, eventually_logged, in_world};
use shop::{Bytestream, Does, Front, Shop, pieces, post, request, whole};

/// Shorter than any test, longer than a statement on a busy machine.
const TTL: Duration = Duration::from_secs(2);

fn inbox(world: &World) -> Inbox {
    Inbox::new("payments", world.pool.clone()).unwrap().lease_ttl(TTL).attempts(3)
}

fn front(world: &World) -> (Shop, Front) {
    let shop = Shop::default();
    let front = Front::new(&shop, inbox(world));
    (shop, front)
}

fn answer(status: u16, body: Bytestream) -> Response<Bytestream> {
    Response::builder().status(status).body(body).unwrap()
}

async fn rows(world: &World) -> i64 {
    sqlx::query_scalar("SELECT count(*) FROM inbox.message").fetch_one(&world.pool).await.unwrap()
}

/// State and attempts.
async fn row(world: &World, key: &str) -> (String, i32) {
    sqlx::query_as("SELECT state, attempts FROM inbox.message WHERE key = $1")
        .bind(key)
        .fetch_one(&world.pool)
        .await
        .unwrap()
}

/// Ends the lease of a key by the database's clock, as time would.
async fn run_out(world: &World, key: &str) {
    let ended = sqlx::query("UPDATE inbox.message SET lease_until = clock_timestamp() WHERE key = $1")
        .bind(key)
        .execute(&world.pool)
        .await
        .unwrap();
    assert_eq!(ended.rows_affected(), 1);
}

/// A request whose handler waits at the gate.
async fn begin(shop: &Shop, front: &Front, key: &str) -> tokio::task::JoinHandle<shop::Reply> {
    shop.next([Does::Waits]);
    let (front, key) = (front.clone(), key.to_owned());
    let waiting = tokio::spawn(async move { front.pay(&key, "100").await });
    shop.entered().await;
    waiting
}

#[test]
fn a_repeat_gets_the_first_answer_and_is_told_so() {
    in_world(1, |world| async move {
        let (shop, front) = front(&world);
        let first = front.pay("key", "100").await;
        first.expect_payment(1);
        assert!(!first.is_replayed() && first.header("set-cookie").is_some());
        for _ in 0..2 {
            let again = front.pay("key", "100").await;
            again.expect_payment(1);
            assert!(again.is_replayed(), "{again:?}");
            assert_eq!(again.body, first.body);
            assert_eq!(again.header("set-cookie"), None, "a cookie is not kept");
        }
        assert_eq!((shop.charged(), shop.asked()), ((1, 1), 0));
        // Another process, with another layer.
        let other = Front::new(&shop, inbox(&world));
        assert!(other.pay("key", "100").await.is_replayed());
    });
}

#[test]
fn a_key_is_the_same_with_and_without_quotes() {
    in_world(1, |world| async move {
        let (shop, front) = front(&world);
        front.pay("8e03978e-40d5", "100").await.expect_payment(1);
        assert!(front.pay("\"8e03978e-40d5\"", "100").await.is_replayed());
        front.pay("\"a \\\"b\\\"\"", "100").await.expect_payment(2);
        assert!(front.pay(" \"a \\\"b\\\"\" ", "100").await.is_replayed());
        assert_eq!(shop.charged(), (2, 2));
    });
}

#[test]
fn without_a_key_that_can_be_read_nothing_runs() {
    in_world(1, |world| async move {
        let (shop, front) = front(&world);
        let send = async |headers: &[(&str, &str)]| {
            front.send(request("POST", "/payments", headers, whole("100"))).await
        };
        send(&[("tenant", "acme")]).await.expect(400, "key-missing");
        for key in ["", "\"\"", "\"open", "a, b", &"k".repeat(1025)] {
            send(&[("tenant", "acme"), ("idempotency-key", key)]).await.expect(400, "key-malformed");
        }
        let twice = [("tenant", "acme"), ("idempotency-key", "a"), ("Idempotency-Key", "a")];
        send(&twice).await.expect(400, "key-malformed");
        send(&[("idempotency-key", "a")]).await.expect(400, "caller-unknown");
        send(&[("tenant", ""), ("idempotency-key", "a")]).await.expect(400, "caller-unknown");
        assert_eq!((shop.charged(), rows(&world).await), ((0, 0), 0));
    });
}

#[test]
fn what_the_layer_is_not_for_passes_through_and_leaves_no_row() {
    in_world(1, |world| async move {
        let (shop, front) = front(&world);
        for _ in 0..2 {
            let get = request("GET", "/payments", &[("idempotency-key", "\"open")], whole(""));
            assert!(!front.send(get).await.is_replayed());
        }
        let optional = Front::with(&shop, inbox(&world), |builder| builder.optional().request_limit(3));
        for _ in 0..2 {
            let post = request("POST", "/payments", &[], pieces([Ok("10"), Ok("000")]));
            let reply = optional.send(post).await;
            assert!(reply.body.ends_with("of 5 bytes"), "{reply:?}");
        }
        assert_eq!((shop.charged(), rows(&world).await), ((4, 1), 0), "by no key");
        optional.pay("\"open", "100").await.expect(400, "key-malformed");
        optional.pay("key", "100").await;
        assert!(optional.pay("key", "100").await.is_replayed(), "with a key it is for it all the same");
    });
}

#[test]
fn two_tenants_with_one_key_never_get_each_others_answer() {
    in_world(1, |world| async move {
        let (shop, front) = front(&world);
        let pay = async |tenant: &str| {
            let headers = [("tenant", tenant), ("idempotency-key", "key")];
            front.send(request("POST", "/payments", &headers, whole("100"))).await
        };
        // Not even while one is at it.
        let acme = begin(&shop, &front, "key").await;
        pay("globex").await.expect_payment(1);
        shop.open();
        acme.await.unwrap().expect_payment(2);
        for (tenant, nr) in [("acme", 2), ("globex", 1)] {
            let again = pay(tenant).await;
            again.expect_payment(nr);
            assert!(again.is_replayed());
        }
        assert_eq!(shop.charged(), (2, 2), "and the provider was given two keys");
        // Nor by way of the look-up.
        shop.next([Does::Panics]);
        let lost = request("POST", "/p", &[("tenant", "acme"), ("idempotency-key", "lost")], whole(""));
        front.send(lost).await.expect(500, "failed");
        shop.next([Does::Answers(answer(500, whole("")))]);
        let headers = [("tenant", "globex"), ("idempotency-key", "lost")];
        assert_eq!(front.send(request("POST", "/p", &headers, whole(""))).await.status, 500);
        let own = front.send(request("POST", "/p", &headers, whole(""))).await;
        own.expect_payment(4);
        assert!(!own.is_replayed(), "what acme's attempt did is not globex's: {own:?}");
    });
}

#[test]
fn what_is_in_progress_is_a_conflict_for_now_and_another_payload_one_for_good() {
    in_world(1, |world| async move {
        let (shop, front) = front(&world);
        let first = begin(&shop, &front, "key").await;
        front.pay("key", "100").await.expect(409, "in-progress");
        front.pay("key", "101").await.expect(422, "payload-differs");
        shop.open();
        first.await.unwrap().expect_payment(1);
        assert!(front.pay("key", "100").await.is_replayed());
        front.pay("key", "101").await.expect(422, "payload-differs");
        assert_eq!(shop.charged(), (1, 1));
    });
}

#[test]
fn another_request_under_a_key_is_refused_in_every_state() {
    in_world(1, |world| async move {
        let (shop, front) = front(&world);
        front.pay("done", "100").await;
        shop.next([Does::Answers(answer(500, whole("")))]);
        front.pay("free", "100").await;
        let left = begin(&shop, &front, "left").await;
        run_out(&world, "left").await;
        for _ in 0..3 {
            shop.next([Does::Answers(answer(500, whole("")))]);
            front.pay("dead", "100").await;
        }
        front.pay("dead", "100").await.expect(500, "given-up");
        let (charged, asked) = (shop.charged(), shop.asked());
        for key in ["done", "free", "left", "dead"] {
            let headers = [("tenant", "acme"), ("idempotency-key", key)];
            let typed = [("tenant", "acme"), ("idempotency-key", key), ("content-type", "text/plain")];
            let coded = [("tenant", "acme"), ("idempotency-key", key), ("content-encoding", "gzip")];
            for (method, path, headers, body) in [
                ("POST", "/payments", &headers[..], "101"),
                ("POST", "/payments", &headers, "100 "),
                ("POST", "/refunds", &headers, "100"),
                ("POST", "/payments?dry=1", &headers, "100"),
                ("PATCH", "/payments", &headers, "100"),
                ("POST", "/payments", &typed, "100"),
                ("POST", "/payments", &coded, "100"),
            ] {
                front.send(request(method, path, headers, whole(body))).await.expect(422, "payload-differs");
            }
        }
        assert_eq!((shop.charged(), shop.asked()), (charged, asked), "nothing ran and nobody was asked");
        // Taken over, and then again another payload.
        let taken = front.pay("left", "100").await;
        assert_eq!(taken.status, 201);
        front.pay("left", "101").await.expect(422, "payload-differs");
        shop.open();
        left.await.unwrap().expect(503, "outcome-unknown");
        assert_eq!(front.pay("left", "100").await.body, taken.body);
    });
}

#[test]
fn of_twenty_at_once_one_runs() {
    in_world(1, |world| async move {
        let (shop, front) = front(&world);
        let replies = join_all((0..20).map(|_| {
            let front = front.clone();
            tokio::spawn(async move { front.pay("key", "100").await })
        }));
        let mut fresh = 0;
        for reply in replies.await {
            let reply = reply.unwrap();
            match reply.status {
                201 => {
                    reply.expect_payment(1);
                    fresh += u32::from(!reply.is_replayed());
                }
                _ => reply.expect(409, "in-progress"),
            }
        }
        assert_eq!((fresh, shop.charged()), (1, (1, 1)));
    });
}

#[test]
fn a_body_over_the_limit_or_broken_off_runs_nothing() {
    in_world(1, |world| async move {
        let shop = Shop::default();
        let front = Front::with(&shop, inbox(&world), |builder| builder.request_limit(10));
        front.send(post("said", whole("eleven byte"))).await.expect(413, "body-too-large");
        let streamed = pieces([Ok("eleven"), Ok(" byte"), Err("it was read on")]);
        front.send(post("streamed", streamed)).await.expect(413, "body-too-large");
        let broken = pieces([Ok("ten"), Err("the client went")]);
        front.send(post("broken", broken)).await.expect(400, "body-unreadable");
        assert_eq!((shop.charged(), rows(&world).await), ((0, 0), 0));
        // Pieces or not is no difference.
        front.send(post("fits", pieces([Ok("ten bytes"), Ok("!")]))).await.expect_payment(1);
        assert!(front.send(post("fits", whole("ten bytes!"))).await.is_replayed());
    });
}

#[test]
fn an_answer_too_large_to_keep_is_given_once_and_its_work_is_never_done_again() {
    in_world(1, |world| async move {
        let shop = Shop::default();
        let front = Front::with(&shop, inbox(&world), |builder| builder.answer_limit(22));
        let large = |body| {
            let answer = Response::builder().status(201).header("location", "/payments/7");
            Does::Charges(answer.header("content-type", "x").body(body).unwrap())
        };
        for (key, body) in [
            ("said", whole("twenty three bytes text")),
            ("streamed", pieces([Ok("twenty three"), Ok(" bytes"), Ok(" text")])),
        ] {
            shop.next([large(body)]);
            let first = front.pay(key, "100").await;
            assert_eq!((first.status, first.body.as_str()), (201, "twenty three bytes text"));
            for _ in 0..2 {
                let again = front.pay(key, "100").await;
                again.expect(410, "answer-not-kept");
                assert!(again.is_replayed() && again.body.contains("\"answer_status\":201"), "{again:?}");
            }
            assert_eq!(row(&world, key).await, ("done".to_owned(), 1));
        }
        assert_eq!((shop.charged(), shop.asked()), ((2, 2), 0));
        // Exactly as large as may be kept, with the headers that are kept.
        let header = "content-typex".len();
        shop.next([Does::Charges(
            Response::builder().header("content-type", "x").body(whole("a".repeat(22 - header))).unwrap(),
        )]);
        front.pay("fits", "100").await;
        let again = front.pay("fits", "100").await;
        assert_eq!((again.status, again.body.len(), again.is_replayed()), (200, 22 - header, true));
        // Where the thing is, where that fits.
        let roomier = Front::with(&shop, inbox(&world), |builder| builder.answer_limit(40));
        shop.next([large(whole("a".repeat(41)))]);
        roomier.pay("place", "100").await;
        assert_eq!(roomier.pay("place", "100").await.header("location"), Some("/payments/7"));
    });
}

#[test]
fn what_is_not_final_is_passed_on_and_the_next_one_asks_first() {
    in_world(1, |world| async move {
        let (shop, front) = front(&world);
        // Charged and then a 500: found by the look-up, stored, given again, never run again.
        shop.next([Does::Charges(answer(500, pieces([Ok("after the "), Ok("charge")])))]);
        let first = front.pay("charged", "100").await;
        assert_eq!((first.status, first.body.as_str()), (500, "after the charge"));
        for _ in 0..2 {
            let again = front.pay("charged", "100").await;
            assert_eq!((again.status, again.body.as_str(), again.is_replayed()), (201, "looked up", true));
        }
        assert_eq!((shop.charged(), shop.asked()), ((1, 1), 1));
        // Not charged: run again, as often as there are attempts.
        for status in [429, 503] {
            shop.next([Does::Answers(answer(status, whole("busy")))]);
            let reply = front.pay("free", "100").await;
            assert_eq!((reply.status, reply.body.as_str()), (status, "busy"));
        }
        let third = front.pay("free", "100").await;
        third.expect_payment(2);
        assert!(!third.is_replayed());
        assert_eq!((shop.attempts(), shop.asked()), (vec![1, 1, 2, 3], 3));
        // A 4xx is an answer.
        shop.next([Does::Answers(answer(422, whole("no such account")))]);
        front.pay("final", "100").await;
        let again = front.pay("final", "100").await;
        assert_eq!((again.status, again.body.as_str(), again.is_replayed()), (422, "no such account", true));
        // And what is one can be said otherwise.
        let other =
            Front::with(&shop, inbox(&world), |builder| builder.final_if(|status| status.is_server_error()));
        shop.next([Does::Answers(answer(500, whole("for good")))]);
        other.pay("other", "100").await;
        assert_eq!(other.pay("other", "100").await.body, "for good");
    });
}

#[test]
fn what_the_provider_cannot_tell_runs_nothing() {
    in_world(1, |world| async move {
        let (shop, front) = front(&world);
        shop.next([Does::Panics]);
        front.pay("key", "100").await.expect(500, "failed");
        shop.provider_says(|| Reconciled::StillUnknown);
        for _ in 0..5 {
            front.pay("key", "100").await.expect(409, "in-progress");
        }
        shop.provider_says(|| panic!("the look-up fell over"));
        front.pay("key", "100").await.expect(500, "failed");
        assert_eq!(row(&world, "key").await, ("in_progress".to_owned(), 1), "asking spends no attempt");
        // Of an answer that is too large a repeat learns what it learns of any.
        shop.provider_says(|| {
            Reconciled::Applied(Answer::new(StatusCode::ACCEPTED).body(vec![b'a'; 1024 * 1024]))
        });
        for _ in 0..2 {
            let reply = front.pay("key", "100").await;
            reply.expect(410, "answer-not-kept");
            assert!(reply.body.contains("202") && reply.is_replayed(), "{reply:?}");
        }
        assert_eq!(shop.charged(), (1, 1));
    });
}

#[test]
fn a_service_that_panics_fails_or_breaks_off_frees_the_key_and_is_asked_after() {
    in_world(1, |world| async move {
        let (shop, front) = front(&world);
        shop.next([Does::Panics]);
        front.pay("panic", "100").await.expect(500, "failed");
        eventually_logged(&["ERROR", "a request panicked", "the service fell over"]).await;
        shop.next([Does::Errs]);
        let error = front.try_send(post("error", whole("100"))).await.unwrap_err();
        assert_eq!(error.to_string(), "the service has no answer", "it is the service's own");
        shop.next([Does::Charges(answer(201, pieces([Ok("half"), Err("of it")])))]);
        front.pay("broken", "100").await.expect(500, "failed");
        for key in ["panic", "error", "broken"] {
            let again = front.pay(key, "100").await;
            assert_eq!((again.body.as_str(), again.is_replayed()), ("looked up", true), "{key}");
        }
        assert_eq!((shop.charged(), shop.asked(), front.running.count()), ((3, 3), 3, 0));
    });
}

#[test]
fn spent_attempts_end_in_a_problem_and_nothing_runs() {
    in_world(1, |world| async move {
        let (shop, front) = front(&world);
        for _ in 0..3 {
            shop.next([Does::Answers(answer(503, whole("")))]);
            front.pay("key", "100").await;
        }
        for _ in 0..2 {
            front.pay("key", "100").await.expect(500, "given-up");
        }
        assert_eq!((shop.attempts(), shop.asked(), shop.charged()), (vec![1, 2, 3], 2, (0, 0)));
    });
}

#[test]
fn a_client_that_hangs_up_ends_nothing_and_finds_the_answer_when_it_comes_again() {
    in_world(1, |world| async move {
        let (shop, mut front) = front(&world);
        // Before the body is there nothing has begun.
        let never = http_body_util::StreamBody::new(futures_util::stream::pending());
        let half = post("half", http_body_util::BodyExt::boxed_unsync(never));
        assert!(futures_util::FutureExt::now_or_never(front.send(half)).is_none());
        assert_eq!((front.running.count(), rows(&world).await), (0, 0));

        let waiting = begin(&shop, &front, "key").await;
        waiting.abort();
        assert!(waiting.await.unwrap_err().is_cancelled());
        assert_eq!(front.running.count(), 1);
        front.pay("key", "100").await.expect(409, "in-progress");
        shop.open();
        front.running.settled().await;
        let again = front.pay("key", "100").await;
        again.expect_payment(1);
        assert!(again.is_replayed());
        assert_eq!((shop.charged(), shop.asked()), ((1, 1), 0));
    });
}

#[test]
fn what_a_process_that_died_after_the_charge_left_behind_is_asked_after() {
    in_world(1, |world| async move {
        let (shop, front) = front(&world);
        shop.next([Does::ChargesAndHangs]);
        let process = tokio::runtime::Runtime::new().unwrap();
        let pool = process.spawn(PgPoolOptions::new().connect_with(world.options.clone())).await.unwrap();
        let dying = Front::new(&shop, Inbox::new("payments", pool.unwrap()).unwrap().lease_ttl(TTL));
        let client = process.spawn(async move { dying.pay("key", "100").await });
        shop.entered().await;
        process.shutdown_background();
        assert!(client.await.unwrap_err().is_cancelled());
        let again = eventually("its lease to have run out", || async {
            let reply = front.pay("key", "100").await;
            if reply.status == 409 { Err(format!("{reply:?}")) } else { Ok(reply) }
        });
        let again = again.await;
        assert_eq!((again.body.as_str(), again.is_replayed()), ("looked up", true));
        assert_eq!((shop.charged(), shop.asked(), shop.attempts()), ((1, 1), 1, vec![1]));
    });
}

#[test]
fn without_its_database_nothing_runs() {
    in_world(1, |world| async move {
        let away = PgPoolOptions::new()
            .acquire_timeout(Duration::from_millis(300))
            .connect_lazy_with(PgConnectOptions::new().host("127.0.0.1").port(1));
        let shop = Shop::default();
        let front = Front::with(&shop, Inbox::new("payments", away).unwrap(), |builder| {
            builder.retry_after(Duration::from_millis(2500))
        });
        let reply = front.pay("key", "100").await;
        reply.expect(503, "unavailable");
        assert_eq!(reply.header("retry-after"), Some("3"));
        assert_eq!((shop.charged(), shop.attempts()), ((0, 0), vec![]));
        drop(world);
    });
}

#[test]
fn an_answer_that_could_not_be_stored_is_not_given() {
    in_world(1, |world| async move {
        let (shop, front) = front(&world);
        let late = begin(&shop, &front, "key").await;
        run_out(&world, "key").await;
        shop.open();
        late.await.unwrap().expect(503, "outcome-unknown");
        let again = front.pay("key", "100").await;
        assert_eq!((again.body.as_str(), again.is_replayed(), shop.asked()), ("looked up", true, 1));
        assert_eq!(shop.charged(), (1, 1));
    });
}

#[test]
fn a_handler_that_says_that_it_moves_on_keeps_its_lease() {
    in_world(1, |world| async move {
        let (shop, front) = front(&world);
        let done = Arc::new(AtomicBool::new(false));
        shop.next([Does::MovesOnUntil(Arc::clone(&done))]);
        let slow = tokio::spawn({
            let front = front.clone();
            async move { front.pay("key", "100").await }
        });
        let begun = Instant::now();
        while begun.elapsed() < TTL * 2 || shop.attempts().is_empty() {
            // The first of all may come before the slow one.
            if !shop.attempts().is_empty() {
                front.pay("key", "100").await.expect(409, "in-progress");
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        done.store(true, Ordering::SeqCst);
        slow.await.unwrap().expect_payment(1);
        assert_eq!((shop.attempts(), shop.asked()), (vec![1], 0));
    });
}

#[test]
fn what_is_stored_but_no_answer_is_told_from_one() {
    in_world(1, |world| async move {
        let (shop, front) = front(&world);
        front.pay("key", "100").await.expect_payment(1);
        let changed = sqlx::query("UPDATE inbox.message SET outcome = '\"paid\"' WHERE key = 'key'");
        changed.execute(&world.pool).await.unwrap();
        let again = front.pay("key", "100").await;
        again.expect(410, "answer-not-kept");
        assert!(again.is_replayed() && !again.body.contains("answer_status"), "{again:?}");
        assert_eq!(shop.charged(), (1, 1));
        // The same name for other leased work: no scope of the layer's is touched by it.
        let nothing = |_: String| std::future::ready(Told::NotApplied);
        let action = async |_: &mut Lease<'_>| Verdict::done();
        inbox(&world).run_leased("acme", "other", b"100", &nothing, action).await.unwrap();
        front.pay("other", "100").await.expect_payment(2);
    });
}

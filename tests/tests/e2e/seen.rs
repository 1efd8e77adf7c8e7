//! A relay seen from outside: what it serves over HTTP, and that none of it depends on the servers it relays between.

use std::net::TcpListener;
use std::time::Duration;

use baton_tests::http::{Exposition, address_of, get, request};
use baton_tests::{
    Harness, Load, Outcome, Process, Proxy, Site, Way, eventually, fail, lasts, program, stays, test,
};
use serde_json::Value;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::leases::shares;

const PATIENCE: Duration = Duration::from_secs(30);

const PAGES: [&str; 5] = ["/", "/livez", "/readyz", "/metrics", "/api/status"];

/// The metrics that conventions name, and those beside them, with their types.
const METRICS: [(&str, &str); 19] = [
    ("baton_outbox_pending_messages", "gauge"),
    ("baton_outbox_oldest_pending_age_seconds", "gauge"),
    ("baton_published_total", "counter"),
    ("baton_publish_failures_total", "counter"),
    ("baton_fenced_total", "counter"),
    ("baton_guard_violations", "gauge"),
    ("baton_leases", "gauge"),
    ("baton_lease_takeovers_total", "counter"),
    ("baton_parked_messages", "gauge"),
    ("baton_stopped_shards", "gauge"),
    ("baton_enqueue_to_ack_seconds", "histogram"),
    ("baton_cursor_lag_messages", "gauge"),
    ("baton_outbox_leaf_bytes", "gauge"),
    ("baton_leaves_truncated_total", "counter"),
    ("baton_leaf_truncations_skipped_total", "counter"),
    ("baton_in_flight_messages", "gauge"),
    ("baton_in_flight_bytes", "gauge"),
    ("baton_database_up", "gauge"),
    ("process_resident_memory_bytes", "gauge"),
];

#[test]
fn every_page_answers_and_none_of_them_takes_anything() {
    test(Duration::from_secs(60), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        let relay = site.relay("seen")?.env("BATON_HTTP__LISTEN", "127.0.0.1:0").start()?;
        let address = address_of(&relay).await?;
        let ready = becomes(&address, "/readyz", 200).await?;
        assert_eq!(ready, "database: ok\nmigrations: ok\nleases: ok\nbroker: ok\n");
        assert_eq!(becomes(&address, "/livez", 200).await?, "ok\n");
        let index = get(&address, "/").await?;
        assert!(index.header("content-type").is_some_and(|kind| kind.starts_with("text/html")), "{index:?}");
        assert!(PAGES[1..].iter().all(|page| index.body.contains(&format!("href=\"{page}\""))), "{index:?}");

        for page in PAGES {
            assert_eq!(get(&address, page).await?.code, 200, "{page}");
            let head = request(&address, "HEAD", page).await?;
            assert_eq!((head.code, head.body.as_str()), (200, ""), "{page}");
            assert!(head.header("content-length").is_some_and(|length| length != "0"), "{page}: {head:?}");
            for method in ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"] {
                let refusal = request(&address, method, page).await?;
                assert_eq!(
                    (refusal.code, refusal.header("allow")),
                    (405, Some("GET, HEAD")),
                    "{method} {page}"
                );
            }
        }
        assert_eq!(get(&address, "/nothing").await?.code, 404);

        // The same document, but for the time that passes between the two.
        eventually("/api/status to be what `baton status --json` prints", PATIENCE, async || {
            shares(&site, &[8]).await?;
            let printed = site.baton(&["status", "--json"])?.finish(PATIENCE).await?.success()?;
            let served = get(&address, "/api/status").await?;
            if served.header("content-type") != Some("application/json") {
                fail!("{served:?}");
            }
            let (served, printed) = (timeless(&served.body)?, timeless(&printed)?);
            if served == printed { Ok(()) } else { fail!("{served} is not {printed}") }
        })
        .await
    });
}

#[test]
fn metrics_say_what_waits_what_was_published_and_who_holds_what() {
    test(Duration::from_secs(90), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        let topic = site.topic("seen", 3).await?;
        let relay = site.relay("seen")?.env("BATON_HTTP__LISTEN", "127.0.0.1:0").start()?;
        let address = address_of(&relay).await?;
        eventually("the leases", PATIENCE, async || shares(&site, &[8]).await).await?;
        insert(&site, &topic, 500).await?;
        site.emptied().await?;

        let page = eventually("nothing that waits", PATIENCE, async || {
            let page = metrics(&address).await?;
            if page.value("baton_outbox_pending_messages")? == 0.0 { Ok(page) } else { fail!("{page:?}") }
        })
        .await?;
        for (name, kind) in METRICS {
            assert_eq!(page.types.get(name).map(String::as_str), Some(kind), "{name}");
        }
        let expected = [
            ("baton_outbox_oldest_pending_age_seconds", 0.0),
            ("baton_published_total", 500.0),
            ("baton_publish_failures_total{cause=\"unknown_topic\"}", 0.0),
            ("baton_fenced_total{operation=\"advance\"}", 0.0),
            ("baton_leases{state=\"held\"}", 8.0),
            ("baton_leases{state=\"expired\"}", 0.0),
            ("baton_leases{state=\"free\"}", 0.0),
            ("baton_lease_takeovers_total", 0.0),
            ("baton_parked_messages{state=\"dead\"}", 0.0),
            ("baton_stopped_shards{cause=\"unknown_topic\"}", 0.0),
            ("baton_stopped_shards{cause=\"too_large\"}", 0.0),
            ("baton_cursor_lag_messages{shard=\"7\"}", 0.0),
            ("baton_in_flight_messages", 0.0),
            ("baton_in_flight_bytes", 0.0),
            ("baton_database_up", 1.0),
        ];
        for (series, value) in expected {
            assert_eq!(page.value(series)?, value, "{series}");
        }
        assert!(page.value("process_resident_memory_bytes")? > 1e6, "{page:?}");
        // A page of each shard at least, and none of them took longer than this test.
        let observed = page.value("baton_enqueue_to_ack_seconds_count")?;
        let seconds = page.value("baton_enqueue_to_ack_seconds_sum")?;
        assert!((8.0..=500.0).contains(&observed) && seconds > 0.0 && seconds / observed < 30.0, "{page:?}");

        // What cannot be published is parked, and is counted by its state and its cause.
        insert(&site, &site.topic_name("nowhere"), 3).await?;
        eventually("three messages that are parked", PATIENCE, async || {
            let page = metrics(&address).await?;
            let seen = [
                page.value("baton_outbox_pending_messages")? == 0.0,
                page.value("baton_parked_messages{state=\"retrying\"}")? == 3.0,
                page.value("baton_publish_failures_total{cause=\"unknown_topic\"}")? >= 3.0,
                page.value("baton_published_total")? == 500.0,
                page.value("baton_stopped_shards{cause=\"unknown_topic\"}")? == 0.0,
            ];
            if seen == [true; 5] { Ok(()) } else { fail!("{seen:?} {page:?}") }
        })
        .await?;

        // Another relay dies and is taken over.
        let mut other = site.relay("other")?.start()?;
        eventually("fair shares", PATIENCE, async || shares(&site, &[4, 4]).await).await?;
        other.kill().await?;
        eventually("expired leases, then four takeovers", PATIENCE, async || {
            let takeovers = metrics(&address).await?.value("baton_lease_takeovers_total")?;
            if takeovers == 4.0 { Ok(()) } else { fail!("{takeovers}") }
        })
        .await
    });
}

#[test]
fn every_refused_statement_is_counted_by_its_operation() {
    test(Duration::from_secs(90), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        let topic = site.topic("fenced", 1).await?;
        let relay = site.relay("fenced")?.env("BATON_HTTP__LISTEN", "127.0.0.1:0").start()?;
        let address = address_of(&relay).await?;
        let counted = async |operation: &str| {
            eventually(format!("a refused {operation}"), PATIENCE, async || {
                let series = format!("baton_fenced_total{{operation=\"{operation}\"}}");
                let count = metrics(&address).await?.value(&series)?;
                if count >= 1.0 { Ok(()) } else { fail!("{count}") }
            })
            .await
        };
        eventually("the leases", PATIENCE, async || shares(&site, &[8]).await).await?;
        let page = metrics(&address).await?;
        for operation in ["claim", "renew", "advance", "release"] {
            assert_eq!(page.value(&format!("baton_fenced_total{{operation=\"{operation}\"}}"))?, 0.0);
        }

        // As after a crash of the server, which takes the token away: leases stay, cursors do not move.
        sqlx::query("UPDATE outbox.token SET token = gen_random_uuid()").execute(site.pool()).await?;
        insert(&site, &topic, 40).await?;
        counted("advance").await?;
        site.emptied().await?;
        eventually("the leases", PATIENCE, async || shares(&site, &[8]).await).await?;

        // As if another had taken one over; while the relay has its connections, and when it comes back without.
        sqlx::query("UPDATE outbox.shard SET generation = generation + 1 WHERE shard = 0")
            .execute(site.pool())
            .await?;
        counted("renew").await?;
        let mut stealing = site.pool().begin().await?;
        sqlx::query("UPDATE outbox.shard SET generation = generation + 1 WHERE shard = 1")
            .execute(&mut *stealing)
            .await?;
        sqlx::query(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
             WHERE datname = current_database() AND application_name LIKE 'baton % fenced'",
        )
        .execute(&mut *stealing)
        .await?;
        stealing.commit().await?;
        counted("claim").await?;

        // A release that finds nothing of its own.
        sqlx::raw_sql(
            "CREATE FUNCTION keep() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
             CREATE TRIGGER keep BEFORE UPDATE ON outbox.shard FOR EACH ROW WHEN (new.owner IS NULL) EXECUTE FUNCTION keep()",
        )
        .execute(site.pool())
        .await?;
        let _other = site.relay("other")?.start()?;
        counted("release").await
    });
}

#[test]
fn a_relay_without_its_database_is_alive_says_what_it_lacks_and_is_ready_again_by_itself() {
    test(Duration::from_secs(120), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        let topic = site.topic("cut", 1).await?;
        let (proxy, behind) = Proxy::before_postgres(site.place()).await?;
        let relay = site
            .relay("cut")?
            .env("DATABASE_URL", &behind.database_url)
            .env("BATON_HTTP__LISTEN", "127.0.0.1:0")
            .start()?;
        let address = address_of(&relay).await?;
        becomes(&address, "/readyz", 200).await?;
        insert(&site, &topic, 10).await?;
        site.emptied().await?;

        // Connections are refused, and then there is only silence.
        for silent in [false, true] {
            if silent {
                proxy.hold(Way::Both);
            } else {
                proxy.refuse();
                proxy.reset_all();
            }
            let unready = becomes(&address, "/readyz", 503).await?;
            assert!(unready.contains("leases: failed: ") && unready.contains("broker: ok"), "{unready}");
            eventually("the database to be missed", PATIENCE, async || {
                let unready = get(&address, "/readyz").await?.body;
                if unready.contains("database: failed: ") { Ok(()) } else { fail!("{unready}") }
            })
            .await?;
            stays("alive", Duration::from_secs(2), async || {
                let live = get(&address, "/livez").await?;
                if live.code == 200 { Ok(()) } else { fail!("{live:?}") }
            })
            .await?;
            let page = metrics(&address).await?;
            assert_eq!(page.value("baton_database_up")?, 0.0, "{page:?}");
            assert_eq!(page.value("baton_published_total")?, 10.0, "{page:?}");
            assert!(
                !page.types.contains_key("baton_leases"),
                "an old value is shown as if it were new: {page:?}"
            );
            let status = get(&address, "/api/status").await?;
            assert!(status.code == 503 && status.body.contains("\"error\""), "{status:?}");

            proxy.heal();
            becomes(&address, "/readyz", 200).await?;
            eventually("the database's gauges", PATIENCE, async || {
                let page = metrics(&address).await?;
                if page.value("baton_leases{state=\"held\"}")? == 8.0 { Ok(()) } else { fail!("{page:?}") }
            })
            .await?;
        }
        Ok(())
    });
}

#[test]
fn a_relay_that_waits_for_its_broker_is_alive_and_says_so() {
    test(Duration::from_secs(60), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        let relay = site
            .relay("early")?
            .env("KAFKA_BROKERS", "127.0.0.1:1")
            .env("BATON_HTTP__LISTEN", "127.0.0.1:0")
            .start()?;
        let address = address_of(&relay).await?;
        let unready = eventually("the database to be found", PATIENCE, async || {
            let unready = get(&address, "/readyz").await?;
            if unready.body.contains("database: ok\n") { Ok(unready) } else { fail!("{unready:?}") }
        })
        .await?;
        assert_eq!(unready.code, 503, "{unready:?}");
        assert!(unready.body.contains("broker: failed: kafka at 127.0.0.1:1 does not answer"), "{unready:?}");
        assert_eq!(get(&address, "/livez").await?.code, 200);
        Ok(())
    });
}

#[test]
fn a_shard_that_stands_still_makes_the_process_unalive_while_the_rest_of_it_moves() {
    test(Duration::from_secs(90), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        let topic = site.topic("still", 1).await?;
        insert(&site, &topic, 100).await?;
        let until = harness.directory().join("go on");
        let launch = site.launch("still", program("planted_relay")?);
        let relay = site
            .as_relay(launch.args(["hold", "P2"]).arg(&until), "still")
            .env("BATON_HTTP__LISTEN", "127.0.0.1:0")
            .start()?;
        let address = address_of(&relay).await?;
        let live = get(&address, "/livez").await?;
        assert_eq!(live.code, 200, "it may stand still for a while: {live:?}");
        let held = async |expected: f64| {
            eventually(format!("{expected} messages in flight"), PATIENCE, async || {
                let page = metrics(&address).await?;
                let (messages, bytes) =
                    (page.value("baton_in_flight_messages")?, page.value("baton_in_flight_bytes")?);
                // A row counts with 200 bytes and what it holds.
                let all =
                    messages == expected && bytes >= 200.0 * expected && (bytes == 0.0) == (expected == 0.0);
                if all { Ok(()) } else { fail!("{messages} in {bytes} bytes") }
            })
            .await
        };
        held(100.0).await?;
        let still = becomes(&address, "/livez", 503).await?;
        assert!(still.lines().all(|line| line.starts_with("shard ")), "{still}");
        std::fs::write(&until, "")?;
        becomes(&address, "/livez", 200).await?;
        site.emptied().await?;
        held(0.0).await
    });
}

#[test]
fn clients_that_send_nothing_or_byte_by_byte_or_do_not_read_keep_no_probe_waiting() {
    test(Duration::from_secs(60), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        let relay = site.relay("beset")?.env("BATON_HTTP__LISTEN", "127.0.0.1:0").start()?;
        let address = address_of(&relay).await?;
        becomes(&address, "/readyz", 200).await?;
        // Two hundred at any time: who is sent away comes again.
        let mut bad = JoinSet::new();
        for n in 0..200 {
            let address = address.clone();
            bad.spawn(async move {
                loop {
                    // Its end is what it is after; how it ends is no matter.
                    drop(misbehave(n % 3, &address).await);
                    lasts("a moment before it comes again", Duration::from_millis(50)).await;
                }
            });
        }
        lasts("all of them being there", Duration::from_secs(1)).await;
        for _ in 0..5 {
            let asked = Instant::now();
            let live = get(&address, "/livez").await?;
            assert_eq!(live.code, 200, "{live:?}");
            assert!(asked.elapsed() < Duration::from_secs(3), "/livez took {:?}", asked.elapsed());
        }
        bad.shutdown().await;
        becomes(&address, "/readyz", 200).await?;
        Ok(())
    });
}

/// A client of no use, until its connection is closed: it sends nothing, a byte now and then, or reads nothing.
async fn misbehave(kind: u32, address: &str) -> std::io::Result<()> {
    let mut stream = TcpStream::connect(address).await?;
    match kind {
        0 => _ = stream.read(&mut [0]).await?,
        1 => loop {
            stream.write_all(b"G").await?;
            lasts("a byte", Duration::from_millis(100)).await;
        },
        _ => {
            for _ in 0..1_000 {
                stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: h\r\n\r\n").await?;
            }
            lasts("an answer that nobody reads", Duration::from_secs(2)).await;
        }
    }
    Ok(())
}

#[test]
fn a_taken_port_ends_the_relay_by_the_name_of_its_key_and_is_no_matter_to_one_that_ends_by_itself() {
    test(Duration::from_secs(60), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        let taken = TcpListener::bind("127.0.0.1:0")?;
        let address = taken.local_addr()?.to_string();
        let ended = site.relay("late")?.env("BATON_HTTP__LISTEN", &address).finish(PATIENCE).await?;
        assert_eq!(ended.status.code(), Some(1), "{ended}");
        for words in [address.as_str(), "http.listen", "BATON_HTTP__LISTEN", "port 0", "off"] {
            assert!(ended.stderr.contains(words), "{words:?} is missing: {ended}");
        }
        let until_empty = site.baton(&["relay", "--until-empty"])?.env("BATON_HTTP__LISTEN", &address);
        until_empty.finish(PATIENCE).await?.success()?;

        let ended = site.relay("wrong")?.env("BATON_HTTP__LISTEN", "9464").finish(PATIENCE).await?;
        assert_eq!(ended.status.code(), Some(2), "{ended}");
        assert!(ended.stderr.contains("http.listen") && ended.stderr.contains("host:port"), "{ended}");

        let mut silent: Process = site.relay("silent")?.env("BATON_HTTP__LISTEN", "off").start()?;
        eventually("the leases", PATIENCE, async || shares(&site, &[8]).await).await?;
        assert!(!silent.stderr().contains("http://"), "{}", silent.stderr());
        assert!(silent.terminate(PATIENCE).await?.success());
        Ok(())
    });
}

/// Waits until a page has this code, and returns what it then says.
async fn becomes(address: &str, page: &str, code: u16) -> Outcome<String> {
    eventually(format!("{page} to answer {code}"), PATIENCE, async || {
        let answer = get(address, page).await?;
        if answer.code == code { Ok(answer.body) } else { fail!("{answer:?}") }
    })
    .await
}

pub(crate) async fn metrics(address: &str) -> Outcome<Exposition> {
    let page = get(address, "/metrics").await?;
    if page.code != 200 || page.header("content-type") != Some("text/plain; version=0.0.4; charset=utf-8") {
        fail!("{page:?}");
    }
    Exposition::read(&page.body)
}

/// A status without what passes by itself.
fn timeless(status: &str) -> Outcome<Value> {
    let mut status: Value = serde_json::from_str(status)?;
    for shard in status["shards"].as_array_mut().into_iter().flatten() {
        shard["lease_left_seconds"] = shard["lease_left_seconds"].is_number().into();
    }
    Ok(status)
}

/// Messages of a key each.
async fn insert(site: &Site, topic: &str, messages: i32) -> Outcome {
    sqlx::query("INSERT INTO outbox.message (topic, key, payload) SELECT $1, 'key-' || i, 'x' FROM generate_series(1, $2) i")
        .bind(topic)
        .bind(messages)
        .execute(site.pool())
        .await?;
    Ok(())
}

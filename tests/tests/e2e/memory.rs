//! What a relay holds is bounded by its settings, whatever waits: resident memory, and which shard may hold how much of it.
//!
//! ```text
//! resident ≤ what an idle relay has + 2 × publish.in_flight_bytes_total + a message of each shard twice + slack
//!                                     └ as it was read, and librdkafka's copy
//! ```
//!
//! The slack is for what allocators and buffers keep. That memory also stays bounded while the broker is away is shown by
//! [`crate::faults`]. `BATON_TIER=full` has ten million messages wait.

use std::time::Duration;

use baton_tests::{Failure, Harness, Load, Outcome, Process, Site, eventually, fail, figure, test};

pub(crate) const MIB: u64 = 1 << 20;

const SLACK: u64 = 32 * MIB;

const SHARDS: u64 = 8;

/// Whether the big numbers are asked for.
pub(crate) fn full() -> bool {
    std::env::var("BATON_TIER").is_ok_and(|tier| tier == "full")
}

/// The most memory that the process has had resident, in bytes.
pub(crate) fn peak(process: &Process) -> Outcome<u64> {
    let status = std::fs::read_to_string(format!("/proc/{}/status", process.id()))?;
    let kilobytes = status.lines().find_map(|line| line.strip_prefix("VmHWM:")?.trim().strip_suffix(" kB"));
    let kilobytes =
        kilobytes.ok_or_else(|| Failure::new("the kernel does not say how much memory it had"))?;
    Ok(kilobytes.trim().parse::<u64>()? << 10)
}

/// The default, `baton.example.toml` says.
const PAGE_ROWS: u64 = 2_000;

/// A relay with these bounds that holds all shards and has nothing to do yet, and what memory it has had.
async fn idle(site: &Site, in_flight: u64, in_flight_total: u64, page_rows: u64) -> Outcome<(Process, u64)> {
    let relay = site
        .relay("relay")?
        .env("BATON_PUBLISH__IN_FLIGHT_BYTES", in_flight.to_string())
        .env("BATON_PUBLISH__IN_FLIGHT_BYTES_TOTAL", in_flight_total.to_string())
        .env("BATON_PUBLISH__PAGE_ROWS", page_rows.to_string())
        .start()?;
    eventually("the relay to hold all shards", Duration::from_secs(20), async || {
        let held: i64 = sqlx::query_scalar("SELECT count(*) FROM outbox.shard WHERE owner = 'relay'")
            .fetch_one(site.pool())
            .await?;
        if held == 8 { Ok(()) } else { fail!("it holds {held}") }
    })
    .await?;
    let memory = peak(&relay)?;
    Ok((relay, memory))
}

async fn enqueue(site: &Site, topic: &str, keys: &[String], first: i64, last: i64, bytes: i32) -> Outcome {
    sqlx::query(
        "INSERT INTO outbox.message (topic, key, payload)
         SELECT $1, ($2::text[])[1 + i % cardinality($2::text[])], convert_to(rpad(i::text, $5, 'x'), 'UTF8')
         FROM generate_series($3::bigint, $4) i",
    )
    .bind(topic)
    .bind(keys)
    .bind(first)
    .bind(last)
    .bind(bytes)
    .execute(site.pool())
    .await?;
    Ok(())
}

async fn count(site: &Site, topic: &str, many: i64, patience: Duration) -> Outcome {
    eventually(format!("{many} records"), patience, async || {
        let count = site.kafka().count(topic).await?;
        if count >= many { Ok(()) } else { fail!("{count} records") }
    })
    .await
}

#[test]
fn resident_memory_does_not_grow_with_the_messages_that_wait() {
    const IN_FLIGHT: u64 = 4 * MIB;
    let (waiting, bytes): (i64, i32) = (if full() { 10_000_000 } else { 150_000 }, 200);
    test(
        Duration::from_secs(if full() { 1_800 } else { 120 }),
        Load::Alone,
        async |harness: &mut Harness| {
            let site = harness.site().await?;
            let topic = site.topic("waiting", 3).await?;
            let keys = site.key_of_each_shard().await?;
            let (mut first, base) = idle(&site, IN_FLIGHT / 2, IN_FLIGHT, PAGE_ROWS).await?;
            first.terminate(Duration::from_secs(20)).await?;
            for from in (1..=waiting).step_by(50_000) {
                enqueue(&site, &topic, &keys, from, (from + 49_999).min(waiting), bytes).await?;
            }
            let (relay, _) = idle(&site, IN_FLIGHT / 2, IN_FLIGHT, PAGE_ROWS).await?;
            count(&site, &topic, waiting, Duration::from_secs(1_500)).await?;
            let most = peak(&relay)?;
            figure(&format!(
                "R30, case 16, F33: {waiting} messages of {bytes} bytes waited: at most {} MiB resident, {} MiB when idle; {} MiB may be in flight",
                most / MIB,
                base / MIB,
                IN_FLIGHT / MIB
            ));
            assert!(most <= base + 2 * IN_FLIGHT + SLACK, "{base} bytes when idle, {most} at most");
            Ok(())
        },
    );
}

#[test]
fn messages_of_a_megabyte_cost_two_copies_of_what_may_be_in_flight_and_no_more() {
    const IN_FLIGHT: u64 = 16 * MIB;
    let many = if full() { 5_000 } else { 200 };
    test(Duration::from_secs(if full() { 900 } else { 120 }), Load::Alone, async |harness: &mut Harness| {
        let site = harness.site().await?;
        let topic = site.topic_with("large", 3, &[("max.message.bytes", "2000000")]).await?;
        let keys = site.key_of_each_shard().await?;
        let (relay, base) = idle(&site, IN_FLIGHT / 2, IN_FLIGHT, PAGE_ROWS).await?;
        enqueue(&site, &topic, &keys, 1, many, 1_000_000).await?;
        count(&site, &topic, many, Duration::from_secs(600)).await?;
        let most = peak(&relay)?;
        figure(&format!(
            "R30: {many} messages of 1 MB: at most {} MiB resident, {} MiB when idle; {} MiB may be in flight and a message of each shard",
            most / MIB,
            base / MIB,
            IN_FLIGHT / MIB
        ));
        assert!(
            most <= base + 2 * (IN_FLIGHT + SHARDS * MIB) + SLACK,
            "{base} bytes when idle, {most} at most"
        );
        Ok(())
    });
}

#[test]
fn headers_that_compress_well_count_as_the_text_that_they_become() {
    const IN_FLIGHT: u64 = 16 * MIB;
    const HEADERS: u64 = 250_000;
    test(Duration::from_secs(120), Load::Alone, async |harness: &mut Harness| {
        let site = harness.site().await?;
        let topic = site.topic_with("headers", 3, &[("max.message.bytes", "2000000")]).await?;
        let keys = site.key_of_each_shard().await?;
        let (relay, base) = idle(&site, IN_FLIGHT / 2, IN_FLIGHT, 50).await?;
        let many = 800;
        sqlx::query(
            "INSERT INTO outbox.message (topic, key, headers)
             SELECT $1, ($2::text[])[1 + i % cardinality($2::text[])], jsonb_build_object('pad', repeat('x', $4))
             FROM generate_series(1, $3) i",
        )
        .bind(&topic)
        .bind(&keys)
        .bind(many)
        .bind(i32::try_from(HEADERS)?)
        .execute(site.pool())
        .await?;
        let stored: i64 =
            sqlx::query_scalar("SELECT max(pg_column_size(headers))::bigint FROM outbox.message")
                .fetch_one(site.pool())
                .await?;
        assert!(stored < 10_000, "they do not compress: {stored} bytes");
        count(&site, &topic, many, Duration::from_secs(60)).await?;
        let most = peak(&relay)?;
        figure(&format!(
            "R30: {many} messages with {HEADERS} bytes of headers, stored as {stored}: at most {} MiB resident, {} MiB when idle",
            most / MIB,
            base / MIB
        ));
        assert!(
            most <= base + 2 * (IN_FLIGHT + SHARDS * HEADERS) + SLACK,
            "{base} bytes when idle, {most} at most"
        );
        Ok(())
    });
}

/// What is published of one message: its number, and how many bytes its payload has. `None`: it is a tombstone.
type Sent = (i64, Option<usize>);

#[test]
fn messages_of_all_sizes_arrive_whole_and_in_order_though_few_of_them_fit_into_a_page_together() {
    const MANY: i64 = 600;
    test(Duration::from_secs(120), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        let topic = site.topic_with("sizes", 3, &[("max.message.bytes", "4000000")]).await?;
        let keys = site.key_of_each_shard().await?;
        let expected: Vec<(String, i64, Option<i32>)> = sqlx::query_as(
            r#"INSERT INTO outbox.message (topic, key, payload, headers)
               SELECT $1, ($2::text[])[1 + i % 3],
                      CASE WHEN i % 11 <> 0 THEN convert_to(rpad('', CASE WHEN i % 97 = 0 THEN 1200000 WHEN i % 31 = 0 THEN 300000
                                                                           WHEN i % 7 = 0 THEN 20000 ELSE 100 END, 'x'), 'UTF8') END,
                      jsonb_build_object('n', i::text)
                          || CASE WHEN i % 53 = 0 THEN jsonb_build_object('pad', (SELECT string_agg(md5(n::text), '') FROM generate_series(1, 3000) n))
                                  ELSE '{}' END
               FROM generate_series(1, $3) i
               RETURNING key, (headers ->> 'n')::bigint, octet_length(payload)"#,
        )
        .bind(&topic)
        .bind(&keys)
        .bind(MANY)
        .fetch_all(site.pool())
        .await?;
        let (_relay, _) = idle(&site, MIB / 4, MIB, PAGE_ROWS).await?;
        count(&site, &topic, MANY, Duration::from_secs(60)).await?;
        let records = site.kafka().records(&topic).await?;
        for key in &keys[..3] {
            let sent: Vec<Sent> = expected
                .iter()
                .filter(|(of, ..)| of == key)
                .map(|(_, n, bytes)| (*n, bytes.and_then(|bytes| usize::try_from(bytes).ok())))
                .collect();
            let seen: Vec<Sent> = records
                .iter()
                .filter(|record| record.key.as_deref() == Some(key.as_bytes()))
                .filter_map(|record| {
                    Some((record.header("n")?.parse().ok()?, record.payload.as_ref().map(Vec::len)))
                })
                .collect();
            assert_eq!(seen, sent, "of the key {key}");
        }
        Ok(())
    });
}

#[test]
fn shards_with_large_messages_for_a_missing_topic_take_nothing_from_the_others_share() {
    const TOTAL: u64 = 8 * MIB;
    test(Duration::from_secs(120), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        let keys = site.key_of_each_shard().await?;
        let missing = site.topic_name("missing");
        let flowing = site.topic("flowing", 1).await?;
        let (_relay, _) = idle(&site, TOTAL, TOTAL, PAGE_ROWS).await?;
        // Each of the three alone could hold all there is.
        enqueue(&site, &missing, &keys[..3], 1, 60, 900_000).await?;
        eventually("all of these to be parked", Duration::from_secs(30), async || {
            let parked: i64 =
                sqlx::query_scalar("SELECT count(*) FROM outbox.parked").fetch_one(site.pool()).await?;
            if parked == 60 { Ok(()) } else { fail!("{parked} are") }
        })
        .await?;
        enqueue(&site, &flowing, &keys[3..], 1, 2_000, 10_000).await?;
        count(&site, &flowing, 2_000, Duration::from_secs(20)).await?;
        site.topic("missing", 1).await?;
        count(&site, &missing, 60, Duration::from_secs(60)).await?;
        site.emptied().await
    });
}

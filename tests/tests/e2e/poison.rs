//! Many keys, some of them poison in each of four ways: the others are complete and in order at nearly full speed, and once the
//! causes are mended all of it is.
//!
//! By default 10,000 messages over 1,000 keys, one run; `BATON_TIER=full` has 100,000, and three pairs with and without poison.

use std::collections::HashMap;
use std::time::Duration;

use baton_tests::{Harness, Load, Outcome, Place, Schema, Site, eventually, fail, figure, kafka_tool, test};

use crate::refusals::{PATIENCE, requeue};

const KEYS: i32 = 1_000;

/// Of each kind; four kinds are the first twenty keys.
const POISON: i32 = 5;

/// Where the messages of each kind go.
struct Topics {
    good: String,
    small: String,
    missing: String,
    denied: String,
    strict: String,
}

impl Topics {
    fn all(&self) -> [&str; 5] {
        [&self.good, &self.small, &self.missing, &self.denied, &self.strict]
    }
}

#[test]
fn poison_keys_of_four_kinds_hold_up_no_other_and_all_arrive_in_order_once_the_causes_are_mended() {
    test(Duration::from_secs(900), Load::Alone, async |harness: &mut Harness| {
        let full = std::env::var("BATON_TIER").is_ok_and(|tier| tier == "full");
        let (messages, pairs) = if full { (100_000, 3) } else { (10_000, 1) };
        let (mut ratios, mut said) = (Vec::new(), Vec::new());
        for _ in 0..pairs {
            let clean = run(harness, messages, false).await?;
            let poisoned = run(harness, messages, true).await?;
            // Of the healthy keys there are fewer messages where some are poison.
            ratios.push(clean / poisoned * f64::from(KEYS - 4 * POISON) / f64::from(KEYS));
            said.push(format!("{clean:.2} s and {poisoned:.2} s"));
        }
        ratios.sort_by(f64::total_cmp);
        figure(&format!(
            "must show 2: {messages} messages, 20 of {KEYS} keys poison: the healthy ones at {:.2} of the speed without poison ({})",
            ratios[ratios.len() / 2],
            said.join(", ")
        ));
        Ok(())
    });
}

/// How many seconds it took from the relay's start until the broker had the last message of the healthy keys; afterwards everything
/// is judged.
async fn run(harness: &mut Harness, messages: i32, poisoned: bool) -> Outcome<f64> {
    let site = harness.site_at(&Place::shared()?, Schema::Both { shards: 8 }).await?;
    let topics = Topics {
        // The broker's clock is the database's: both are this machine's.
        good: site.topic_with("good", 6, &[("message.timestamp.type", "LogAppendTime")]).await?,
        small: site.topic_with("small", 1, &[("max.message.bytes", "10000")]).await?,
        missing: site.topic_name("missing"),
        denied: site.topic("denied", 1).await?,
        strict: site.topic_with("strict", 1, &[("message.timestamp.before.max.ms", "3600000")]).await?,
    };
    let acl = async |act: &str, who: &str, operations: &[&str]| -> Outcome {
        let tool = kafka_tool(&site, "org.apache.kafka.tools.AclCommand").await?;
        let mut tool = tool.args([act, "--force", "--topic", &topics.denied, who, "User:ANONYMOUS"]);
        for operation in operations {
            tool = tool.args(["--operation", operation]);
        }
        tool.finish(PATIENCE).await?.success().map(drop)
    };
    if poisoned {
        acl("--add", "--allow-principal", &["Read", "Describe", "Delete"]).await?;
        acl("--add", "--deny-principal", &["Write"]).await?;
    }
    sqlx::query(
        "INSERT INTO outbox.message (topic, key, payload, created_at)
         SELECT CASE WHEN $7 AND k < $2 THEN $3 WHEN $7 AND k < 2 * $2 THEN $4 WHEN $7 AND k < 3 * $2 THEN $5
                     WHEN $7 AND k < 4 * $2 THEN $6 ELSE $1 END,
                'key-' || k,
                convert_to(n || CASE WHEN $7 AND k < $2 AND n = 1 THEN repeat(' ', 20000) ELSE repeat(' ', 80) END, 'UTF8'),
                CASE WHEN $7 AND k >= 3 * $2 AND k < 4 * $2 AND n = 1 THEN now() - interval '2 h' ELSE now() END
         FROM generate_series(0, $8 / $9 - 1) n, generate_series(0, $9 - 1) k ORDER BY n, k",
    )
    .bind(&topics.good)
    .bind(POISON)
    .bind(&topics.small)
    .bind(&topics.missing)
    .bind(&topics.denied)
    .bind(&topics.strict)
    .bind(poisoned)
    .bind(messages)
    .bind(KEYS)
    .execute(site.pool())
    .await?;
    let per_key = messages / KEYS;
    let healthy = if poisoned { KEYS - 4 * POISON } else { KEYS };
    let began: i64 = sqlx::query_scalar("SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint")
        .fetch_one(site.pool())
        .await?;
    let relay = site.relay("relay")?.start()?;
    site.emptied().await?;
    // A replaced producer repeats: it is the first time that counts.
    let mut there = HashMap::new();
    for record in site.kafka().records(&topics.good).await? {
        let message = (record.key_text().map(str::to_owned), record.payload_text().map(str::to_owned));
        let at = record.timestamp_ms.unwrap_or_default();
        there.entry(message).and_modify(|first: &mut i64| *first = at.min(*first)).or_insert(at);
    }
    assert_eq!(there.len(), usize::try_from(healthy * per_key)?);
    let last = there.into_values().max().unwrap_or_default();
    let took = Duration::from_millis(u64::try_from(last - began)?).as_secs_f64();
    in_order(&site, &topics, per_key, |key| !poisoned || key >= 4 * POISON).await?;
    if poisoned {
        let keys: i64 = sqlx::query_scalar(
            "SELECT count(DISTINCT (topic, key)) FROM outbox.parked WHERE state NOT IN ('published', 'discarded')",
        )
        .fetch_one(site.pool())
        .await?;
        assert_eq!(keys, i64::from(4 * POISON), "{}", relay.stderr());
        site.kafka().set_topic(&topics.small, &[("max.message.bytes", "100000")]).await?;
        site.kafka().set_topic(&topics.strict, &[("message.timestamp.before.max.ms", "86400000")]).await?;
        site.topic("missing", 1).await?;
        acl("--remove", "--deny-principal", &["Write"]).await?;
        acl("--remove", "--allow-principal", &["Read", "Describe", "Delete"]).await?;
        for state in ["dead", "retrying"] {
            requeue(&site, &["--state", state]).await?;
        }
        eventually("everything, in order", Duration::from_secs(60), async || {
            in_order(&site, &topics, per_key, |_| true).await
        })
        .await?;
        let lost: i64 = sqlx::query_scalar("SELECT count(*) FROM outbox.parked WHERE state <> 'published'")
            .fetch_one(site.pool())
            .await?;
        assert_eq!(lost, 0, "{}", relay.stderr());
    }
    drop(relay);
    harness.leave(&site).await;
    Ok(took)
}

/// Whether all messages of these keys are there, their first occurrences in order.
async fn in_order(site: &Site, topics: &Topics, per_key: i32, of: impl Fn(i32) -> bool) -> Outcome {
    let mut seen: HashMap<String, Vec<i32>> = HashMap::new();
    for topic in topics.all() {
        if site.kafka().partitions(topic).await? == 0 {
            continue;
        }
        for record in site.kafka().records(topic).await? {
            let n = record.payload_text().unwrap_or_default().trim().parse()?;
            let of_key = seen.entry(record.key_text().unwrap_or_default().to_owned()).or_default();
            if !of_key.contains(&n) {
                of_key.push(n);
            }
        }
    }
    for key in (0..KEYS).filter(|key| of(*key)) {
        let of_key = seen.remove(&format!("key-{key}")).unwrap_or_default();
        if !of_key.iter().copied().eq(0..per_key) {
            fail!("key-{key}: {of_key:?}");
        }
    }
    Ok(())
}

//! `baton status`: the JSON is a public format.

use std::time::Duration;

use baton_tests::{Harness, Load, Outcome, Site, eventually, fail, test};
use serde_json::{Value, json};

const PATIENCE: Duration = Duration::from_secs(30);

#[test]
fn status_json_has_exactly_the_documented_members() {
    test(Duration::from_secs(60), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        let topic = site.topic("status", 1).await?;
        sqlx::query("INSERT INTO outbox.message (topic, key, payload) SELECT $1, i::text, 'x' FROM generate_series(1, 50) i")
            .bind(&topic)
            .execute(site.pool())
            .await?;
        let waiting = status(&site).await?;
        assert_eq!(shape(&waiting), documented("number", "null", "null"));
        assert_eq!(waiting["pending"], json!({"count": 50, "exact": true}));
        assert_eq!(waiting["relays"], json!([]));
        let lag: i64 = shards(&waiting).map(|shard| shard["lag_messages"].as_i64().unwrap_or(0)).sum();
        assert_eq!(lag, 50);

        let relay = site.relay("the-relay")?.start()?;
        let held = eventually("a relay that holds all and nothing that waits", PATIENCE, async || {
            let status = status(&site).await?;
            let all = shards(&status).all(|shard| shard["owner"] == "the-relay");
            if all && status["pending"]["count"] == 0 { Ok(status) } else { fail!("{status}") }
        })
        .await?;
        assert_eq!(shape(&held), documented("null", "string", "number"));
        assert_eq!(held["relays"], json!([{"owner": "the-relay", "shards": [0, 1, 2, 3, 4, 5, 6, 7]}]));
        for shard in shards(&held) {
            assert!(shard["generation"].as_i64() == Some(1) && shard["lag_messages"] == 0, "{shard}");
            let left = shard["lease_left_seconds"].as_f64().unwrap_or(-1.0);
            assert!((0.0..=3.0).contains(&left), "{shard}");
        }

        // Killed, its leases run out: that is seen, apart from released ones.
        drop(relay);
        eventually("expired leases", PATIENCE, async || {
            let status = status(&site).await?;
            if status["expired_leases"] == 8 { Ok(()) } else { fail!("{status}") }
        })
        .await?;
        let words = site.baton(&["status"])?.finish(PATIENCE).await?.success()?;
        let first = words.lines().next().unwrap_or_default();
        assert!(first.contains("oldest waiting message"), "the oldest age comes first: {words}");
        Ok(())
    });
}

async fn status(site: &Site) -> Outcome<Value> {
    let printed = site.baton(&["status", "--json"])?.finish(PATIENCE).await?.success()?;
    Ok(serde_json::from_str(&printed)?)
}

fn shards(status: &Value) -> impl Iterator<Item = &Value> {
    status["shards"].as_array().into_iter().flatten()
}

/// surface.md's shape for an outbox of eight shards; the three kinds of value that depend on its state are given.
fn documented(age: &str, owner: &str, lease: &str) -> Value {
    let shard = json!({
        "shard": "number", "owner": owner, "generation": "number", "lease_left_seconds": lease,
        "cursor": {"position": "number", "snapshot": "string", "ceiling": "string", "late": "null"},
        "lag_messages": "number", "lag_seconds": age,
    });
    json!({
        "oldest_pending_age_seconds": age,
        "expired_leases": "number",
        "pending": {"count": "number", "exact": "bool"},
        "parked": {"retrying": "number", "blocked": "number", "dead": "number", "paused": "number", "oldest_age_seconds": "null"},
        "relays": "array",
        "shards": vec![shard; 8],
    })
}

/// The same document with each value replaced by its kind.
fn shape(value: &Value) -> Value {
    match value {
        Value::Object(members) => members
            .iter()
            .map(|(name, value)| (name.clone(), if name == "relays" { json!("array") } else { shape(value) }))
            .collect(),
        Value::Array(items) => items.iter().map(shape).collect(),
        Value::Null => json!("null"),
        Value::Bool(_) => json!("bool"),
        Value::Number(_) => json!("number"),
        Value::String(_) => json!("string"),
    }
}

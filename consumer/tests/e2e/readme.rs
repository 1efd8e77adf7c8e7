//! The README's consumer: the very lines, run.

use sqlx::Executor;

use crate::fixture::{Send, eventually, in_world};

mod billing;

#[test]
fn the_readmes_consumer_has_at_most_30_lines_and_applies_each_message_once() {
    let code = include_str!("readme/billing.rs");
    assert!(code.lines().count() <= 30, "{} lines", code.lines().count());
    let readme = include_str!("../../../README.md");
    let block = format!("```rust\n{}```", code.replace("pub(super) ", ""));
    assert!(
        readme.contains(&block),
        "the README shows another consumer than the one that is tested:\n{block}"
    );
    in_world(1, |world| async move {
        world.pool.execute("CREATE TABLE invoice (order_id text, amount_cents bigint)").await.unwrap();
        for id in ["1", "2", "1"] {
            let order = format!("{{\"order_id\":\"{id}\",\"amount_cents\":100}}");
            world.send(Send::new(id, &order)).await;
        }
        let (pool, kafka, topic) = (world.pool.clone(), world.kafka(), world.topic.clone());
        let running = tokio::spawn(async move { billing::bill(pool, kafka, &topic).await });
        let invoices = eventually("three records are done with", || async {
            let (invoices, done): (i64, i64) = sqlx::query_as(
                "SELECT (SELECT count(*) FROM invoice), (SELECT count(*) FROM inbox.message WHERE state = 'done')",
            )
            .fetch_one(&world.pool)
            .await
            .unwrap();
            if done == 2 { Ok(invoices) } else { Err(format!("{invoices} invoices, {done} done")) }
        })
        .await;
        assert_eq!(invoices, 2);
        assert!(!running.is_finished());
        running.abort();
    });
}

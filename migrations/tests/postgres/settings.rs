//! The number of shards and the slot period.

use std::num::NonZeroU16;
use std::time::Duration;

use baton_migrations::{Error, Obstacle, migrate_outbox};
use sqlx::{Connection as _, Executor as _, PgConnection};

use crate::fixture::{self, value};

fn shards(n: u16) -> Option<NonZeroU16> {
    NonZeroU16::new(n)
}

async fn obstacle(c: &mut PgConnection, asked: u16) -> Obstacle {
    match migrate_outbox(c, shards(asked), None).await {
        Err(Error::ShardsFixed { asked: named, obstacle, .. }) if named.get() == asked => obstacle,
        other => panic!("expected to be refused, got {other:?}"),
    }
}

#[tokio::test]
async fn every_shard_has_a_cursor_that_starts_from_a_real_snapshot() {
    fixture::empty(async |db| {
        let mut c = db.connect().await;
        let settings =
            migrate_outbox(&mut c, shards(5), Some(Duration::from_millis(1500))).await.unwrap().settings;
        let settings = settings.unwrap();
        assert_eq!((settings.shards.get(), settings.slot_period), (5, Duration::from_millis(1500)));

        let cursors: i64 = value(
            &mut c,
            "SELECT count(*) FROM outbox.cursor JOIN outbox.shard USING (shard)
             WHERE position = 0 AND late_snapshot IS NULL AND owner IS NULL AND cursor.generation = 0
               AND pg_snapshot_xmin(snapshot) BETWEEN '4' AND ceiling",
        )
        .await;
        assert_eq!(cursors, 5);
        let slot: i16 = value(&mut c, "SELECT outbox.slot_at(to_timestamp(1.5 * 6))").await;
        let before: i16 = value(&mut c, "SELECT outbox.slot_at(to_timestamp(1.5 * 6 - 0.001))").await;
        assert_eq!((before, slot), (1, 2));
        let largest: i16 =
            value(&mut c, "SELECT max(outbox.shard_of(k::text, NULL)) FROM generate_series(1, 1000) k").await;
        assert_eq!(largest, 4);
    })
    .await;
}

#[tokio::test]
async fn an_unused_outbox_gets_another_number_of_shards_and_generations_never_fall() {
    fixture::outbox(async |db| {
        let mut c = db.connect().await;
        c.execute("UPDATE outbox.shard SET generation = 7 WHERE shard = 6").await.unwrap();
        c.execute("UPDATE outbox.advance SET position = 41 WHERE shard = 3").await.unwrap();
        for n in [4, 16, 1, 1024] {
            let settings = migrate_outbox(&mut c, shards(n), None).await.unwrap().settings.unwrap();
            assert_eq!(settings.shards.get(), n);
            let state: (i64, i64, i64, i64) = sqlx::query_as(
                "SELECT count(*), min(s.generation), min(c.generation), min(c.position)
                 FROM outbox.shard s JOIN outbox.cursor c USING (shard)",
            )
            .fetch_one(&mut c)
            .await
            .unwrap();
            assert_eq!(state, (i64::from(n), 7, 7, 41));
        }
        c.execute(
            "INSERT INTO outbox.message (topic, key) SELECT 't', k::text FROM generate_series(1, 9999) k",
        )
        .await
        .unwrap();
        let used: i64 = value(&mut c, "SELECT count(DISTINCT shard) FROM outbox.message").await;
        assert_eq!(used, 1024);
    })
    .await;
}

#[tokio::test]
async fn the_number_of_shards_is_fixed_while_anything_waits_or_anybody_works() {
    fixture::outbox(async |db| {
        let mut c = db.connect().await;
        let mut producer = db.connect().await;

        let mut open = producer.begin().await.unwrap();
        open.execute("INSERT INTO outbox.message (topic) VALUES ('t')").await.unwrap();
        assert_eq!(obstacle(&mut c, 9).await, Obstacle::Busy);
        open.commit().await.unwrap();
        assert_eq!(obstacle(&mut c, 9).await, Obstacle::Messages);
        c.execute("TRUNCATE outbox.message").await.unwrap();

        c.execute(
            "UPDATE outbox.shard SET owner = 'a', lease_until = clock_timestamp() + '1h' WHERE shard = 1",
        )
        .await
        .unwrap();
        assert_eq!(obstacle(&mut c, 9).await, Obstacle::Relays);
        c.execute("UPDATE outbox.shard SET lease_until = clock_timestamp() WHERE shard = 1").await.unwrap();

        c.execute("INSERT INTO outbox.relay VALUES ('idle', DEFAULT, clock_timestamp() + '1h')")
            .await
            .unwrap();
        assert_eq!(obstacle(&mut c, 9).await, Obstacle::Relays);
        c.execute("DELETE FROM outbox.relay").await.unwrap();

        c.execute(
            "INSERT INTO outbox.parked (id, position, shard, topic, created_at, state, generation)
             VALUES (gen_random_uuid(), 1, 1, 't', now(), 'blocked', 1)",
        )
        .await
        .unwrap();
        assert_eq!(obstacle(&mut c, 9).await, Obstacle::Parked);
        c.execute("DELETE FROM outbox.parked").await.unwrap();

        let kept = migrate_outbox(&mut c, None, None).await.unwrap().settings.unwrap();
        assert_eq!(kept.shards.get(), 8);
        migrate_outbox(&mut c, shards(9), None).await.unwrap();
    })
    .await;
}

#[tokio::test]
async fn a_producer_that_enqueues_during_a_change_of_shards_lands_in_the_new_ones() {
    fixture::outbox(async |db| {
        let mut c = db.connect().await;
        let mut producer = db.connect().await;
        let enqueue =
            "INSERT INTO outbox.message (topic, key) SELECT 't', k::text FROM generate_series(1, 2000) k";
        // The plan of the first is cached; the second must not use its literal.
        let statement = sqlx::query(enqueue);
        statement.execute(&mut producer).await.unwrap();
        c.execute("TRUNCATE outbox.message").await.unwrap();
        migrate_outbox(&mut c, shards(64), None).await.unwrap();
        sqlx::query(enqueue).execute(&mut producer).await.unwrap();
        let wrong: i64 = value(
            &mut c,
            "SELECT count(*) FROM outbox.message WHERE shard <> outbox.shard_of(key, position)",
        )
        .await;
        let used: i64 = value(&mut c, "SELECT count(DISTINCT shard) FROM outbox.message").await;
        assert_eq!((wrong, used), (0, 64));
    })
    .await;
}

#[tokio::test]
async fn the_slot_period_may_change_at_any_time() {
    fixture::outbox(async |db| {
        let mut c = db.connect().await;
        c.execute("INSERT INTO outbox.message (topic) VALUES ('t')").await.unwrap();
        let settings =
            migrate_outbox(&mut c, None, Some(Duration::from_secs(2))).await.unwrap().settings.unwrap();
        assert_eq!(settings.slot_period, Duration::from_secs(2));
        let stored: String = value(&mut c, "SELECT slot_period::text FROM outbox.settings").await;
        let slot: i16 = value(&mut c, "SELECT outbox.slot_at(to_timestamp(6.5))").await;
        assert_eq!((stored.as_str(), slot), ("00:00:02", 3));
        let kept = migrate_outbox(&mut c, None, None).await.unwrap().settings.unwrap();
        assert_eq!(kept, settings);
    })
    .await;
}

#[tokio::test]
async fn choices_out_of_range_are_refused_before_anything_is_done() {
    fixture::empty(async |db| {
        let mut c = db.connect().await;
        let error = migrate_outbox(&mut c, shards(1025), None).await.unwrap_err();
        assert!(matches!(error, Error::TooManyShards { .. }), "{error}");
        for asked in [Duration::ZERO, Duration::from_millis(999), Duration::from_secs(366 * 24 * 3600)] {
            let error = migrate_outbox(&mut c, None, Some(asked)).await.unwrap_err();
            assert!(matches!(error, Error::SlotPeriod { .. }), "{error}");
        }
        let schemas: i64 = value(&mut c, "SELECT count(*) FROM pg_namespace WHERE nspname = 'outbox'").await;
        assert_eq!(schemas, 0);
    })
    .await;
}

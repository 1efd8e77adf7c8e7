//! Cursors through an upgrade: a database that was migrated when there was one row a shard, updated in place.

use baton_migrations::{Line, State, check, migrate_outbox};
use sqlx::migrate::{Migration, MigrationType, Migrator};
use sqlx::{AssertSqlSafe, Executor as _, PgConnection, SqlSafeStr as _};

use crate::fixture::{self, Database, value};

/// A database as the first migration made it, in the middle of its work: one shard works off late rows, one has been
/// claimed often, one has done nothing.
async fn of_the_first_migration(db: &Database) -> PgConnection {
    let mut c = db.connect().await;
    let first = Migration::new(
        1,
        "outbox".into(),
        MigrationType::Simple,
        include_str!("../../outbox/0001_outbox.sql").into_sql_str(),
        false,
    );
    let mut migrator = Migrator::with_migrations(vec![first]);
    migrator.dangerous_set_table_name("outbox._migrations");
    migrator.create_schema("outbox");
    migrator.run(&mut c).await.unwrap();
    c.execute(
        "INSERT INTO outbox.settings (system_identifier, shards, slot_period)
         SELECT system_identifier, 8, '6 h' FROM pg_control_system();
         INSERT INTO outbox.shard (shard, owner, generation, lease_until)
         SELECT s, 'relay', s * 7, clock_timestamp() - interval '1 minute' FROM generate_series(0, 7) s;
         INSERT INTO outbox.cursor (shard, generation, position, snapshot, ceiling)
         SELECT s, s * 7, s * 1000, '100:200:150,160', '210' FROM generate_series(0, 7) s;
         UPDATE outbox.cursor SET late_snapshot = '180:300:190', late_position = 2718 WHERE shard = 3;
         CREATE TABLE public.before AS SELECT * FROM outbox.cursor",
    )
    .await
    .unwrap();
    c
}

#[tokio::test]
async fn an_upgrade_keeps_cursors_that_are_in_the_middle_of_late_rows() {
    fixture::empty(async |db| {
        let mut c = of_the_first_migration(db).await;
        assert!(matches!(check(&mut c, Line::Outbox).await.unwrap(), State::Behind { applied: 1, .. }));

        let applied = migrate_outbox(&mut c, None, None).await.unwrap();

        assert_eq!(applied.versions, fixture::outbox_versions()[1..]);
        assert_eq!(check(&mut c, Line::Outbox).await.unwrap(), State::Current);
        const COLUMNS: &str =
            "shard, generation, position, snapshot::text, ceiling, late_snapshot::text, late_position, advanced_at";
        let differ = format!(
            "SELECT count(*) FROM ((SELECT {COLUMNS} FROM outbox.cursor EXCEPT SELECT {COLUMNS} FROM public.before)
             UNION ALL (SELECT {COLUMNS} FROM public.before EXCEPT SELECT {COLUMNS} FROM outbox.cursor)) changed"
        );
        let differ: i64 = sqlx::query_scalar(AssertSqlSafe(differ)).fetch_one(&mut c).await.unwrap();
        assert_eq!(differ, 0);
        let late: i64 =
            value(&mut c, "SELECT late_position FROM outbox.cursor WHERE shard = 3 AND generation = 21").await;
        assert_eq!(late, 2718);
    })
    .await;
}

#[tokio::test]
async fn the_durable_cursor_is_the_newest_row_of_its_shard() {
    fixture::outbox(async |db| {
        let mut c = db.connect().await;
        c.execute(
            "INSERT INTO outbox.advance (shard, number, generation, position, snapshot, ceiling)
             SELECT 5, n, 1, n * 10, '3:3:', '3' FROM generate_series(2, 40) n",
        )
        .await
        .unwrap();
        let cursors: Vec<(i16, i64, i64)> =
            sqlx::query_as("SELECT shard, number, position FROM outbox.cursor ORDER BY shard")
                .fetch_all(&mut c)
                .await
                .unwrap();
        let expected: Vec<_> = (0..8).map(|s| if s == 5 { (s, 40, 400) } else { (s, 1, 0) }).collect();
        assert_eq!(cursors, expected);
    })
    .await;
}

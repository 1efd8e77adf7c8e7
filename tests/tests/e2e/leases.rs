//! What the database saw of leases and cursors: triggers write down every change, so that tests judge by that and not by
//! what a relay says of itself.

use baton_tests::{Outcome, Site, fail};
use sqlx::{Executor, FromRow};

/// One change of a row of `outbox.shard`.
#[derive(Debug, FromRow)]
pub(crate) struct LeaseChange {
    pub(crate) shard: i16,
    pub(crate) owner_before: Option<String>,
    pub(crate) owner: Option<String>,
    pub(crate) generation_before: i64,
    pub(crate) generation: i64,
    /// Nobody's, or run out, when it was changed.
    pub(crate) was_free: bool,
}

pub(crate) async fn watch_leases(site: &Site) -> Outcome {
    site.pool()
        .execute(
            "CREATE SEQUENCE change;
             CREATE TABLE lease_change (n bigint DEFAULT nextval('change'), at timestamptz DEFAULT clock_timestamp(),
                 by text DEFAULT current_setting('application_name'), shard smallint, owner_before text, owner text,
                 generation_before bigint, generation bigint, lease_until_before timestamptz,
                 lease_until timestamptz, was_free boolean);
             CREATE TABLE cursor_change (n bigint DEFAULT nextval('change'), by text DEFAULT current_setting('application_name'),
                 shard smallint, owner text, position_before bigint, position bigint);
             CREATE FUNCTION note_lease() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
                 INSERT INTO lease_change (shard, owner_before, owner, generation_before, generation, lease_until_before, lease_until,
                     was_free)
                 VALUES (new.shard, old.owner, new.owner, old.generation, new.generation, old.lease_until, new.lease_until,
                         old.lease_until IS NULL OR old.lease_until <= clock_timestamp());
                 RETURN NULL;
             END $$;
             CREATE FUNCTION note_cursor() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
                 INSERT INTO cursor_change (shard, owner, position_before, position)
                 SELECT s.shard, s.owner, before.position, new.position
                 FROM outbox.shard s, LATERAL (SELECT position FROM outbox.advance WHERE shard = new.shard AND number < new.number
                                               ORDER BY number DESC LIMIT 1) before
                 WHERE s.shard = new.shard;
                 RETURN NULL;
             END $$;
             CREATE TRIGGER note AFTER UPDATE ON outbox.shard FOR EACH ROW EXECUTE FUNCTION note_lease();
             CREATE TRIGGER note AFTER INSERT ON outbox.advance FOR EACH ROW EXECUTE FUNCTION note_cursor()",
        )
        .await?;
    Ok(())
}

pub(crate) async fn lease_changes(site: &Site) -> Outcome<Vec<LeaseChange>> {
    Ok(sqlx::query_as(
        "SELECT shard, owner_before, owner, generation_before, generation, was_free FROM lease_change ORDER BY n",
    )
    .fetch_all(site.pool())
    .await?)
}

pub(crate) async fn claims(site: &Site, owner: &str) -> Outcome<i64> {
    Ok(sqlx::query_scalar(
        "SELECT count(*) FROM lease_change WHERE owner = $1 AND generation > generation_before",
    )
    .bind(owner)
    .fetch_one(site.pool())
    .await?)
}

/// Ok when the living leases are spread like this, smallest share first.
pub(crate) async fn shares(site: &Site, expected: &[i64]) -> Outcome {
    let shares: Vec<i64> = sqlx::query_scalar(
        "SELECT count(*) FROM outbox.shard WHERE lease_until > clock_timestamp() GROUP BY owner ORDER BY 1",
    )
    .fetch_all(site.pool())
    .await?;
    if shares == expected { Ok(()) } else { fail!("the shares are {shares:?}") }
}

/// Messages of 40 keys, a thousand a transaction, each with its place within its key.
pub(crate) async fn fill(site: &Site, topic: &str, messages: i64) -> Outcome {
    let from: i64 = sqlx::query_scalar("SELECT count(*) FROM outbox.message").fetch_one(site.pool()).await?;
    for first in (from..from + messages).step_by(1000) {
        let last = (first + 999).min(from + messages - 1);
        sqlx::query(
            r#"INSERT INTO outbox.message (topic, key, payload)
               SELECT $1, 'key-' || i % 40, convert_to(format('{"seq":%s}', i), 'UTF8') FROM generate_series($2, $3) i"#,
        )
        .bind(topic)
        .bind(first)
        .bind(last)
        .execute(site.pool())
        .await?;
    }
    Ok(())
}

//! What an advance costs does not grow, however long a snapshot keeps the vacuum away; and the ring that this takes loses
//! no advance and keeps no more rows than it must.
//!
//! A row that is updated under a held snapshot leaves every version behind, and whoever looks the row up walks them. So
//! cursors are a ring of appended rows, and the lease row, which must be updated, is looked up from its newest version.
//! The statements are the relay's own; their `clock_timestamp()` is one of the test's, which goes on at each renewal, because
//! hours under load pass here in seconds. `BATON_TIER=full` makes 100,000 writes of 3,000.

use std::time::Duration;

use baton_relay::database::PLANNED;
use baton_tests::{Harness, Load, Outcome, Site, eventually, fail, figure, test};
use serde_json::Value;
use sqlx::postgres::{PgArguments, PgRow};
use sqlx::query::Query;
use sqlx::{AssertSqlSafe, Executor, PgConnection, Postgres, Row};
use tokio::time::Instant;
use uuid::Uuid;

use crate::leases::fill;

const OWNER: &str = "ring";
const SHARD: i16 = 3;
/// What the median is taken of.
const SAMPLES: usize = 200;
const PATIENCE: Duration = Duration::from_secs(30);

#[test]
fn an_advance_costs_what_it_cost_at_first_after_any_number_of_them_under_a_held_snapshot() {
    test(Duration::from_secs(1200), Load::Alone, async |harness: &mut Harness| {
        let full = std::env::var("BATON_TIER").is_ok_and(|tier| tier == "full");
        // At four advances a second and a lease of 10 s, renewed every third of it, 13 come on one renewal. A few advances
        // must show as much of the lease row as many.
        let (writes, a_renewal) = if full { (100_000, 13) } else { (3_000, 1) };
        let site = harness.site().await?;
        let mut shard = Held::claim(&site).await?;
        let mut holder = site.connect().await?;
        holder.execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT pg_current_xact_id()").await?;

        let [first] = medians([&mut shard]).await?;
        let first_buffers = shard.buffers().await?;
        shard.many(writes, a_renewal).await?;
        // Beside one that has just begun, in turns, so that whatever else the machine does slows down both.
        let mut new = Held::claim(&harness.site().await?).await?;
        let [last, beside] = medians([&mut shard, &mut new]).await?;
        let last_buffers = shard.buffers().await?;
        // As autovacuum would in the meantime; what it learns must not lead to another plan.
        site.pool().execute("ANALYZE outbox.shard, outbox.fence, outbox.advance").await?;
        shard.advance().await?;
        let analyzed = shard.buffers().await?;
        // Few rows among many that could not be vacuumed, and the planner told so.
        site.pool()
            .execute(
                "DELETE FROM outbox.advance a USING outbox.cursor c WHERE a.shard = c.shard AND a.number < c.number",
            )
            .await?;
        site.pool().execute("VACUUM ANALYZE outbox.advance").await?;
        shard.advance().await?;
        let alone = shard.buffers().await?;
        holder.execute("ROLLBACK").await?;

        figure(&format!(
            "must show 5: an advance takes {first:?} at first and {last:?} after {writes} of them under a held snapshot, \
             when another's first take {beside:?} (medians of {SAMPLES}); buffers {first_buffers}, then {last_buffers}, \
             after ANALYZE {analyzed}, once all others are deleted {alone}"
        ));
        for buffers in [last_buffers, analyzed, alone] {
            // One more level of three indexes, and a page where a row begins the next one; not versions of a row.
            assert!(buffers <= first_buffers + 8, "{first_buffers} buffers at first, then {buffers}");
        }
        // A few writes cost little in time, whatever is wrong; the small tier judges by buffers.
        assert!(!full || last <= beside.mul_f64(1.5), "{beside:?} at first, {last:?} at last");
        Ok(())
    });
}

#[test]
fn a_claim_that_waited_for_an_advance_starts_from_where_it_went() {
    test(Duration::from_secs(60), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        let mut before = Held::claim(&site).await?;
        before.advance().await?;
        before.advancing.execute("BEGIN").await?;
        before.position = 41;
        before.advance().await?;

        let mut heir = site.connect().await?;
        let claiming = tokio::spawn(async move {
            let generation = claim(&mut heir, before.generation).await?.map(|(generation, _)| generation);
            Outcome::Ok((generation, durable(&mut heir).await?))
        });
        eventually("the claim to wait", PATIENCE, async || waits(&site).await).await?;
        before.advancing.execute("COMMIT").await?;
        assert_eq!(claiming.await??, (Some(before.generation + 1), 42));
        Ok(())
    });
}

#[test]
fn an_advance_that_waited_for_a_claim_is_fenced() {
    test(Duration::from_secs(60), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        let mut stale = Held::claim(&site).await?;
        stale.advance().await?;
        let mut heir = site.connect().await?;
        heir.execute("BEGIN").await?;
        assert!(claim(&mut heir, stale.generation).await?.is_some());

        let advancing = tokio::spawn(async move { stale.advance().await });
        eventually("the advance to wait", PATIENCE, async || waits(&site).await).await?;
        heir.execute("COMMIT").await?;
        assert!(advancing.await?.is_err(), "the stale owner moved the cursor after the claim");
        assert_eq!(durable(&mut heir).await?, 1);
        Ok(())
    });
}

#[test]
fn a_ring_keeps_its_newest_rows_and_nothing_that_a_killed_relay_left() {
    test(Duration::from_secs(120), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        let topic = site.topic("ring", 1).await?;
        let ring = async || -> Outcome<(i64, i64, i64)> {
            Ok(sqlx::query_as(
                "SELECT count(*), min(number), max(number) FROM outbox.advance WHERE shard = outbox.shard_of('key-0', 0)",
            )
            .fetch_one(site.pool())
            .await?)
        };
        // An advance for every two messages.
        let relay = || {
            let launch = site.relay("ring")?;
            launch.env("BATON_PUBLISH__PAGE_ROWS", "2").env("BATON_PUBLISH__IN_FLIGHT_ROWS", "2").start()
        };
        fill(&site, &topic, 40_000).await?;
        let mut first = relay()?;
        eventually("some advances", PATIENCE, async || {
            let (_, _, newest) = ring().await?;
            if newest > 100 { Ok(()) } else { fail!("{newest}") }
        })
        .await?;
        first.kill().await?;
        let (_, oldest, left_at) = ring().await?;
        assert_eq!(oldest, 1, "the first relay was to leave rows behind, and was at {left_at}");

        let mut second = relay()?;
        eventually("many more advances", Duration::from_secs(60), async || {
            let (_, _, newest) = ring().await?;
            if newest > left_at + 600 { Ok(()) } else { fail!("{newest}") }
        })
        .await?;
        assert!(second.terminate(PATIENCE).await?.success());
        let (rows, oldest, newest) = ring().await?;
        assert!(
            oldest > left_at && rows <= 400 && newest - oldest + 1 == rows,
            "{rows} rows, {oldest} to {newest}"
        );
        Ok(())
    });
}

/// A shard that is held as a relay holds it, with a connection for the cursor and one for the leases.
struct Held {
    advancing: PgConnection,
    renewing: PgConnection,
    generation: i64,
    token: Uuid,
    position: i64,
    /// What the clock shows.
    seconds: f64,
}

impl Held {
    async fn claim(site: &Site) -> Outcome<Self> {
        let (mut advancing, mut renewing) = (site.connect().await?, site.connect().await?);
        for connection in [&mut advancing, &mut renewing] {
            // As on the relay's own connections.
            for (name, value) in PLANNED {
                connection.execute(AssertSqlSafe(format!("SET {name} = '{value}'"))).await?;
            }
            connection.execute(CLOCK).await?;
        }
        renewing.execute(include_str!("../../../relay/queries/token_ensure.sql")).await?;
        let Some((generation, token)) = claim(&mut renewing, -1).await? else {
            fail!("a free shard was refused")
        };
        Ok(Self { advancing, renewing, generation, token, position: 0, seconds: 0.0 })
    }

    fn statement(&self, sql: &'static str) -> Query<'static, Postgres, PgArguments> {
        sqlx::query(sql)
            .bind(OWNER)
            .bind(self.token)
            .bind(vec![SHARD])
            .bind(vec![self.generation])
            .bind(vec![self.position])
            .bind(vec![format!("{0}:{0}:", 1_000 + self.position)])
            .bind(vec![(1_000 + self.position).to_string()])
            .bind(vec![None::<String>])
            .bind(vec![None::<i64>])
    }

    async fn advance(&mut self) -> Outcome {
        self.position += 1;
        let moved = self.statement(ADVANCE).fetch_all(&mut self.advancing).await?;
        if moved.len() == 1 { Ok(()) } else { fail!("advance {} was fenced", self.position) }
    }

    /// Advances, and a renewal after each so many of them.
    async fn many(&mut self, writes: usize, a_renewal: usize) -> Outcome {
        self.advancing.execute("SET synchronous_commit = off").await?;
        self.renewing.execute("SET synchronous_commit = off").await?;
        for number in 0..writes {
            self.advance().await?;
            if number % a_renewal == 0 {
                self.renew().await?;
            }
        }
        self.advancing.execute("SET synchronous_commit = on").await?;
        Ok(())
    }

    async fn renew(&mut self) -> Outcome {
        self.seconds += RENEW_EVERY;
        let at = format!("SET ticking.seconds = '{}'", self.seconds);
        self.advancing.execute(AssertSqlSafe(at.as_str())).await?;
        self.renewing.execute(AssertSqlSafe(at.as_str())).await?;
        sqlx::query(include_str!("../../../relay/queries/relay_heartbeat.sql"))
            .bind(OWNER)
            .bind(HELD_FOR)
            .execute(&mut self.renewing)
            .await?;
        let renewed = sqlx::query(include_str!("../../../relay/queries/lease_renew.sql"))
            .bind(OWNER)
            .bind(vec![SHARD])
            .bind(vec![self.generation])
            .bind(HELD_FOR)
            .bind(vec![self.token])
            .fetch_all(&mut self.renewing)
            .await?;
        if renewed.len() == 1 { Ok(()) } else { fail!("a renewal was fenced") }
    }

    /// What one advance touches.
    async fn buffers(&mut self) -> Outcome<i64> {
        self.position += 1;
        let row = self.statement(EXPLAIN).fetch_one(&mut self.advancing).await?;
        let plan: Value = row.try_get(0)?;
        let number = |name: &str| plan[0]["Plan"][name].as_i64().unwrap_or(0);
        Ok(number("Shared Hit Blocks") + number("Shared Read Blocks"))
    }
}

/// What one advance of each takes, its commit on disk included.
async fn medians<const N: usize>(mut shards: [&mut Held; N]) -> Outcome<[Duration; N]> {
    let mut times = [const { Vec::new() }; N];
    for _ in 0..SAMPLES {
        for (shard, times) in shards.iter_mut().zip(&mut times) {
            let began = Instant::now();
            shard.advance().await?;
            times.push(began.elapsed());
        }
    }
    Ok(times.map(|mut times| {
        times.sort_unstable();
        times[SAMPLES / 2]
    }))
}

/// Claims the shard by this generation, or by none: the new generation and the token.
async fn claim(connection: &mut PgConnection, held_by: i64) -> Outcome<Option<(i64, Uuid)>> {
    let claimed: Option<PgRow> = sqlx::query(include_str!("../../../relay/queries/lease_claim.sql"))
        .bind(SHARD)
        .bind(OWNER)
        .bind(held_by)
        .bind(HELD_FOR)
        .fetch_optional(connection)
        .await?;
    let Some(row) = claimed else { return Ok(None) };
    Ok(Some((row.try_get(0)?, row.try_get(1)?)))
}

/// The position of the durable cursor, as a relay reads it.
async fn durable(connection: &mut PgConnection) -> Outcome<i64> {
    let row = sqlx::query(include_str!("../../../relay/queries/cursor_read.sql"))
        .bind(SHARD)
        .fetch_one(connection)
        .await?;
    Ok(row.try_get(0)?)
}

/// Ok when one statement of this database waits for a lock.
async fn waits(site: &Site) -> Outcome {
    let waiting: i64 = sqlx::query_scalar(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'",
    )
    .fetch_one(site.pool())
    .await?;
    if waiting == 1 { Ok(()) } else { fail!("{waiting} wait") }
}

/// Milliseconds of a lease, and seconds until it is renewed: the relay's defaults.
const HELD_FOR: i64 = 10_000;
const RENEW_EVERY: f64 = 3.25;
/// Volatile, and no SQL function that could be inlined: to the planner it is what `clock_timestamp()` is.
const CLOCK: &str = "SELECT pg_advisory_lock(1);
    CREATE SCHEMA IF NOT EXISTS ticking;
    CREATE OR REPLACE FUNCTION ticking.clock_timestamp() RETURNS timestamptz LANGUAGE plpgsql VOLATILE AS $$
        BEGIN RETURN timestamptz '2031-01-01 00:00:00+00' + make_interval(secs => current_setting('ticking.seconds')::float8); END $$;
    SELECT pg_advisory_unlock(1);
    SET ticking.seconds = 0;
    SET search_path = ticking, pg_catalog";
const ADVANCE: &str = include_str!("../../../relay/queries/cursor_advance.sql");
const EXPLAIN: &str = concat!(
    "EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) ",
    include_str!("../../../relay/queries/cursor_advance.sql")
);

//! Space comes back, by truncating leaves, and never at the cost of a message, a producer or a dump.
//!
//! What may be truncated is tried by the relay's own statement on leaves that are made to be in turn, with cursors and
//! milestones written by hand: hours pass in milliseconds. What a relay does with it is tried with slots of a second or two.
//! `BATON_TIER=full` compares the slowest insert with and without slots that turn, in five pairs of runs.

mod inserts;

use std::time::Duration;

use baton_relay::leaves::{Kept, Why};
use baton_relay::status::{self, Status};
use baton_tests::ledger::{Committed, Seen, judge};
use baton_tests::{Harness, Load, Outcome, Site, eventually, fail, figure, lasts, test};
use sqlx::{AssertSqlSafe, Connection, Executor, PgConnection};
use tokio::task::JoinSet;
use tokio::time::Instant;

const PATIENCE: Duration = Duration::from_secs(30);
const SECOND: Duration = Duration::from_secs(1);
/// What the four leaves take when all are empty: a page of each of their indexes.
const EMPTY: i64 = 4 * 24 * 1024;

#[test]
fn a_leaf_is_truncated_only_in_turn_and_once_all_of_it_had_been_consumed_a_slot_period_ago() {
    test(Duration::from_secs(60), Load::Light, async |harness: &mut Harness| {
        let mut leaf = Leaf::in_turn(harness.site().await?).await?;
        leaf.insert(100).await?;
        assert_eq!(leaf.truncate().await?.0, "unconsumed", "nothing is consumed");
        leaf.consume().await?;
        assert_eq!(leaf.truncate().await?.0, "kept", "nobody knows since when it is consumed");
        // The slot period is 6 h: what was published 5 h ago can be published once more (case 19f).
        leaf.milestone(5).await?;
        assert_eq!(leaf.truncate().await?.0, "kept");
        let before = leaf.bytes().await?;
        leaf.milestone(7).await?;
        for slot in [1, 2, 3].map(|back| (leaf.slot + back) % 4) {
            assert_eq!(leaf.try_truncate(slot).await?.0, "not in turn");
        }
        assert_eq!(leaf.rows().await?, 100);
        assert_eq!(leaf.truncate().await?.0, "truncated");
        assert_eq!((leaf.rows().await?, leaf.bytes().await?), (0, EMPTY / 4), "{before} bytes before");
        assert_eq!(leaf.truncate().await?.0, "empty");

        // Two laps in one leaf: what is of this one keeps all of it.
        leaf.insert(10).await?;
        assert_eq!(leaf.truncate().await?.0, "unconsumed");
        leaf.consume().await?;
        assert_eq!(leaf.truncate().await?.0, "kept", "the milestone does not cover the second lap");
        Ok(())
    });
}

#[test]
fn a_leaf_with_a_late_row_that_is_not_consumed_is_not_truncated() {
    test(Duration::from_secs(60), Load::Light, async |harness: &mut Harness| {
        // Whether the cursor's snapshot names the late transaction as running, or ends below it.
        for named in [true, false] {
            let mut leaf = Leaf::in_turn(harness.site().await?).await?;
            let mut late = leaf.site.connect().await?;
            late.execute("BEGIN").await?;
            let xid: i64 =
                sqlx::query_scalar("SELECT pg_current_xact_id()::text::bigint").fetch_one(&mut late).await?;
            insert(&mut late, leaf.slot, 4).await?;
            leaf.insert(20).await?;
            leaf.consume().await?;
            if !named {
                leaf.end_snapshots_at(xid).await?;
            }
            leaf.milestone(7).await?;
            assert_eq!(leaf.truncate().await?.0, "locked", "a writer is at work");
            late.execute("COMMIT").await?;
            assert_eq!(leaf.truncate().await?.0, "unconsumed", "named: {named}");

            // While late rows are worked off: those up to the late position are consumed, the others are not.
            leaf.work_off(3).await?;
            assert_eq!(leaf.truncate().await?.0, "unconsumed", "named: {named}");
            leaf.work_off(24).await?;
            assert_eq!(leaf.truncate().await?.0, "kept", "consumed, but not a slot period ago");
            leaf.milestone(7).await?;
            assert_eq!(leaf.truncate().await?.0, "truncated", "named: {named}");
        }
        Ok(())
    });
}

#[test]
fn rows_that_a_relay_cannot_see_keep_their_leaf() {
    test(Duration::from_secs(60), Load::Light, async |harness: &mut Harness| {
        let mut leaf = Leaf::in_turn(harness.site().await?).await?;
        leaf.insert(100).await?;
        leaf.milestone(7).await?;
        // Of a shard that another table has lost its row of.
        leaf.admin.execute("DELETE FROM outbox.fence").await?;
        assert_eq!(leaf.truncate().await?.0, "unconsumed");

        let leaf_table = format!("outbox.message_{}", leaf.slot);
        for (hide, show, words) in [
            (
                "ALTER TABLE outbox.message ENABLE ROW LEVEL SECURITY".to_owned(),
                "ALTER TABLE outbox.message DISABLE ROW LEVEL SECURITY".to_owned(),
                "row-level security",
            ),
            (
                format!("ALTER TABLE outbox.message DETACH PARTITION {leaf_table}"),
                format!(
                    "ALTER TABLE outbox.message ATTACH PARTITION {leaf_table} FOR VALUES IN ({})",
                    leaf.slot
                ),
                "is not attached",
            ),
        ] {
            leaf.admin.execute(AssertSqlSafe(hide.clone())).await?;
            match leaf.truncate().await {
                Err(failure) if failure.to_string().contains(words) => {}
                other => fail!("after {hide}: {other:?}"),
            }
            assert_eq!(leaf.rows().await?, 100, "after {hide}");
            leaf.admin.execute(AssertSqlSafe(show)).await?;
        }
        assert_eq!(leaf.truncate().await?.0, "unconsumed");
        Ok(())
    });
}

#[test]
fn whoever_has_a_leaf_locked_keeps_it_is_named_and_makes_nobody_wait() {
    test(Duration::from_secs(90), Load::Light, async |harness: &mut Harness| {
        let mut leaf = Leaf::in_turn(harness.site().await?).await?;
        leaf.insert(50).await?;
        leaf.consume().await?;
        leaf.milestone(7).await?;
        let kept = async |site: &Site| {
            eventually("a holder that status names", PATIENCE, async || {
                let leaves = look(site).await?.leaves;
                match leaves.into_iter().find_map(|leaf| leaf.kept.filter(|kept| kept.why == Why::Locked)) {
                    Some(kept) => Ok(kept),
                    None => fail!("none"),
                }
            })
            .await
        };

        let mut reader = leaf.site.connect().await?;
        reader
            .execute(
                "SET application_name = 'the dump'; BEGIN; LOCK TABLE outbox.message IN ACCESS SHARE MODE",
            )
            .await?;
        assert_eq!(leaf.truncate().await?.0, "locked");
        let named = kept(&leaf.site).await?;
        // A public format.
        let members = |value: serde_json::Value| -> Vec<String> {
            value.as_object().map(|object| object.keys().cloned().collect()).unwrap_or_default()
        };
        assert_eq!(
            members(serde_json::to_value(&named)?),
            ["holder", "position", "shard", "until", "why", "words"]
        );
        let of_leaf = look(&leaf.site).await?.leaves.swap_remove(0);
        assert_eq!(
            members(serde_json::to_value(&of_leaf)?),
            ["bytes", "current", "kept", "oldest_consumed_at", "slot", "turn_at"]
        );
        let Kept { words, holder, .. } = named;
        let holder = holder.unwrap_or_else(|| panic!("{words}"));
        assert_eq!(
            members(serde_json::to_value(&holder)?),
            ["age_seconds", "application_name", "pid", "prepared"]
        );
        assert_eq!(holder.application_name.as_deref(), Some("the dump"), "{words}");
        assert!(holder.age_seconds.is_some_and(|age| age >= 1.0) && words.contains("the dump"), "{words}");
        reader.execute("COMMIT").await?;

        // A prepared transaction is a writer without a process.
        reader.execute("BEGIN").await?;
        insert(&mut reader, leaf.slot, 1).await?;
        let gid = leaf.site.topic_name("orphan");
        reader.execute(AssertSqlSafe(format!("PREPARE TRANSACTION '{gid}'"))).await?;
        assert_eq!(leaf.truncate().await?.0, "locked");
        let Kept { words, holder, .. } = kept(&leaf.site).await?;
        assert_eq!(holder.and_then(|holder| holder.prepared), Some(gid.clone()), "{words}");
        reader.execute(AssertSqlSafe(format!("ROLLBACK PREPARED '{gid}'"))).await?;

        // Its lock is not waited for, however long it may wait for others: what it had seen before would be old by then.
        let mut writer = leaf.site.connect().await?;
        writer.execute("BEGIN").await?;
        insert(&mut writer, leaf.slot, 1).await?;
        leaf.admin.execute("ALTER FUNCTION outbox.truncate_leaf SET lock_timeout = '60s'").await?;
        let mut at_once = leaf.site.connect().await?;
        at_once.execute("SET statement_timeout = '15s'").await?;
        assert_eq!(truncate(&mut at_once, leaf.slot).await?.0, "locked");
        leaf.admin.execute("ALTER FUNCTION outbox.truncate_leaf SET lock_timeout = '100ms'").await?;
        writer.execute("ROLLBACK").await?;

        // What the check itself needs and somebody has locked is waited for so briefly that nobody behind is held up.
        reader.execute("BEGIN; LOCK TABLE outbox.milestone IN ACCESS EXCLUSIVE MODE").await?;
        let began = Instant::now();
        assert_eq!(leaf.truncate().await?.0, "locked");
        assert!(began.elapsed() < 5 * SECOND, "{:?}", began.elapsed());
        reader.execute("COMMIT").await?;

        // Under another isolation the check would see what was there before the lock.
        reader.execute("BEGIN ISOLATION LEVEL REPEATABLE READ").await?;
        let refused = truncate(&mut reader, leaf.slot).await;
        assert!(refused.is_err_and(|error| error.to_string().contains("READ COMMITTED")));
        reader.execute("ROLLBACK").await?;
        assert_eq!((leaf.rows().await?, leaf.truncate().await?.0.as_str()), (50, "truncated"));
        Ok(())
    });
}

#[test]
fn of_many_that_truncate_a_leaf_at_once_one_does_and_the_others_withdraw() {
    test(Duration::from_secs(60), Load::Light, async |harness: &mut Harness| {
        let mut leaf = Leaf::in_turn(harness.site().await?).await?;
        for round in 0..5 {
            leaf.insert(200).await?;
            leaf.consume().await?;
            leaf.milestone(7).await?;
            let mut racing = JoinSet::new();
            for _ in 0..6 {
                let (mut connection, slot) = (leaf.site.connect().await?, leaf.slot);
                racing.spawn(async move { truncate(&mut connection, slot).await });
            }
            let mut outcomes = Vec::new();
            while let Some(outcome) = racing.join_next().await {
                outcomes.push(outcome??.0);
            }
            let of = |outcome: &str| outcomes.iter().filter(|seen| *seen == outcome).count();
            assert_eq!(of("truncated"), 1, "round {round}: {outcomes:?}");
            assert_eq!(of("empty") + of("locked"), 5, "round {round}: {outcomes:?}");
        }
        Ok(())
    });
}

#[test]
fn a_look_at_a_leaf_touches_little_however_much_is_in_it() {
    test(Duration::from_secs(60), Load::Light, async |harness: &mut Harness| {
        let mut leaf = Leaf::in_turn(harness.site().await?).await?;
        leaf.insert(40_000).await?;
        leaf.consume().await?;
        leaf.milestone(5).await?;
        leaf.milestone(7).await?;
        for milestone in ["NULL", "(SELECT max(at) FROM outbox.milestone)"] {
            let sql = format!(
                "EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) SELECT * FROM outbox.unconsumed({}::smallint, {milestone})",
                leaf.slot
            );
            leaf.admin
                .execute("SET jit = off; SET enable_seqscan = off; SET enable_bitmapscan = off")
                .await?;
            let plan: serde_json::Value =
                sqlx::query_scalar(AssertSqlSafe(sql)).fetch_one(&mut leaf.admin).await?;
            let buffers = ["Shared Hit Blocks", "Shared Read Blocks"]
                .map(|kind| plan[0]["Plan"][kind].as_i64().unwrap_or(0));
            let touched: i64 = buffers.iter().sum();
            assert!((1..300).contains(&touched), "{touched} buffers: {plan:#}");
        }
        Ok(())
    });
}

#[test]
fn space_comes_back_and_a_shard_that_lags_keeps_its_leaf_until_it_has_caught_up() {
    test(Duration::from_secs(90), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        slot_period(&site, SECOND).await?;
        let topic = site.topic("space", 2).await?;
        let relay = site.relay("relay")?.env("BATON_PARK__ROWS", "1").start()?;
        let mut admin = site.connect().await?;
        let sql = "INSERT INTO outbox.message (topic, key, payload)
                   SELECT $1, 'key-' || i % 50, convert_to(lpad(i::text, 300, '0'), 'UTF8') FROM generate_series(1, 20000) i";
        sqlx::query(sql).bind(&topic).execute(&mut admin).await?;
        let peak = bytes(&site).await?;
        empties(&site).await?;
        assert_eq!(site.kafka().count(&topic).await?, 20_000);
        figure(&format!(
            "the outbox took {peak} bytes with 20000 messages and {} once they were consumed",
            bytes(&site).await?
        ));

        // One that is parked, and one for which there is no room there: its leaf stays, lap after lap, and status says what keeps it.
        let missing = site.topic_name("missing");
        let mut position = 0_i64;
        for _ in 0..2 {
            position = sqlx::query_scalar(
                "INSERT INTO outbox.message (topic, key, payload) VALUES ($1, 'k', 'x') RETURNING position",
            )
            .bind(&missing)
            .fetch_one(&mut admin)
            .await?;
        }
        eventually("status to say what keeps the leaf", PATIENCE, async || {
            let status = look(&site).await?;
            let kept: Vec<&Kept> = status.leaves.iter().filter_map(|leaf| leaf.kept.as_ref()).collect();
            if kept.iter().any(|kept| kept.why == Why::Unconsumed && kept.position == Some(position)) {
                Ok(())
            } else {
                fail!("{kept:?}")
            }
        })
        .await?;
        eventually("a warning after its turn", PATIENCE, async || {
            let said = relay.stderr();
            if said.contains("was not truncated in its turn") && said.contains("had not consumed position") {
                Ok(())
            } else {
                fail!("{said}")
            }
        })
        .await?;
        assert_eq!(site.pending().await?, 1);
        site.topic("missing", 1).await?;
        empties(&site).await?;
        assert_eq!(site.kafka().count(&missing).await?, 2);
        assert!(relay.stderr().contains("truncated a leaf of the outbox"), "{}", relay.stderr());
        Ok(())
    });
}

#[test]
fn a_relay_that_was_away_for_many_slots_publishes_all_of_them_and_truncates_a_slot_period_later() {
    const PERIOD: Duration = Duration::from_secs(2);
    test(Duration::from_secs(90), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        slot_period(&site, SECOND).await?;
        let topic = site.topic("away", 1).await?;
        let mut producer = Producer::new(&site, &topic, "k").await?;
        // More than a lap of slots of a second, so that two laps share leaves.
        let until = Instant::now() + 5 * SECOND;
        let mut tick = tokio::time::interval(Duration::from_millis(20));
        while Instant::now() < until {
            tick.tick().await;
            producer.enqueue().await?;
        }
        slot_period(&site, PERIOD).await?;
        let mut relay = site.relay("first")?.start()?;
        site.emptied().await?;
        // Consumed just now: all of it can be read for another period, however old it is.
        let consumed = Instant::now();
        let committed = i64::try_from(producer.committed.len())?;
        while consumed.elapsed() + Duration::from_millis(300) < PERIOD {
            let rows: i64 =
                sqlx::query_scalar("SELECT count(*) FROM outbox.message").fetch_one(site.pool()).await?;
            // It was consumed a moment before that was seen.
            if consumed.elapsed() + Duration::from_millis(200) < PERIOD {
                assert_eq!(rows, committed, "gone {:?} after it was consumed", consumed.elapsed());
            }
            lasts("the time between two counts", Duration::from_millis(100)).await;
        }
        // Killed again and again, in whatever it does while leaves are in turn.
        for _ in 0..6 {
            let until = Instant::now() + Duration::from_millis(600);
            while Instant::now() < until {
                tick.tick().await;
                producer.enqueue().await?;
            }
            relay.kill().await?;
            relay = site.relay("next")?.start()?;
        }
        let _other = site.relay("other")?.start()?;
        site.emptied().await?;
        empties(&site).await?;
        nothing_lost(&site, &topic, producer.committed).await
    });
}

/// A producer of one key, and what it has committed.
struct Producer {
    connection: PgConnection,
    topic: String,
    key: String,
    committed: Vec<Committed>,
}

impl Producer {
    async fn new(site: &Site, topic: &str, key: &str) -> Outcome<Self> {
        let connection = site.connect().await?;
        Ok(Self { connection, topic: topic.to_owned(), key: key.to_owned(), committed: Vec::new() })
    }

    /// One message, and how long its insert took.
    async fn enqueue(&mut self) -> Outcome<Duration> {
        let began = Instant::now();
        self.many(1).await?;
        Ok(began.elapsed())
    }

    async fn many(&mut self, messages: i64) -> Outcome {
        let ids: Vec<String> = sqlx::query_scalar(
            "INSERT INTO outbox.message (topic, key, payload)
             SELECT $1, $2, convert_to(lpad('', 200, 'x'), 'UTF8') FROM generate_series(1, $3) RETURNING id::text",
        )
        .bind(&self.topic)
        .bind(&self.key)
        .bind(messages)
        .fetch_all(&mut self.connection)
        .await?;
        for id in ids {
            let rank = i64::try_from(self.committed.len())?;
            self.committed.push(Committed { id, key: Some(self.key.clone()), rank, content: Vec::new() });
        }
        Ok(())
    }
}

/// Nothing is lost, forged or out of order: the table may be empty by now, so the producers are the witnesses.
async fn nothing_lost(site: &Site, topic: &str, committed: Vec<Committed>) -> Outcome {
    let records = site.kafka().records(topic).await?;
    let seen: Vec<Seen> = records
        .iter()
        .map(|record| Seen {
            id: record.header("ce_id").unwrap_or("no ce_id").to_owned(),
            lane: record.partition.to_string(),
            content: Vec::new(),
        })
        .collect();
    let findings = judge(&committed, &seen);
    assert!(findings.wire_is_right(), "{findings}");
    Ok(())
}

/// Waits until every leaf is empty.
async fn empties(site: &Site) -> Outcome {
    eventually("every leaf to be empty", PATIENCE, async || {
        let leaves = look(site).await?.leaves;
        let bytes: i64 = leaves.iter().map(|leaf| leaf.bytes).sum();
        if bytes <= EMPTY { Ok(()) } else { fail!("{bytes} bytes: {leaves:?}") }
    })
    .await
}

async fn bytes(site: &Site) -> Outcome<i64> {
    Ok(look(site).await?.leaves.iter().map(|leaf| leaf.bytes).sum())
}

async fn look(site: &Site) -> Outcome<Status> {
    let mut connection = site.connect().await?;
    let status = status::read(&mut connection).await?;
    connection.close().await?;
    Ok(status)
}

pub(crate) async fn slot_period(site: &Site, period: Duration) -> Outcome {
    let mut connection = site.connect().await?;
    baton_migrations::migrate_outbox(&mut connection, None, Some(period)).await?;
    connection.close().await?;
    Ok(())
}

/// A leaf in turn, by a slot period of 6 h; nobody publishes.
struct Leaf {
    site: Site,
    /// With every privilege.
    admin: PgConnection,
    /// With a relay's and no other.
    relay: PgConnection,
    slot: i16,
}

impl Leaf {
    async fn in_turn(site: Site) -> Outcome<Self> {
        let (mut admin, mut relay) = (site.connect().await?, site.connect().await?);
        relay.execute("SET ROLE baton_relay").await?;
        // Not just before the turn of a slot.
        eventually("a slot that lasts for a while", 3 * PATIENCE, async || {
            let left: f64 = sqlx::query_scalar(
                "SELECT (21600 - mod(extract(epoch FROM clock_timestamp()), 21600))::float8",
            )
            .fetch_one(site.pool())
            .await?;
            if left > 60.0 { Ok(()) } else { fail!("{left} s of it are left") }
        })
        .await?;
        let slot = sqlx::query_scalar("SELECT ((outbox.slot_at(clock_timestamp()) + 2) % 4)::smallint")
            .fetch_one(&mut admin)
            .await?;
        Ok(Self { site, admin, relay, slot })
    }

    async fn insert(&mut self, messages: i64) -> Outcome {
        insert(&mut self.admin, self.slot, messages).await
    }

    async fn rows(&mut self) -> Outcome<i64> {
        let sql = format!("SELECT count(*) FROM outbox.message_{}", self.slot);
        Ok(sqlx::query_scalar(AssertSqlSafe(sql)).fetch_one(&mut self.admin).await?)
    }

    async fn bytes(&mut self) -> Outcome<i64> {
        let sql = format!("SELECT pg_total_relation_size('outbox.message_{}')", self.slot);
        Ok(sqlx::query_scalar(AssertSqlSafe(sql)).fetch_one(&mut self.admin).await?)
    }

    /// Every shard consumes what is visible now.
    async fn consume(&mut self) -> Outcome {
        self.advance(
            "(SELECT max(position) FROM outbox.message), pg_current_snapshot(), pg_current_xact_id(), NULL::pg_snapshot, NULL::bigint",
        )
        .await
    }

    /// Every shard works off what is late, as it shows now, up to this position.
    async fn work_off(&mut self, position: i64) -> Outcome {
        self.advance(&format!("position, snapshot, ceiling, pg_current_snapshot(), {position}::bigint")).await
    }

    /// As if each cursor's snapshot were from before this transaction had begun, and its ceiling were not.
    async fn end_snapshots_at(&mut self, xid: i64) -> Outcome {
        self.advance(&format!(
            "position, '{xid}:{xid}:'::pg_snapshot, ceiling, NULL::pg_snapshot, NULL::bigint"
        ))
        .await
    }

    async fn advance(&mut self, cursor: &str) -> Outcome {
        let sql = format!(
            "INSERT INTO outbox.advance (shard, number, generation, position, snapshot, ceiling, late_snapshot, late_position)
             SELECT shard, number + 1, generation, {cursor} FROM outbox.cursor"
        );
        self.admin.execute(AssertSqlSafe(sql)).await?;
        Ok(())
    }

    /// As if the cursors had been these so many hours ago.
    async fn milestone(&mut self, hours: i32) -> Outcome {
        sqlx::query(
            "WITH old AS (DELETE FROM outbox.milestone)
             INSERT INTO outbox.milestone
             SELECT statement_timestamp() - make_interval(hours => $1), shard, position, snapshot, ceiling, late_snapshot, late_position
             FROM outbox.cursor",
        )
        .bind(hours)
        .execute(&mut self.admin)
        .await?;
        Ok(())
    }

    async fn truncate(&mut self) -> Outcome<(String, Option<i64>)> {
        self.try_truncate(self.slot).await
    }

    async fn try_truncate(&mut self, slot: i16) -> Outcome<(String, Option<i64>)> {
        truncate(&mut self.relay, slot).await
    }
}

/// The relay's own statement: what came of it, and the bytes.
async fn truncate(connection: &mut PgConnection, slot: i16) -> Outcome<(String, Option<i64>)> {
    let row: (String, Option<i64>, Option<i16>, Option<i64>) =
        sqlx::query_as(include_str!("../../../relay/queries/retention_truncate.sql"))
            .bind(slot)
            .fetch_one(connection)
            .await?;
    Ok((row.0, row.1))
}

/// Messages of as many keys into this leaf.
async fn insert(connection: &mut PgConnection, slot: i16, messages: i64) -> Outcome {
    sqlx::query(
        "INSERT INTO outbox.message (slot, topic, key, payload)
         SELECT $1, 'topic', 'key-' || i, convert_to(repeat('x', 100), 'UTF8') FROM generate_series(1, $2) i",
    )
    .bind(slot)
    .bind(messages)
    .execute(connection)
    .await?;
    Ok(())
}

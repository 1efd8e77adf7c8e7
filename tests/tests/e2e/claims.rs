//! The rules of ownership at their edges, on the statements that the relay itself runs.
//!
//! A process cannot be stopped at the very microsecond at which its lease ends, but a clock can: these connections look
//! for `clock_timestamp()` in a schema of the test first, where it stands still. Everything else is the product's own SQL.

use std::time::Duration;

use baton_tests::{Harness, Load, Outcome, Site, test};
use sqlx::{AssertSqlSafe, Executor, PgConnection, Row};
use tokio::task::JoinSet;
use uuid::Uuid;

const SHARD: i16 = 3;
const TTL_MS: i64 = 10_000;

/// A moment of the frozen clock, and the one at which a lease of [`TTL_MS`] that begins then ends.
const START: &str = "2031-01-01 00:00:00+00";
const JUST_BEFORE: &str = "2031-01-01 00:00:09.999999+00";
const END: &str = "2031-01-01 00:00:10+00";

#[test]
fn at_exactly_the_leases_end_its_owner_is_refused_though_nobody_else_has_come() {
    test(Duration::from_secs(60), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        for act in Act::ALL {
            let shard = (SHARD + act as i16) % 8;
            let message = message_in(&site, shard).await?;
            let mut hand = Hand::frozen(&site, "worker-a", START).await?;
            let held = hand.claim(shard, None).await?.expect("a free shard is there to be taken");
            let lease = lease_of(&site, shard).await?;
            let (before, at_the_end) = (lease.clone(), JUST_BEFORE);

            hand.at(END).await?;
            assert!(!hand.may(act, held, message).await?, "{act:?} at exactly the lease's end");
            assert_eq!(lease_of(&site, shard).await?, before, "{act:?} changed what it was refused");
            hand.at("2031-01-01 00:00:11+00").await?;
            assert!(!hand.may(act, held, message).await?, "{act:?} after the lease's end");
            assert_eq!(lease_of(&site, shard).await?, before, "{act:?} revived a lease");

            hand.at(at_the_end).await?;
            assert!(hand.may(act, held, message).await?, "{act:?} a microsecond before the lease's end");
        }
        Ok(())
    });
}

#[test]
fn until_exactly_the_leases_end_nobody_else_can_claim_and_from_then_on_anybody_can() {
    test(Duration::from_secs(60), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        let mut first = Hand::frozen(&site, "worker-a", START).await?;
        let held = first.claim(SHARD, None).await?.expect("a free shard is there to be taken");
        let mut other = Hand::frozen(&site, "worker-b", JUST_BEFORE).await?;
        assert!(other.claim(SHARD, None).await?.is_none(), "claimed from a living owner");
        // Nor by guessing the generation, nor by the name alone.
        assert!(other.claim(SHARD, Some(held.generation)).await?.is_none());
        let mut namesake = Hand::frozen(&site, "worker-a", JUST_BEFORE).await?;
        assert!(namesake.claim(SHARD, None).await?.is_none(), "a name is not a lease");
        assert!(namesake.claim(SHARD, Some(held.generation - 1)).await?.is_none());

        other.at(END).await?;
        let taken = other.claim(SHARD, None).await?.expect("at its end the lease is anybody's");
        assert_eq!(taken.generation, held.generation + 1);
        Ok(())
    });
}

#[test]
fn a_lease_from_before_a_crash_of_the_server_is_not_kept_alive() {
    test(Duration::from_secs(60), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        let mut hand = Hand::frozen(&site, "worker-a", START).await?;
        let held = hand.claim(SHARD, None).await?.expect("a free shard is there to be taken");
        assert!(hand.renew(held).await?);
        // What crash recovery does to an unlogged table; a pooler may hide the crash from an idle relay.
        site.pool().execute("TRUNCATE outbox.token").await?;
        assert!(!hand.renew(held).await?, "renewed though nothing can be published under it");
        site.pool().execute(include_str!("../../../relay/queries/token_ensure.sql")).await?;
        assert!(!hand.renew(held).await?, "renewed by another life's token");
        Ok(())
    });
}

#[test]
fn an_owner_name_that_is_used_again_cannot_act_by_its_earlier_generation() {
    test(Duration::from_secs(60), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        let message = message_in(&site, SHARD).await?;
        let mut before = Hand::frozen(&site, "worker-a", START).await?;
        let first = before.claim(SHARD, None).await?.expect("a free shard is there to be taken");
        let mut restarted = Hand::frozen(&site, "worker-a", END).await?;
        let second = restarted.claim(SHARD, None).await?.expect("an expired shard is there to be taken");
        assert_eq!(second.generation, first.generation + 1);

        before.at(END).await?;
        let lease = lease_of(&site, SHARD).await?;
        for act in Act::ALL {
            assert!(!before.may(act, first, message).await?, "{act:?} by the earlier generation");
        }
        assert_eq!(lease_of(&site, SHARD).await?, lease);
        // Nor does what it wanted to set aside go with an advance of the current one that meets it in one statement.
        restarted.park_as_of(second, message, first.generation).await?;
        let parked: i64 =
            sqlx::query_scalar("SELECT count(*) FROM outbox.parked").fetch_one(site.pool()).await?;
        assert_eq!(parked, 0);
        for act in Act::ALL {
            assert!(restarted.may(act, second, message).await?, "{act:?} by the current generation");
        }
        Ok(())
    });
}

#[test]
fn a_heartbeat_of_a_past_generation_never_revives_its_lease() {
    test(Duration::from_secs(60), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        let mut old = Hand::frozen(&site, "worker-a", START).await?;
        let first = old.claim(SHARD, None).await?.expect("a free shard is there to be taken");
        let mut new = Hand::frozen(&site, "worker-b", END).await?;
        let second = new.claim(SHARD, None).await?.expect("an expired shard is there to be taken");
        let lease = lease_of(&site, SHARD).await?;
        // While the next owner lives, after its lease has run out too, and after it has given it back.
        for at in [END, "2031-01-01 00:00:15+00", "2031-01-01 00:05:00+00"] {
            old.at(at).await?;
            assert!(!old.renew(first).await?, "revived at {at}");
            assert_eq!(lease_of(&site, SHARD).await?, lease, "at {at}");
        }
        assert!(new.release(second).await?);
        old.at(END).await?;
        assert!(!old.renew(first).await?, "revived what was given back");
        let freed = lease_of(&site, SHARD).await?;
        assert_eq!(freed, (None, second.generation, None), "a release keeps the generation");
        Ok(())
    });
}

#[test]
fn of_many_that_race_for_an_expired_shard_one_wins_each_time_under_the_next_generation() {
    test(Duration::from_secs(90), Load::Light, async |harness: &mut Harness| {
        const RACERS: usize = 16;
        const ROUNDS: i64 = 20;
        let site = harness.site().await?;
        let mut racers = Vec::new();
        for number in 0..RACERS {
            racers.push(Hand::awake(&site, &format!("worker-{number}")).await?);
        }
        let mut last_winner = None;
        for round in 1..=ROUNDS {
            let line = std::sync::Arc::new(tokio::sync::Barrier::new(RACERS));
            let mut race = JoinSet::new();
            for mut racer in racers.drain(..) {
                let line = line.clone();
                race.spawn(async move {
                    line.wait().await;
                    let won = racer.claim(SHARD, None).await;
                    (racer, won)
                });
            }
            let mut winners = Vec::new();
            for (racer, won) in race.join_all().await {
                if let Some(held) = won? {
                    winners.push((racer.owner.clone(), held.generation));
                }
                racers.push(racer);
            }
            let [(winner, generation)] = winners.as_slice() else { panic!("round {round}: {winners:?}") };
            assert_eq!(*generation, round, "each claim raises the generation by one");
            let (owner, in_table, _) = lease_of(&site, SHARD).await?;
            assert_eq!((owner.as_deref(), in_table), (Some(winner.as_str()), round));
            last_winner = Some(winner.clone());
            sqlx::query("UPDATE outbox.shard SET lease_until = clock_timestamp() WHERE shard = $1")
                .bind(SHARD)
                .execute(site.pool())
                .await?;
        }
        assert!(last_winner.is_some());
        Ok(())
    });
}

/// What an owner does by its lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Act {
    Renew,
    Advance,
    Stop,
    /// The cursor moves, and a message goes aside with it.
    Park,
    Tidy,
    Settle,
    Release,
}

impl Act {
    /// The last one ends the lease.
    const ALL: [Self; 7] =
        [Self::Renew, Self::Advance, Self::Stop, Self::Park, Self::Tidy, Self::Settle, Self::Release];
}

/// What a claim won.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Grip {
    pub(crate) shard: i16,
    pub(crate) generation: i64,
    pub(crate) token: Uuid,
}

/// An owner as the database sees one: a connection on which the relay's own statements are run.
pub(crate) struct Hand {
    connection: PgConnection,
    pub(crate) owner: String,
}

impl Hand {
    /// With the server's clock.
    pub(crate) async fn awake(site: &Site, owner: &str) -> Outcome<Self> {
        let mut connection = site.connect().await?;
        connection.execute(include_str!("../../../relay/queries/token_ensure.sql")).await?;
        Ok(Self { connection, owner: owner.to_owned() })
    }

    /// With a clock that stands still.
    pub(crate) async fn frozen(site: &Site, owner: &str, now: &str) -> Outcome<Self> {
        let mut hand = Self::awake(site, owner).await?;
        hand.connection
            .execute(
                "SELECT pg_advisory_lock(1);
                 CREATE SCHEMA IF NOT EXISTS frozen;
                 CREATE OR REPLACE FUNCTION frozen.clock_timestamp() RETURNS timestamptz LANGUAGE sql
                     AS $$ SELECT current_setting('frozen.now')::timestamptz $$;
                 SELECT pg_advisory_unlock(1);
                 SET search_path = frozen, pg_catalog",
            )
            .await?;
        hand.at(now).await?;
        Ok(hand)
    }

    /// Sets the clock that stands still.
    pub(crate) async fn at(&mut self, now: &str) -> Outcome {
        self.connection.execute(AssertSqlSafe(format!("SET frozen.now = '{now}'"))).await?;
        let stands: bool =
            sqlx::query_scalar("SELECT clock_timestamp() = current_setting('frozen.now')::timestamptz")
                .fetch_one(&mut self.connection)
                .await?;
        assert!(stands, "the clock of this connection runs");
        Ok(())
    }

    pub(crate) async fn claim(&mut self, shard: i16, held_by: Option<i64>) -> Outcome<Option<Grip>> {
        let row = sqlx::query(include_str!("../../../relay/queries/lease_claim.sql"))
            .bind(shard)
            .bind(&self.owner)
            .bind(held_by.unwrap_or(-1))
            .bind(TTL_MS)
            .fetch_optional(&mut self.connection)
            .await?;
        let Some(row) = row else { return Ok(None) };
        Ok(Some(Grip { shard, generation: row.try_get(0)?, token: row.try_get(1)? }))
    }

    pub(crate) async fn renew(&mut self, grip: Grip) -> Outcome<bool> {
        let rows = sqlx::query(include_str!("../../../relay/queries/lease_renew.sql"))
            .bind(&self.owner)
            .bind(vec![grip.shard])
            .bind(vec![grip.generation])
            .bind(TTL_MS)
            .bind(vec![grip.token])
            .fetch_all(&mut self.connection)
            .await?;
        Ok(rows.len() == 1)
    }

    pub(crate) async fn release(&mut self, grip: Grip) -> Outcome<bool> {
        let row = sqlx::query(include_str!("../../../relay/queries/lease_release.sql"))
            .bind(grip.shard)
            .bind(&self.owner)
            .bind(grip.generation)
            .fetch_optional(&mut self.connection)
            .await?;
        Ok(row.is_some())
    }

    /// Moves the cursor nowhere, as far as it is let.
    pub(crate) async fn advance(&mut self, grip: Grip) -> Outcome<bool> {
        let rows = sqlx::query(include_str!("../../../relay/queries/cursor_advance.sql"))
            .bind(&self.owner)
            .bind(grip.token)
            .bind(vec![grip.shard])
            .bind(vec![grip.generation])
            .bind(vec![0_i64])
            .bind(vec!["3:3:"])
            .bind(vec!["3"])
            .bind(vec![None::<String>])
            .bind(vec![None::<i64>])
            .fetch_all(&mut self.connection)
            .await?;
        Ok(rows.len() == 1)
    }

    /// Writes down that the message at this position stops the shard.
    async fn stop(&mut self, grip: Grip, position: i64) -> Outcome<bool> {
        let row = sqlx::query(include_str!("../../../relay/queries/stopped_write.sql"))
            .bind(&self.owner)
            .bind(grip.token)
            .bind(grip.shard)
            .bind(grip.generation)
            .bind(position)
            .bind("too_large")
            .bind("on purpose")
            .bind(1_000_i64)
            .fetch_optional(&mut self.connection)
            .await?;
        Ok(row.is_some())
    }

    /// Moves the cursor nowhere, and sets the message at this position aside with it.
    async fn park(&mut self, grip: Grip, position: i64) -> Outcome<bool> {
        self.park_as_of(grip, position, grip.generation).await
    }

    /// The same, of a message that the owner of this generation wanted to set aside.
    async fn park_as_of(&mut self, grip: Grip, position: i64, generation: i64) -> Outcome<bool> {
        let id: Uuid = sqlx::query_scalar("SELECT id FROM outbox.message WHERE position = $1")
            .bind(position)
            .fetch_one(&mut self.connection)
            .await?;
        let rows = sqlx::query(include_str!("../../../relay/queries/cursor_advance_parking.sql"))
            .bind(&self.owner)
            .bind(grip.token)
            .bind(vec![grip.shard])
            .bind(vec![grip.generation])
            .bind(vec![0_i64])
            .bind(vec!["3:3:"])
            .bind(vec!["3"])
            .bind(vec![None::<String>])
            .bind(vec![None::<i64>])
            .bind(vec![grip.shard])
            .bind(vec![position])
            .bind(vec![id])
            .bind(vec!["blocked"])
            .bind(vec![None::<String>])
            .bind(vec![None::<String>])
            .bind(vec![0_i32])
            .bind(vec![None::<i64>])
            .bind(vec![generation])
            .fetch_all(&mut self.connection)
            .await?;
        Ok(rows.len() == 1)
    }

    /// Lets what is set aside and waits for nothing be tried.
    async fn tidy(&mut self, grip: Grip) -> Outcome<bool> {
        let row = sqlx::query(include_str!("../../../relay/queries/parked_tidy.sql"))
            .bind(&self.owner)
            .bind(grip.token)
            .bind(grip.shard)
            .bind(grip.generation)
            .fetch_optional(&mut self.connection)
            .await?;
        Ok(row.is_some())
    }

    /// Writes down that the message at this position, which was set aside, is published.
    async fn settle(&mut self, grip: Grip, position: i64) -> Outcome<bool> {
        let rows = sqlx::query(include_str!("../../../relay/queries/parked_settle.sql"))
            .bind(&self.owner)
            .bind(grip.token)
            .bind(grip.shard)
            .bind(grip.generation)
            .bind(vec![position])
            .bind(vec!["published"])
            .bind(vec![None::<String>])
            .bind(vec![None::<String>])
            .bind(vec![None::<i64>])
            .bind(vec![None::<i32>])
            .bind(vec![None::<i32>])
            .fetch_all(&mut self.connection)
            .await?;
        Ok(!rows.is_empty())
    }

    /// Whether the database lets it.
    pub(crate) async fn may(&mut self, act: Act, grip: Grip, message: i64) -> Outcome<bool> {
        match act {
            Act::Renew => self.renew(grip).await,
            Act::Advance => self.advance(grip).await,
            Act::Stop => self.stop(grip, message).await,
            Act::Park => self.park(grip, message).await,
            Act::Tidy => self.tidy(grip).await,
            Act::Settle => self.settle(grip, message).await,
            Act::Release => self.release(grip).await,
        }
    }
}

/// A message of this shard; its position.
async fn message_in(site: &Site, shard: i16) -> Outcome<i64> {
    let keys = site.key_of_each_shard().await?;
    let key = usize::try_from(shard).ok().and_then(|shard| keys.get(shard));
    Ok(sqlx::query_scalar("INSERT INTO outbox.message (topic, key) VALUES ('t', $1) RETURNING position")
        .bind(key)
        .fetch_one(site.pool())
        .await?)
}

/// Owner, generation and expiry of a shard.
async fn lease_of(site: &Site, shard: i16) -> Outcome<(Option<String>, i64, Option<String>)> {
    Ok(sqlx::query_as("SELECT owner, generation, lease_until::text FROM outbox.shard WHERE shard = $1")
        .bind(shard)
        .fetch_one(site.pool())
        .await?)
}

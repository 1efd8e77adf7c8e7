//! Who may publish a shard: one owner a generation, whatever happens to the processes.
//!
//! A trigger writes down every change of a lease and of a cursor, so that these tests judge by what the database saw and
//! not by what a relay says of itself.

use std::collections::BTreeMap;
use std::time::Duration;

use baton_tests::workload::{self, Workload};
use baton_tests::{Harness, Load, Outcome, Process, Site, eventually, fail, figure, lasts, stays, test};
use sqlx::{Executor, FromRow};

const PATIENCE: Duration = Duration::from_secs(30);

#[test]
fn each_generation_has_one_owner_and_is_never_given_out_again() {
    test(Duration::from_secs(120), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        watch_leases(&site).await?;
        let mut relays: Vec<Process> = Vec::new();
        for owner in ["one", "two", "three"] {
            relays.push(site.relay(owner)?.start()?);
        }
        let mut random = fastrand::Rng::new();
        for round in 0..8 {
            lasts("three relays at work", Duration::from_millis(random.u64(300..1500))).await;
            let victim = random.usize(..3);
            let owner = ["one", "two", "three"][victim];
            if round % 3 == 0 {
                relays[victim].terminate(PATIENCE).await?;
            } else {
                relays[victim].kill().await?;
            }
            // By the same name: what authorises is owner and generation.
            relays[victim] = site.relay(owner)?.start()?;
        }
        eventually("three fair shares", PATIENCE, async || shares(&site, &[2, 3, 3]).await).await?;

        let mut generations: BTreeMap<i16, i64> = BTreeMap::new();
        let mut claims = 0;
        for change in lease_changes(&site).await? {
            let latest = generations.entry(change.shard).or_insert(0);
            assert_eq!(change.generation_before, *latest, "{change:?}");
            if change.generation == change.generation_before {
                assert!(change.owner.is_none() || change.owner == change.owner_before, "{change:?}");
                continue;
            }
            claims += 1;
            assert_eq!(change.generation, *latest + 1, "{change:?}");
            assert!(change.was_free, "taken from a living owner: {change:?}");
            *latest = change.generation;
        }
        assert!(claims > 8, "only {claims} claims");
        Ok(())
    });
}

#[test]
fn a_relay_that_wakes_after_its_lease_moves_no_cursor_and_publishes_nothing_it_had_not_handed_over() {
    test(Duration::from_secs(150), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        let topic = site.topic("zombie", 3).await?;
        let Succession { mut zombie, mut heir, before } = succession(harness, &site, &topic, "heir").await?;
        let claims_before = claims(&site, "zombie").await?;

        zombie.go_on()?;
        eventually("the first relay to take part again, as a healthy one", PATIENCE, async || {
            shares(&site, &[4, 4]).await
        })
        .await?;
        assert!(claims(&site, "zombie").await? > claims_before);
        // Late duplicates: what its producers had of it when it was stopped. All the rest the other has published.
        let late = by_source(&site, &topic, "/first").await? - before;
        assert!(late <= 8 * IN_FLIGHT, "{late} records after its lease had run out");
        // What it owns now it owns by new generations, and it publishes by them.
        fill(&site, &topic, 1_000).await?;
        eventually("both to finish", PATIENCE, async || nothing_waits(&site).await).await?;
        assert_eq!(zombie.try_exited()?, None, "{}", zombie.stderr());
        for relay in [&mut zombie, &mut heir] {
            assert!(relay.terminate(PATIENCE).await?.success());
        }
        let stale: i64 =
            sqlx::query_scalar("SELECT count(*) FROM cursor_change WHERE by <> 'baton cursor ' || owner")
                .fetch_one(site.pool())
                .await?;
        assert_eq!(stale, 0, "the stale owner moved a cursor");
        no_cursor_went_back(&site).await?;
        let (findings, _) =
            workload::judge(&workload::truth(&site, &topic).await?, &site.kafka().records(&topic).await?);
        assert!(findings.wire_is_right(), "{findings}");
        figure(&format!(
            "a relay stopped past its lease and continued: {late} late duplicates of it; {findings}"
        ));
        Ok(())
    });
}

#[test]
fn a_relay_that_wakes_beside_a_namesake_can_do_nothing_by_its_earlier_generations() {
    test(Duration::from_secs(150), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        let topic = site.topic("namesake", 3).await?;
        let Succession { mut zombie, mut heir, before } =
            succession(harness, &site, &topic, "zombie").await?;
        zombie.go_on()?;
        stays("the namesake's leases and cursors", Duration::from_secs(4), async || {
            shares(&site, &[8]).await?;
            no_cursor_went_back(&site).await
        })
        .await?;
        let late = by_source(&site, &topic, "/first").await? - before;
        assert!(late <= 8 * IN_FLIGHT, "{late} records after its lease had run out");
        // Its farewell gives back nothing that is another's.
        let claims_before = claims(&site, "zombie").await?;
        assert!(zombie.terminate(PATIENCE).await?.success(), "{}", zombie.stderr());
        fill(&site, &topic, 1_000).await?;
        eventually("the namesake to finish", PATIENCE, async || nothing_waits(&site).await).await?;
        shares(&site, &[8]).await?;
        assert_eq!(claims(&site, "zombie").await?, claims_before);
        assert!(heir.terminate(PATIENCE).await?.success());
        let (findings, _) =
            workload::judge(&workload::truth(&site, &topic).await?, &site.kafka().records(&topic).await?);
        assert!(findings.wire_is_right(), "{findings}");
        Ok(())
    });
}

/// Rows in flight a shard, in the tests of a relay that is stopped in the middle of its work.
const IN_FLIGHT: i64 = 500;

/// A relay that was stopped in the middle of its work, and another that has taken over and finished it.
struct Succession {
    zombie: Process,
    heir: Process,
    /// How many records the first had put on the topic by then.
    before: i64,
}

async fn succession(harness: &Harness, site: &Site, topic: &str, heir: &str) -> Outcome<Succession> {
    const MESSAGES: i64 = 60_000;
    // Batches wait, so that a page takes long enough to be caught in the middle of it on any machine.
    let file = harness.directory().join("slow.toml");
    std::fs::write(&file, "[kafka.properties]\n\"linger.ms\" = 200\n")?;
    watch_leases(site).await?;
    fill(site, topic, MESSAGES).await?;
    let relay = |owner: &str, source: &str| {
        site.relay(owner)?
            .args(["--config", &file.display().to_string()])
            .env("BATON_RELAY__SOURCE", source)
            .env("BATON_PUBLISH__PAGE_ROWS", IN_FLIGHT.to_string())
            .env("BATON_PUBLISH__IN_FLIGHT_ROWS", IN_FLIGHT.to_string())
            .start()
    };
    let zombie = relay("zombie", "/first")?;
    eventually("the first relay to be in the middle of it", PATIENCE, async || {
        let count = site.kafka().count(topic).await?;
        if count > 1_000 { Ok(()) } else { fail!("{count} published") }
    })
    .await?;
    zombie.stop()?;
    let before = by_source(site, topic, "/first").await?;
    assert!(before < MESSAGES, "it had published everything before it was stopped");
    let heir = relay(heir, "/second")?;
    eventually("the second relay to hold all shards", Duration::from_secs(8), async || {
        shares(site, &[8]).await?;
        let claimed: i64 = sqlx::query_scalar("SELECT count(*) FROM outbox.shard WHERE generation > 1")
            .fetch_one(site.pool())
            .await?;
        if claimed == 8 { Ok(()) } else { fail!("it has claimed {claimed}") }
    })
    .await?;
    eventually("the second relay to finish", PATIENCE, async || nothing_waits(site).await).await?;
    Ok(Succession { zombie, heir, before })
}

async fn no_cursor_went_back(site: &Site) -> Outcome {
    let back: i64 = sqlx::query_scalar("SELECT count(*) FROM cursor_change WHERE position < position_before")
        .fetch_one(site.pool())
        .await?;
    if back == 0 { Ok(()) } else { fail!("a cursor went back {back} times") }
}

#[test]
fn sigterm_drains_and_hands_the_leases_back_so_that_another_takes_over_within_a_second() {
    test(Duration::from_secs(90), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        let topic = site.topic("handover", 3).await?;
        watch_leases(&site).await?;
        let relay = |owner| site.relay(owner)?.env("BATON_LEASE__TTL", "20s").start();
        let (mut leaving, mut staying) = (relay("leaving")?, relay("staying")?);
        eventually("fair shares", PATIENCE, async || shares(&site, &[4, 4]).await).await?;
        let mut writers = Workload { writers: 3, ..Workload::new(1, &topic) }.start(&site).await?;
        lasts("some load", Duration::from_secs(2)).await;

        let status = leaving.terminate(Duration::from_secs(10)).await?;
        assert!(status.success(), "{status}: {}", leaving.stderr());
        eventually("the other to hold all", Duration::from_secs(2), async || shares(&site, &[8]).await)
            .await?;
        lasts("some load", Duration::from_secs(1)).await;
        writers.stop().await?;
        eventually("everything to be published", PATIENCE, async || nothing_waits(&site).await).await?;
        assert!(staying.terminate(PATIENCE).await?.success());

        // Each of the four shards, from its release to its claim.
        let gap: f64 = sqlx::query_scalar(
            "SELECT max(extract(epoch FROM claim.at - release.at))::float8
             FROM lease_change release
             JOIN LATERAL (SELECT at FROM lease_change c WHERE c.shard = release.shard AND c.n > release.n
                           AND c.generation > release.generation ORDER BY c.n LIMIT 1) claim ON true
             WHERE release.owner IS NULL AND release.owner_before = 'leaving'",
        )
        .fetch_one(site.pool())
        .await?;
        assert!(gap < 1.0, "a shard was nobody's for {gap} s");
        let (findings, _) =
            workload::judge(&workload::truth(&site, &topic).await?, &site.kafka().records(&topic).await?);
        assert!(findings.effects_are_right(), "a hand-over repeats nothing: {findings}");
        figure(&format!("hand-over by SIGTERM under load: nobody's for {gap:.3} s at most; {findings}"));
        Ok(())
    });
}

#[test]
fn a_killed_relays_shards_are_taken_over_within_a_second_of_the_leases_end() {
    test(Duration::from_secs(60), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        watch_leases(&site).await?;
        let (mut dying, _living) = (site.relay("dying")?.start()?, site.relay("living")?.start()?);
        eventually("fair shares", PATIENCE, async || shares(&site, &[4, 4]).await).await?;
        dying.kill().await?;
        eventually("the other to hold all", PATIENCE, async || shares(&site, &[8]).await).await?;
        let late: f64 = sqlx::query_scalar(
            "SELECT max(extract(epoch FROM at - lease_until_before))::float8 FROM lease_change
             WHERE owner = 'living' AND owner_before = 'dying'",
        )
        .fetch_one(site.pool())
        .await?;
        assert!((0.0..1.0).contains(&late), "taken over {late} s after the lease had run out");
        Ok(())
    });
}

#[test]
fn a_relay_whose_connections_are_cut_has_its_own_shards_back_at_once() {
    test(Duration::from_secs(90), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        let topic = site.topic("cut", 3).await?;
        // A lease far longer than the test: only by owner and generation can the shards come back.
        let mut relay = site.relay("cut")?.env("BATON_LEASE__TTL", "300s").start()?;
        eventually("all shards held", PATIENCE, async || shares(&site, &[8]).await).await?;
        let mut writers = Workload { writers: 3, ..Workload::new(2, &topic) }.start(&site).await?;
        for _ in 0..5 {
            lasts("some load", Duration::from_millis(1500)).await;
            // Between two sessions it has none: its delays grow when one follows the other.
            eventually("connections to cut", PATIENCE, async || {
                let cut: i64 = sqlx::query_scalar(
                    "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
                     WHERE datname = current_database() AND application_name LIKE 'baton %'",
                )
                .fetch_one(site.pool())
                .await?;
                if cut > 0 { Ok(()) } else { fail!("there are none") }
            })
            .await?;
        }
        writers.stop().await?;
        eventually("everything to be published", PATIENCE, async || nothing_waits(&site).await).await?;
        assert!(relay.terminate(PATIENCE).await?.success(), "{}", relay.stderr());
        let (findings, _) =
            workload::judge(&workload::truth(&site, &topic).await?, &site.kafka().records(&topic).await?);
        assert!(findings.wire_is_right(), "{findings}");
        Ok(())
    });
}

#[test]
fn until_empty_ends_when_all_that_is_committed_is_published_by_whoever_holds_the_shards() {
    test(Duration::from_secs(90), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        let topic = site.topic("until", 3).await?;
        let until_empty = async || {
            let launch = site.baton(&["relay", "--until-empty"])?.env("BATON_LEASE__TTL", "3s");
            launch.finish(PATIENCE).await?.success()
        };
        // With nothing to do, and with an open transaction, which is not waited for.
        until_empty().await?;
        let mut open = site.pool().begin().await?;
        let insert = "INSERT INTO outbox.message (topic, key, payload) VALUES ($1, 'key-1', '{\"seq\":1}')";
        sqlx::query(insert).bind(&topic).execute(&mut *open).await?;
        fill(&site, &topic, 500).await?;
        until_empty().await?;
        assert_eq!(site.kafka().count(&topic).await?, 500);
        open.commit().await?;
        until_empty().await?;
        assert_eq!(site.kafka().count(&topic).await?, 501);

        // Another one holds every shard, and stands still at first: waited for, not worked around.
        let holder = site.relay("holder")?.env("BATON_LEASE__TTL", "60s").start()?;
        eventually("all shards held", PATIENCE, async || shares(&site, &[8]).await).await?;
        holder.stop()?;
        fill(&site, &topic, 500).await?;
        let mut waiting = site.baton(&["relay", "--until-empty"])?.start()?;
        stays("waiting for the holder", Duration::from_secs(3), async || match waiting.try_exited()? {
            None => Ok(()),
            Some(status) => fail!("it ended with {status}"),
        })
        .await?;
        holder.go_on()?;
        assert!(waiting.exited(PATIENCE).await?.success());
        assert_eq!(site.kafka().count(&topic).await?, 1001);
        Ok(())
    });
}

/// One change of a row of `outbox.shard`.
#[derive(Debug, FromRow)]
struct LeaseChange {
    shard: i16,
    owner_before: Option<String>,
    owner: Option<String>,
    generation_before: i64,
    generation: i64,
    /// Nobody's, or run out, when it was changed.
    was_free: bool,
}

async fn watch_leases(site: &Site) -> Outcome {
    site.pool()
        .execute(
            "CREATE SEQUENCE change;
             CREATE TABLE lease_change (n bigint DEFAULT nextval('change'), at timestamptz DEFAULT clock_timestamp(),
                 by text DEFAULT current_setting('application_name'), shard smallint, owner_before text, owner text,
                 generation_before bigint, generation bigint, lease_until_before timestamptz, was_free boolean);
             CREATE TABLE cursor_change (n bigint DEFAULT nextval('change'), by text DEFAULT current_setting('application_name'),
                 shard smallint, owner text, position_before bigint, position bigint);
             CREATE FUNCTION note_lease() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
                 INSERT INTO lease_change (shard, owner_before, owner, generation_before, generation, lease_until_before, was_free)
                 VALUES (new.shard, old.owner, new.owner, old.generation, new.generation, old.lease_until,
                         old.lease_until IS NULL OR old.lease_until <= clock_timestamp());
                 RETURN NULL;
             END $$;
             CREATE FUNCTION note_cursor() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
                 IF new.position <> old.position OR new.snapshot::text <> old.snapshot::text THEN
                     INSERT INTO cursor_change (shard, owner, position_before, position)
                     SELECT shard, owner, old.position, new.position FROM outbox.shard WHERE shard = new.shard;
                 END IF;
                 RETURN NULL;
             END $$;
             CREATE TRIGGER note AFTER UPDATE ON outbox.shard FOR EACH ROW EXECUTE FUNCTION note_lease();
             CREATE TRIGGER note AFTER UPDATE ON outbox.cursor FOR EACH ROW EXECUTE FUNCTION note_cursor()",
        )
        .await?;
    Ok(())
}

async fn lease_changes(site: &Site) -> Outcome<Vec<LeaseChange>> {
    Ok(sqlx::query_as(
        "SELECT shard, owner_before, owner, generation_before, generation, was_free FROM lease_change ORDER BY n",
    )
    .fetch_all(site.pool())
    .await?)
}

async fn claims(site: &Site, owner: &str) -> Outcome<i64> {
    Ok(sqlx::query_scalar(
        "SELECT count(*) FROM lease_change WHERE owner = $1 AND generation > generation_before",
    )
    .bind(owner)
    .fetch_one(site.pool())
    .await?)
}

/// Ok when the living leases are spread like this, smallest share first.
async fn shares(site: &Site, expected: &[i64]) -> Outcome {
    let shares: Vec<i64> = sqlx::query_scalar(
        "SELECT count(*) FROM outbox.shard WHERE lease_until > clock_timestamp() GROUP BY owner ORDER BY 1",
    )
    .fetch_all(site.pool())
    .await?;
    if shares == expected { Ok(()) } else { fail!("the shares are {shares:?}") }
}

async fn nothing_waits(site: &Site) -> Outcome {
    let mut connection = site.connect().await?;
    let status = baton_relay::status::read(&mut connection).await?;
    if status.pending.count == 0 { Ok(()) } else { fail!("{} wait", status.pending.count) }
}

/// Messages of 40 keys, a thousand a transaction, each with its place within its key.
async fn fill(site: &Site, topic: &str, messages: i64) -> Outcome {
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

async fn by_source(site: &Site, topic: &str, source: &str) -> Outcome<i64> {
    let records = site.kafka().records(topic).await?;
    Ok(i64::try_from(records.iter().filter(|record| record.header("ce_source") == Some(source)).count())?)
}

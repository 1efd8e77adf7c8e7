//! Who may publish a shard: one owner a generation, whatever happens to the processes.

use std::collections::BTreeMap;
use std::time::Duration;

use baton_tests::workload::{self, Workload};
use baton_tests::{Harness, Load, Outcome, Process, Site, eventually, fail, figure, lasts, stays, test};

use crate::leases::{fill, lease_changes, shares, watch_leases};

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
fn three_relays_share_eight_shards_fairly_and_only_those_that_must_move_do() {
    test(Duration::from_secs(90), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        watch_leases(&site).await?;
        // A lease far longer than the test: what moves is handed over, not waited for.
        let relay = |owner| site.relay(owner)?.env("BATON_LEASE__TTL", "60s").start();
        let (_one, mut two) = (relay("one")?, relay("two")?);
        eventually("two fair shares", PATIENCE, async || shares(&site, &[4, 4]).await).await?;

        // One comes: two shards move, both to it.
        let before = lease_changes(&site).await?.len();
        let _three = relay("three")?;
        eventually("three fair shares", PATIENCE, async || shares(&site, &[2, 3, 3]).await).await?;
        let moved = Moves::since(&site, before).await?;
        assert_eq!((moved.released, moved.claims), (2, vec![("three".to_owned(), 2)]));

        // One goes: its own shards move, and no others.
        let before = lease_changes(&site).await?.len();
        assert!(two.terminate(PATIENCE).await?.success(), "{}", two.stderr());
        eventually("two fair shares", PATIENCE, async || shares(&site, &[4, 4]).await).await?;
        stays("the fair shares", Duration::from_secs(2), async || shares(&site, &[4, 4]).await).await?;
        let moved = Moves::since(&site, before).await?;
        assert_eq!((moved.released, moved.claims.iter().map(|(_, many)| many).sum::<usize>()), (3, 3));
        Ok(())
    });
}

/// Which leases were given back and which were won.
struct Moves {
    released: usize,
    claims: Vec<(String, usize)>,
}

impl Moves {
    async fn since(site: &Site, changes: usize) -> Outcome<Self> {
        let mut moves = Self { released: 0, claims: Vec::new() };
        let mut claims: BTreeMap<String, usize> = BTreeMap::new();
        for change in lease_changes(site).await?.into_iter().skip(changes) {
            match &change.owner {
                None => {
                    assert_eq!(
                        change.generation, change.generation_before,
                        "given back under another: {change:?}"
                    );
                    moves.released += 1;
                }
                Some(owner) if change.generation > change.generation_before => {
                    *claims.entry(owner.clone()).or_default() += 1;
                }
                Some(_) => {}
            }
        }
        moves.claims = claims.into_iter().collect();
        Ok(moves)
    }
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
        // Nobody leaves a share to it any more.
        let listed: i64 = sqlx::query_scalar("SELECT count(*) FROM outbox.relay WHERE owner = 'leaving'")
            .fetch_one(site.pool())
            .await?;
        assert_eq!(listed, 0, "it has ended, and is listed as living");
        eventually("the other to hold all", Duration::from_secs(2), async || shares(&site, &[8]).await)
            .await?;
        lasts("some load", Duration::from_secs(1)).await;
        writers.stop().await?;
        site.emptied().await?;
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
        // Handed back under the generation it was held by; only the next claim raises it.
        let given_back: Vec<(i64, i64)> = lease_changes(&site)
            .await?
            .iter()
            .filter(|change| change.owner.is_none() && change.owner_before.as_deref() == Some("leaving"))
            .map(|change| (change.generation_before, change.generation))
            .collect();
        assert!(
            given_back.len() >= 4 && given_back.iter().all(|(before, after)| before == after),
            "{given_back:?}"
        );
        let (findings, _) =
            workload::judge(&workload::truth(&site, &topic).await?, &site.kafka().records(&topic).await?);
        assert!(findings.effects_are_right(), "a hand-over repeats nothing: {findings}");
        figure(&format!("hand-over by SIGTERM under load: nobody's for {gap:.3} s at most; {findings}"));
        Ok(())
    });
}

#[test]
fn a_relay_says_farewell_before_it_drains_and_what_another_still_drains_is_not_kept_for_it() {
    test(Duration::from_secs(60), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        watch_leases(&site).await?;
        // One that has said farewell and takes long over its last shard.
        sqlx::raw_sql(
            "INSERT INTO outbox.relay (owner, live_until) VALUES ('slow', '-infinity');
             UPDATE outbox.shard SET owner = 'slow', lease_until = clock_timestamp() + '10 min' WHERE shard = 3;
             CREATE TABLE relay_change (n bigint DEFAULT nextval('change'), owner text, leaving boolean);
             CREATE FUNCTION note_relay() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
                 INSERT INTO relay_change (owner, leaving) VALUES (new.owner, new.live_until = '-infinity');
                 RETURN NULL;
             END $$;
             CREATE TRIGGER note AFTER UPDATE ON outbox.relay FOR EACH ROW EXECUTE FUNCTION note_relay();",
        )
        .execute(site.pool())
        .await?;
        let mut heir = site.relay("heir")?.start()?;
        eventually("all but the drained one", PATIENCE, async || shares(&site, &[1, 7]).await).await?;
        assert!(heir.terminate(PATIENCE).await?.success());
        let (farewell, released, beats): (Option<i64>, Option<i64>, i64) = sqlx::query_as(
            "SELECT (SELECT min(n) FROM relay_change WHERE owner = 'heir' AND leaving),
                    (SELECT max(n) FROM lease_change WHERE owner IS NULL AND owner_before = 'heir'),
                    (SELECT count(*) FROM relay_change r WHERE owner = 'heir' AND NOT leaving
                     AND n > (SELECT min(n) FROM relay_change WHERE owner = 'heir' AND leaving))",
        )
        .fetch_one(site.pool())
        .await?;
        assert!(farewell.is_some(), "it never said farewell");
        assert!(farewell < released, "it told the others only once it had drained everything");
        assert_eq!(beats, 0, "it counted itself among the living again");
        Ok(())
    });
}

#[test]
fn a_farewell_is_remembered_while_its_relay_drains_though_others_leave_and_forgotten_once_it_holds_nothing() {
    test(Duration::from_secs(60), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        sqlx::raw_sql(
            "INSERT INTO outbox.relay (owner, live_until) VALUES
                 ('slow', '-infinity'), ('died over it', '-infinity'),
                 ('long dead', clock_timestamp() - interval '2 days'), ('just died', clock_timestamp() - interval '1 hour');
             UPDATE outbox.shard SET owner = 'slow', lease_until = clock_timestamp() + '10 min' WHERE shard = 3;",
        )
        .execute(site.pool())
        .await?;
        for name in ["leaver", "heir"] {
            let mut relay = site.relay(name)?.start()?;
            // Who has said farewell counts for nothing, though its lease runs: else half of the shards would be kept for it.
            eventually(format!("all but the drained one for {name}"), PATIENCE, async || {
                shares(&site, &[1, 7]).await
            })
            .await?;
            assert!(relay.terminate(PATIENCE).await?.success(), "{}", relay.stderr());
            let listed: Vec<String> = sqlx::query_scalar("SELECT owner FROM outbox.relay ORDER BY owner")
                .fetch_all(site.pool())
                .await?;
            assert_eq!(listed, ["just died", "slow"], "once {name} has left");
        }
        Ok(())
    });
}

#[test]
fn a_lease_without_an_end_written_by_hand_keeps_no_relay_from_the_other_shards() {
    test(Duration::from_secs(60), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        // Refused by the table; an operator who takes the constraint away gets this far.
        sqlx::raw_sql(
            "ALTER TABLE outbox.shard DROP CONSTRAINT a_lease_ends;
             UPDATE outbox.shard SET owner = 'nobody', lease_until = 'infinity' WHERE shard = 3",
        )
        .execute(site.pool())
        .await?;
        let relay = site.relay("relay")?.start()?;
        // The other one lives as far as anybody can tell, so half of the shards is left to it.
        eventually("a fair share", PATIENCE, async || shares(&site, &[1, 4]).await).await?;
        assert!(!relay.stderr().contains("ERROR"), "{}", relay.stderr());
        Ok(())
    });
}

#[test]
fn a_relay_that_finds_its_name_in_use_says_so_and_takes_over_when_the_other_is_gone() {
    const SAID: &str = "another relay runs under this name and holds 8 shards";
    test(Duration::from_secs(90), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        let topic = site.topic("same", 1).await?;
        let mut first = site.relay("same")?.start()?;
        eventually("it to hold all", PATIENCE, async || shares(&site, &[8]).await).await?;
        let mut second = site.relay("same")?.start()?;
        eventually("the second to say that its name is in use", PATIENCE, async || {
            if second.stderr().contains(SAID) { Ok(()) } else { fail!("{}", second.stderr()) }
        })
        .await?;
        assert!(first.terminate(PATIENCE).await?.success(), "{}", first.stderr());
        assert!(!first.stderr().contains("under this name"), "{}", first.stderr());
        fill(&site, &topic, 100).await?;
        site.emptied().await?;

        // What a killed one leaves behind is not in use.
        second.kill().await?;
        let heir = site.relay("same")?.start()?;
        fill(&site, &topic, 100).await?;
        site.emptied().await?;
        assert!(!heir.stderr().contains("under this name"), "{}", heir.stderr());
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
        site.emptied().await?;
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

        // Told to end before it is done, it does not say that it is.
        holder.stop()?;
        fill(&site, &topic, 500).await?;
        let mut waiting = site.baton(&["relay", "--until-empty"])?.start()?;
        stays("waiting for the holder", Duration::from_secs(1), async || match waiting.try_exited()? {
            None => Ok(()),
            Some(status) => fail!("it ended with {status}"),
        })
        .await?;
        assert_eq!(waiting.terminate(PATIENCE).await?.code(), Some(1), "{}", waiting.stderr());
        assert!(waiting.stderr().contains("told to end with messages left"), "{}", waiting.stderr());
        Ok(())
    });
}

#[test]
fn until_empty_ends_and_says_how_many_are_parked_when_nothing_else_is_left_whoever_holds_their_shard() {
    test(Duration::from_secs(60), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        let holder = site.relay("holder")?.env("BATON_LEASE__TTL", "60s").start()?;
        eventually("all shards held", PATIENCE, async || shares(&site, &[8]).await).await?;
        for _ in 0..2 {
            sqlx::query("INSERT INTO outbox.message (topic, key) VALUES ($1, 'key')")
                .bind(site.topic_name("nowhere"))
                .execute(site.pool())
                .await?;
        }
        let ended = site.baton(&["relay", "--until-empty"])?.finish(PATIENCE).await?;
        assert_eq!(ended.status.code(), Some(1), "{ended}");
        assert!(ended.stderr.contains("2 messages are parked and 0 are dead"), "{ended}");

        // Once they are published, nothing is left.
        let topic = site.topic("nowhere", 1).await?;
        eventually("both to be published", PATIENCE, async || {
            let seen = site.kafka().count(&topic).await?;
            if seen == 2 { Ok(()) } else { fail!("{seen}") }
        })
        .await?;
        eventually("both to be settled", PATIENCE, async || {
            let ended = site.baton(&["relay", "--until-empty"])?.finish(PATIENCE).await?;
            if ended.status.success() { Ok(()) } else { fail!("{ended}") }
        })
        .await?;
        drop(holder);
        Ok(())
    });
}

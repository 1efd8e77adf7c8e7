//! What an operator breaks for a moment: named with what to do, fatal at start, ridden out once the relay runs.

use std::panic::{AssertUnwindSafe, resume_unwind};
use std::time::Duration;

use baton_tests::{Harness, Load, Outcome, Process, Site, eventually, fail, lasts, stays, test};
use futures_util::FutureExt;
use sqlx::{AssertSqlSafe, Executor};
use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval};

use crate::leases::{shares, watch_leases};

const PATIENCE: Duration = Duration::from_secs(30);

#[test]
fn at_start_a_role_without_its_privileges_is_told_which_and_by_which_grant() {
    test(Duration::from_secs(90), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        Role::with(&site, "", async |role: &Role| {
            let ends_with = async |words: &[&str]| -> Outcome {
                let relay = site.relay("relay")?.env("DATABASE_URL", &role.url);
                let ended = relay.finish(PATIENCE).await?;
                assert_eq!(ended.status.code(), Some(1), "{ended}");
                let errors: Vec<&str> = ended.stderr.lines().filter(|l| l.starts_with("error: ")).collect();
                assert_eq!(errors.len(), 1, "{ended}");
                for word in words.iter().chain(&[&role.name[..], "GRANT baton_relay TO"]) {
                    assert!(errors[0].contains(word), "{word:?} is missing: {ended}");
                }
                assert!(!ended.stderr.contains("at line"), "{ended}");
                Ok(())
            };
            ends_with(&["USAGE ON SCHEMA outbox"]).await?;
            role.grant(&site).await?;
            site.pool().execute("REVOKE UPDATE ON outbox.shard FROM baton_relay").await?;
            ends_with(&["UPDATE ON outbox.shard", "baton migrate outbox"]).await?;
            // What it says helps.
            site.baton(&["migrate", "outbox"])?.finish(PATIENCE).await?.success()?;
            let relay = site.baton(&["relay", "--until-empty"])?.env("DATABASE_URL", &role.url);
            relay.finish(PATIENCE).await?.success()?;
            site.pool().execute("DROP TABLE outbox.stopped").await?;
            let ended = site.relay("relay")?.env("DATABASE_URL", &role.url).finish(PATIENCE).await?;
            assert_eq!(ended.status.code(), Some(1), "{ended}");
            assert!(ended.stderr.contains("run `baton migrate outbox`"), "{ended}");
            Ok(())
        })
        .await
    });
}

#[test]
fn a_newer_schema_is_refused_at_start_and_ridden_out_by_a_relay_that_runs() {
    test(Duration::from_secs(90), Load::Light, async |harness: &mut Harness| {
        let newest = baton_migrations::Line::Outbox.newest();
        assert_eq!(
            baton_relay::database::SCHEMA,
            newest,
            "SCHEMA says which migrations this relay was made for"
        );
        let site = harness.site().await?;
        let topic = site.topic("newer", 1).await?;
        let mut relay = site.relay("relay")?.start()?;
        publishes(&site, &topic, 1).await?;
        let (later, known) = ((newest + 1).to_string(), newest.to_string());
        sqlx::query("INSERT INTO outbox._migrations VALUES ($1, 'later', now(), true, '', 0)")
            .bind(newest + 1)
            .execute(site.pool())
            .await?;
        let words = ["newer than this binary", &later, &known, "use the baton that migrated it"];
        let ended = site.relay("late")?.finish(PATIENCE).await?;
        assert_eq!(ended.status.code(), Some(1), "{ended}");
        for word in words {
            assert!(ended.stderr.contains(word), "{word:?} is missing: {ended}");
        }
        // The one that runs goes on while it can, and when it has to begin anew it says so and waits.
        publishes(&site, &topic, 2).await?;
        cut_connections(&site, "baton % relay").await?;
        names(&relay, 0, &words).await?;
        sqlx::query("DELETE FROM outbox._migrations WHERE version = $1")
            .bind(newest + 1)
            .execute(site.pool())
            .await?;
        publishes(&site, &topic, 3).await?;
        assert!(relay.terminate(PATIENCE).await?.success(), "{}", relay.stderr());
        Ok(())
    });
}

#[test]
fn a_migration_waits_for_an_open_transaction_by_turns_with_producers_and_says_for_whom() {
    test(Duration::from_secs(60), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        sqlx::raw_sql(
            "ALTER TABLE outbox.message DROP CONSTRAINT a_message_is_valid;
             DROP FUNCTION outbox.message_is_valid;
             ALTER TABLE outbox.shard DROP CONSTRAINT a_lease_ends;
             DROP TABLE outbox.paused;
             DROP INDEX outbox.parked_counted;
             ALTER TABLE outbox.parked DROP COLUMN place, DROP COLUMN budget_from, DROP COLUMN settled_at,
                 DROP CONSTRAINT what_is_dead_or_paused_has_a_cause,
                 ADD CONSTRAINT what_is_not_blocked_has_a_cause CHECK (state = 'blocked' OR cause IS NOT NULL);
             CREATE INDEX parked_queue ON outbox.parked (shard);
             DELETE FROM outbox._migrations WHERE version > 5",
        )
        .execute(site.pool())
        .await?;
        let mut open = site.pool().begin().await?;
        let pid: i32 = sqlx::query_scalar("SELECT pg_backend_pid()").fetch_one(&mut *open).await?;
        sqlx::query("SET LOCAL application_name = 'the-report'").execute(&mut *open).await?;
        sqlx::query("SELECT FROM outbox.shard").execute(&mut *open).await?;
        let mut migrating = site.baton(&["migrate", "outbox"])?.start()?;
        let pid = format!("pid {pid} (the-report, ");
        eventually("whom it waits for", PATIENCE, async || {
            let said = migrating.stderr();
            if said.contains(&pid) && said.contains("producers go first") { Ok(()) } else { fail!("{said}") }
        })
        .await?;
        open.commit().await?;
        assert!(migrating.exited(PATIENCE).await?.success(), "{}", migrating.stderr());
        assert!(migrating.stdout().contains("4 migrations applied"), "{}", migrating.stdout());
        assert!(!migrating.stderr().contains("slow statement"), "{}", migrating.stderr());
        Ok(())
    });
}

#[test]
fn a_privilege_revoked_while_it_runs_is_named_and_ridden_out() {
    test(Duration::from_secs(90), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        let topic = site.topic("revoked", 1).await?;
        Role::with(&site, "IN ROLE baton_relay", async |role: &Role| {
            let mut relay = site.relay("relay")?.env("DATABASE_URL", &role.url).start()?;
            publishes(&site, &topic, 1).await?;
            for (number, privilege) in
                ["UPDATE ON outbox.shard", "SELECT ON outbox.message", "INSERT ON outbox.token"]
                    .iter()
                    .enumerate()
            {
                let logged = errors(&relay).len();
                site.pool().execute(AssertSqlSafe(format!("REVOKE {privilege} FROM baton_relay"))).await?;
                // What a running session does not need is noticed by the next.
                cut_connections(&site, "baton %").await?;
                names(&relay, logged, &[&role.name, privilege, "GRANT baton_relay TO"]).await?;
                stays("the relay", Duration::from_secs(1), async || match relay.try_exited()? {
                    None => Ok(()),
                    Some(status) => fail!("it ended with {status}"),
                })
                .await?;
                site.pool().execute(AssertSqlSafe(format!("GRANT {privilege} TO baton_relay"))).await?;
                publishes(&site, &topic, number + 2).await?;
            }
            // With growing delays: not a flood.
            assert!(errors(&relay).len() < 60, "{} errors", errors(&relay).len());
            assert!(!relay.stderr().contains("at line"), "{}", relay.stderr());
            assert!(relay.terminate(PATIENCE).await?.success(), "{}", relay.stderr());
            Ok(())
        })
        .await
    });
}

#[test]
fn a_schema_that_is_gone_for_a_moment_is_named_and_ridden_out() {
    test(Duration::from_secs(90), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        let topic = site.topic("renamed", 1).await?;
        let mut relay = site.relay("relay")?.start()?;
        publishes(&site, &topic, 1).await?;
        site.pool().execute("ALTER SCHEMA outbox RENAME TO away").await?;
        names(&relay, 0, &["run `baton migrate outbox`"]).await?;
        assert_eq!(relay.try_exited()?, None, "{}", relay.stderr());
        site.pool().execute("ALTER SCHEMA away RENAME TO outbox").await?;
        publishes(&site, &topic, 2).await?;
        assert!(relay.terminate(PATIENCE).await?.success(), "{}", relay.stderr());
        Ok(())
    });
}

#[test]
fn connections_that_are_cut_again_and_again_disturb_no_other_relay_and_delay_no_takeover() {
    test(Duration::from_secs(90), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        watch_leases(&site).await?;
        let relay = |owner| site.relay(owner)?.env("BATON_LEASE__TTL", "2s").start();
        let (mut unlucky, mut healthy) = (relay("unlucky")?, relay("healthy")?);
        eventually("fair shares", PATIENCE, async || shares(&site, &[4, 4]).await).await?;

        let (stop, stopped) = watch::channel(false);
        let cutting = tokio::spawn(cut_again_and_again(site.clone(), stopped));
        lasts("cuts", Duration::from_secs(6)).await;
        let lost: i64 = sqlx::query_scalar(
            "SELECT count(*) FROM lease_change
             WHERE owner_before = 'healthy' AND owner IS DISTINCT FROM owner_before AND owner IS NOT NULL",
        )
        .fetch_one(site.pool())
        .await?;
        assert_eq!(lost, 0, "the healthy relay lost a lease");
        stop.send_replace(true);
        let cuts = cutting.await??;
        assert!(cuts > 10, "only {cuts} connections were cut");

        // From now on the unlucky one is let alone, and however long it has been backing off it is there in time.
        healthy.kill().await?;
        // By name: the healthy one may have held them all when it died.
        eventually("the other to hold all", PATIENCE, async || {
            let held: i64 = sqlx::query_scalar(
                "SELECT count(*) FROM outbox.shard WHERE owner = 'unlucky' AND lease_until > clock_timestamp()",
            )
            .fetch_one(site.pool())
            .await?;
            if held == 8 { Ok(()) } else { fail!("it holds {held}") }
        })
        .await?;
        let late: f64 = sqlx::query_scalar(
            "SELECT max(extract(epoch FROM at - lease_until_before))::float8 FROM lease_change
             WHERE owner = 'unlucky' AND owner_before = 'healthy'",
        )
        .fetch_one(site.pool())
        .await?;
        assert!((0.0..1.0).contains(&late), "taken over {late} s after the lease had run out");
        assert!(unlucky.terminate(PATIENCE).await?.success(), "{}", unlucky.stderr());
        Ok(())
    });
}

/// Cuts the unlucky relay's connections until told to stop. Returns how many.
async fn cut_again_and_again(site: Site, stopped: watch::Receiver<bool>) -> Outcome<i64> {
    let mut tick = interval(Duration::from_millis(150));
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut cuts = 0;
    while !*stopped.borrow() {
        tick.tick().await;
        cuts += cut_connections(&site, "baton % unlucky").await?;
    }
    Ok(cuts)
}

async fn cut_connections(site: &Site, like: &str) -> Outcome<i64> {
    Ok(sqlx::query_scalar(
        "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
         WHERE datname = current_database() AND application_name LIKE $1",
    )
    .bind(like)
    .fetch_one(site.pool())
    .await?)
}

/// Inserts a message for each shard and waits until everything is on the topic.
async fn publishes(site: &Site, topic: &str, round: usize) -> Outcome {
    sqlx::query("INSERT INTO outbox.message (topic, key) SELECT $1, unnest($2::text[])")
        .bind(topic)
        .bind(site.key_of_each_shard().await?)
        .execute(site.pool())
        .await?;
    site.emptied().await?;
    let count = site.kafka().count(topic).await?;
    if count < i64::try_from(round * 8)? {
        fail!("{count} records after round {round}")
    }
    Ok(())
}

fn errors(relay: &Process) -> Vec<String> {
    relay.stderr().lines().filter(|line| line.contains("ERROR")).map(str::to_owned).collect()
}

/// Waits for an ERROR, after the first `known`, that has all these words.
async fn names(relay: &Process, known: usize, words: &[&str]) -> Outcome {
    eventually("an ERROR that says what to do", PATIENCE, async || {
        let errors = errors(relay);
        let named = errors.iter().skip(known).any(|line| words.iter().all(|word| line.contains(word)));
        if named { Ok(()) } else { fail!("{words:?} are in none of {errors:#?}") }
    })
    .await
}

/// A login role of the test's own. Roles belong to the whole server, so it must be dropped.
pub(crate) struct Role {
    pub name: String,
    pub url: String,
}

impl Role {
    /// Makes a role with these attributes, and drops it after `body`, however that ends.
    pub(crate) async fn with(
        site: &Site,
        attributes: &str,
        body: impl AsyncFnOnce(&Self) -> Outcome,
    ) -> Outcome {
        let name = format!("baton_test_role_{}", uuid::Uuid::new_v4().simple());
        let create = format!("CREATE ROLE {name} LOGIN PASSWORD 'correct-horse' {attributes}");
        site.pool().execute(AssertSqlSafe(create)).await?;
        let url = &site.place().database_url;
        let (scheme, rest) = url.split_once("://").unwrap_or(("postgres", url));
        let host = rest.split_once('@').map_or(rest, |(_, host)| host);
        let role = Self { url: format!("{scheme}://{name}:correct-horse@{host}"), name };
        let ended = AssertUnwindSafe(body(&role)).catch_unwind().await;
        site.pool().execute(AssertSqlSafe(format!("DROP ROLE {}", role.name))).await?;
        ended.unwrap_or_else(|panic| resume_unwind(panic))
    }

    async fn grant(&self, site: &Site) -> Outcome {
        site.pool().execute(AssertSqlSafe(format!("GRANT baton_relay TO {}", self.name))).await?;
        Ok(())
    }
}

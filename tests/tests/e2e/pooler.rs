//! A real pgbouncer between relay and Postgres. In session mode everything works; in transaction or statement mode a relay
//! refuses before it has claimed anything, and so do the commands that it would break.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::time::Duration;

use baton_tests::{Harness, Load, Outcome, Place, Process, Site, eventually, fail, figure, test};
use sqlx::postgres::PgConnectOptions;

const PATIENCE: Duration = Duration::from_secs(30);

/// Who runs it: it refuses to run as root.
const NOBODY: u32 = 65_534;

#[test]
fn a_pooler_that_gives_sessions_to_transactions_is_refused_before_anything_is_claimed() {
    test(Duration::from_secs(90), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        for (name, mode) in [
            ("transaction", "pool_mode = transaction"),
            ("in-turn", "pool_mode = transaction\nserver_round_robin = 1\nmin_pool_size = 4"),
            ("statement", "pool_mode = statement"),
        ] {
            let pooler = Pooler::start(&site, name, mode).await?;
            // It has as many sessions as ever asked at once; a relay must not be told by chance.
            for _ in 0..3 {
                let ended = site.relay("relay")?.env("DATABASE_URL", &pooler.url).finish(PATIENCE).await?;
                assert_eq!(ended.status.code(), Some(1), "{name}: {ended}");
                for words in
                    ["a connection pooler at 127.0.0.1:", "pool_mode = session", "outbox.database_url"]
                {
                    assert!(ended.stderr.contains(words), "{name}: {words:?} is missing: {ended}");
                }
                let error = ended.stderr.lines().find(|line| line.starts_with("error: ")).unwrap_or_default();
                figure(&format!("must show 3: pgbouncer in {name} mode: exit 1: {error}"));
            }
            let doctor = site.baton(&["doctor"])?.env("DATABASE_URL", &pooler.url).finish(PATIENCE).await?;
            assert_eq!(doctor.status.code(), Some(1), "{name}: {doctor}");
            assert!(doctor.stdout.contains("pool_mode = session"), "{name}: {doctor}");
            for command in [&["migrate", "outbox"][..], &["rebase"], &["audit"]] {
                // The second one would find what the first has prepared.
                for _ in 0..2 {
                    let ended =
                        site.baton(command)?.env("DATABASE_URL", &pooler.url).finish(PATIENCE).await?;
                    assert_eq!(ended.status.code(), Some(1), "{name}: {command:?}: {ended}");
                    for words in ["a connection pooler", "needs a session of its own", "pool_mode = session"]
                    {
                        assert!(
                            ended.stderr.contains(words),
                            "{name}: {command:?}: {words:?} is missing: {ended}"
                        );
                    }
                }
            }
        }
        let touched: i64 = sqlx::query_scalar(
            "SELECT (SELECT sum(generation) FROM outbox.shard)::bigint + (SELECT count(*) FROM outbox.relay)",
        )
        .fetch_one(site.pool())
        .await?;
        assert_eq!(touched, 0, "something was claimed");
        Ok(())
    });
}

#[test]
fn behind_a_pooler_in_session_mode_a_relay_works_and_notices_a_lost_session() {
    test(Duration::from_secs(90), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        let topic = site.topic("pooled", 1).await?;
        let pooler = Pooler::start(&site, "session", "pool_mode = session").await?;
        let mut relay = site.relay("relay")?.env("DATABASE_URL", &pooler.url).start()?;
        publishes(&site, &topic, 1_000).await?;
        // The pooler closes the relay's connection when the session behind it dies: nothing hides a crash of the server.
        let cut: i64 = sqlx::query_scalar(
            "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
             WHERE datname = current_database() AND application_name LIKE 'baton % relay'",
        )
        .fetch_one(site.pool())
        .await?;
        assert_eq!(cut, 4, "a relay has four sessions");
        eventually("the relay to notice", PATIENCE, async || {
            if relay.stderr().contains("the database was lost") {
                Ok(())
            } else {
                fail!("{}", relay.stderr())
            }
        })
        .await?;
        publishes(&site, &topic, 1_000).await?;
        let status = site.baton(&["status"])?.env("DATABASE_URL", &pooler.url);
        status.finish(PATIENCE).await?.success()?;
        assert!(relay.terminate(PATIENCE).await?.success(), "{}", relay.stderr());
        let held: i64 = sqlx::query_scalar("SELECT count(*) FROM outbox.shard WHERE owner IS NOT NULL")
            .fetch_one(site.pool())
            .await?;
        assert_eq!(held, 0, "it has not released its leases");
        Ok(())
    });
}

async fn publishes(site: &Site, topic: &str, messages: i64) -> Outcome {
    let before = site.kafka().count(topic).await?;
    sqlx::query(
        "INSERT INTO outbox.message (topic, key) SELECT $1, 'k' || i FROM generate_series(1, $2::bigint) i",
    )
    .bind(topic)
    .bind(messages)
    .execute(site.pool())
    .await?;
    site.emptied().await?;
    let published = site.kafka().count(topic).await? - before;
    if published < messages { fail!("{published} of {messages} published") } else { Ok(()) }
}

/// A pgbouncer before the site's Postgres.
struct Pooler {
    url: String,
    _process: Process,
}

impl Pooler {
    async fn start(site: &Site, name: &str, mode: &str) -> Outcome<Self> {
        let program = program()?;
        let port = TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port();
        let url = site.place().with_postgres_address(&format!("127.0.0.1:{port}"))?.database_url;
        let server: PgConnectOptions = site.place().database_url.parse()?;
        let password = password(&site.place().database_url);
        // It asks nobody for a password, and gives its own to the server.
        let configuration = format!(
            "[databases]\n* = host={} port={} user={} password={password}\n[pgbouncer]\nlisten_addr = 127.0.0.1\n\
             listen_port = {port}\nunix_socket_dir =\nauth_type = any\n{mode}\n",
            server.get_host(),
            server.get_port(),
            server.get_username(),
        );
        let process = site
            .launch(&format!("pgbouncer-{name}"), program)
            .arg("/dev/stdin")
            .input(configuration)
            .user(NOBODY, NOBODY)
            .start()?;
        let pooled = Place { database_url: url.clone(), brokers: String::new() };
        let address = pooled.postgres_address()?.to_owned();
        eventually("pgbouncer to serve", PATIENCE, async || {
            tokio::net::TcpStream::connect(&address).await?;
            Ok(())
        })
        .await?;
        Ok(Self { url, _process: process })
    }
}

/// The password in a URL of the tests' own server, which has nothing in it that would be encoded.
fn password(url: &str) -> &str {
    let authority = url.split_once("://").map_or(url, |(_, rest)| rest);
    let user = authority.split_once('@').map_or("", |(user, _)| user);
    user.split_once(':').map_or("", |(_, password)| password)
}

/// Debian puts it where only root's path leads.
fn program() -> Outcome<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path)
        .chain([Path::new("/usr/sbin").to_owned()])
        .map(|directory| directory.join("pgbouncer"))
        .find(|program| program.is_file());
    match found {
        Some(program) => Ok(program),
        None => fail!(
            "pgbouncer is missing: install it (on Debian `apt-get install pgbouncer`), or run `cargo xtask test` as root"
        ),
    }
}

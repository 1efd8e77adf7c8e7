//! A consumer applies each message once, whatever it is fed and whenever it dies.

use std::time::Duration;

use baton_tests::ledger::{self, Committed, Seen};
use baton_tests::{
    Draft, Harness, Load, Outcome, Process, Proxy, Site, eventually, fail, figure, lasts, program, test,
};
use sqlx::Executor;

const MESSAGES: usize = 5_000;
const PATIENCE: Duration = Duration::from_secs(60);

#[test]
fn five_thousand_records_fed_twice_to_two_consumers_killed_at_random_take_effect_once_each() {
    test(Duration::from_secs(180), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        let topic = site.topic("work", 4).await?;
        let group = site.topic_name("group");
        effect_table(&site).await?;
        let messages: Vec<Committed> = (0..MESSAGES).map(message).collect();
        let drafts: Vec<Draft> = messages.iter().map(draft).collect();
        site.kafka().produce(&topic, [drafts.clone(), drafts].concat()).await?;
        assert_eq!(site.kafka().count(&topic).await?, 10_000);

        let mut consumers = [start(&site, &topic, &group, 0)?, start(&site, &topic, &group, 1)?];
        let mut random = fastrand::Rng::new();
        let mut kills = 0;
        while site.kafka().lag(&group, &topic).await? > 0 && kills < 10 {
            lasts("work between two kills", Duration::from_millis(random.u64(300..2_500))).await;
            let victim = random.usize(..2);
            consumers[victim].kill().await?;
            kills += 1;
            consumers[victim] = start(&site, &topic, &group, kills + 1)?;
        }
        consumed(&site, &topic, &group).await?;

        let findings = ledger::judge(&messages, &effects(&site).await?);
        figure(&format!("must show 6: {findings}; {kills} consumers killed"));
        assert!(findings.effects_are_right(), "{findings}");
        assert_eq!(findings.seen, MESSAGES);
        assert!(kills >= 3, "only {kills} were killed before all was done");

        // One byte changed under an old key, and under it once more with the old bytes.
        let old = &messages[77];
        let mut changed = old.clone();
        changed.content = String::from_utf8_lossy(&old.content).replace("\"seq\":1", "\"seq\":2").into();
        let differ = old.content.iter().zip(&changed.content).filter(|(a, b)| a != b).count();
        assert_eq!((old.content.len(), differ), (changed.content.len(), 1));
        site.kafka().produce(&topic, vec![draft(&changed), draft(old)]).await?;
        consumed(&site, &topic, &group).await?;
        let findings = ledger::judge(&messages, &effects(&site).await?);
        assert!(findings.effects_are_right(), "{findings}");
        let dead = site.kafka().records(&format!("{topic}.effects.dlt")).await?;
        assert_eq!(dead.len(), 1);
        assert_eq!(dead[0].header("dlt-cause"), Some("conflict"));
        assert_eq!(dead[0].payload, Some(changed.content));
        figure(&format!(
            "must show 6: one byte changed under an old key: {} effects, 1 conflict",
            findings.seen
        ));

        for consumer in &mut consumers {
            let status = consumer.terminate(Duration::from_secs(30)).await?;
            assert!(status.success(), "{status}: {}", consumer.stderr());
        }
        Ok(())
    });
}

#[test]
fn records_that_cannot_be_applied_become_dead_letters_and_those_behind_them_flow() {
    test(Duration::from_secs(90), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        let topic = site.topic("mixed", 1).await?;
        let group = site.topic_name("group");
        effect_table(&site).await?;
        let good = |number: usize| draft(&message(number));
        let poison = Draft::new("k", "{\"behave\":\"poison\"}").header("idempotency-key", "poison");
        site.kafka()
            .produce(
                &topic,
                vec![
                    good(0),
                    Draft::new("k", "this is not JSON").header("idempotency-key", "undecodable"),
                    Draft::new("k", "{}"),
                    poison,
                    good(1),
                ],
            )
            .await?;
        let mut consumer = start(&site, &topic, &group, 0)?;
        consumed(&site, &topic, &group).await?;
        let applied: Vec<String> = effects(&site).await?.into_iter().map(|effect| effect.id).collect();
        assert_eq!(applied, ["placed:0", "placed:1"]);

        let dead = site.kafka().records(&format!("{topic}.effects.dlt")).await?;
        let mut causes: Vec<Option<&str>> = dead.iter().map(|record| record.header("dlt-cause")).collect();
        causes.sort_unstable();
        assert_eq!(causes, [Some("no_identity"), Some("permanent"), Some("undecodable")]);
        for record in &dead {
            for name in [
                "dlt-cause",
                "dlt-error",
                "dlt-attempts",
                "dlt-original-topic",
                "dlt-original-partition",
                "dlt-original-offset",
                "dlt-original-timestamp",
                "dlt-consumer",
                "dlt-first-failed-at",
                "dlt-failed-at",
            ] {
                assert!(record.header(name).is_some(), "{name} is missing: {:?}", record.header_texts());
            }
            assert_eq!(record.header("dlt-original-topic"), Some(topic.as_str()));
            assert_eq!(record.header("dlt-consumer"), Some("effects"));
        }
        let broken = dead.iter().find(|record| record.header("dlt-cause") == Some("undecodable"));
        assert_eq!(broken.and_then(|record| record.payload_text()), Some("this is not JSON"));
        assert!(consumer.terminate(Duration::from_secs(30)).await?.success(), "{}", consumer.stderr());
        Ok(())
    });
}

#[test]
fn a_consumer_of_a_topic_that_does_not_exist_ends_with_the_topics_name() {
    test(Duration::from_secs(60), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        let absent = site.topic_name("absent");
        let launch = site.launch("consumer", program("effect_consumer")?).args([&absent, "group"]);
        let ended = launch.finish(PATIENCE).await?;
        assert_eq!(ended.status.code(), Some(1), "{ended}");
        assert!(ended.stderr.contains(&format!("no such topic: {absent}; create it")), "{ended}");
        Ok(())
    });
}

#[test]
fn what_the_relay_publishes_twice_takes_effect_once() {
    test(Duration::from_secs(90), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        let topic = site.topic("path", 2).await?;
        let group = site.topic_name("group");
        effect_table(&site).await?;
        sqlx::query(
            r#"INSERT INTO outbox.message (topic, key, payload)
               SELECT $1, 'key-' || i % 20, convert_to(format('{"seq":%s}', i), 'UTF8') FROM generate_series(1, 1000) i"#,
        )
        .bind(&topic)
        .execute(site.pool())
        .await?;
        // The cursors as before the first run: what a crash that lost them would repeat.
        site.pool().execute("CREATE TABLE saved AS SELECT * FROM outbox.cursor").await?;
        let relay = async || site.baton(&["relay", "--until-empty"])?.finish(PATIENCE).await?.success();
        relay().await?;
        site.pool()
            .execute(
                r#"INSERT INTO outbox.advance (shard, number, generation, "position", snapshot, ceiling)
                   SELECT s.shard, c.number + 1, c.generation, s."position", s.snapshot, s.ceiling
                   FROM saved s JOIN outbox.cursor c USING (shard)"#,
            )
            .await?;
        relay().await?;
        assert_eq!(site.kafka().count(&topic).await?, 2_000);

        let _consumer = start(&site, &topic, &group, 0)?;
        consumed(&site, &topic, &group).await?;
        let rows: Vec<(String, String, i64, Vec<u8>)> = sqlx::query_as(
            r#"SELECT '/' || current_database() || '#' || id, key, "position", payload FROM outbox.message"#,
        )
        .fetch_all(site.pool())
        .await?;
        let committed: Vec<Committed> = rows
            .into_iter()
            .map(|(id, key, rank, content)| Committed { id, key: Some(key), rank, content })
            .collect();
        let findings = ledger::judge(&committed, &effects(&site).await?);
        assert!(findings.effects_are_right(), "{findings}");
        Ok(())
    });
}

#[test]
fn an_outage_of_the_database_in_the_middle_of_an_attempt_on_what_was_set_aside_spends_none() {
    test(Duration::from_secs(120), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        let (topic, group) = (site.topic("tired", 1).await?, site.topic_name("group"));
        effect_table(&site).await?;
        let (proxy, behind) = Proxy::before_postgres(site.place()).await?;
        let launch = site.launch("consumer", program("effect_consumer")?).args([&topic, &group]);
        let launch = launch.env("EFFECTS_NAME", "tired").env("EFFECTS_PARK", "1").env("EFFECTS_STALL", "30");
        let _consumer = launch.env("DATABASE_URL", &behind.database_url).start()?;
        let draft = Draft::new("k", r#"{"behave":"tired"}"#).header("idempotency-key", "tired");
        site.kafka().produce(&topic, vec![draft]).await?;
        let attempts = async || -> Outcome<Option<i32>> {
            let asked = sqlx::query_scalar("SELECT attempts FROM inbox.parked WHERE owner IS NULL");
            Ok(asked.fetch_optional(site.pool()).await?)
        };
        let failed = async || match attempts().await? {
            Some(attempts) if attempts >= 1 => Ok(()),
            other => fail!("{other:?}"),
        };
        eventually("it to be set aside", PATIENCE, failed).await?;
        let mut lock = site.connect().await?;
        // The handler is done and its mark waits: what fails then is not the handler.
        lock.execute(
            "SELECT pg_advisory_lock(1);
             CREATE FUNCTION wait_to_mark() RETURNS trigger LANGUAGE plpgsql AS
                 $$ BEGIN PERFORM pg_advisory_xact_lock_shared(1); RETURN NEW; END $$;
             CREATE TRIGGER wait_to_mark BEFORE INSERT OR UPDATE ON inbox.message FOR EACH ROW
                 WHEN (NEW.state = 'done') EXECUTE FUNCTION wait_to_mark();
             CREATE TABLE well ()",
        )
        .await?;
        let waiting = "FROM pg_locks l JOIN pg_stat_activity a USING (pid)
             WHERE a.datname = current_database() AND NOT l.granted AND l.locktype = 'advisory' AND l.objid = 1";
        let mut before = None;
        for _ in 0..3 {
            eventually("the mark to be at the lock", PATIENCE, async || {
                let sql = sqlx::AssertSqlSafe(format!("SELECT count(*) {waiting}"));
                let count: i64 = sqlx::query_scalar(sql).fetch_one(site.pool()).await?;
                if count == 1 { Ok(()) } else { fail!("{count}") }
            })
            .await?;
            let taken: i32 =
                sqlx::query_scalar("SELECT attempts FROM inbox.parked").fetch_one(site.pool()).await?;
            assert_eq!(*before.get_or_insert(taken), taken);
            proxy.refuse();
            proxy.reset_all();
            let sql = sqlx::AssertSqlSafe(format!("SELECT pg_terminate_backend(pid) {waiting}"));
            site.pool().execute(sqlx::query(sql)).await?;
            lasts("the lease and more", Duration::from_secs(3)).await;
            proxy.heal();
        }
        lock.execute("SELECT pg_advisory_unlock(1)").await?;
        consumed(&site, &topic, &group).await?;
        eventually("its effect", PATIENCE, async || match effects(&site).await?.len() {
            1 => Ok(()),
            other => fail!("{other}"),
        })
        .await?;
        assert_eq!(attempts().await?, before);
        Ok(())
    });
}

fn message(number: usize) -> Committed {
    let (key, rank) = (number % 50, number / 50);
    Committed {
        id: format!("placed:{number}"),
        key: Some(format!("customer-{key}")),
        rank: rank.try_into().unwrap_or(i64::MAX),
        content: format!(r#"{{"customer":{key},"seq":{rank}}}"#).into_bytes(),
    }
}

fn draft(message: &Committed) -> Draft {
    Draft::new(message.key.as_deref().unwrap_or_default(), message.content.clone())
        .header("ce_type", "work.done")
        .header("idempotency-key", &message.id)
}

fn start(site: &Site, topic: &str, group: &str, number: usize) -> Outcome<Process> {
    let name = format!("consumer-{number}");
    site.launch(&name, program("effect_consumer")?).args([topic, group]).start()
}

async fn effect_table(site: &Site) -> Outcome {
    site.pool()
        .execute("CREATE TABLE effect (n bigint GENERATED ALWAYS AS IDENTITY, key text, content bytea, partition int)")
        .await?;
    Ok(())
}

async fn consumed(site: &Site, topic: &str, group: &str) -> Outcome {
    eventually("all records consumed", PATIENCE, async || {
        let lag = site.kafka().lag(group, topic).await?;
        if lag == 0 { Ok(()) } else { fail!("{lag} records are not committed") }
    })
    .await
}

async fn effects(site: &Site) -> Outcome<Vec<Seen>> {
    let rows: Vec<(String, Vec<u8>, i32)> =
        sqlx::query_as("SELECT key, content, partition FROM effect ORDER BY n")
            .fetch_all(site.pool())
            .await?;
    let seen =
        |(id, content, partition): (String, Vec<u8>, i32)| Seen { id, content, lane: partition.to_string() };
    Ok(rows.into_iter().map(seen).collect())
}

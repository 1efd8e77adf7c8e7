//! `baton inbox`: what an operator sees of a consumer, and decides.
//!
//! Every command runs as a role that is a member of `baton_operator` and of nothing else, while the consumer runs.

use std::time::Duration;

use baton_tests::service::{Asked, Service};
use baton_tests::{
    Draft, Finished, Harness, Launch, Load, Outcome, Process, Site, eventually, fail, program, test,
};
use serde_json::Value;
use sqlx::{AssertSqlSafe, Executor};

use crate::endurance::Role;

const PATIENCE: Duration = Duration::from_secs(30);

/// A consumer of a topic with one partition, and an operator.
struct Scene {
    site: Site,
    topic: String,
    group: String,
    operator: String,
}

impl Scene {
    /// Runs `body` with a scene of its own.
    fn play(body: impl AsyncFnOnce(&mut Self) -> Outcome) {
        test(Duration::from_secs(120), Load::Light, async |harness: &mut Harness| {
            let site = harness.site().await?;
            let topic = site.topic("work", 1).await?;
            let group = site.topic_name("group");
            site.pool()
                .execute(
                    "CREATE TABLE effect (n bigint GENERATED ALWAYS AS IDENTITY, key text, content bytea, partition int,
                                          at timestamptz DEFAULT clock_timestamp())",
                )
                .await?;
            Role::with(&site.clone(), "IN ROLE baton_operator", async |role| {
                body(&mut Self { site, topic, group, operator: role.url.clone() }).await
            })
            .await
        });
    }

    fn launch(&self) -> Outcome<Launch> {
        let launch = self.site.launch("effects", program("effect_consumer")?);
        Ok(launch.args([&self.topic, &self.group]).env("EFFECTS_NAME", "effects"))
    }

    async fn send(&self, messages: &[(&str, &str, &str)]) -> Outcome {
        let drafts = messages
            .iter()
            .map(|(id, key, content)| Draft::new(key, (*content).to_owned()).header("idempotency-key", id));
        self.site.kafka().produce(&self.topic, drafts.collect()).await
    }

    async fn consumed(&self) -> Outcome {
        eventually("all to be consumed", PATIENCE, async || {
            match self.site.kafka().lag(&self.group, &self.topic).await? {
                0 => Ok(()),
                lag => fail!("lag {lag}"),
            }
        })
        .await
    }

    async fn inbox(&self, args: &[&str]) -> Outcome<Finished> {
        let args: Vec<&str> = [&["inbox"], args].concat();
        self.site.baton(&args)?.env("DATABASE_URL", &self.operator).finish(PATIENCE).await
    }

    async fn done(&self, args: &[&str]) -> Outcome<String> {
        self.inbox(args).await?.success()
    }

    async fn json(&self, args: &[&str]) -> Outcome<Value> {
        Ok(serde_json::from_str(&self.done(&[args, &["--json"]].concat()).await?)?)
    }

    /// Ends with that code, and with these words on stderr.
    async fn refused(&self, args: &[&str], code: i32, words: &str) -> Outcome<String> {
        let finished = self.inbox(args).await?;
        if finished.status.code() != Some(code) || !finished.stderr.contains(words) {
            fail!("{args:?}: not {code} with {words:?}: {finished}");
        }
        Ok(finished.stdout)
    }

    async fn well(&self) -> Outcome {
        self.site.pool().execute("CREATE TABLE IF NOT EXISTS well ()").await?;
        Ok(())
    }

    async fn parked(&self) -> Outcome<Vec<(String, String)>> {
        let rows = sqlx::query_as("SELECT idempotency_key, state FROM inbox.parked ORDER BY key, sequence");
        Ok(rows.fetch_all(self.site.pool()).await?)
    }

    async fn are_parked(&self, expected: &[(&str, &str)]) -> Outcome {
        eventually(format!("{expected:?} to be set aside"), PATIENCE, async || {
            let found = self.parked().await?;
            let found: Vec<(&str, &str)> = found.iter().map(|(key, state)| (&**key, &**state)).collect();
            if found == expected { Ok(()) } else { fail!("{found:?}") }
        })
        .await
    }

    async fn effects(&self, expected: &[&str]) -> Outcome {
        eventually(format!("the effects {expected:?}"), PATIENCE, async || {
            let found: Vec<String> =
                sqlx::query_scalar("SELECT key FROM effect ORDER BY n").fetch_all(self.site.pool()).await?;
            if found == expected { Ok(()) } else { fail!("{found:?}") }
        })
        .await
    }

    /// Command, arguments and number of each audit row that this test's commands left, oldest first.
    async fn audited(&self) -> Outcome<Vec<(String, Value, i64)>> {
        let rows: Vec<(String, String, i64)> = sqlx::query_as(
            "SELECT command, arguments::text, affected FROM inbox.audit WHERE command <> 'migrate inbox' ORDER BY id",
        )
        .fetch_all(self.site.pool())
        .await?;
        let parse = |(command, arguments, affected): (String, String, i64)| {
            Ok((command, serde_json::from_str(&arguments)?, affected))
        };
        rows.into_iter().map(parse).collect()
    }

    async fn id(&self, idempotency_key: &str) -> Outcome<String> {
        let id: i64 = sqlx::query_scalar("SELECT sequence FROM inbox.parked WHERE idempotency_key = $1")
            .bind(idempotency_key)
            .fetch_one(self.site.pool())
            .await?;
        Ok(id.to_string())
    }

    async fn ends(&self, mut consumer: Process) -> Outcome {
        let status = consumer.terminate(PATIENCE).await?;
        if status.success() { Ok(()) } else { fail!("{status}: {}", consumer.stderr()) }
    }
}

#[test]
fn of_any_key_show_says_where_it_stands_which_transition_stopped_it_and_whether_it_can_be_run_again() {
    Scene::play(async |scene| {
        let consumer = scene.launch()?.env("EFFECTS_ATTEMPTS", "2").env("EFFECTS_PARK", "yes").start()?;
        scene
            .send(&[
                ("ok", "a", "{}"),
                ("poison", "b", r#"{"behave":"poison"}"#),
                ("tired", "c", r#"{"behave":"tired"}"#),
            ])
            .await?;
        scene.consumed().await?;
        scene.are_parked(&[("tired", "dead")]).await?;

        let done = &scene.json(&["show", "ok"]).await?["records"][0];
        assert_eq!((&done["state"], &done["can_run_again"]), (&"done".into(), &false.into()), "{done:#}");
        assert_eq!(done["consumer"], "effects");
        assert_eq!(
            (&done["topic"], &done["partition"], &done["offset"]),
            (&(*scene.topic).into(), &0.into(), &0.into())
        );
        assert!(done["finished_at"].is_string() && done["stopped"].is_null(), "{done:#}");

        let shown = scene.json(&["show", "poison", "--consumer", "effects"]).await?;
        let dead = &shown["records"][0];
        assert_eq!(
            (&dead["state"], &dead["cause"], &dead["error"]),
            (&"dead".into(), &"permanent".into(), &"poison".into())
        );
        assert_eq!(
            (&dead["attempts"], &dead["generation"], &dead["can_run_again"]),
            (&1.into(), &1.into(), &true.into())
        );
        assert_eq!(dead["stopped"]["transition"], "free → dead (buried)");
        assert_eq!(dead["stopped"]["why"], "permanent: poison");
        assert_eq!(shown["parked"], Value::Array(Vec::new()));

        let spent = scene.json(&["show", "tired"]).await?;
        assert_eq!(spent["records"][0]["cause"], "exhausted");
        let aside = &spent["parked"][0];
        assert_eq!(aside["stopped"]["transition"], "retrying → dead (given up)", "{aside:#}");
        assert!(aside["stopped"]["generation"].as_i64() > Some(0), "{aside:#}");
        assert_eq!(
            (&aside["attempts"], &aside["can_run_again"], &aside["state"]),
            (&2.into(), &true.into(), &"dead".into())
        );
        let text = scene.done(&["show", "tired"]).await?;
        for words in ["retrying → dead (given up)", "exhausted: tired", "baton inbox parked requeue"] {
            assert!(text.contains(words), "{words}: {text}");
        }

        scene.refused(&["show", "nobody's"], 1, "no consumer knows the idempotency key \"nobody's\"").await?;
        scene.refused(&["show", "ok", "--consumer", "other"], 1, "no consumer \"other\" knows").await?;
        scene.ends(consumer).await
    });
}

#[test]
fn a_key_that_a_dead_letter_holds_up_goes_on_in_order_once_its_dead_one_is_requeued() {
    Scene::play(async |scene| {
        let consumer = scene.launch()?.env("EFFECTS_BLOCK", "yes").start()?;
        scene
            .send(&[
                ("a1", "a", r#"{"behave":"sick"}"#),
                ("a2", "a", "{}"),
                ("a3", "a", "{}"),
                ("b1", "b", "{}"),
            ])
            .await?;
        scene.consumed().await?;
        scene.are_parked(&[("a1", "dead"), ("a2", "blocked"), ("a3", "blocked")]).await?;

        let listed = scene.json(&["parked", "list", "--topic", &scene.topic]).await?;
        let [first, second, _] = listed.as_array().map(Vec::as_slice).unwrap_or_default() else {
            fail!("{listed:#}");
        };
        for field in [
            "id",
            "consumer",
            "topic",
            "key",
            "position",
            "state",
            "cause",
            "error",
            "attempts",
            "first_failed_at",
            "last_failed_at",
            "next_attempt_at",
            "generation",
            "can_run_again",
        ] {
            assert!(first.get(field).is_some(), "{field} is missing: {first:#}");
        }
        assert_eq!(
            (&first["key"], &first["cause"], &first["can_run_again"]),
            (&"a".into(), &"permanent".into(), &true.into())
        );
        assert_eq!((&second["behind"], &second["can_run_again"]), (&first["id"], &false.into()));
        assert_eq!(second["stopped"]["transition"], "received → blocked (queued)");

        // Nothing without a filter, nothing without --yes, and nothing of what a filter leaves out.
        scene.refused(&["parked", "requeue", "--yes"], 2, "never takes everything").await?;
        let plan = scene.refused(&["parked", "requeue", "--consumer", "effects"], 2, "add --yes").await?;
        assert_eq!(plan, "to requeue: 1 record (1 dead)\nleft as they are: 2 records (2 blocked)\n");
        for nothing in [["--cause", "panic"], ["--key", "b"], ["--older-than", "1h"], ["--topic", "other"]] {
            let said = scene.done(&["parked", "requeue", nothing[0], nothing[1], "--yes"]).await?;
            assert!(said.ends_with("nothing has been changed\n"), "{nothing:?}: {said}");
        }
        scene.are_parked(&[("a1", "dead"), ("a2", "blocked"), ("a3", "blocked")]).await?;
        assert!(scene.audited().await?.is_empty());

        // Still sick: it dies once more, with a second dead letter, and holds its key up as before.
        let id = scene.id("a1").await?;
        scene.done(&["parked", "requeue", &id, "--yes"]).await?;
        eventually("a second dead letter", PATIENCE, async || {
            match scene.site.kafka().count(&format!("{}.effects.dlt", scene.topic)).await? {
                2 => Ok(()),
                count => fail!("{count}"),
            }
        })
        .await?;
        scene.are_parked(&[("a1", "dead"), ("a2", "blocked"), ("a3", "blocked")]).await?;
        scene.well().await?;
        let said =
            scene.done(&["parked", "requeue", "--cause", "permanent", "--state", "dead", "--yes"]).await?;
        assert!(said.ends_with("requeued: 1\n"), "{said}");
        scene.effects(&["b1", "a1", "a2", "a3"]).await?;
        scene.are_parked(&[("a1", "done"), ("a2", "done"), ("a3", "done")]).await?;
        let shown = scene.json(&["show", "a1"]).await?;
        assert_eq!(
            (&shown["records"][0]["state"], &shown["parked"][0]["state"]),
            (&"done".into(), &"done".into())
        );

        let audited = scene.audited().await?;
        assert_eq!(audited.len(), 2);
        let (command, arguments, affected) = &audited[1];
        assert_eq!((command.as_str(), *affected), ("inbox parked requeue", 1));
        assert_eq!(
            *arguments,
            serde_json::json!({"cause": "permanent", "state": "dead", "were": {"dead": 1}})
        );
        // A dead letter that is read once more is a duplicate.
        scene.send(&[("a1", "a", r#"{"behave":"sick"}"#)]).await?;
        scene.consumed().await?;
        scene.effects(&["b1", "a1", "a2", "a3"]).await?;
        scene.ends(consumer).await
    });
}

#[test]
fn what_is_discarded_is_never_run_and_the_next_of_its_key_goes_on() {
    Scene::play(async |scene| {
        let consumer = scene.launch()?.env("EFFECTS_BLOCK", "yes").start()?;
        let sick = r#"{"behave":"sick"}"#;
        scene
            .send(&[
                ("a1", "a", sick),
                ("a2", "a", "{}"),
                ("a3", "a", "{}"),
                ("c1", "c", sick),
                ("c2", "c", "{}"),
            ])
            .await?;
        scene.consumed().await?;
        let blocked =
            [("a1", "dead"), ("a2", "blocked"), ("a3", "blocked"), ("c1", "dead"), ("c2", "blocked")];
        scene.are_parked(&blocked).await?;
        // One in the middle changes nothing for those behind.
        let middle = scene.id("a2").await?;
        scene.done(&["parked", "discard", &middle, "--yes"]).await?;
        scene
            .are_parked(&[
                ("a1", "dead"),
                ("a2", "discarded"),
                ("a3", "blocked"),
                ("c1", "dead"),
                ("c2", "blocked"),
            ])
            .await?;
        let said = scene.done(&["parked", "discard", "--key", "a", "--cause", "permanent", "--yes"]).await?;
        assert!(said.ends_with("discarded: 1; let go behind them: 1\n"), "{said}");
        scene.effects(&["a3"]).await?;
        scene
            .are_parked(&[
                ("a1", "discarded"),
                ("a2", "discarded"),
                ("a3", "done"),
                ("c1", "dead"),
                ("c2", "blocked"),
            ])
            .await?;
        // A whole key at once: nothing of it is let go in between.
        scene.well().await?;
        let said = scene.done(&["parked", "discard", "--key", "c", "--yes"]).await?;
        assert!(said.ends_with("discarded: 2\n"), "{said}");
        scene.send(&[("c3", "c", "{}"), ("a1", "a", sick)]).await?;
        scene.effects(&["a3", "c3"]).await?;
        scene.consumed().await?;
        scene.effects(&["a3", "c3"]).await?;
        let settled = scene.json(&["parked", "list", "--state", "discarded"]).await?;
        assert_eq!(settled.as_array().map(Vec::len), Some(4), "{settled:#}");
        let said = scene.done(&["parked", "requeue", "--state", "discarded", "--yes"]).await?;
        assert!(said.contains("left as they are: 4 records (4 discarded)"), "{said}");
        let counts: Vec<i64> = scene.audited().await?.into_iter().map(|(_, _, affected)| affected).collect();
        assert_eq!(counts, [1, 1, 2]);
        scene.ends(consumer).await
    });
}

#[test]
fn a_record_that_is_being_tried_is_refused_and_neither_requeued_nor_discarded() {
    Scene::play(async |scene| {
        let consumer = scene
            .launch()?
            .env("EFFECTS_ATTEMPTS", "1000")
            .env("EFFECTS_STALL", "60")
            .env("EFFECTS_LEASE", "60")
            .start()?;
        scene.send(&[("a1", "a", r#"{"behave":"tired","hold":"before"}"#), ("a2", "a", "{}")]).await?;
        scene.consumed().await?;
        scene.are_parked(&[("a1", "retrying"), ("a2", "blocked")]).await?;
        // Whoever takes it now stands still with it.
        let mut lock = scene.site.connect().await?;
        lock.execute("SELECT pg_advisory_lock(1)").await?;
        let is_tried = async || {
            let lease: Option<bool> = sqlx::query_scalar(
                "SELECT lease_until > clock_timestamp() + '1 s'::interval FROM inbox.parked WHERE idempotency_key = 'a1'",
            )
            .fetch_one(scene.site.pool())
            .await?;
            if lease == Some(true) { Ok(()) } else { fail!("nobody tries it") }
        };
        eventually("somebody to try it", PATIENCE, is_tried).await?;
        let id = scene.id("a1").await?;
        for decision in ["requeue", "discard"] {
            let said = scene
                .refused(&["parked", decision, &id, "--yes"], 1, "being tried by a consumer right now")
                .await?;
            assert!(said.contains("ed: 0\n"), "{said}");
        }
        scene.are_parked(&[("a1", "retrying"), ("a2", "blocked")]).await?;
        scene.well().await?;
        lock.execute("SELECT pg_advisory_unlock(1)").await?;
        scene.effects(&["a1", "a2"]).await?;
        scene.ends(consumer).await
    });
}

#[test]
fn dead_ones_of_one_key_that_are_requeued_together_run_in_order_each_with_all_its_attempts() {
    Scene::play(async |scene| {
        let consumer = scene.launch()?.env("EFFECTS_ATTEMPTS", "2").env("EFFECTS_PARK", "yes").start()?;
        let tired = r#"{"behave":"tired"}"#;
        scene.send(&[("a1", "a", tired), ("a2", "a", tired), ("a3", "a", tired)]).await?;
        scene.consumed().await?;
        scene.are_parked(&[("a1", "dead"), ("a2", "dead"), ("a3", "dead")]).await?;
        scene.ends(consumer).await?;
        scene.well().await?;
        let said = scene.done(&["parked", "requeue", "--cause", "exhausted", "--yes"]).await?;
        assert!(said.contains("requeued: 3, of them 2 in their turn"), "{said}");
        scene.are_parked(&[("a1", "retrying"), ("a2", "blocked"), ("a3", "blocked")]).await?;
        let attempts: Vec<i32> =
            sqlx::query_scalar("SELECT attempts FROM inbox.parked").fetch_all(scene.site.pool()).await?;
        assert_eq!(attempts, [0, 0, 0]);
        let waiting = scene.json(&["show", "a1"]).await?;
        assert_eq!(waiting["records"][0]["stopped"]["transition"], "dead → free (requeued)", "{waiting:#}");
        let consumer = scene.launch()?.start()?;
        scene.effects(&["a1", "a2", "a3"]).await?;
        scene.are_parked(&[("a1", "done"), ("a2", "done"), ("a3", "done")]).await?;
        scene.ends(consumer).await
    });
}

#[test]
fn leased_work_that_is_requeued_is_asked_after_before_it_is_run() {
    Scene::play(async |scene| {
        let service = Service::start().await?;
        let launch =
            || Ok::<_, baton_tests::Failure>(scene.launch()?.env("EFFECTS_SERVICE", service.address()));
        let consumer = launch()?.env("EFFECTS_BLOCK", "yes").start()?;
        scene.send(&[("a1", "a", r#"{"behave":"sick"}"#), ("a2", "a", "{}")]).await?;
        scene.consumed().await?;
        scene.are_parked(&[("a1", "dead"), ("a2", "blocked")]).await?;
        assert!(service.journal().is_empty(), "{:?}", service.journal());
        scene.well().await?;
        scene.done(&["parked", "requeue", "--key", "a", "--yes"]).await?;
        scene.are_parked(&[("a1", "done"), ("a2", "done")]).await?;
        let journal: Vec<(Asked, String)> =
            service.journal().into_iter().map(|entry| (entry.asked, entry.key)).collect();
        let expected = [(Asked::Look, "a1"), (Asked::Call, "a1"), (Asked::Call, "a2")];
        assert_eq!(journal, expected.map(|(asked, key)| (asked, key.to_owned())));
        scene.ends(consumer).await
    });
}

#[test]
fn a_requeued_conflict_lets_the_other_payload_alone_and_is_a_conflict_again() {
    Scene::play(async |scene| {
        let consumer = scene.launch()?.env("EFFECTS_BLOCK", "yes").start()?;
        scene.send(&[("a1", "a", r#"{"behave":"poison"}"#)]).await?;
        scene.consumed().await?;
        scene.send(&[("a1", "b", r#"{"behave":"poison","n":2}"#)]).await?;
        scene.consumed().await?;
        scene.are_parked(&[("a1", "dead"), ("a1", "dead")]).await?;
        let listed = scene.json(&["parked", "list", "--cause", "conflict"]).await?;
        let id = listed[0]["id"].to_string();
        scene.done(&["parked", "requeue", &id, "--yes"]).await?;
        eventually("it to be given up again", PATIENCE, async || {
            let shown = scene.json(&["parked", "show", &id]).await?;
            if (&shown["state"], &shown["cause"]) == (&"dead".into(), &"conflict".into())
                && shown["generation"] == 1
            {
                Ok(())
            } else {
                fail!("{shown:#}")
            }
        })
        .await?;
        let shown = scene.json(&["show", "a1"]).await?;
        assert_eq!(
            (&shown["records"][0]["state"], &shown["records"][0]["cause"]),
            (&"dead".into(), &"permanent".into())
        );
        scene.ends(consumer).await
    });
}

#[test]
fn a_record_that_was_set_aside_is_shown_with_its_headers_and_its_payload() {
    Scene::play(async |scene| {
        let consumer = scene.launch()?.start()?;
        scene.send(&[("a1", "a", r#"{"behave":"tired"}"#)]).await?;
        scene.consumed().await?;
        let id = scene.id("a1").await?;
        let shown = scene.json(&["parked", "show", &id]).await?;
        assert_eq!(shown["payload"], r#"{"behave":"tired"}"#);
        assert_eq!(shown["headers"], serde_json::json!([["idempotency-key", "a1"]]));
        let text = scene.done(&["parked", "show", &id]).await?;
        assert!(text.contains("idempotency-key: a1") && text.contains(r#"{"behave":"tired"}"#), "{text}");
        scene.refused(&["parked", "show", "4711"], 1, "no record with id 4711").await?;
        scene.refused(&["parked", "requeue", "4711", "--yes"], 1, "no record with id 4711").await?;
        scene.refused(&["parked", "list", "--cause", "bad"], 2, "unknown cause").await?;
        scene
            .refused(&["parked", "list", "--state", "gone"], 2, "retrying, blocked, dead, done or discarded")
            .await?;
        scene.ends(consumer).await
    });
}

#[test]
fn a_purge_takes_what_is_finished_and_old_and_says_what_it_leaves_and_why() {
    Scene::play(async |scene| {
        let consumer = scene.launch()?.env("EFFECTS_BLOCK", "yes").start()?;
        scene
            .send(&[
                ("a1", "a", "{}"),
                ("a2", "a", "{}"),
                ("a3", "a", "{}"),
                ("p", "b", r#"{"behave":"poison"}"#),
            ])
            .await?;
        scene.consumed().await?;
        let old = "UPDATE inbox.message SET created_at = created_at - '9 d'::interval, finished_at = finished_at - '9 d'::interval,
                   record_time = record_time - '9 d'::interval WHERE key IN ('a1', 'a2', 'p')";
        scene.site.pool().execute(old).await?;
        let count = async || -> Outcome<i64> {
            Ok(sqlx::query_scalar("SELECT count(*) FROM inbox.message").fetch_one(scene.site.pool()).await?)
        };

        let said = scene.done(&["purge", "--older-than", "8d", "--dry-run"]).await?;
        for words in [
            "effects: would purge 2 rows and 0 settled records",
            "left: 1 rows finished later than that",
            "left: 1 rows given up",
            "left: 1 records set aside not settled",
            "nothing has been changed",
        ] {
            assert!(said.contains(words), "{words}: {said}");
        }
        assert_eq!((count().await?, scene.audited().await?.len()), (4, 0));
        let said = scene.done(&["purge", "--consumer", "effects", "--older-than", "10d"]).await?;
        assert!(said.contains("effects: purged 0 rows"), "{said}");
        let said = scene.done(&["purge", "--consumer", "effects", "--older-than", "8d"]).await?;
        assert!(said.contains("effects: purged 2 rows and 0 settled records"), "{said}");
        assert_eq!(count().await?, 2);
        let audited = scene.audited().await?;
        let affected: Vec<i64> = audited.iter().map(|(_, _, affected)| *affected).collect();
        assert_eq!(affected, [0, 2], "{audited:?}");
        assert_eq!(audited[1].0, "inbox purge");
        assert_eq!(audited[1].1["older_than_seconds"], 691_200.0);
        scene
            .refused(
                &["purge", "--consumer", "other"],
                1,
                "the inbox has no consumer \"other\"; it has effects",
            )
            .await?;
        scene.refused(&["purge", "--older-than", "10ms"], 2, "at least 1s").await?;

        // It is the consumers' own purge: what is gone is refused by its record's time.
        let watermark: Option<f64> =
            sqlx::query_scalar("SELECT extract(day FROM now() - purged_record_time)::float8 FROM inbox.horizon WHERE consumer = 'effects'")
                .fetch_optional(scene.site.pool())
                .await?;
        assert_eq!(watermark, Some(9.0));
        scene.ends(consumer).await
    });
}

#[test]
fn dead_work_that_is_as_old_as_what_was_purged_is_applied_once_it_is_requeued() {
    Scene::play(async |scene| {
        let consumer = scene.launch()?.env("EFFECTS_BLOCK", "yes").start()?;
        scene.send(&[("a1", "a", r#"{"behave":"sick"}"#)]).await?;
        scene.consumed().await?;
        scene.are_parked(&[("a1", "dead")]).await?;
        let purged = "INSERT INTO inbox.horizon VALUES ('effects', now() + '1 h'::interval)";
        scene.site.pool().execute(AssertSqlSafe(purged.to_owned())).await?;
        scene.well().await?;
        scene.done(&["parked", "requeue", "--consumer", "effects", "--yes"]).await?;
        scene.effects(&["a1"]).await?;
        scene.are_parked(&[("a1", "done")]).await?;
        scene.ends(consumer).await
    });
}

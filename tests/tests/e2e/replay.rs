//! Dead letters are chosen, counted and sent again, whatever dies meanwhile, and each takes effect once.

use std::collections::BTreeMap;
use std::time::Duration;

use baton_tests::service::{Asked, Service};
use baton_tests::{
    Draft, Harness, Load, Outcome, Process, Record, Site, eventually, fail, figure, program, test,
};
use serde_json::Value;
use sqlx::Executor;

const PATIENCE: Duration = Duration::from_secs(60);

/// A topic, a consumer named `effects`, and whether its bug is mended.
struct Shop {
    site: Site,
    topic: String,
    group: String,
}

impl Shop {
    async fn open(harness: &mut Harness, partitions: usize) -> Outcome<Self> {
        let site = harness.site().await?;
        let topic = site.topic("orders", partitions).await?;
        let group = site.topic_name("group");
        site.pool()
            .execute("CREATE TABLE effect (n bigint GENERATED ALWAYS AS IDENTITY, key text, content bytea, partition int)")
            .await?;
        Ok(Self { site, topic, group })
    }

    fn dead_letters(&self) -> String {
        format!("{}.effects.dlt", self.topic)
    }

    fn replays(&self) -> String {
        format!("{}.effects.replay", self.topic)
    }

    fn consumer(&self, settings: &[(&str, &str)]) -> Outcome<Process> {
        let launch =
            self.site.launch("consumer", program("effect_consumer")?).args([&self.topic, &self.group]);
        settings.iter().fold(launch, |launch, (name, value)| launch.env(name, *value)).start()
    }

    fn mended(&self) -> Outcome<Process> {
        self.consumer(&[("EFFECTS_MENDED", "1")])
    }

    async fn consumed(&self) -> Outcome {
        for (topic, group) in
            [(&self.topic, self.group.clone()), (&self.replays(), format!("{}.replay", self.group))]
        {
            eventually("all records consumed", PATIENCE, async || {
                if self.site.kafka().partitions(topic).await? == 0 {
                    fail!("no topic {topic} yet");
                }
                let lag = self.site.kafka().lag(&group, topic).await?;
                if lag == 0 { Ok(()) } else { fail!("{lag} records of {topic} are not committed") }
            })
            .await?;
        }
        Ok(())
    }

    /// `baton replay …`, which must end well.
    async fn replay(&self, args: &[&str]) -> Outcome<String> {
        self.site.baton(&[&["replay"], args].concat())?.finish(PATIENCE).await?.success()
    }

    async fn json(&self, args: &[&str]) -> Outcome<Value> {
        Ok(serde_json::from_str(&self.replay(&[args, &["--json"]].concat()).await?)?)
    }

    /// A new plan of this consumer, as JSON.
    async fn plan(&self, args: &[&str]) -> Outcome<Value> {
        self.json(&[&["plan", "--consumer", "effects", "--topic", &self.topic], args].concat()).await
    }

    /// The counts of a plan once every item that was sent is told of.
    async fn settled(&self, plan: &Value) -> Outcome<Value> {
        eventually("every item to be told of", PATIENCE, async || {
            let status = self.json(&["status", id(plan)]).await?;
            if status["waiting"] == 0 && status["unsettled"] == 0 { Ok(status) } else { fail!("{status}") }
        })
        .await
    }

    /// How often each key took effect.
    async fn effects(&self) -> Outcome<BTreeMap<String, i64>> {
        let rows: Vec<(String, i64)> = sqlx::query_as("SELECT key, count(*) FROM effect GROUP BY key")
            .fetch_all(self.site.pool())
            .await?;
        Ok(rows.into_iter().collect())
    }

    async fn produce(&self, drafts: Vec<Draft>) -> Outcome {
        self.site.kafka().produce(&self.topic, drafts).await
    }

    async fn letters(&self) -> Outcome<Vec<Record>> {
        self.site.kafka().records(&self.dead_letters()).await
    }
}

fn id(plan: &Value) -> &str {
    plan["plan"].as_str().unwrap_or_default()
}

fn order(number: usize, payload: &str) -> Draft {
    Draft::new(&format!("customer-{}", number % 20), payload)
        .header("ce_type", "order.placed")
        .header("idempotency-key", &format!("placed:{number}"))
}

fn poison(number: usize) -> Draft {
    order(number, r#"{"behave":"poison"}"#)
}

/// `(sent, applied, duplicate, conflict, dead_again, waiting)`.
fn counts(status: &Value) -> [i64; 6] {
    ["sent", "applied", "duplicate", "conflict", "dead_again", "waiting"]
        .map(|name| status[name].as_i64().unwrap_or(-1))
}

fn bytes_of_headers(record: &Record) -> usize {
    record.headers.iter().map(|(name, value)| name.len() + value.as_ref().map_or(0, Vec::len)).sum()
}

#[test]
fn five_hundred_dead_letters_of_three_causes_are_replayed_by_two_runs_one_of_them_killed_and_take_effect_once()
 {
    test(Duration::from_secs(240), Load::Light, async |harness: &mut Harness| {
        let shop = Shop::open(harness, 3).await?;
        let orders = (0..500).map(|number| match number {
            0..240 => poison(number),
            240..400 => order(number, r#"{"behave":"panic"}"#),
            _ => order(number, "this is not JSON"),
        });
        shop.produce(orders.collect()).await?;
        let mut consumer = shop.consumer(&[])?;
        shop.consumed().await?;
        assert_eq!(shop.letters().await?.len(), 500);

        let permanent = shop.plan(&["--cause", "permanent"]).await?;
        assert_eq!((&permanent["items"], &permanent["by_cause"]["permanent"]), (&240.into(), &240.into()));
        let plan = shop.plan(&[]).await?;
        assert_eq!(plan["by_cause"], serde_json::json!({"permanent": 240, "panic": 160, "undecodable": 100}));
        assert_eq!(plan["skipped"]["already_replayed"], 0, "what is only planned has not been replayed");
        assert_eq!(shop.site.kafka().count(&shop.replays()).await?, 0, "a plan publishes nothing");
        assert_eq!(counts(&shop.json(&["status", id(&plan)]).await?), [0, 0, 0, 0, 0, 500]);

        // Fifty more after the plan.
        shop.produce((500..550).map(poison).collect()).await?;
        shop.consumed().await?;
        assert_eq!(shop.letters().await?.len(), 550);
        assert!(consumer.terminate(PATIENCE).await?.success(), "{}", consumer.stderr());

        let _mended = shop.mended()?;
        let before = shop.site.kafka().count(&shop.topic).await?;
        let run = |rate: &'static str| shop.site.baton(&["replay", "run", id(&plan), "--rate", rate]);
        let (mut first, mut second) = (run("60/s")?.start()?, run("40/s")?.start()?);
        eventually("some of it to be sent", PATIENCE, async || {
            let sent = counts(&shop.json(&["status", id(&plan)]).await?)[0];
            if sent >= 60 { Ok(()) } else { fail!("{sent} are sent") }
        })
        .await?;
        first.kill().await?;
        let mut resumed = run("60/s")?.start()?;
        for run in [&mut second, &mut resumed] {
            let status = run.exited(Duration::from_secs(90)).await?;
            assert!(status.success(), "{}", run.stderr());
        }
        let status = shop.settled(&plan).await?;
        let [sent, applied, duplicate, conflict, dead_again, waiting] = counts(&status);
        figure(&format!("must show 5: {status}"));
        assert_eq!((sent, waiting, applied + duplicate + conflict + dead_again), (500, 0, 500));
        assert_eq!(
            (applied, dead_again),
            (400, 100),
            "what is mended is applied, and what is no JSON stays none"
        );
        assert_eq!(status["state"], "finished");

        shop.consumed().await?;
        let effects = shop.effects().await?;
        assert_eq!(effects.len(), 400);
        assert!(effects.values().all(|count| *count == 1), "{effects:?}");
        assert!(!effects.contains_key("placed:500"), "what came after the plan is not part of it");
        assert_eq!(shop.site.kafka().count(&shop.topic).await?, before, "no other group sees any of it");

        let again = shop.replay(&["run", id(&plan)]).await?;
        assert!(again.contains("is finished"), "{again}");
        // What another plan has sent is said and left out, but for what has died again since.
        let next = shop.plan(&[]).await?;
        assert_eq!(next["by_cause"], serde_json::json!({"permanent": 50, "undecodable": 100}));
        assert_eq!(next["skipped"]["already_replayed"], 400);
        let again = shop.plan(&["--again", "--cause", "panic"]).await?;
        assert_eq!(again["items"], 160);
        shop.replay(&["run", id(&again)]).await?;
        assert_eq!(counts(&shop.settled(&again).await?), [160, 0, 160, 0, 0, 0]);
        assert_eq!(shop.effects().await?.len(), 400);
        Ok(())
    });
}

#[test]
fn a_record_that_fails_for_ever_stops_at_the_loop_cap_and_its_headers_do_not_grow_over_ten_rounds() {
    test(Duration::from_secs(240), Load::Light, async |harness: &mut Harness| {
        let shop = Shop::open(harness, 1).await?;
        shop.produce(vec![poison(1)]).await?;
        let _consumer = shop.consumer(&[])?;
        shop.consumed().await?;
        let mut sizes = Vec::new();
        for round in 1..=10_usize {
            let cap = if round <= 3 { "3" } else { "20" };
            if round == 4 {
                let stopped = shop.plan(&[]).await?;
                assert_eq!((&stopped["items"], &stopped["skipped"]["loop_cap"]), (&0.into(), &1.into()));
                let said = shop.replay(&["plan", "--consumer", "effects", "--topic", &shop.topic]).await?;
                assert!(said.contains("left out: 1, because they have been replayed 3 times"), "{said}");
            }
            let plan = shop.plan(&["--loop-cap", cap]).await?;
            assert_eq!(plan["items"], 1, "{plan}");
            shop.replay(&["run", id(&plan)]).await?;
            assert_eq!(counts(&shop.settled(&plan).await?), [1, 0, 0, 0, 1, 0]);
            let letters = shop.letters().await?;
            assert_eq!(letters.len(), round + 1);
            let letter = &letters[round];
            assert_eq!(letter.header("replay-round"), Some(round.to_string().as_str()));
            for name in [
                "dlt-original-topic",
                "dlt-original-partition",
                "dlt-original-offset",
                "dlt-original-timestamp",
            ] {
                assert_eq!(letter.header(name), letters[0].header(name), "{name}");
            }
            sizes.push(bytes_of_headers(letter));
        }
        figure(&format!("must show 6: header bytes of ten rounds: {sizes:?}"));
        // The round's second digit.
        assert!(sizes.iter().all(|size| *size <= sizes[0] + 2), "{sizes:?}");
        assert!(shop.effects().await?.is_empty());
        Ok(())
    });
}

#[test]
fn a_replay_under_the_same_key_is_refused_where_it_conflicts_and_new_work_under_a_new_key_is_applied() {
    test(Duration::from_secs(120), Load::Light, async |harness: &mut Harness| {
        let shop = Shop::open(harness, 1).await?;
        let nameless = Draft::new("k", "{}");
        shop.produce(vec![order(1, r#"{"cents":100}"#), order(1, r#"{"cents":900}"#), nameless]).await?;
        let _consumer = shop.consumer(&[])?;
        shop.consumed().await?;
        let plan = shop.plan(&[]).await?;
        assert_eq!(plan["by_cause"], serde_json::json!({"conflict": 1, "no_identity": 1}));
        shop.replay(&["run", id(&plan)]).await?;
        assert_eq!(counts(&shop.settled(&plan).await?), [2, 0, 0, 1, 1, 0]);
        assert_eq!(shop.effects().await?, BTreeMap::from([("placed:1".to_owned(), 1)]));

        let plan = shop.plan(&["--new-key"]).await?;
        assert_eq!(plan["items"], 2);
        let (overlapping, same) = (shop.plan(&["--new-key"]).await?, shop.plan(&[]).await?);
        assert_eq!((&overlapping["items"], &same["items"]), (&2.into(), &2.into()));
        shop.replay(&["run", id(&plan)]).await?;
        assert_eq!(counts(&shop.settled(&plan).await?), [2, 2, 0, 0, 0, 0]);
        // One at a time: each is looked at before it is sent.
        for plan in [&overlapping, &same] {
            let told = shop.replay(&["run", id(plan), "--limit", "1"]).await?;
            assert!(told.contains("left out: 2, because another plan has sent them meanwhile"), "{told}");
            assert_eq!(counts(&shop.settled(plan).await?), [2, 0, 2, 0, 0, 0]);
        }
        let mut expected: Vec<String> = (1..=2).map(|item| format!("replay:{}:{item}", id(&plan))).collect();
        expected.insert(0, "placed:1".to_owned());
        assert_eq!(shop.effects().await?.into_keys().collect::<Vec<_>>(), expected);
        let recorded: Vec<String> = sqlx::query_scalar(
            "SELECT idempotency_key FROM inbox.replay_item WHERE plan = $1::text::uuid ORDER BY item",
        )
        .bind(id(&plan))
        .fetch_all(shop.site.pool())
        .await?;
        assert_eq!(recorded, expected[1..]);
        Ok(())
    });
}

#[test]
fn a_run_that_is_told_to_stop_does_so_in_order_and_the_next_one_goes_on() {
    test(Duration::from_secs(120), Load::Light, async |harness: &mut Harness| {
        let shop = Shop::open(harness, 2).await?;
        shop.produce((0..60).map(poison).collect()).await?;
        let mut consumer = shop.consumer(&[])?;
        shop.consumed().await?;
        consumer.terminate(PATIENCE).await?;
        let plan = shop.plan(&["--limit", "50"]).await?;
        let some = shop.replay(&["run", id(&plan), "--limit", "5"]).await?;
        assert!(some.contains("sent 5 items") && some.contains("45 are left"), "{some}");

        let mut run = shop.site.baton(&["replay", "run", id(&plan), "--rate", "10/s"])?.start()?;
        eventually("it to send", PATIENCE, async || {
            let sent = counts(&shop.json(&["status", id(&plan)]).await?)[0];
            if sent > 8 { Ok(()) } else { fail!("{sent} are sent") }
        })
        .await?;
        assert!(run.terminate(Duration::from_secs(20)).await?.success(), "{}", run.stderr());
        assert!(run.stdout().contains("stopped in order"), "{}", run.stdout());
        let status = shop.json(&["status", id(&plan)]).await?;
        assert_eq!(status["state"], "running");
        let sending: i64 =
            sqlx::query_scalar("SELECT count(*) FROM inbox.replay_item WHERE state = 'sending'")
                .fetch_one(shop.site.pool())
                .await?;
        assert_eq!(sending, 0, "it leaves no claim behind");

        let rest = shop.replay(&["run", id(&plan)]).await?;
        assert!(rest.contains("is finished"), "{rest}");
        assert_eq!(shop.site.kafka().count(&shop.replays()).await?, 50, "each was sent once");
        assert_eq!(counts(&shop.json(&["status", id(&plan)]).await?), [50, 0, 0, 0, 0, 0]);
        let audited: Vec<(String, i64)> = sqlx::query_as(
            "SELECT coalesce(arguments->>'event', command), affected FROM inbox.audit WHERE command LIKE 'replay %' ORDER BY id",
        )
        .fetch_all(shop.site.pool())
        .await?;
        let events: Vec<&str> = audited.iter().map(|(event, _)| event.as_str()).collect();
        assert_eq!(events, ["replay plan", "begun", "limit", "begun", "stopped", "begun", "finished"]);
        assert_eq!(audited.iter().skip(1).map(|(_, affected)| affected).sum::<i64>(), 50);

        let listed = shop.json(&["list"]).await?;
        assert_eq!((&listed[0]["plan"], &listed[0]["state"]), (&plan["plan"], &"finished".into()));
        Ok(())
    });
}

#[test]
fn what_is_already_on_the_topic_when_a_run_dies_unmarked_is_sent_again_and_takes_effect_once() {
    test(Duration::from_secs(120), Load::Light, async |harness: &mut Harness| {
        let shop = Shop::open(harness, 1).await?;
        shop.produce((0..20).map(poison).collect()).await?;
        let mut consumer = shop.consumer(&[])?;
        shop.consumed().await?;
        consumer.terminate(PATIENCE).await?;
        let plan = shop.plan(&[]).await?;
        // The mark cannot be written: as if the run ended between the acknowledgement and the mark.
        shop.site
            .pool()
            .execute(
                "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'crash'; END $$;
                 CREATE TRIGGER refuse BEFORE UPDATE ON inbox.replay_item FOR EACH ROW WHEN (NEW.state = 'sent') EXECUTE FUNCTION refuse();",
            )
            .await?;
        let ended = shop.site.baton(&["replay", "run", id(&plan)])?.finish(PATIENCE).await?;
        assert_eq!(ended.status.code(), Some(1), "{ended}");
        assert_eq!(shop.site.kafka().count(&shop.replays()).await?, 20);
        shop.site
            .pool()
            .execute(
                "DROP TRIGGER refuse ON inbox.replay_item;
                 UPDATE inbox.replay_item SET lease_until = clock_timestamp() WHERE state = 'sending'",
            )
            .await?;
        shop.replay(&["run", id(&plan)]).await?;
        assert_eq!(shop.site.kafka().count(&shop.replays()).await?, 40);
        let _mended = shop.mended()?;
        assert_eq!(counts(&shop.settled(&plan).await?), [20, 20, 0, 0, 0, 0]);
        shop.consumed().await?;
        let effects = shop.effects().await?;
        assert_eq!((effects.len(), effects.values().sum::<i64>()), (20, 20));
        Ok(())
    });
}

#[test]
fn dead_letters_of_spring_kafka_are_understood_and_what_tells_of_them_is_taken_off() {
    test(Duration::from_secs(120), Load::Light, async |harness: &mut Harness| {
        let shop = Shop::open(harness, 2).await?;
        let _consumer = shop.consumer(&[])?;
        shop.consumed().await?;
        let spring = shop.site.topic("orders-dlt", 2).await?;
        let letter = |number: i64, exception: &str, group: &str| {
            order(usize::try_from(number).unwrap_or_default(), "{}")
                .header(
                    "kafka_dlt-exception-fqcn",
                    "org.springframework.kafka.listener.ListenerExecutionFailedException",
                )
                .header("kafka_dlt-exception-cause-fqcn", exception)
                .header("kafka_dlt-exception-stacktrace", &"at com.example ".repeat(200))
                .header("kafka_dlt-original-topic", &shop.topic)
                .header("kafka_dlt-original-consumer-group", group)
                .header("kafka_dlt-original-timestamp-type", "CreateTime")
                .header_bytes("kafka_dlt-original-partition", &1_i32.to_be_bytes())
                .header_bytes("kafka_dlt-original-offset", &(5_000_000_000 + number).to_be_bytes())
                .header_bytes("kafka_dlt-original-timestamp", &1_769_850_300_250_i64.to_be_bytes())
        };
        let letters = (0..7).map(|number| {
            let exception =
                if number < 4 { "java.lang.IllegalStateException" } else { "java.io.IOException" };
            letter(number, exception, "orders-service")
        });
        // The same topic has what another service could not do with the same records.
        let others = (3..6).map(|number| letter(number, "java.io.IOException", "shipping-service"));
        // In a transaction, so that the last offset of each partition is a marker.
        shop.site.kafka().produce_in_transaction(&spring, letters.chain(others).collect()).await?;
        // The markers that end a transaction may come after its producer was told that it has ended.
        let others = serde_json::json!({"orders-service": 7, "shipping-service": 3});
        eventually("all letters to be there", PATIENCE, async || {
            let plan = shop.plan(&["--dlt", &spring]).await?;
            assert_eq!(plan["items"], 0);
            let found = &plan["skipped"]["other_consumers"];
            if *found == others { Ok(()) } else { fail!("{found}") }
        })
        .await?;
        let ours = ["--dlt", &spring, "--group", "orders-service"];
        let plan = shop.plan(&ours).await?;
        assert_eq!(
            plan["by_cause"],
            serde_json::json!({"java.lang.IllegalStateException": 4, "java.io.IOException": 3})
        );
        let plan = shop.plan(&[&ours[..], &["--cause", "java.io.IOException"]].concat()).await?;
        assert_eq!(plan["items"], 3);
        let origins: Vec<(i32, i64, i64)> = sqlx::query_as(
            "SELECT original_partition, original_offset, original_time_ms FROM inbox.replay_item WHERE plan = $1::text::uuid ORDER BY original_offset",
        )
        .bind(id(&plan))
        .fetch_all(shop.site.pool())
        .await?;
        assert_eq!(origins, [4, 5, 6].map(|number| (1, 5_000_000_000 + number, 1_769_850_300_250)));
        shop.replay(&["run", id(&plan)]).await?;
        assert_eq!(counts(&shop.settled(&plan).await?), [3, 3, 0, 0, 0, 0]);
        for record in shop.site.kafka().records(&shop.replays()).await? {
            let names: Vec<&str> = record.headers.iter().map(|(name, _)| name.as_str()).collect();
            assert_eq!(
                names,
                [
                    "ce_type",
                    "idempotency-key",
                    "replay-plan",
                    "replay-item",
                    "replay-round",
                    "replay-original-timestamp"
                ]
            );
            assert_eq!(record.header("replay-original-timestamp"), Some("1769850300250"));
        }
        Ok(())
    });
}

#[test]
fn what_goes_to_the_original_topic_names_the_groups_it_reaches_and_is_applied_once() {
    test(Duration::from_secs(120), Load::Light, async |harness: &mut Harness| {
        let shop = Shop::open(harness, 1).await?;
        shop.produce((0..5).map(poison).collect()).await?;
        let mut consumer = shop.consumer(&[])?;
        shop.consumed().await?;
        consumer.terminate(PATIENCE).await?;
        let _mended = shop.mended()?;
        let plan = shop.plan(&["--to-original"]).await?;
        assert_eq!(plan["groups"], serde_json::json!([shop.group]));
        let said = shop.replay(&["run", id(&plan)]).await?;
        assert!(said.contains(&format!("{} reaches {}", shop.topic, shop.group)), "{said}");
        assert_eq!(counts(&shop.settled(&plan).await?), [5, 5, 0, 0, 0, 0]);
        assert_eq!(shop.site.kafka().count(&shop.topic).await?, 10);
        assert_eq!(shop.effects().await?.len(), 5);
        Ok(())
    });
}

#[test]
fn a_replay_of_leased_work_asks_first_and_calls_once() {
    test(Duration::from_secs(120), Load::Light, async |harness: &mut Harness| {
        let shop = Shop::open(harness, 1).await?;
        let service = Service::start().await?;
        shop.produce((0..5).map(poison).collect()).await?;
        let mut consumer = shop.consumer(&[("EFFECTS_SERVICE", service.address())])?;
        shop.consumed().await?;
        consumer.terminate(PATIENCE).await?;
        assert!(service.journal().is_empty());
        let _mended = shop.consumer(&[("EFFECTS_SERVICE", service.address()), ("EFFECTS_MENDED", "1")])?;
        let plan = shop.plan(&[]).await?;
        shop.replay(&["run", id(&plan)]).await?;
        assert_eq!(counts(&shop.settled(&plan).await?), [5, 5, 0, 0, 0, 0]);
        let asked: Vec<Asked> = service.journal().iter().map(|entry| entry.asked).collect();
        assert_eq!(
            asked.iter().filter(|asked| **asked == Asked::Look).count(),
            5,
            "each is asked after first"
        );
        assert_eq!(asked.iter().filter(|asked| **asked == Asked::Call).count(), 5);
        Ok(())
    });
}

#[test]
fn nothing_of_it_needs_more_than_an_operators_role() {
    test(Duration::from_secs(90), Load::Light, async |harness: &mut Harness| {
        let shop = Shop::open(harness, 1).await?;
        shop.produce(vec![poison(1)]).await?;
        let mut consumer = shop.consumer(&[])?;
        shop.consumed().await?;
        consumer.terminate(PATIENCE).await?;
        let url = &shop.site.place().database_url;
        let database = url.rsplit('/').next().unwrap_or_default();
        let role = format!("operator_{}", database.split('?').next().unwrap_or_default());
        let make = format!("CREATE ROLE {role} LOGIN PASSWORD 'secret' IN ROLE baton_operator");
        shop.site.pool().execute(sqlx::AssertSqlSafe(make)).await?;
        let at = url.find('@').map_or(url.len(), |at| at + 1);
        let url = format!("postgres://{role}:secret@{}", &url[at..]);
        let replay = async |args: &[&str]| {
            let args = [&["--database-url", &url, "replay"], args].concat();
            shop.site.baton(&args)?.finish(PATIENCE).await?.success()
        };
        let plan = replay(&["plan", "--consumer", "effects", "--topic", &shop.topic, "--json"]).await?;
        let plan: Value = serde_json::from_str(&plan)?;
        replay(&["run", id(&plan)]).await?;
        replay(&["status", id(&plan)]).await?;
        let listed = replay(&["list"]).await?;
        assert!(listed.contains("finished"), "{listed}");
        let who: Vec<String> =
            sqlx::query_scalar("SELECT DISTINCT who FROM inbox.audit WHERE command LIKE 'replay %'")
                .fetch_all(shop.site.pool())
                .await?;
        assert_eq!(who, std::slice::from_ref(&role));
        shop.site
            .pool()
            .execute(sqlx::AssertSqlSafe(format!("DROP OWNED BY {role}; DROP ROLE {role}")))
            .await?;
        Ok(())
    });
}

#[test]
fn what_cannot_be_replayed_is_refused_in_clear_words() {
    test(Duration::from_secs(90), Load::Light, async |harness: &mut Harness| {
        let shop = Shop::open(harness, 1).await?;
        let none = "00000000-0000-4000-8000-000000000000";
        let plan = ["replay", "plan", "--consumer", "effects", "--topic", &shop.topic];
        for (args, code, words) in [
            (plan.to_vec(), 1, "there is no topic"),
            ([&plan[..], &["--cause", "permanant"]].concat(), 2, "unknown cause \"permanant\""),
            ([&plan[..], &["--from", "yesterday"]].concat(), 2, "RFC 3339"),
            (vec!["replay", "run", none], 1, "no replay plan"),
            (vec!["replay", "status", none], 1, "baton replay list"),
            (vec!["replay", "run", "seven"], 2, "seven"),
            (vec!["replay", "run", none, "--rate", "0"], 2, "items a second"),
        ] {
            let ended = shop.site.baton(&args)?.finish(PATIENCE).await?;
            assert_eq!(ended.status.code(), Some(code), "{args:?}: {ended}");
            assert!(ended.stderr.contains(words), "{args:?}: {ended}");
        }
        Ok(())
    });
}

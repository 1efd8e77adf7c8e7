//! What is inserted by SQL alone is what any Kafka consumer reads: key, value, headers, timestamp.

use std::path::{Path, PathBuf};
use std::time::Duration;

use baton_tests::{Harness, Load, Outcome, Record, Site, fail, figure, kafka_tool, test};

const PATIENCE: Duration = Duration::from_secs(60);

#[test]
fn a_row_inserted_by_psql_alone_is_read_by_kafkas_own_console_consumer() {
    test(Duration::from_secs(120), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        let topic = site.topic("orders", 1).await?;
        let rows = psql(
            &site,
            &format!(
                r#"INSERT INTO outbox.message (topic, key, payload)
                     VALUES ('{topic}', 'order-1', '{{"total": 5}}');
                   INSERT INTO outbox.message (topic, key, payload, headers, type, idempotency_key)
                     VALUES ('{topic}', 'order-1', '{{"total": 6}}', '{{"traceparent": "00-ab-cd-01", "content-type": "text/json"}}',
                             'order.changed', 'changed:1');
                   INSERT INTO outbox.message (topic, key, payload) VALUES ('{topic}', 'order-1', NULL);
                   SELECT id, round(extract(epoch FROM created_at) * 1000), current_database()
                     FROM outbox.message ORDER BY "position""#
            ),
        )
        .await?;
        let rows: Vec<Vec<&str>> = rows.lines().map(|line| line.split('|').collect()).collect();
        assert_eq!(rows.len(), 3, "{rows:?}");
        site.baton(&["relay", "--until-empty"])?.finish(PATIENCE).await?.success()?;

        let printed = kafka_tool(&site, "org.apache.kafka.tools.consumer.ConsoleConsumer")
            .await?
            .args(["--topic", &topic, "--from-beginning", "--max-messages", "3", "--timeout-ms", "30000"])
            .args(
                ["timestamp", "headers", "key", "value"]
                    .iter()
                    .flat_map(|part| ["--formatter-property".to_owned(), format!("print.{part}=true")]),
            )
            .finish(PATIENCE)
            .await?
            .success()?;
        let source = format!("/{}", rows[0][2]);
        // jsonb orders the members of an object by length; an array of pairs would keep its own order.
        let expected = [
            format!(
                "CreateTime:{}\tce_specversion:1.0,ce_id:{},ce_source:{source},ce_type:{topic},\
                 content-type:application/json\torder-1\t{{\"total\": 5}}",
                rows[0][1], rows[0][0]
            ),
            format!(
                "CreateTime:{}\tce_specversion:1.0,ce_id:{},ce_source:{source},ce_type:order.changed,\
                 idempotency-key:changed:1,traceparent:00-ab-cd-01,content-type:text/json\torder-1\t{{\"total\": 6}}",
                rows[1][1], rows[1][0]
            ),
            format!(
                "CreateTime:{}\tce_specversion:1.0,ce_id:{},ce_source:{source},ce_type:{topic}\torder-1\tnull",
                rows[2][1], rows[2][0]
            ),
        ];
        let printed: Vec<&str> = printed.lines().collect();
        assert_eq!(printed, expected);
        figure(&format!("must show 3: kafka-console-consumer printed {:?}", printed[0]));
        Ok(())
    });
}

#[test]
fn null_and_empty_keys_tombstones_and_200_headers_arrive_as_they_were_written() {
    test(Duration::from_secs(90), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        let topic = site.topic("odd", 1).await?;
        // In the order of the positions, which one shard and one partition keep: every key below is of one shard only if
        // it is the same, so each row is told by its payload or its type instead.
        sqlx::query(
            r#"INSERT INTO outbox.message (topic, key, payload, headers, type) VALUES
               ($1, NULL, 'null key', NULL, NULL),
               ($1, '', 'empty key', 'null', NULL),
               ($1, 'k', NULL, '{}', 'tombstone'),
               ($1, 'k', '', '[]', NULL),
               ($1, 'k', 'many headers', (SELECT jsonb_agg(jsonb_build_array('h' || i % 100, i::text) ORDER BY i)
                                          FROM generate_series(1, 200) i), NULL),
               ($1, 'k', 'kinds of headers', '[["text", "ü"], ["none", null], ["bytes", {"base64": "AP8="}], ["text", ""]]', NULL),
               ($1, 'k', 'replaced', '{"ce_source": "/mine", "ce_subject": "s", "content-type": "text/plain"}', NULL)"#,
        )
        .bind(&topic)
        .execute(site.pool())
        .await?;
        site.baton(&["relay", "--until-empty"])?.finish(PATIENCE).await?.success()?;

        let records = site.kafka().records(&topic).await?;
        assert_eq!(records.len(), 7);
        let by_payload = |text: &str| find(&records, |record| record.payload_text() == Some(text));
        assert_eq!(by_payload("null key")?.key, None);
        assert_eq!(by_payload("empty key")?.key.as_deref(), Some(&b""[..]));
        let tombstone = find(&records, |record| record.header("ce_type") == Some("tombstone"))?;
        assert_eq!((tombstone.payload.as_ref(), tombstone.header("content-type")), (None, None));
        let empty = by_payload("")?;
        assert_eq!(empty.header("content-type"), Some("application/json"));

        let many = own_headers(by_payload("many headers")?);
        let expected: Vec<(String, Option<Vec<u8>>)> =
            (1..=200).map(|i| (format!("h{}", i % 100), Some(i.to_string().into_bytes()))).collect();
        assert_eq!(many, expected);

        let kinds = own_headers(by_payload("kinds of headers")?);
        let expected: [(&str, Option<&[u8]>); 4] =
            [("text", Some("ü".as_bytes())), ("none", None), ("bytes", Some(&[0, 255])), ("text", Some(b""))];
        let kinds: Vec<(&str, Option<&[u8]>)> =
            kinds.iter().map(|(name, value)| (name.as_str(), value.as_deref())).collect();
        assert_eq!(kinds, expected);

        let replaced = by_payload("replaced")?.header_texts();
        for (name, value) in [("ce_source", "/mine"), ("ce_subject", "s"), ("content-type", "text/plain")] {
            let found: Vec<_> = replaced.iter().filter(|(given, _)| given == name).collect();
            assert_eq!(found, [&(name.to_owned(), Some(value.to_owned()))]);
        }
        Ok(())
    });
}

#[test]
fn a_record_carries_the_time_of_its_row() {
    test(Duration::from_secs(60), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        let topic = site.topic("timed", 1).await?;
        let created: i64 = sqlx::query_scalar(
            "INSERT INTO outbox.message (topic, key, payload) VALUES ($1, 'k', 'x')
             RETURNING round(extract(epoch FROM created_at) * 1000)::bigint",
        )
        .bind(&topic)
        .fetch_one(site.pool())
        .await?;
        let relay = site.baton(&["relay", "--until-empty"])?.env("BATON_RELAY__CE_TIME", "true");
        relay.finish(PATIENCE).await?.success()?;
        let records = site.kafka().records(&topic).await?;
        assert_eq!(records.len(), 1);
        assert_eq!(records[0].timestamp_ms, Some(created));
        let Some(time) = records[0].header("ce_time") else { fail!("no ce_time: {:?}", records[0]) };
        let same: bool = sqlx::query_scalar(
            "SELECT date_trunc('milliseconds', $1::timestamptz) = to_timestamp($2::numeric / 1000)",
        )
        .bind(time)
        .bind(created)
        .fetch_one(site.pool())
        .await?;
        assert!(same, "ce_time is {time}, the row's {created}");
        Ok(())
    });
}

fn find(records: &[Record], wanted: impl Fn(&Record) -> bool) -> Outcome<&Record> {
    match records.iter().filter(|record| wanted(record)).collect::<Vec<_>>()[..] {
        [record] => Ok(record),
        ref found => fail!("{} records are like that", found.len()),
    }
}

/// Those that are not the envelope's.
fn own_headers(record: &Record) -> Vec<(String, Option<Vec<u8>>)> {
    let envelope = |name: &str| name.starts_with("ce_") || name == "content-type";
    record.headers.iter().filter(|(name, _)| !envelope(name)).cloned().collect()
}

/// Runs these statements by the real `psql`; gives the bare rows.
async fn psql(site: &Site, sql: &str) -> Outcome<String> {
    let program = psql_program()?;
    site.launch("psql", program)
        .args(["-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1", "-d", &site.place().database_url])
        .input(sql)
        .finish(PATIENCE)
        .await?
        .success()
}

fn psql_program() -> Outcome<PathBuf> {
    let in_path = std::env::var_os("PATH").map_or_else(Vec::new, |path| {
        std::env::split_paths(&path).map(|directory| directory.join("psql")).collect()
    });
    let of_debian = std::fs::read_dir("/usr/lib/postgresql")
        .into_iter()
        .flatten()
        .filter_map(|entry| Some(entry.ok()?.path().join("bin/psql")));
    let found = in_path.into_iter().chain(of_debian).find(|path| Path::is_file(path));
    match found {
        Some(path) => Ok(path),
        None => fail!("psql is not installed: `apt-get install postgresql-client`"),
    }
}

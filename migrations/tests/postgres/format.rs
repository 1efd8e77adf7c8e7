//! The public format of the outbox: columns, constraints and the shard hash. A change here breaks somebody.

use sqlx::{AssertSqlSafe, Executor as _};

use crate::fixture::{self, refusal, value};

#[tokio::test]
async fn the_columns_of_a_message_stand_in_their_order() {
    fixture::outbox(async |db| {
        let columns: String = value(
            &mut db.connect().await,
            "SELECT string_agg(attname || ' ' || format_type(atttypid, atttypmod) || CASE WHEN attnotnull THEN ' not null' ELSE '' END,
                               ', ' ORDER BY attnum)
             FROM pg_attribute WHERE attrelid = 'outbox.message'::regclass AND attnum > 0",
        )
        .await;
        assert_eq!(
            columns,
            "xid xid8 not null, position bigint not null, slot smallint not null, shard smallint not null, \
             id uuid not null, idempotency_key text, topic text not null, key text, type text, payload bytea, \
             headers jsonb, created_at timestamp with time zone not null"
        );
    })
    .await;
}

#[tokio::test]
async fn the_sequence_of_positions_caches_nothing_and_no_index_is_unique() {
    fixture::outbox(async |db| {
        let mut c = db.connect().await;
        let cache: i64 = value(
            &mut c,
            "SELECT seqcache FROM pg_sequence WHERE seqrelid = pg_get_serial_sequence('outbox.message', 'position')::regclass",
        )
        .await;
        assert_eq!(cache, 1);
        let indexes: String = value(
            &mut c,
            r#"SELECT string_agg(DISTINCT (substring(indexdef from 'USING.*') || CASE WHEN indexdef LIKE '%UNIQUE%' THEN ' unique' ELSE '' END) COLLATE "C", ', ')
               FROM pg_indexes WHERE schemaname = 'outbox' AND tablename LIKE 'message%'"#,
        )
        .await;
        assert_eq!(
            indexes,
            r#"USING btree (shard, "position"), USING btree (shard, outbox.xid_bits(xid), "position")"#
        );
        let triggers: i64 = value(
            &mut c,
            "SELECT count(*) FROM pg_trigger WHERE tgrelid IN (SELECT oid FROM pg_class WHERE relname LIKE 'message%')",
        )
        .await;
        assert_eq!(triggers, 0);
    })
    .await;
}

/// Key → shard of 8. Where a message lies, and so who publishes it, follows from this; it must be the same on every
/// Postgres, for every collation, for ever.
const SHARDS: [(&str, i16); 12] = [
    ("", 5),
    ("a", 1),
    ("alice", 5),
    ("bob", 5),
    ("customer-1", 4),
    ("customer-2", 1),
    ("order:00000000-0000-0000-0000-000000000000", 4),
    ("Grüße", 2),
    ("ключ", 0),
    ("日本語", 4),
    ("🦀", 1),
    (" a ", 4),
];

#[tokio::test]
async fn every_key_lies_in_the_shard_that_it_always_lay_in() {
    fixture::outbox(async |db| {
        let mut c = db.connect().await;
        for (key, _) in SHARDS {
            let insert = sqlx::query("INSERT INTO outbox.message (topic, key) VALUES ('t', $1)").bind(key);
            insert.execute(&mut c).await.unwrap();
        }
        let rows: Vec<(String, i16)> =
            sqlx::query_as("SELECT key, shard FROM outbox.message ORDER BY position")
                .fetch_all(&mut c)
                .await
                .unwrap();
        let expected: Vec<(String, i16)> = SHARDS.iter().map(|(k, s)| ((*k).to_owned(), *s)).collect();
        assert_eq!(rows, expected);
    })
    .await;
}

#[tokio::test]
async fn a_message_without_a_key_lies_where_its_position_says() {
    fixture::outbox(async |db| {
        let mut c = db.connect().await;
        c.execute("INSERT INTO outbox.message (topic) SELECT 't' FROM generate_series(1, 100)")
            .await
            .unwrap();
        let wrong: i64 =
            value(&mut c, "SELECT count(*) FROM outbox.message WHERE shard <> position % 8").await;
        assert_eq!(wrong, 0);
    })
    .await;
}

#[tokio::test]
async fn what_no_message_may_be_is_refused_by_a_constraint_that_says_so() {
    const TOPIC: &str = "topic_must_be_1_to_249_of_letters_digits_dot_underscore_dash";
    const TYPE: &str = "type_from_1_byte_to_1_kib";
    const IDEMPOTENCY_KEY: &str = "idempotency_key_from_1_byte_to_1_kib";
    const CREATED_AT: &str = "created_at_from_1970_to_9999";
    fixture::outbox(async |db| {
        let mut c = db.connect().await;
        for (columns, values, constraint) in [
            ("topic", "''", TOPIC),
            ("topic", "'.'", TOPIC),
            ("topic", "'..'", TOPIC),
            ("topic", "'two words'", TOPIC),
            ("topic", "E'line\\n'", TOPIC),
            ("topic", "'Grüße'", TOPIC),
            ("topic", "repeat('a', 250)", TOPIC),
            ("topic", "repeat('a', 248) || 'ü'", TOPIC),
            ("topic", "repeat('a', 1024 * 1024)", TOPIC),
            ("topic, key", "'t', repeat('ü', 32769)", "key_at_most_64_kib"),
            ("topic, type", "'t', ''", TYPE),
            ("topic, type", "'t', repeat('a', 1025)", TYPE),
            ("topic, idempotency_key", "'t', ''", IDEMPOTENCY_KEY),
            ("topic, idempotency_key", "'t', repeat('ü', 513)", IDEMPOTENCY_KEY),
            ("topic, created_at", "'t', '1969-12-31 23:59:59.999999+00'", CREATED_AT),
            ("topic, created_at", "'t', '10000-01-01 00:00:00+00'", CREATED_AT),
            ("topic, created_at", "'t', '-infinity'", CREATED_AT),
            (
                "topic, payload",
                "'t', convert_to(repeat('a', 64 * 1024 * 1024 + 1), 'UTF8')",
                "payload_at_most_64_mib",
            ),
            (
                "topic, headers",
                "'t', jsonb_build_object('a', repeat('a', 256 * 1024))",
                "headers_at_most_256_kib",
            ),
            (
                "topic, headers",
                "'t', jsonb_build_array(jsonb_build_array('a', repeat('a', 256 * 1024 - 10)))",
                "headers_at_most_256_kib",
            ),
        ] {
            let sql = format!("INSERT INTO outbox.message ({columns}) VALUES ({values})");
            assert_eq!(
                refusal(&mut c, &sql).await,
                ("23514".to_owned(), Some(constraint.to_owned())),
                "{sql}"
            );
        }
        // not_null_violation
        assert_eq!(refusal(&mut c, "INSERT INTO outbox.message (key) VALUES ('k')").await.0, "23502");
        let kept: i64 = value(&mut c, "SELECT count(*) FROM outbox.message").await;
        assert_eq!(kept, 0);
    })
    .await;
}

#[tokio::test]
async fn the_largest_and_the_smallest_messages_are_taken() {
    fixture::outbox(async |db| {
        let mut c = db.connect().await;
        for (columns, values) in [
            ("topic", "'a'"),
            ("topic", "'...'"),
            ("topic", "repeat('Z', 249)"),
            ("topic, key", "'t', ''"),
            ("topic, key", "'t', repeat('ü', 32768)"),
            ("topic, type, idempotency_key", "'t', repeat('a', 1024), repeat('ü', 512)"),
            ("topic, payload", "'t', ''"),
            ("topic, payload", "'t', convert_to(repeat('a', 64 * 1024 * 1024), 'UTF8')"),
            ("topic, headers", "'t', jsonb_build_object('a', repeat('a', 256 * 1024 - 9))"),
            (
                "topic, headers",
                "'t', jsonb_build_array(jsonb_build_array('a', repeat('a', 256 * 1024 - 11)))",
            ),
            ("topic, created_at", "'t', '1970-01-01 00:00:00+00'"),
            ("topic, created_at", "'t', '9999-12-31 23:59:59.999999+00'"),
        ] {
            let sql = format!("INSERT INTO outbox.message ({columns}) VALUES ({values})");
            c.execute(AssertSqlSafe(sql.as_str())).await.expect(&sql);
        }
    })
    .await;
}

#[tokio::test]
async fn a_character_may_stand_in_a_topic_exactly_if_it_is_a_letter_digit_dot_underscore_or_dash() {
    fixture::outbox(async |db| {
        let mut c = db.connect().await;
        // Whatever may be mistaken for a letter or the end of a line: Latin, the signs of patterns, spaces, line separators.
        let tried = ('\u{1}'..='\u{24f}').chain(['\u{2028}', '\u{2029}', '\u{212a}', '\u{ff41}', '\u{ff0e}']);
        for character in tried {
            let belongs = character.is_ascii_alphanumeric() || ['.', '_', '-'].contains(&character);
            for topic in [
                format!("{character}a"),
                format!("a{character}"),
                format!("a{character}a"),
                format!("{character}{character}{character}"),
            ] {
                let insert = "INSERT INTO outbox.message (topic) VALUES ($1)";
                let taken = sqlx::query(insert).bind(&topic).execute(&mut c).await.is_ok();
                assert_eq!(taken, belongs, "{topic:?}");
            }
        }
    })
    .await;
}

#[tokio::test]
async fn a_refusal_reads_as_that_of_a_check_constraint_on_the_table() {
    fixture::outbox(async |db| {
        let mut c = db.connect().await;
        let error = c
            .execute("INSERT INTO outbox.message (topic, key) VALUES ('t', repeat('k', 65537))")
            .await
            .unwrap_err();
        let error = error.into_database_error().unwrap();
        let said = error.downcast_ref::<sqlx::postgres::PgDatabaseError>();
        assert_eq!(
            said.message(),
            r#"new row for relation "message" violates check constraint "key_at_most_64_kib""#
        );
        assert_eq!((said.code(), said.schema(), said.table()), ("23514", Some("outbox"), Some("message")));
        assert!(error.is_check_violation());
    })
    .await;
}

#[tokio::test]
async fn sql_callers_enqueue_with_one_function() {
    fixture::outbox(async |db| {
        let mut c = db.connect().await;
        let id: sqlx::types::Uuid =
            value(&mut c, r#"SELECT outbox.enqueue('orders', 'alice', '{"a": 1}')"#).await;
        let stored: bool = sqlx::query_scalar(
            r#"SELECT payload = convert_to('{"a": 1}', 'UTF8') AND topic = 'orders' AND key = 'alice'
                      AND type IS NULL AND headers IS NULL AND idempotency_key IS NULL
               FROM outbox.message WHERE id = $1"#,
        )
        .bind(id)
        .fetch_one(&mut c)
        .await
        .unwrap();
        assert!(stored);

        c.execute(
            r#"SELECT outbox.enqueue(topic => 'orders', key => NULL, payload => NULL, headers => '{"h": "v"}',
                                     type => 'order.gone', idempotency_key => 'gone:1')"#,
        )
        .await
        .unwrap();
        let stored: bool = value(
            &mut c,
            r#"SELECT payload IS NULL AND key IS NULL AND headers = '{"h": "v"}' AND type = 'order.gone'
               FROM outbox.message WHERE idempotency_key = 'gone:1'"#,
        )
        .await;
        assert!(stored);
        let refused = refusal(&mut c, "SELECT outbox.enqueue('no topic', NULL, '1')").await;
        assert_eq!(
            refused.1.as_deref(),
            Some("topic_must_be_1_to_249_of_letters_digits_dot_underscore_dash")
        );
    })
    .await;
}

#[tokio::test]
async fn a_message_with_the_largest_key_can_be_parked() {
    fixture::outbox(async |db| {
        let mut c = db.connect().await;
        // Random, so that no index can compress it.
        let key: String = std::iter::repeat_with(fastrand::alphanumeric).take(65536).collect();
        for (position, state) in [(1_i64, "blocked"), (2, "blocked")] {
            sqlx::query(
                "INSERT INTO outbox.parked (id, position, shard, topic, key, created_at, state, generation)
                 VALUES (gen_random_uuid(), $1, 1, 't', $2, now(), $3, 1)",
            )
            .bind(position)
            .bind(&key)
            .bind(state)
            .execute(&mut c)
            .await
            .unwrap();
        }
    })
    .await;
}

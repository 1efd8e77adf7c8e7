//! The public format of the inbox, as far as its constraints hold it.

use sqlx::Executor as _;

use crate::fixture::{self, refusal};

fn random(length: usize) -> String {
    std::iter::repeat_with(fastrand::alphanumeric).take(length).collect()
}

#[tokio::test]
async fn the_longest_consumer_scope_and_key_fit_together() {
    fixture::inbox(async |db| {
        let mut c = db.connect().await;
        // A topic of 249, a separator and a type of 1 KiB make the longest scope by default.
        sqlx::query("INSERT INTO inbox.message (consumer, scope, key, fingerprint, state) VALUES ($1, $2, $3, 'v1:sha256:00', 'in_progress')")
            .bind(random(249))
            .bind(random(249 + 1 + 1024))
            .bind(random(1024))
            .execute(&mut c)
            .await
            .unwrap();
    })
    .await;
}

#[tokio::test]
async fn a_record_with_the_longest_key_can_be_parked() {
    fixture::inbox(async |db| {
        let mut c = db.connect().await;
        for offset in [1_i64, 2] {
            sqlx::query(
                r#"INSERT INTO inbox.parked (consumer, topic, "partition", "offset", key, scope, idempotency_key, state)
                   VALUES ($1, $2, 0, $3, $4, 's', $5, 'blocked')"#,
            )
            .bind(random(249))
            .bind(random(249))
            .bind(offset)
            .bind(random(65536).into_bytes())
            .bind(random(1024))
            .execute(&mut c)
            .await
            .unwrap();
        }
    })
    .await;
}

#[tokio::test]
async fn what_no_inbox_row_may_be_is_refused_by_a_constraint_that_says_so() {
    fixture::inbox(async |db| {
        let mut c = db.connect().await;
        let columns = "consumer, scope, key, fingerprint, state, finished_at, lease_until, outcome, cause";
        for (values, constraint) in [
            ("'', 's', 'k', 'v1:sha256:00', 'done', now(), null, null, null", "consumer_from_1_to_249_bytes"),
            ("repeat('c', 250), 's', 'k', 'v1:sha256:00', 'done', now(), null, null, null", "consumer_from_1_to_249_bytes"),
            ("'c', repeat('s', 1281), 'k', 'v1:sha256:00', 'done', now(), null, null, null", "scope_at_most_1280_bytes"),
            ("'c', 's', '', 'v1:sha256:00', 'done', now(), null, null, null", "key_from_1_byte_to_1_kib"),
            ("'c', 's', repeat('k', 1025), 'v1:sha256:00', 'done', now(), null, null, null", "key_from_1_byte_to_1_kib"),
            ("'c', 's', 'k', 'sha256:00', 'done', now(), null, null, null", "fingerprint_names_its_version"),
            ("'c', 's', 'k', 'v1:sha256:00', 'finished', now(), null, null, null", "state_is_known"),
            ("'c', 's', 'k', 'v1:sha256:00', 'done', null, null, null, null", "what_is_settled_has_a_time"),
            ("'c', 's', 'k', 'v1:sha256:00', 'in_progress', now(), null, null, null", "what_is_settled_has_a_time"),
            ("'c', 's', 'k', 'v1:sha256:00', 'done', now(), now(), null, null", "what_is_settled_has_no_lease"),
            ("'c', 's', 'k', 'v1:sha256:00', 'dead', now(), null, '1', 'panic'", "only_a_done_one_has_an_outcome"),
            ("'c', 's', 'k', 'v1:sha256:00', 'dead', now(), null, null, null", "a_dead_one_has_a_cause"),
            ("'c', 's', 'k', 'v1:sha256:00', 'done', now(), null, null, 'panic'", "a_dead_one_has_a_cause"),
        ] {
            let sql = format!("INSERT INTO inbox.message ({columns}) VALUES ({values})");
            assert_eq!(refusal(&mut c, &sql).await, ("23514".to_owned(), Some(constraint.to_owned())), "{sql}");
        }
        c.execute("INSERT INTO inbox.message (consumer, scope, key, fingerprint, state, finished_at) VALUES ('c', '', 'k', 'v1:sha256:00', 'done', now())")
            .await
            .unwrap();
    })
    .await;
}

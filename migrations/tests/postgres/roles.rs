//! Who may do what.

use baton_migrations::{Error, Line, State, check, migrate_outbox};
use baton_outbox::Message;
use sqlx::{Connection as _, Executor as _, PgConnection};

use crate::fixture::{self, refusal, value};

const DENIED: &str = "42501";

#[tokio::test]
async fn a_producer_enqueues_in_every_way() {
    fixture::outbox(async |db| {
        let mut producer = db.login("IN ROLE baton_producer").await;
        let c = &mut producer.connection;

        c.execute("INSERT INTO outbox.message (topic, key, payload) VALUES ('t', 'k', '1')").await.unwrap();
        let all = "INSERT INTO outbox.message (topic, key, payload, headers, type, idempotency_key, id)
                   VALUES ('t', 'k', '1', '{}', 'y', 'i', gen_random_uuid()) RETURNING id";
        sqlx::query_scalar::<_, sqlx::types::Uuid>(all).fetch_one(&mut *c).await.unwrap();
        c.execute("SELECT outbox.enqueue('t', 'k', '{}')").await.unwrap();
        let mut copy = c.copy_in_raw("COPY outbox.message (topic, key, payload) FROM STDIN").await.unwrap();
        copy.send(&b"t\tk1\t\\\\x00\nt\tk2\t\\N\n"[..]).await.unwrap();
        assert_eq!(copy.finish().await.unwrap(), 2);
        let message = Message::builder("t").key("k").header("h", "v").bytes(*b"1");
        let mut tx = c.begin().await.unwrap();
        baton_outbox::enqueue(&mut tx, &message).await.unwrap();
        baton_outbox::enqueue_all(&mut tx, &[message.clone(), message]).await.unwrap();
        tx.commit().await.unwrap();
        let ids: i64 = value(&mut *c, "SELECT count(DISTINCT id) FROM outbox.message").await;
        assert_eq!(ids, 8);
    })
    .await;
}

#[tokio::test]
async fn a_producer_can_do_nothing_else() {
    fixture::outbox(async |db| {
        let mut producer = db.login("IN ROLE baton_producer").await;
        let c = &mut producer.connection;
        for sql in [
            "SELECT payload FROM outbox.message",
            "SELECT * FROM outbox.message",
            "SELECT position FROM outbox.message",
            "SELECT topic FROM outbox.message_0",
            "INSERT INTO outbox.message (topic) VALUES ('t') RETURNING position",
            "INSERT INTO outbox.message (topic, xid) VALUES ('t', '3')",
            "INSERT INTO outbox.message (topic, position) OVERRIDING SYSTEM VALUE VALUES ('t', 1)",
            "INSERT INTO outbox.message (topic, slot) VALUES ('t', 1)",
            "INSERT INTO outbox.message (topic, created_at) VALUES ('t', now())",
            "INSERT INTO outbox.message_0 (topic) VALUES ('t')",
            "UPDATE outbox.message SET topic = 'u'",
            "DELETE FROM outbox.message",
            "TRUNCATE outbox.message",
            "SELECT FROM outbox.cursor",
            "SELECT FROM outbox.settings",
            "UPDATE outbox.shard SET generation = 9",
            "SELECT FROM outbox._migrations",
            "SELECT nextval(pg_get_serial_sequence('outbox.message', 'position'))",
            "CREATE TABLE outbox.mine ()",
        ] {
            assert_eq!(refusal(c, sql).await.0, DENIED, "{sql}");
        }
        // generated_always: nobody may, whatever the privileges.
        assert_eq!(refusal(c, "INSERT INTO outbox.message (topic, shard) VALUES ('t', 1)").await.0, "428C9");
        assert_eq!(
            refusal(c, "INSERT INTO outbox.message (topic, position) VALUES ('t', 1)").await.0,
            "428C9"
        );
    })
    .await;
}

/// Every privilege of every group role, as `role table: privileges`, columns in brackets.
const OUTBOX_GRANTS: &str = "\
baton_operator _migrations: SELECT
baton_operator advance: SELECT
baton_operator audit: INSERT SELECT
baton_operator cursor: SELECT
baton_operator fence: SELECT
baton_operator message: SELECT
baton_operator message_0: SELECT
baton_operator message_1: SELECT
baton_operator message_2: SELECT
baton_operator message_3: SELECT
baton_operator message_position_seq: SELECT
baton_operator milestone: SELECT
baton_operator parked: SELECT UPDATE
baton_operator paused: DELETE INSERT SELECT
baton_operator relay: SELECT
baton_operator settings: SELECT
baton_operator shard: SELECT
baton_operator stopped: SELECT
baton_operator token: SELECT
baton_producer message: INSERT(id,idempotency_key,topic,key,type,payload,headers) SELECT(id)
baton_readonly _migrations: SELECT
baton_readonly advance: SELECT
baton_readonly audit: SELECT
baton_readonly cursor: SELECT
baton_readonly fence: SELECT
baton_readonly message: SELECT
baton_readonly message_0: SELECT
baton_readonly message_1: SELECT
baton_readonly message_2: SELECT
baton_readonly message_3: SELECT
baton_readonly message_position_seq: SELECT
baton_readonly milestone: SELECT
baton_readonly parked: SELECT
baton_readonly paused: SELECT
baton_readonly relay: SELECT
baton_readonly settings: SELECT
baton_readonly shard: SELECT
baton_readonly stopped: SELECT
baton_readonly token: SELECT
baton_relay _migrations: SELECT
baton_relay advance: DELETE INSERT SELECT
baton_relay audit: INSERT SELECT
baton_relay cursor: SELECT
baton_relay fence: SELECT UPDATE
baton_relay message: SELECT
baton_relay message_0: SELECT TRUNCATE
baton_relay message_1: SELECT TRUNCATE
baton_relay message_2: SELECT TRUNCATE
baton_relay message_3: SELECT TRUNCATE
baton_relay message_position_seq: SELECT
baton_relay milestone: DELETE INSERT SELECT
baton_relay parked: DELETE INSERT SELECT UPDATE
baton_relay paused: SELECT
baton_relay relay: DELETE INSERT SELECT UPDATE
baton_relay settings: SELECT
baton_relay shard: SELECT UPDATE
baton_relay stopped: INSERT SELECT UPDATE
baton_relay token: INSERT SELECT";
const INBOX_GRANTS: &str = "\
baton_consumer _migrations: SELECT
baton_consumer audit: INSERT SELECT
baton_consumer horizon: DELETE INSERT SELECT UPDATE
baton_consumer message: DELETE INSERT SELECT UPDATE
baton_consumer parked: DELETE INSERT SELECT UPDATE
baton_consumer replay_item: SELECT UPDATE
baton_consumer replay_plan: SELECT
baton_operator _migrations: SELECT
baton_operator audit: INSERT SELECT
baton_operator horizon: INSERT SELECT UPDATE
baton_operator message: DELETE SELECT UPDATE
baton_operator parked: DELETE SELECT UPDATE
baton_operator replay_item: INSERT SELECT UPDATE
baton_operator replay_plan: INSERT SELECT
baton_readonly _migrations: SELECT
baton_readonly audit: SELECT
baton_readonly horizon: SELECT
baton_readonly message: SELECT
baton_readonly parked: SELECT
baton_readonly replay_item: SELECT
baton_readonly replay_plan: SELECT";

async fn grants(c: &mut PgConnection, schema: &str) -> String {
    let rows: Vec<String> = sqlx::query_scalar(
        "SELECT role || ' ' || name || ': ' || string_agg(privilege, ' ' ORDER BY privilege)
         FROM (SELECT a.grantee::regrole::text AS role, c.relname AS name, a.privilege_type AS privilege
               FROM pg_class c, aclexplode(c.relacl) a
               WHERE c.relnamespace = $1::regnamespace
               UNION ALL
               SELECT a.grantee::regrole::text, c.relname, a.privilege_type || '(' || string_agg(t.attname, ',' ORDER BY t.attnum) || ')'
               FROM pg_class c JOIN pg_attribute t ON t.attrelid = c.oid, aclexplode(t.attacl) a
               WHERE c.relnamespace = $1::regnamespace
               GROUP BY a.grantee, c.relname, a.privilege_type) granted
         WHERE role LIKE 'baton\\_%'
         GROUP BY role, name ORDER BY role, name",
    )
    .bind(schema)
    .fetch_all(c)
    .await
    .unwrap();
    rows.join("\n")
}

#[tokio::test]
async fn the_group_roles_have_exactly_these_privileges() {
    fixture::outbox(async |db| {
        let mut c = db.connect().await;
        baton_migrations::migrate_inbox(&mut c).await.unwrap();
        assert_eq!(grants(&mut c, "outbox").await, OUTBOX_GRANTS);
        assert_eq!(grants(&mut c, "inbox").await, INBOX_GRANTS);
        let logins: i64 = value(
            &mut c,
            "SELECT count(*) FROM pg_roles WHERE rolcanlogin AND rolname IN
             ('baton_producer', 'baton_relay', 'baton_consumer', 'baton_operator', 'baton_readonly')",
        )
        .await;
        assert_eq!(logins, 0);
    })
    .await;
}

#[tokio::test]
async fn every_role_of_a_service_can_check_the_state_and_a_stranger_is_told_what_is_missing() {
    fixture::outbox(async |db| {
        for group in ["baton_relay", "baton_operator", "baton_readonly"] {
            let mut login = db.login(&format!("IN ROLE {group}")).await;
            assert_eq!(check(&mut login.connection, Line::Outbox).await.unwrap(), State::Current, "{group}");
        }
        let mut stranger = db.login("").await;
        let error = check(&mut stranger.connection, Line::Outbox).await.unwrap_err();
        assert!(matches!(error, Error::Denied { doing: "read", .. }), "{error}");
    })
    .await;
}

#[tokio::test]
async fn migrating_a_restored_database_brings_its_grants_back() {
    fixture::outbox(async |db| {
        let mut c = db.connect().await;
        let before = grants(&mut c, "outbox").await;
        // As after a restore with --no-privileges, or into a cluster that has no such roles.
        c.execute("REVOKE ALL ON ALL TABLES IN SCHEMA outbox FROM baton_producer, baton_relay, baton_operator, baton_readonly")
            .await
            .unwrap();
        c.execute("REVOKE ALL ON SCHEMA outbox FROM baton_producer, baton_relay, baton_operator, baton_readonly")
            .await
            .unwrap();
        let applied = migrate_outbox(&mut c, None, None).await.unwrap();
        assert_eq!(applied.roles, ["baton_producer", "baton_relay", "baton_operator", "baton_readonly"]);
        assert_eq!(grants(&mut c, "outbox").await, before);
        assert_eq!(migrate_outbox(&mut c, None, None).await.unwrap().roles, Vec::<String>::new());
    })
    .await;
}

#[tokio::test]
async fn producers_enqueue_where_public_may_not_execute_functions() {
    fixture::empty(async |db| {
        let mut admin = db.connect().await;
        admin.execute("ALTER DEFAULT PRIVILEGES REVOKE EXECUTE ON FUNCTIONS FROM PUBLIC").await.unwrap();
        migrate_outbox(&mut admin, None, None).await.unwrap();
        let mut producer = db.login("IN ROLE baton_producer").await;
        let message = Message::builder("t").key("k").header("h", "v").bytes(*b"1");
        baton_outbox::enqueue(&mut producer.connection, &message).await.unwrap();
        producer.connection.execute("SELECT outbox.enqueue('t', 'k', '{}')").await.unwrap();
    })
    .await;
}

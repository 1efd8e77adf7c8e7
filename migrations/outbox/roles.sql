-- Who may do what. Not part of a numbered migration, because a database that was restored into another cluster has its
-- tables and neither the roles nor the grants: `baton migrate outbox` runs this whenever something of it is missing.

-- Group roles, no login. They belong to the whole cluster, so another database, or a migration that runs at this very
-- moment, may have made them already.
DO $$
DECLARE
    role text;
BEGIN
    FOREACH role IN ARRAY ARRAY['baton_producer', 'baton_relay', 'baton_operator', 'baton_readonly'] LOOP
        BEGIN
            IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = role) THEN
                EXECUTE format('CREATE ROLE %I NOLOGIN', role);
            END IF;
        EXCEPTION WHEN duplicate_object OR unique_violation THEN NULL;
        END;
    END LOOP;
END $$;

GRANT USAGE ON SCHEMA outbox TO baton_producer, baton_relay, baton_operator, baton_readonly;
-- Said aloud for databases where PUBLIC may not execute functions: inserts call these.
GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA outbox TO baton_producer, baton_relay, baton_operator, baton_readonly;
GRANT INSERT (topic, key, payload, headers, type, idempotency_key, id) ON outbox.message TO baton_producer;
GRANT SELECT (id) ON outbox.message TO baton_producer;
GRANT SELECT ON ALL TABLES IN SCHEMA outbox TO baton_relay, baton_operator, baton_readonly;
-- To see that the sequence is ahead of every position in use.
GRANT SELECT ON SEQUENCE outbox.message_position_seq TO baton_relay, baton_operator, baton_readonly;
GRANT UPDATE ON outbox.shard, outbox.fence TO baton_relay;
GRANT INSERT, DELETE ON outbox.advance, outbox.milestone TO baton_relay;
GRANT INSERT ON outbox.token TO baton_relay;
GRANT INSERT, UPDATE ON outbox.stopped TO baton_relay;
GRANT INSERT, UPDATE, DELETE ON outbox.relay, outbox.parked TO baton_relay;
GRANT TRUNCATE ON outbox.message_0, outbox.message_1, outbox.message_2, outbox.message_3 TO baton_relay;
GRANT INSERT ON outbox.audit TO baton_relay, baton_operator;
GRANT UPDATE ON outbox.parked TO baton_operator;
GRANT INSERT, DELETE ON outbox.paused TO baton_operator;

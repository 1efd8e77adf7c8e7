-- Who may do what. Not part of a numbered migration, because a database that was restored into another cluster has its
-- tables and neither the roles nor the grants: `baton migrate inbox` runs this whenever something of it is missing.

-- Group roles, no login. They belong to the whole cluster, so another database, or a migration that runs at this very
-- moment, may have made them already.
DO $$
DECLARE
    role text;
BEGIN
    FOREACH role IN ARRAY ARRAY['baton_consumer', 'baton_operator', 'baton_readonly'] LOOP
        BEGIN
            IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = role) THEN
                EXECUTE format('CREATE ROLE %I NOLOGIN', role);
            END IF;
        EXCEPTION WHEN duplicate_object OR unique_violation THEN NULL;
        END;
    END LOOP;
END $$;

GRANT USAGE ON SCHEMA inbox TO baton_consumer, baton_operator, baton_readonly;
GRANT SELECT ON ALL TABLES IN SCHEMA inbox TO baton_consumer, baton_operator, baton_readonly;
GRANT INSERT, UPDATE, DELETE ON inbox.message, inbox.parked, inbox.horizon TO baton_consumer;
-- An operator requeues and discards, and purges as a consumer does.
GRANT UPDATE, DELETE ON inbox.parked, inbox.message TO baton_operator;
GRANT INSERT, UPDATE ON inbox.horizon TO baton_operator;
GRANT INSERT ON inbox.audit TO baton_consumer, baton_operator;
GRANT INSERT ON inbox.replay_plan TO baton_operator;
GRANT INSERT, UPDATE ON inbox.replay_item TO baton_operator;
GRANT UPDATE ON inbox.replay_item TO baton_consumer;

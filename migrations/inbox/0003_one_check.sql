-- What a claim and a mark cost. Each of the two statements parsed and set up eleven check constraints anew: 135 of the 280 µs that
-- both took in the server (PostgreSQL 15, 2 cores). So there is one check, of a function that a session compiles once, as on
-- outbox.message. It says which constraint a row breaks by the name, the text and the code that the check of that name gave.

-- Not immutable: it must not be tried out while something is planned. Strict: where nothing is broken it is not called.
CREATE FUNCTION inbox.refuse(broken text) RETURNS boolean LANGUAGE plpgsql STRICT PARALLEL SAFE AS $$
BEGIN
    RAISE EXCEPTION 'new row for relation "message" violates check constraint "%"', broken
        USING ERRCODE = 'check_violation', CONSTRAINT = broken, SCHEMA = 'inbox', TABLE = 'message';
END $$;

CREATE FUNCTION inbox.message_is_valid(
    consumer text, scope text, key text, fingerprint text, state text, generation bigint, lease_until timestamptz, attempts integer,
    outcome json, cause text, finished_at timestamptz
) RETURNS boolean LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
BEGIN
    -- One expression, because each that plpgsql evaluates is set up again in every transaction.
    RETURN coalesce(inbox.refuse(CASE
        WHEN octet_length(consumer) NOT BETWEEN 1 AND 249 THEN 'consumer_from_1_to_249_bytes'
        WHEN octet_length(scope) > 1280 THEN 'scope_at_most_1280_bytes'
        WHEN octet_length(key) NOT BETWEEN 1 AND 1024 THEN 'key_from_1_byte_to_1_kib'
        WHEN fingerprint !~ '^v[0-9]+:[a-z0-9]+:[0-9a-f]+$' THEN 'fingerprint_names_its_version'
        WHEN state NOT IN ('in_progress', 'done', 'dead') THEN 'state_is_known'
        WHEN generation < 1 THEN 'message_generation_check'
        WHEN attempts < 0 THEN 'message_attempts_check'
        WHEN (state = 'in_progress') <> (finished_at IS NULL) THEN 'what_is_settled_has_a_time'
        WHEN state <> 'in_progress' AND lease_until IS NOT NULL THEN 'what_is_settled_has_no_lease'
        WHEN state <> 'done' AND outcome IS NOT NULL THEN 'only_a_done_one_has_an_outcome'
        WHEN (state = 'dead') <> (cause IS NOT NULL) THEN 'a_dead_one_has_a_cause'
    END), true);
END $$;

-- Rows that are there already have passed those checks; the table is not read again.
ALTER TABLE inbox.message
    DROP CONSTRAINT consumer_from_1_to_249_bytes,
    DROP CONSTRAINT scope_at_most_1280_bytes,
    DROP CONSTRAINT key_from_1_byte_to_1_kib,
    DROP CONSTRAINT fingerprint_names_its_version,
    DROP CONSTRAINT state_is_known,
    DROP CONSTRAINT message_generation_check,
    DROP CONSTRAINT message_attempts_check,
    DROP CONSTRAINT what_is_settled_has_a_time,
    DROP CONSTRAINT what_is_settled_has_no_lease,
    DROP CONSTRAINT only_a_done_one_has_an_outcome,
    DROP CONSTRAINT a_dead_one_has_a_cause,
    ADD CONSTRAINT a_message_is_valid CHECK (inbox.message_is_valid(
        consumer, scope, key, fingerprint, state, generation, lease_until, attempts, outcome, cause, finished_at)) NOT VALID;

-- What an insert costs. Every statement that inserts parses and plans each check constraint and each generated column anew, and
-- inlines the SQL functions in them anew: ten checks and a generated column were nine tenths of a row's cost (86 µs beside the
-- 8 µs of a plain table, PostgreSQL 15). So there is one check, of a function that a session compiles once. It says which
-- constraint a row breaks by the name, the text and the code that the check of that name gave.
CREATE FUNCTION outbox.message_is_valid(
    topic text, key text, idempotency_key text, type text, payload bytea, headers jsonb, created_at timestamptz
) RETURNS boolean LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
DECLARE
    broken text := CASE
        WHEN topic !~ '^[a-zA-Z0-9._-]{1,249}$' OR topic = '.' OR topic = '..'
            THEN 'topic_must_be_1_to_249_of_letters_digits_dot_underscore_dash'
        WHEN octet_length(key) > 65536 THEN 'key_at_most_64_kib'
        WHEN octet_length(idempotency_key) NOT BETWEEN 1 AND 1024 THEN 'idempotency_key_from_1_byte_to_1_kib'
        WHEN octet_length(type) NOT BETWEEN 1 AND 1024 THEN 'type_from_1_byte_to_1_kib'
        WHEN octet_length(payload) > 67108864 THEN 'payload_at_most_64_mib'
        WHEN created_at < '1970-01-01 00:00:00+00' OR created_at >= '10000-01-01 00:00:00+00' THEN 'created_at_from_1970_to_9999'
        WHEN headers IS NULL THEN NULL
        WHEN octet_length(headers::text) > 262144 THEN 'headers_at_most_256_kib'
        WHEN NOT outbox.headers_are_valid(headers) THEN 'headers_must_be_an_object_or_an_array_of_pairs'
        WHEN outbox.headers_name_a_column(headers) THEN 'headers_must_not_name_what_has_a_column'
    END;
BEGIN
    IF broken IS NOT NULL THEN
        RAISE EXCEPTION 'new row for relation "message" violates check constraint "%"', broken
            USING ERRCODE = 'check_violation', CONSTRAINT = broken, SCHEMA = 'outbox', TABLE = 'message';
    END IF;
    RETURN true;
END $$;

-- Rows that are there already have passed those checks; the table is not read again.
ALTER TABLE outbox.message
    DROP CONSTRAINT IF EXISTS topic_must_be_1_to_249_of_letters_digits_dot_underscore_dash,
    DROP CONSTRAINT IF EXISTS key_at_most_64_kib,
    DROP CONSTRAINT IF EXISTS idempotency_key_from_1_byte_to_1_kib,
    DROP CONSTRAINT IF EXISTS type_from_1_byte_to_1_kib,
    DROP CONSTRAINT IF EXISTS payload_at_most_64_mib,
    DROP CONSTRAINT IF EXISTS created_at_from_1970_to_9999,
    DROP CONSTRAINT IF EXISTS headers_at_most_256_kib,
    DROP CONSTRAINT IF EXISTS headers_must_be_an_object_or_an_array_of_pairs,
    DROP CONSTRAINT IF EXISTS headers_must_not_name_what_has_a_column,
    ADD CONSTRAINT a_message_is_valid
        CHECK (outbox.message_is_valid(topic, key, idempotency_key, type, payload, headers, created_at)) NOT VALID;

-- The shard of a key, for the same reason: not inlined. `baton migrate outbox` writes the number of shards into it.
DO $do$
BEGIN
    EXECUTE format(
        $f$CREATE OR REPLACE FUNCTION outbox.shard_of(key text, "position" bigint) RETURNS smallint
            LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
            BEGIN
                RETURN ((coalesce(hashtextextended(key COLLATE "C", 0), "position") & 9223372036854775807) %% %s)::smallint;
            END $$$f$,
        coalesce((SELECT shards FROM outbox.settings), 8));
END $do$;

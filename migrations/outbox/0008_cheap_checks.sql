-- What the check costs. For '{1,249}' Postgres builds an automaton that counts, and builds it again, step by step, for every row: it was
-- half of what an insert cost. A search for one character that does not belong needs two states; the length is asked apart. A row
-- with headers cost as much again, because each function asked a query about them. A row that breaks nothing is judged by one
-- expression now, and its headers by two more. What is refused, by which name, text and code, is what it was.

-- Not immutable: it must not be tried out while something is planned. Strict: where nothing is broken it is not called.
CREATE OR REPLACE FUNCTION outbox.refuse(broken text) RETURNS boolean LANGUAGE plpgsql STRICT PARALLEL SAFE AS $$
BEGIN
    RAISE EXCEPTION 'new row for relation "message" violates check constraint "%"', broken
        USING ERRCODE = 'check_violation', CONSTRAINT = broken, SCHEMA = 'outbox', TABLE = 'message';
END $$;

-- An object {"name": value}, or an array of pairs [["name", value], …] where order or repeats matter; JSON null is none.
CREATE OR REPLACE FUNCTION outbox.headers_are_valid(headers jsonb) RETURNS boolean
    LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
BEGIN
    -- Nothing but strings and nulls. 'strict', because 'lax' looks into an array as if its elements stood there.
    IF (CASE jsonb_typeof(headers)
            WHEN 'object' THEN NOT headers @? 'strict $.* ? (@.type() != "string" && @.type() != "null")'
            WHEN 'array' THEN NOT headers @? 'strict $[*] ? (!(@.type() == "array" && @.size() == 2 && @[0].type() == "string" && (@[1].type() == "string" || @[1].type() == "null")))'
        END) THEN
        RETURN true;
    END IF;
    -- Values by base64 are looked at one by one, and so is whatever is wrong.
    CASE jsonb_typeof(headers)
        WHEN 'null' THEN
            RETURN true;
        WHEN 'object' THEN
            RETURN NOT EXISTS (SELECT FROM jsonb_each(headers) h WHERE NOT outbox.header_value_is_valid(h.value));
        WHEN 'array' THEN
            RETURN NOT EXISTS (
                SELECT FROM jsonb_array_elements(headers) pair
                WHERE CASE WHEN jsonb_typeof(pair) <> 'array' THEN true
                           WHEN jsonb_array_length(pair) <> 2 OR jsonb_typeof(pair -> 0) <> 'string' THEN true
                           ELSE NOT outbox.header_value_is_valid(pair -> 1) END);
        ELSE
            RETURN false;
    END CASE;
END $$;

-- Which rule headers break; null where there are none, or none is broken.
CREATE OR REPLACE FUNCTION outbox.broken_by_headers(headers jsonb) RETURNS text LANGUAGE plpgsql IMMUTABLE STRICT PARALLEL SAFE AS $$
BEGIN
    RETURN CASE
        WHEN octet_length(headers::text) > 262144 THEN 'headers_at_most_256_kib'
        WHEN NOT outbox.headers_are_valid(headers) THEN 'headers_must_be_an_object_or_an_array_of_pairs'
        WHEN CASE jsonb_typeof(headers)
                WHEN 'object' THEN headers ?| ARRAY['ce_id', 'ce_type', 'ce_specversion', 'idempotency-key']
                WHEN 'array' THEN headers @? 'strict $[*][0] ? (@ == "ce_id" || @ == "ce_type" || @ == "ce_specversion" || @ == "idempotency-key")'
             END THEN 'headers_must_not_name_what_has_a_column'
    END;
END $$;

CREATE OR REPLACE FUNCTION outbox.message_is_valid(
    topic text, key text, idempotency_key text, type text, payload bytea, headers jsonb, created_at timestamptz
) RETURNS boolean LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
BEGIN
    -- One expression, because each that plpgsql evaluates is set up again in every transaction.
    RETURN coalesce(outbox.refuse(CASE
        WHEN topic ~ '[^a-zA-Z0-9._-]' OR octet_length(topic) NOT BETWEEN 1 AND 249 OR topic = '.' OR topic = '..'
            THEN 'topic_must_be_1_to_249_of_letters_digits_dot_underscore_dash'
        WHEN octet_length(key) > 65536 THEN 'key_at_most_64_kib'
        WHEN octet_length(idempotency_key) NOT BETWEEN 1 AND 1024 THEN 'idempotency_key_from_1_byte_to_1_kib'
        WHEN octet_length(type) NOT BETWEEN 1 AND 1024 THEN 'type_from_1_byte_to_1_kib'
        WHEN octet_length(payload) > 67108864 THEN 'payload_at_most_64_mib'
        WHEN created_at < '1970-01-01 00:00:00+00' OR created_at >= '10000-01-01 00:00:00+00' THEN 'created_at_from_1970_to_9999'
        ELSE outbox.broken_by_headers(headers)
    END), true);
END $$;

-- outbox.headers_name_a_column, which nothing calls any more, stays: a long insert that runs while this is applied still calls it.

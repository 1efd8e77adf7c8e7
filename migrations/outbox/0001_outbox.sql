-- The outbox: an append-only table of messages, the shards that relays lease, and the cursors that say how far each
-- shard is published. Column names, header shapes and the shard hash are a public format.

CREATE SCHEMA IF NOT EXISTS outbox;

-- What was chosen for this database. One row, made by `baton migrate outbox`.
CREATE TABLE outbox.settings (
    only_row          boolean PRIMARY KEY DEFAULT true CHECK (only_row),
    outbox_id         uuid NOT NULL DEFAULT gen_random_uuid(),
    system_identifier bigint NOT NULL,
    shards            smallint NOT NULL CONSTRAINT shards_from_1_to_1024 CHECK (shards BETWEEN 1 AND 1024),
    slot_period       interval NOT NULL CONSTRAINT slot_period_at_least_1s CHECK (slot_period >= interval '1 second'),
    created_at        timestamptz NOT NULL DEFAULT clock_timestamp()
);
COMMENT ON COLUMN outbox.settings.outbox_id IS 'names this outbox on a Kafka that several services share; renewed by baton rebase';

-- `baton migrate outbox` replaces these two with the numbers of outbox.settings as literals, so that inserts inline them.
CREATE FUNCTION outbox.shard_of(key text, "position" bigint) RETURNS smallint
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    RETURN (coalesce(hashtextextended(key COLLATE "C", 0), "position") & 9223372036854775807) % 8;

CREATE FUNCTION outbox.slot_at(at timestamptz) RETURNS smallint
    LANGUAGE sql STABLE PARALLEL SAFE
    RETURN floor(extract(epoch FROM at) / 21600)::bigint % 4;

-- A header value is a string, null, or {"base64": "…"}: RFC 4648 with its padding, white space skipped because encode()
-- breaks lines. decode() would be no judge: it takes more than that ('QQ=A'), and other decoders do not.
CREATE FUNCTION outbox.header_value_is_valid(value jsonb) RETURNS boolean
    LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT CASE jsonb_typeof(value)
        WHEN 'string' THEN true
        WHEN 'null' THEN true
        WHEN 'object' THEN jsonb_typeof(value -> 'base64') IS NOT DISTINCT FROM 'string' AND value - 'base64' = '{}'
            AND translate(value ->> 'base64', E' \t\r\n', '') COLLATE "C"
                ~ '^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$'
        ELSE false END
$$;

-- An object {"name": value}, or an array of pairs [["name", value], …] where order or repeats matter; JSON null is none.
CREATE FUNCTION outbox.headers_are_valid(headers jsonb) RETURNS boolean
    LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
BEGIN
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

-- True when a header has the name of something that has a column of its own.
CREATE FUNCTION outbox.headers_name_a_column(headers jsonb) RETURNS boolean
    LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT CASE jsonb_typeof(headers)
        WHEN 'object' THEN headers ?| ARRAY['ce_id', 'ce_type', 'ce_specversion', 'idempotency-key']
        WHEN 'array' THEN EXISTS (
            SELECT FROM jsonb_array_elements(headers) pair
            WHERE pair ->> 0 IN ('ce_id', 'ce_type', 'ce_specversion', 'idempotency-key'))
        ELSE false END
$$;

-- One row is one message. `xid` stands before `position` so that a row takes its transaction id before its position:
-- the reading rule rests on it. No unique index and no trigger: an insert must neither fail nor wait because of the relay.
CREATE TABLE outbox.message (
    xid             xid8 NOT NULL DEFAULT pg_current_xact_id(),
    "position"      bigint NOT NULL GENERATED ALWAYS AS IDENTITY (CACHE 1),
    slot            smallint NOT NULL DEFAULT outbox.slot_at(now()),
    shard           smallint NOT NULL GENERATED ALWAYS AS (outbox.shard_of(key, "position")) STORED,
    id              uuid NOT NULL DEFAULT gen_random_uuid(),
    idempotency_key text COLLATE "C",
    topic           text COLLATE "C" NOT NULL,
    key             text COLLATE "C",
    type            text COLLATE "C",
    payload         bytea,
    headers         jsonb,
    created_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT topic_must_be_1_to_249_of_letters_digits_dot_underscore_dash
        CHECK (topic ~ '^[a-zA-Z0-9._-]{1,249}$' AND topic <> '.' AND topic <> '..'),
    CONSTRAINT key_at_most_64_kib CHECK (octet_length(key) <= 65536),
    CONSTRAINT idempotency_key_from_1_byte_to_1_kib CHECK (octet_length(idempotency_key) BETWEEN 1 AND 1024),
    CONSTRAINT type_from_1_byte_to_1_kib CHECK (octet_length(type) BETWEEN 1 AND 1024),
    CONSTRAINT payload_at_most_64_mib CHECK (octet_length(payload) <= 67108864),
    CONSTRAINT headers_at_most_256_kib CHECK (headers IS NULL OR octet_length(headers::text) <= 262144),
    CONSTRAINT headers_must_be_an_object_or_an_array_of_pairs CHECK (headers IS NULL OR outbox.headers_are_valid(headers)),
    CONSTRAINT headers_must_not_name_what_has_a_column CHECK (headers IS NULL OR NOT outbox.headers_name_a_column(headers))
) PARTITION BY LIST (slot);

CREATE TABLE outbox.message_0 PARTITION OF outbox.message FOR VALUES IN (0);
CREATE TABLE outbox.message_1 PARTITION OF outbox.message FOR VALUES IN (1);
CREATE TABLE outbox.message_2 PARTITION OF outbox.message FOR VALUES IN (2);
CREATE TABLE outbox.message_3 PARTITION OF outbox.message FOR VALUES IN (3);

-- No statistics on xid: after a bulk load one xid may be every row, and the planner would then leave (shard, xid) for a walk
-- over the whole shard. Without them it always takes the index.
ALTER TABLE outbox.message ALTER COLUMN xid SET STATISTICS 0;
ALTER TABLE outbox.message_0 ALTER COLUMN xid SET STATISTICS 0;
ALTER TABLE outbox.message_1 ALTER COLUMN xid SET STATISTICS 0;
ALTER TABLE outbox.message_2 ALTER COLUMN xid SET STATISTICS 0;
ALTER TABLE outbox.message_3 ALTER COLUMN xid SET STATISTICS 0;

CREATE INDEX message_shard_position ON outbox.message (shard, "position");
CREATE INDEX message_shard_xid ON outbox.message (shard, xid);

-- For SQL callers. Other languages insert into outbox.message as they are used to.
CREATE FUNCTION outbox.enqueue(topic text, key text, payload jsonb, headers jsonb DEFAULT NULL, type text DEFAULT NULL, idempotency_key text DEFAULT NULL)
    RETURNS uuid LANGUAGE sql AS $$
    INSERT INTO outbox.message (topic, key, payload, headers, type, idempotency_key)
    VALUES ($1, $2, convert_to($3::text, 'UTF8'), $4, $5, $6)
    RETURNING id
$$;

-- Who may publish which slice of the keys, until when. `generation` only ever rises.
CREATE TABLE outbox.shard (
    shard       smallint PRIMARY KEY,
    owner       text,
    generation  bigint NOT NULL DEFAULT 0,
    lease_until timestamptz,
    CONSTRAINT an_owner_has_an_expiry CHECK ((owner IS NULL) = (lease_until IS NULL)),
    CONSTRAINT a_generation_never_falls_below_zero CHECK (generation >= 0)
) WITH (fillfactor = 10);

-- How far a shard is published: every message with position <= `position` that `snapshot` shows, and, while late ones are
-- being worked off, those that `late_snapshot` shows up to `late_position`. `generation` is that of the last claim:
-- a claim writes it, so an advance and a claim meet on this row's lock.
CREATE TABLE outbox.cursor (
    shard         smallint PRIMARY KEY REFERENCES outbox.shard,
    generation    bigint NOT NULL DEFAULT 0,
    "position"    bigint NOT NULL DEFAULT 0,
    snapshot      pg_snapshot NOT NULL,
    ceiling       xid8 NOT NULL,
    late_snapshot pg_snapshot,
    late_position bigint,
    advanced_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT a_late_page_has_a_snapshot_and_a_position CHECK ((late_snapshot IS NULL) = (late_position IS NULL))
) WITH (fillfactor = 10);

-- Emptied by crash recovery and by promotion. Every claim remembers the token, every advance requires it: after a crash that
-- lost the tail, positions are given out again, and a cursor kept in memory would skip what is written under them.
CREATE UNLOGGED TABLE outbox.token (
    only_row boolean PRIMARY KEY DEFAULT true CHECK (only_row),
    token    uuid NOT NULL DEFAULT gen_random_uuid()
);

-- The relays that live, so that they share the shards fairly. A row past `live_until` counts for nothing.
CREATE TABLE outbox.relay (
    owner      text PRIMARY KEY,
    started_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    live_until timestamptz NOT NULL
) WITH (fillfactor = 10);

-- Messages set aside, in order, and those that wait behind them.
CREATE TABLE outbox.parked (
    id              uuid NOT NULL,
    "position"      bigint PRIMARY KEY,
    shard           smallint NOT NULL REFERENCES outbox.shard,
    idempotency_key text COLLATE "C",
    topic           text COLLATE "C" NOT NULL,
    key             text COLLATE "C",
    type            text COLLATE "C",
    payload         bytea,
    headers         jsonb,
    created_at      timestamptz NOT NULL,
    state           text NOT NULL CONSTRAINT state_is_known
        CHECK (state IN ('retrying', 'blocked', 'paused', 'dead', 'published', 'discarded')),
    cause           text CONSTRAINT cause_is_known
        CHECK (cause IN ('too_large', 'unknown_topic', 'invalid_topic', 'not_authorized', 'invalid_record', 'paused')),
    error           text,
    attempts        integer NOT NULL DEFAULT 0 CHECK (attempts >= 0),
    first_failed_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    last_failed_at  timestamptz,
    next_attempt_at timestamptz,
    generation      bigint NOT NULL,
    CONSTRAINT what_is_not_blocked_has_a_cause CHECK (state = 'blocked' OR cause IS NOT NULL),
    CONSTRAINT only_a_retrying_one_has_a_next_attempt CHECK (next_attempt_at IS NULL OR state = 'retrying')
);
-- By a hash of the key, because a key may be longer than an index row; look-ups name both.
CREATE INDEX parked_queue ON outbox.parked (shard, topic, hashtextextended(key, 0), "position")
    WHERE state IN ('retrying', 'blocked', 'paused', 'dead');
CREATE INDEX parked_due ON outbox.parked (shard, next_attempt_at) WHERE state = 'retrying';
CREATE INDEX parked_id ON outbox.parked (id);

-- Who changed what by the commands that change something.
CREATE TABLE outbox.audit (
    id        bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at        timestamptz NOT NULL DEFAULT clock_timestamp(),
    who       text NOT NULL DEFAULT session_user,
    command   text NOT NULL,
    arguments jsonb NOT NULL DEFAULT '{}',
    affected  bigint NOT NULL
);

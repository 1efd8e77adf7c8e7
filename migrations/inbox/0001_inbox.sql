-- The inbox: what each consumer has applied, by idempotency key, and what it has set aside.

CREATE SCHEMA IF NOT EXISTS inbox;

-- One row is one piece of work of one consumer. In transactional mode the row, the handler's effects and the completion
-- commit together, so others only ever see `done` or `dead`; `in_progress` is seen in leased mode. The limits: a consumer is
-- part of a topic's name; a scope holds a topic of 249 and a type of 1 KiB; the three together fit an index row of 2704.
CREATE TABLE inbox.message (
    consumer      text COLLATE "C" NOT NULL CONSTRAINT consumer_from_1_to_249_bytes CHECK (octet_length(consumer) BETWEEN 1 AND 249),
    scope         text COLLATE "C" NOT NULL CONSTRAINT scope_at_most_1280_bytes CHECK (octet_length(scope) <= 1280),
    key           text COLLATE "C" NOT NULL CONSTRAINT key_from_1_byte_to_1_kib CHECK (octet_length(key) BETWEEN 1 AND 1024),
    fingerprint   text COLLATE "C" NOT NULL CONSTRAINT fingerprint_names_its_version CHECK (fingerprint ~ '^v[0-9]+:[a-z0-9]+:[0-9a-f]+$'),
    state         text NOT NULL CONSTRAINT state_is_known CHECK (state IN ('in_progress', 'done', 'dead')),
    owner         text,
    generation    bigint NOT NULL DEFAULT 1 CHECK (generation >= 1),
    lease_until   timestamptz,
    attempts      integer NOT NULL DEFAULT 1 CHECK (attempts >= 0),
    outcome       json,
    cause         text,
    error         text,
    record_time   timestamptz,
    topic         text,
    "partition"   integer,
    "offset"      bigint,
    created_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    finished_at   timestamptz,
    PRIMARY KEY (consumer, scope, key),
    CONSTRAINT what_is_settled_has_a_time CHECK ((state IN ('done', 'dead')) = (finished_at IS NOT NULL)),
    CONSTRAINT what_is_settled_has_no_lease CHECK (state = 'in_progress' OR lease_until IS NULL),
    CONSTRAINT only_a_done_one_has_an_outcome CHECK (outcome IS NULL OR state = 'done'),
    CONSTRAINT a_dead_one_has_a_cause CHECK ((state = 'dead') = (cause IS NOT NULL))
);
CREATE INDEX message_purge ON inbox.message (consumer, record_time) WHERE state = 'done';

-- Records set aside so that offsets may move on, in order per (consumer, topic, key).
CREATE TABLE inbox.parked (
    consumer           text COLLATE "C" NOT NULL,
    sequence           bigint GENERATED ALWAYS AS IDENTITY (CACHE 1) PRIMARY KEY,
    topic              text COLLATE "C" NOT NULL,
    "partition"        integer NOT NULL,
    "offset"           bigint NOT NULL,
    key                bytea,
    payload            bytea,
    headers            json NOT NULL DEFAULT '[]',
    record_time        timestamptz,
    scope              text COLLATE "C" NOT NULL,
    idempotency_key    text COLLATE "C" NOT NULL,
    state              text NOT NULL CONSTRAINT state_is_known CHECK (state IN ('retrying', 'blocked', 'dead', 'done', 'discarded')),
    cause              text,
    error              text,
    attempts           integer NOT NULL DEFAULT 0 CHECK (attempts >= 0),
    first_failed_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    last_failed_at     timestamptz,
    next_attempt_at    timestamptz,
    owner              text,
    generation         bigint NOT NULL DEFAULT 0,
    lease_until        timestamptz,
    UNIQUE (consumer, topic, "partition", "offset", idempotency_key),
    CONSTRAINT an_owner_has_an_expiry CHECK ((owner IS NULL) = (lease_until IS NULL))
);
-- By a hash of the key, because a key may be longer than an index row; look-ups name both.
CREATE INDEX parked_queue ON inbox.parked (consumer, topic, sha256(key), sequence) WHERE state IN ('retrying', 'blocked', 'dead');
CREATE INDEX parked_due ON inbox.parked (consumer, next_attempt_at) WHERE state = 'retrying';

-- The highest record time ever purged: what is at or below it and has no row is too old to be told from a duplicate.
CREATE TABLE inbox.horizon (
    consumer           text COLLATE "C" PRIMARY KEY,
    purged_record_time timestamptz NOT NULL
);

CREATE TABLE inbox.audit (
    id        bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at        timestamptz NOT NULL DEFAULT clock_timestamp(),
    who       text NOT NULL DEFAULT session_user,
    command   text NOT NULL,
    arguments jsonb NOT NULL DEFAULT '{}',
    affected  bigint NOT NULL
);

-- Replay plans: which dead letters an operator has chosen to send again, and what became of each (docs/decisions/0017).
-- They stand in the consumer's database, because the consumer says what became of an item in the transaction that settles its work.

CREATE TABLE inbox.replay_plan (
    plan         uuid PRIMARY KEY DEFAULT gen_random_uuid(),
    consumer     text COLLATE "C" NOT NULL,
    topic        text COLLATE "C" NOT NULL,
    dead_letters text COLLATE "C" NOT NULL,
    target       text COLLATE "C" NOT NULL,
    new_key      boolean NOT NULL,
    again        boolean NOT NULL,
    loop_cap     integer NOT NULL CONSTRAINT loop_cap_is_not_negative CHECK (loop_cap >= 0),
    filters      jsonb NOT NULL DEFAULT '{}',
    -- By partition of the dead-letter topic: up to where it was read.
    ends         jsonb NOT NULL,
    skipped      jsonb NOT NULL DEFAULT '{}',
    items        bigint NOT NULL,
    created_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    created_by   text NOT NULL DEFAULT session_user
);

-- One row is one dead letter under one plan: where it stands, what it says of itself, and who is sending it.
CREATE TABLE inbox.replay_item (
    plan               uuid NOT NULL REFERENCES inbox.replay_plan,
    item               bigint NOT NULL CONSTRAINT items_count_from_1 CHECK (item >= 1),
    consumer           text COLLATE "C" NOT NULL,
    "partition"        integer NOT NULL,
    "offset"           bigint NOT NULL,
    -- Names the record that died, whichever of its letters this is.
    subject            bytea NOT NULL,
    -- What the replayed record carries: how often it has been replayed by then.
    round              integer NOT NULL CONSTRAINT rounds_count_from_1 CHECK (round >= 1),
    cause              text,
    -- What the inbox knows its work by, the new key where the plan makes one; null where the letter names no identity.
    idempotency_key    text COLLATE "C",
    original_topic     text COLLATE "C",
    original_partition integer,
    original_offset    bigint,
    original_time_ms   bigint,
    first_failed_at    timestamptz,
    failed_at          timestamptz,
    state              text NOT NULL DEFAULT 'waiting' CONSTRAINT state_is_known
                       CHECK (state IN ('waiting', 'sending', 'sent', 'applied', 'duplicate', 'conflict', 'dead_again')),
    owner              text,
    generation         bigint NOT NULL DEFAULT 0,
    lease_until        timestamptz,
    error              text,
    sent_at            timestamptz,
    revived_at         timestamptz,
    settled_at         timestamptz,
    PRIMARY KEY (plan, item),
    UNIQUE (plan, "partition", "offset"),
    CONSTRAINT what_is_being_sent_has_a_lease CHECK ((state = 'sending') = (lease_until IS NOT NULL) AND (lease_until IS NULL OR owner IS NOT NULL)),
    CONSTRAINT what_is_sent_has_a_time CHECK ((state IN ('waiting', 'sending')) = (sent_at IS NULL)),
    CONSTRAINT what_is_settled_has_a_time CHECK ((state IN ('applied', 'duplicate', 'conflict', 'dead_again')) = (settled_at IS NOT NULL))
);
CREATE INDEX replay_item_unsent ON inbox.replay_item (plan, item) WHERE state IN ('waiting', 'sending');
CREATE INDEX replay_item_subject ON inbox.replay_item (consumer, subject);
-- What is planned and not settled keeps its inbox row: without it the replay would be new work.
CREATE INDEX replay_item_unsettled ON inbox.replay_item (consumer, idempotency_key)
    WHERE state IN ('waiting', 'sending', 'sent');

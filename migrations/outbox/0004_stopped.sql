-- What a shard stands still at, for whoever asks; and times that a record can carry.

-- The message that Kafka refused last in each shard, one row a shard, written by the owner of its lease. It counts as long as
-- that message is there and the shard's cursor does not cover it: nothing is deleted when a shard flows again, and what a
-- killed relay wrote stays true. `xid` is the message's, because a position alone does not say whether a cursor covers it.
CREATE TABLE outbox.stopped (
    shard           smallint PRIMARY KEY REFERENCES outbox.shard ON DELETE CASCADE,
    "position"      bigint NOT NULL,
    xid             xid8 NOT NULL,
    id              uuid NOT NULL,
    topic           text COLLATE "C" NOT NULL,
    key             text COLLATE "C",
    cause           text NOT NULL CONSTRAINT cause_is_known
        CHECK (cause IN ('too_large', 'unknown_topic', 'invalid_topic', 'not_authorized', 'invalid_record')),
    error           text NOT NULL,
    attempts        integer NOT NULL CONSTRAINT an_attempt_was_made CHECK (attempts >= 1),
    generation      bigint NOT NULL,
    first_failed_at timestamptz NOT NULL,
    last_failed_at  timestamptz NOT NULL,
    next_attempt_at timestamptz NOT NULL
);
COMMENT ON COLUMN outbox.stopped.generation IS 'of the lease under which it was tried last';

-- A record's timestamp counts milliseconds from 1970 on, and RFC 3339 has four digits for a year. Only the owner of the
-- table can set this column, so rows that are there already are not looked at: an operator who has a strange one can
-- still migrate, and it is published with the earliest time there is.
ALTER TABLE outbox.message ADD CONSTRAINT created_at_from_1970_to_9999
    CHECK (created_at >= '1970-01-01 00:00:00+00' AND created_at < '10000-01-01 00:00:00+00') NOT VALID;

-- Messages set aside: what relays and operators need beside the table itself, which no relay has written to before this.

-- `place` is the order in which messages were set aside. It is the order of a key's queue, and not `position`: a message that
-- commits late has a lower position than those it has to wait behind. One owner at a time sets a shard's messages aside.
ALTER TABLE outbox.parked
    ADD COLUMN place bigint GENERATED ALWAYS AS IDENTITY,
    ADD COLUMN budget_from integer NOT NULL DEFAULT 0 CONSTRAINT a_budget_begins_at_an_attempt CHECK (budget_from BETWEEN 0 AND attempts),
    ADD COLUMN settled_at timestamptz,
    -- One that waited behind another and is tried now has no cause of its own.
    DROP CONSTRAINT what_is_not_blocked_has_a_cause,
    ADD CONSTRAINT what_is_dead_or_paused_has_a_cause CHECK (state NOT IN ('dead', 'paused') OR cause IS NOT NULL),
    ADD CONSTRAINT only_a_settled_one_has_an_end CHECK (settled_at IS NULL OR state IN ('published', 'discarded'));
COMMENT ON COLUMN outbox.parked.budget_from IS 'how many attempts were spent when it was requeued last: its budget counts from there';

DROP INDEX outbox.parked_queue;
CREATE INDEX parked_queue ON outbox.parked (shard, topic, hashtextextended(key, 0), place)
    WHERE state IN ('retrying', 'blocked', 'paused', 'dead');
-- Those that count towards the most that a shard may have.
CREATE INDEX parked_counted ON outbox.parked (shard)
    WHERE state IN ('retrying', 'blocked', 'paused', 'dead') AND cause IS DISTINCT FROM 'paused';
CREATE INDEX parked_settled ON outbox.parked (settled_at) WHERE settled_at IS NOT NULL;

-- The topics that operators have paused: what is read for one is set aside instead of published.
CREATE TABLE outbox.paused (
    topic text COLLATE "C" PRIMARY KEY,
    since timestamptz NOT NULL DEFAULT clock_timestamp(),
    who   text NOT NULL DEFAULT session_user
);

-- A cursor for every shard that has none. It starts from a real snapshot: whatever is at or below its position has
-- been seen, whatever comes later lies above it. $1 position.
WITH fenced AS (
    INSERT INTO outbox.fence (shard, generation) SELECT shard, generation FROM outbox.shard
    ON CONFLICT (shard) DO NOTHING
    RETURNING shard, generation
)
INSERT INTO outbox.advance (shard, number, generation, "position", snapshot, ceiling)
SELECT shard, 1, generation, $1, pg_current_snapshot(), pg_current_xact_id() FROM fenced

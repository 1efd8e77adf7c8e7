-- A cursor for every shard that has none. It starts from a real snapshot: whatever is at or below its position has
-- been seen, whatever comes later lies above it. $1 position.
INSERT INTO outbox.cursor (shard, generation, "position", snapshot, ceiling)
SELECT shard, generation, $1, pg_current_snapshot(), pg_current_xact_id() FROM outbox.shard
ON CONFLICT (shard) DO NOTHING

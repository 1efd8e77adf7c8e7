-- The shards that are not there yet. They start at the highest generation that any of them had, so that a generation
-- never comes back. $1 number of shards.
INSERT INTO outbox.shard (shard, generation)
SELECT s, (SELECT coalesce(max(generation), 0) FROM outbox.shard)
FROM generate_series(0, $1::integer - 1) s
ON CONFLICT (shard) DO NOTHING

-- The shards that have no cursor; of all there are, not of those that some table happens to have a row of.
SELECT coalesce(array_agg(n.shard::smallint ORDER BY n.shard), '{}')
FROM generate_series(0, greatest((SELECT shards::integer FROM outbox.settings), (SELECT max(shard) + 1 FROM outbox.shard)) - 1) n(shard)
WHERE NOT EXISTS (SELECT FROM outbox.cursor c WHERE c.shard = n.shard)

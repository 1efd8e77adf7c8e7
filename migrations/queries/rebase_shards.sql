-- Nobody's, under a generation that nobody ever had. $1 shards.
INSERT INTO outbox.shard AS s (shard, generation)
SELECT n.shard, 1 + greatest(held.generation, f.generation, (SELECT max(a.generation) FROM outbox.advance a WHERE a.shard = n.shard), 0)
FROM unnest($1::smallint[]) AS n(shard)
LEFT JOIN outbox.shard held ON held.shard = n.shard
LEFT JOIN outbox.fence f ON f.shard = n.shard
ON CONFLICT (shard) DO UPDATE SET owner = NULL, lease_until = NULL, generation = excluded.generation

-- Claims and advances meet on these rows: an advance of an earlier generation matches none from now on. $1 shards.
INSERT INTO outbox.fence (shard, generation)
SELECT s.shard, s.generation FROM outbox.shard s WHERE s.shard = ANY ($1::smallint[])
ON CONFLICT (shard) DO UPDATE SET generation = excluded.generation

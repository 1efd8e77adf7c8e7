-- One more row of each shard's ring. $1 shards, $2 positions, $3 the snapshot, which shows whatever lies at or below them.
INSERT INTO outbox.advance (shard, number, generation, "position", snapshot, ceiling)
SELECT n.shard, 1 + coalesce((SELECT max(a.number) FROM outbox.advance a WHERE a.shard = n.shard), 0), s.generation, n."position",
       $3::pg_snapshot, pg_current_xact_id()
FROM unnest($1::smallint[], $2::bigint[]) AS n(shard, "position")
JOIN outbox.shard s ON s.shard = n.shard

-- Moves cursors by what Kafka has acknowledged. $1 owner, $2 token, $3 shards, $4 generations, $5 positions, $6 snapshots,
-- $7 ceilings, $8 late snapshots or null, $9 late positions or null. What is not returned is fenced.
UPDATE outbox.cursor AS c
SET "position" = a."position", snapshot = a.snapshot::pg_snapshot, ceiling = a.ceiling::xid8,
    late_snapshot = a.late_snapshot::pg_snapshot, late_position = a.late_position, advanced_at = clock_timestamp()
FROM (SELECT * FROM unnest($3::smallint[], $4::bigint[], $5::bigint[], $6::text[], $7::text[], $8::text[], $9::bigint[])
          AS a(shard, generation, "position", snapshot, ceiling, late_snapshot, late_position) ORDER BY a.shard) a,
     outbox.shard s, outbox.token t
WHERE c.shard = a.shard AND c.generation = a.generation
  AND s.shard = a.shard AND s.owner = $1 AND s.generation = a.generation AND s.lease_until > clock_timestamp()
  AND t.token = $2
RETURNING c.shard

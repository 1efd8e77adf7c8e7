-- Moves cursors by what Kafka has acknowledged: appends a row for each. $1 owner, $2 token, $3 shards, $4 generations,
-- $5 positions, $6 snapshots, $7 ceilings, $8 late snapshots or null, $9 late positions or null. What is not returned is
-- fenced. The fence rows are locked first, in order of shard, so that a claim comes wholly before or wholly after; the lease
-- is judged once more when the lock is there.
WITH held AS MATERIALIZED (
    SELECT a.*, s.lease_until
    FROM unnest($3::smallint[], $4::bigint[], $5::bigint[], $6::text[], $7::text[], $8::text[], $9::bigint[])
             AS a(shard, generation, "position", snapshot, ceiling, late_snapshot, late_position)
    JOIN outbox.fence f ON f.shard = a.shard AND f.generation = a.generation
    JOIN outbox.token t ON t.only_row AND t.token = $2
    -- By the index shard_lease and its newest entry: renewals leave versions of the lease row behind.
    CROSS JOIN LATERAL (
        SELECT s.lease_until FROM outbox.shard s
        WHERE s.shard + 0 = a.shard AND s.lease_until > (SELECT clock_timestamp())
          AND s.owner = $1 AND s.generation = a.generation
        ORDER BY s.lease_until DESC LIMIT 1
    ) s
    ORDER BY a.shard
    FOR UPDATE OF f
)
INSERT INTO outbox.advance (shard, number, generation, "position", snapshot, ceiling, late_snapshot, late_position)
SELECT h.shard,
       (SELECT last.number FROM outbox.advance last WHERE last.shard = h.shard ORDER BY last.number DESC LIMIT 1) + 1,
       h.generation, h."position", h.snapshot::pg_snapshot, h.ceiling::xid8, h.late_snapshot::pg_snapshot, h.late_position
FROM held h
WHERE h.lease_until > clock_timestamp()
RETURNING shard, number

-- Planted, in test builds only: the lease must be valid and its owner's name must be ours, but any generation is taken for
-- the current one. A relay that was stopped is not told from its namesake that took over.
-- Parameters and columns as in cursor_advance.sql.
WITH held AS MATERIALIZED (
    SELECT a.*
    FROM unnest($3::smallint[], $4::bigint[], $5::bigint[], $6::text[], $7::text[], $8::text[], $9::bigint[])
             AS a(shard, generation, "position", snapshot, ceiling, late_snapshot, late_position)
    JOIN outbox.fence f ON f.shard = a.shard
    JOIN outbox.token t ON t.token = $2
    JOIN outbox.shard s ON s.shard = a.shard AND s.owner = $1 AND s.lease_until > clock_timestamp()
    ORDER BY a.shard
    FOR UPDATE OF f
)
INSERT INTO outbox.advance (shard, number, generation, "position", snapshot, ceiling, late_snapshot, late_position)
SELECT h.shard,
       (SELECT last.number FROM outbox.advance last WHERE last.shard = h.shard ORDER BY last.number DESC LIMIT 1) + 1,
       h.generation, h."position", h.snapshot::pg_snapshot, h.ceiling::xid8, h.late_snapshot::pg_snapshot, h.late_position
FROM held h
RETURNING shard, number

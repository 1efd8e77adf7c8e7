-- Planted, in test builds only: whoever asks moves the cursor, whether the lease is his or not.
-- Parameters and columns as in cursor_advance.sql.
INSERT INTO outbox.advance (shard, number, generation, "position", snapshot, ceiling, late_snapshot, late_position)
SELECT a.shard,
       (SELECT last.number FROM outbox.advance last WHERE last.shard = a.shard ORDER BY last.number DESC LIMIT 1) + 1,
       a.generation, a."position", a.snapshot::pg_snapshot, a.ceiling::xid8, a.late_snapshot::pg_snapshot, a.late_position
FROM unnest($3::smallint[], $4::bigint[], $5::bigint[], $6::text[], $7::text[], $8::text[], $9::bigint[])
         AS a(shard, generation, "position", snapshot, ceiling, late_snapshot, late_position)
WHERE $1::text IS NOT NULL AND $2::uuid IS NOT NULL
RETURNING shard, number

-- One row a shard: its lease, its cursor, and what waits above it; counted up to 10,000, estimated beyond, so that it costs
-- the same however much waits.
SELECT s.shard, s.owner, s.generation,
       -- Judged by the moment of its snapshot: a slow look must not let leases run out that were renewed meanwhile.
       extract(epoch FROM s.lease_until - statement_timestamp())::double precision AS lease_left,
       c."position", c.snapshot::text, c.ceiling::text, c.late_snapshot::text, c.late_position,
       CASE WHEN w.counted <= 10000 THEN w.counted
            ELSE greatest(10001, (w.last - c."position") / greatest((SELECT count(*) FROM outbox.shard), 1)) END AS lag,
       w.counted <= 10000 AS exact,
       extract(epoch FROM clock_timestamp() - w.oldest)::double precision AS lag_seconds
FROM outbox.shard s
JOIN outbox.cursor c USING (shard)
CROSS JOIN (SELECT pg_current_snapshot() AS shown OFFSET 0) now
CROSS JOIN LATERAL (
    SELECT count(*) AS counted, min(p.created_at) FILTER (WHERE isfinite(p.created_at)) AS oldest,
           (SELECT m."position" FROM outbox.message m WHERE m.shard = s.shard ORDER BY m."position" DESC LIMIT 1) AS last
    FROM (
        (SELECT m.created_at FROM outbox.message m
         WHERE m.shard = s.shard AND m."position" > c."position" ORDER BY m."position" LIMIT 10001)
        UNION ALL
        (SELECT late.created_at
         FROM outbox.late_rows(s.shard, c."position", c.snapshot, c.ceiling, c.late_snapshot, c.late_position, now.shown, 10001) late
         LIMIT 10001)
        LIMIT 10001
    ) p
) w
ORDER BY s.shard

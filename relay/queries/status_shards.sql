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
CROSS JOIN LATERAL (
    SELECT count(*) AS counted, min(p.created_at) FILTER (WHERE isfinite(p.created_at)) AS oldest,
           (SELECT m."position" FROM outbox.message m WHERE m.shard = s.shard ORDER BY m."position" DESC LIMIT 1) AS last
    FROM (
        (SELECT m.created_at FROM outbox.message m
         WHERE m.shard = s.shard AND m."position" > c."position" ORDER BY m."position" LIMIT 10001)
        UNION ALL
        -- As in page_read.sql: those that the cursor saw running, id by id, and those from its snapshot's xmax to the ceiling.
        (SELECT late.created_at
         FROM unnest(ARRAY(SELECT x FROM pg_snapshot_xip(c.snapshot) x WHERE pg_visible_in_snapshot(x, pg_current_snapshot()))) AS x(xid)
         CROSS JOIN LATERAL (
            SELECT m.created_at FROM outbox.message m
            WHERE m.shard = s.shard AND outbox.xid_bits(m.xid) BETWEEN outbox.xid_bits(x.xid) AND outbox.xid_bits(x.xid)
              AND m.xid = x.xid AND m."position" + 0 <= c."position"
              AND NOT (c.late_snapshot IS NOT NULL AND m."position" <= c.late_position AND pg_visible_in_snapshot(m.xid, c.late_snapshot))
            -- This order keeps the planner on the late index.
            ORDER BY m.shard, outbox.xid_bits(m.xid) LIMIT 10001
         ) late
         LIMIT 10001)
        UNION ALL
        (SELECT late.created_at
         FROM (SELECT pg_snapshot_xmax(c.snapshot)::text::bigint AS first, c.ceiling::text::bigint AS ceiling) r
         CROSS JOIN LATERAL (
            SELECT r.first % 2147483648 AS least,
                   CASE WHEN r.first / 2147483648 = r.ceiling / 2147483648 THEN r.ceiling % 2147483648 ELSE 2147483648 END AS below
            WHERE r.first < r.ceiling
            UNION ALL
            SELECT 0, r.ceiling % 2147483648 WHERE r.first / 2147483648 < r.ceiling / 2147483648
         ) part
         CROSS JOIN LATERAL (
            SELECT m.created_at FROM outbox.message m
            WHERE m.shard = s.shard AND outbox.xid_bits(m.xid) >= part.least AND outbox.xid_bits(m.xid) < part.below
              AND m.xid >= pg_snapshot_xmax(c.snapshot) AND m.xid < c.ceiling AND m."position" + 0 <= c."position"
              AND NOT (c.late_snapshot IS NOT NULL AND m."position" <= c.late_position AND pg_visible_in_snapshot(m.xid, c.late_snapshot))
            ORDER BY m.shard, outbox.xid_bits(m.xid) LIMIT 10001
         ) late
         LIMIT 10001)
        LIMIT 10001
    ) p
) w
ORDER BY s.shard

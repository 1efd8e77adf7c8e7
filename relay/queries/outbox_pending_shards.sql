-- The shards whose durable cursor does not yet cover what $1 (a snapshot) shows at or below $2 (a position).
SELECT c.shard
FROM outbox.cursor c
WHERE EXISTS (
        SELECT FROM outbox.message m
        WHERE m.shard = c.shard AND m."position" > c."position" AND m."position" <= $2
          AND pg_visible_in_snapshot(m.xid, $1::pg_snapshot))
   -- As in page_read.sql: those that the cursor saw running, id by id, and those from its snapshot's xmax to the ceiling.
   OR EXISTS (
        SELECT FROM unnest(ARRAY(SELECT x FROM pg_snapshot_xip(c.snapshot) x WHERE pg_visible_in_snapshot(x, $1::pg_snapshot))) AS x(xid)
        CROSS JOIN LATERAL (
            SELECT FROM outbox.message m
            WHERE m.shard = c.shard AND outbox.xid_bits(m.xid) BETWEEN outbox.xid_bits(x.xid) AND outbox.xid_bits(x.xid)
              AND m.xid = x.xid AND m."position" + 0 <= c."position"
              AND NOT (c.late_snapshot IS NOT NULL AND m."position" <= c.late_position AND pg_visible_in_snapshot(m.xid, c.late_snapshot))
            -- This order keeps the planner on the late index.
            ORDER BY m.shard, outbox.xid_bits(m.xid) LIMIT 1
        ) late)
   OR EXISTS (
        SELECT FROM (SELECT pg_snapshot_xmax(c.snapshot)::text::bigint AS first, c.ceiling::text::bigint AS ceiling) r
        CROSS JOIN LATERAL (
            SELECT r.first % 2147483648 AS least,
                   CASE WHEN r.first / 2147483648 = r.ceiling / 2147483648 THEN r.ceiling % 2147483648 ELSE 2147483648 END AS below
            WHERE r.first < r.ceiling
            UNION ALL
            SELECT 0, r.ceiling % 2147483648 WHERE r.first / 2147483648 < r.ceiling / 2147483648
        ) part
        CROSS JOIN LATERAL (
            SELECT FROM outbox.message m
            WHERE m.shard = c.shard AND outbox.xid_bits(m.xid) >= part.least AND outbox.xid_bits(m.xid) < part.below
              AND m.xid >= pg_snapshot_xmax(c.snapshot) AND m.xid < c.ceiling
              AND m."position" + 0 <= c."position" AND pg_visible_in_snapshot(m.xid, $1::pg_snapshot)
              AND NOT (c.late_snapshot IS NOT NULL AND m."position" <= c.late_position AND pg_visible_in_snapshot(m.xid, c.late_snapshot))
            ORDER BY m.shard, outbox.xid_bits(m.xid) LIMIT 1
        ) late)
ORDER BY c.shard

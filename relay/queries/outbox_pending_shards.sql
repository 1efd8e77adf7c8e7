-- The shards whose durable cursor does not yet cover what $1 (a snapshot) shows at or below $2 (a position).
SELECT c.shard
FROM outbox.cursor c
WHERE EXISTS (
        SELECT FROM outbox.message m
        WHERE m.shard = c.shard AND m."position" > c."position" AND m."position" <= $2
          AND pg_visible_in_snapshot(m.xid, $1::pg_snapshot))
   OR EXISTS (
        SELECT FROM outbox.message m
        WHERE m.shard = c.shard AND m.xid = ANY (ARRAY(SELECT x FROM pg_snapshot_xip(c.snapshot) x WHERE pg_visible_in_snapshot(x, $1::pg_snapshot)))
          AND m."position" + 0 <= c."position"
          AND NOT (c.late_snapshot IS NOT NULL AND m."position" <= c.late_position AND pg_visible_in_snapshot(m.xid, c.late_snapshot)))
   OR EXISTS (
        SELECT FROM outbox.message m
        WHERE m.shard = c.shard AND m.xid >= pg_snapshot_xmax(c.snapshot) AND m.xid < c.ceiling
          AND m."position" + 0 <= c."position" AND pg_visible_in_snapshot(m.xid, $1::pg_snapshot)
          AND NOT (c.late_snapshot IS NOT NULL AND m."position" <= c.late_position AND pg_visible_in_snapshot(m.xid, c.late_snapshot)))
ORDER BY c.shard

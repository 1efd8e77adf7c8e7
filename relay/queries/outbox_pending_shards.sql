-- The shards whose durable cursor does not yet cover what $1 (a snapshot) shows at or below $2 (a position).
SELECT c.shard
FROM outbox.cursor c
WHERE EXISTS (
        SELECT FROM outbox.message m
        WHERE m.shard = c.shard AND m."position" > c."position" AND m."position" <= $2
          AND pg_visible_in_snapshot(m.xid, $1::pg_snapshot))
   OR EXISTS (
        SELECT FROM outbox.late_rows(c.shard, c."position", c.snapshot, c.ceiling, c.late_snapshot, c.late_position, $1::pg_snapshot, 1))
ORDER BY c.shard

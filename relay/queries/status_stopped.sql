-- The messages that shards stand still at. One counts as long as it is there and the shard's cursor does not cover it.
SELECT s.shard, s."position", s.id, s.topic, s.key, s.cause, s.error, s.generation, s.attempts,
       to_char(s.first_failed_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"') AS first_failed_at,
       to_char(s.last_failed_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"') AS last_failed_at,
       to_char(s.next_attempt_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"') AS next_attempt_at,
       extract(epoch FROM s.next_attempt_at - clock_timestamp())::double precision AS next_attempt_in_seconds,
       extract(epoch FROM clock_timestamp() - s.first_failed_at)::double precision AS age_seconds
FROM outbox.stopped s
JOIN outbox.cursor c USING (shard)
WHERE NOT (s."position" <= c."position" AND pg_visible_in_snapshot(s.xid, c.snapshot))
  AND NOT (c.late_snapshot IS NOT NULL AND s."position" <= c.late_position AND pg_visible_in_snapshot(s.xid, c.late_snapshot))
  AND EXISTS (SELECT FROM outbox.message m WHERE m.shard = s.shard AND m."position" = s."position" AND m.xid = s.xid)

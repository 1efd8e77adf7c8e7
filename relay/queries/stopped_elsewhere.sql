-- What stops the shards that others hold now: not this process, which holds $1 under the generations $2. One that an earlier owner
-- wrote down may be over, and one of this owner's is where the shard flows again, as for status_stopped.sql.
SELECT s.shard, s.id, s."position", s.topic, s.cause, s.attempts
FROM outbox.stopped s
JOIN outbox.shard h ON h.shard = s.shard AND h.generation = s.generation
JOIN outbox.cursor c ON c.shard = s.shard
WHERE h.lease_until > clock_timestamp()
  AND NOT EXISTS (SELECT FROM unnest($1::smallint[], $2::bigint[]) AS ours(shard, generation)
                  WHERE ours.shard = h.shard AND ours.generation = h.generation)
  AND NOT (s."position" <= c."position" AND pg_visible_in_snapshot(s.xid, c.snapshot))
  AND NOT (c.late_snapshot IS NOT NULL AND s."position" <= c.late_position AND pg_visible_in_snapshot(s.xid, c.late_snapshot))
  AND EXISTS (SELECT FROM outbox.message m WHERE m.shard = s.shard AND m."position" = s."position" AND m.xid = s.xid)

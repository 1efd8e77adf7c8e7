-- What stops the shards that others than $1 hold now. One that an earlier owner wrote down may be over.
SELECT s.shard, s.id, s."position", s.topic, s.cause, s.attempts
FROM outbox.stopped s
JOIN outbox.shard h ON h.shard = s.shard AND h.generation = s.generation
WHERE h.owner <> $1 AND h.lease_until > clock_timestamp()

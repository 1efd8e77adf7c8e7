-- Extends the leases that still are this relay's. $1 owner, $2 shards, $3 their generations, $4 milliseconds.
-- What is not returned is fenced. In order of shard, so that no two of these wait for each other.
UPDATE outbox.shard AS s
SET lease_until = clock_timestamp() + make_interval(secs => $4::double precision / 1000)
FROM (SELECT h.shard, h.generation FROM unnest($2::smallint[], $3::bigint[]) AS h(shard, generation) ORDER BY h.shard) h
-- By the index shard_lease, where earlier versions of the row end below the present; and once more after a lock was waited for.
WHERE s.shard + 0 = h.shard AND s.lease_until > (SELECT clock_timestamp())
  AND s.generation = h.generation AND s.owner = $1 AND s.lease_until > clock_timestamp()
RETURNING s.shard

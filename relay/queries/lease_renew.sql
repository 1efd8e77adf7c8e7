-- Extends the leases that still are this relay's. $1 owner, $2 shards, $3 their generations, $4 milliseconds, $5 the crash tokens
-- of their claims. What is not returned is fenced. In order of shard, so that no two of these wait for each other.
UPDATE outbox.shard AS s
SET lease_until = clock_timestamp() + make_interval(secs => $4::double precision / 1000)
FROM (SELECT h.shard, h.generation
      FROM unnest($2::smallint[], $3::bigint[], $5::uuid[]) AS h(shard, generation, token)
      -- A lease from before a crash is not kept alive: nothing can be published under it.
      JOIN outbox.token t ON t.only_row AND t.token = h.token
      ORDER BY h.shard) h
-- By the index shard_lease, where earlier versions of the row end below the present; and once more after a lock was waited for.
WHERE s.shard + 0 = h.shard AND s.lease_until > (SELECT clock_timestamp())
  AND s.generation = h.generation AND s.owner = $1 AND s.lease_until > clock_timestamp()
RETURNING s.shard

-- Takes a shard that is free, expired, or held by this very process, under a new generation.
-- $1 shard, $2 owner, $3 the generation this process holds it by, or -1, $4 milliseconds.
-- The fence row takes the generation too: an advance of the generation before has committed by then, or waits for its lock
-- and then matches nothing.
WITH lease AS (
    UPDATE outbox.shard
    SET owner = $2, generation = generation + 1,
        lease_until = clock_timestamp() + make_interval(secs => $4::double precision / 1000)
    WHERE shard = $1
      -- Without a token a lease would be taken that nothing can be published under.
      AND EXISTS (SELECT FROM outbox.token)
      AND (lease_until IS NULL OR lease_until <= clock_timestamp() OR (owner = $2 AND generation = $3))
    RETURNING shard, generation
)
UPDATE outbox.fence AS f
SET generation = lease.generation
FROM lease, outbox.token t
WHERE f.shard = lease.shard
RETURNING f.generation, t.token

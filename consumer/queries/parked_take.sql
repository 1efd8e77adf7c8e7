-- The records that are due, each under a lease of its own and the next generation. One that another process is taking is passed
-- over. The attempt is counted here, so that one which ends its process is counted too. $2 topics, $3 owner, $4 milliseconds, $5 how many.
WITH due AS (
    SELECT sequence FROM inbox.parked
    WHERE consumer = $1 AND topic = ANY ($2) AND state = 'retrying' AND next_attempt_at <= clock_timestamp()
      AND (lease_until IS NULL OR lease_until <= clock_timestamp())
    ORDER BY next_attempt_at
    LIMIT $5
    FOR UPDATE SKIP LOCKED
)
UPDATE inbox.parked p
SET owner = $3, generation = p.generation + 1, attempts = p.attempts + 1, lease_until = clock_timestamp() + make_interval(secs => $4::double precision / 1000)
FROM due
WHERE p.sequence = due.sequence
RETURNING p.sequence, p.generation, p.topic, p."partition", p."offset", p.key, p.payload, p.headers::text,
          (extract(epoch FROM p.record_time) * 1000)::bigint, p.attempts,
          (extract(epoch FROM clock_timestamp() - p.first_failed_at) * 1000)::bigint

-- Records that were set aside, in order. Each of the filters may be null: $1 consumer, $2 topic, $3 key, $4 cause, $5 states,
-- $6 seconds since the first failure, $7 sequences, $8 idempotency key.
SELECT p.sequence AS id, p.consumer, p.topic, p.key, p."partition", p."offset", p.state, p.cause, p.error, p.attempts,
       to_char(p.first_failed_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"') AS first_failed_at,
       to_char(p.last_failed_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"') AS last_failed_at,
       to_char(p.next_attempt_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"') AS next_attempt_at,
       to_char(p.settled_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"') AS settled_at,
       p.owner, p.generation, extract(epoch FROM p.lease_until - clock_timestamp())::double precision AS lease_left_seconds,
       extract(epoch FROM clock_timestamp() - p.first_failed_at)::double precision AS age_seconds,
       p.scope, p.idempotency_key,
       CASE WHEN p.state = 'blocked' THEN
           (SELECT min(e.sequence) FROM inbox.parked e
            WHERE e.consumer = p.consumer AND e.topic = p.topic AND sha256(e.key) = sha256(p.key) AND e.key = p.key
              AND e.sequence < p.sequence AND e.state IN ('retrying', 'blocked', 'dead')) END AS behind
FROM inbox.parked p
WHERE ($1::text IS NULL OR p.consumer = $1)
  AND ($2::text IS NULL OR p.topic = $2)
  AND ($3::bytea IS NULL OR p.key = $3)
  AND ($4::text IS NULL OR p.cause = $4)
  AND ($5::text[] IS NULL OR p.state = ANY ($5))
  AND ($6::double precision IS NULL OR p.first_failed_at < clock_timestamp() - make_interval(secs => $6))
  AND ($7::bigint[] IS NULL OR p.sequence = ANY ($7))
  AND ($8::text IS NULL OR p.idempotency_key = $8)
ORDER BY p.sequence

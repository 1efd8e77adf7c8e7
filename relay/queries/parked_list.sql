-- What is set aside, in order of place. $1 ids or null, $2 topic, $3 key, $4 cause, $5 state, $6 least age in seconds (each null: any;
-- no state: all that is not settled), $7 rows. `behind`: the first one of its key, which it waits for.
SELECT p.id, p.topic, p.key, p."position", p.shard, p.state, p.cause, p.error, p.attempts, p.generation,
       to_char(p.first_failed_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"') AS first_failed_at,
       to_char(p.last_failed_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"') AS last_failed_at,
       to_char(p.next_attempt_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"') AS next_attempt_at,
       to_char(p.created_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"') AS created_at,
       extract(epoch FROM clock_timestamp() - p.first_failed_at)::double precision AS age_seconds,
       CASE WHEN p.state = 'blocked' THEN (
           SELECT e.id FROM outbox.parked e
           WHERE e.shard = p.shard AND e.topic = p.topic AND hashtextextended(e.key, 0) = hashtextextended(p.key, 0)
             AND e.state IN ('retrying', 'blocked', 'paused', 'dead') AND e.key = p.key AND e.place < p.place
           ORDER BY e.place LIMIT 1) END AS behind
FROM outbox.parked p
WHERE ($1::uuid[] IS NULL OR p.id = ANY ($1)) AND ($2::text IS NULL OR p.topic = $2) AND ($3::text IS NULL OR p.key = $3)
  AND ($4::text IS NULL OR p.cause = $4)
  AND CASE WHEN $5::text IS NULL THEN $1 IS NOT NULL OR p.state IN ('retrying', 'blocked', 'paused', 'dead') ELSE p.state = $5 END
  AND ($6::double precision IS NULL OR p.first_failed_at <= clock_timestamp() - make_interval(secs => $6))
ORDER BY p.place LIMIT $7

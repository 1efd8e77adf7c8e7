-- A bug for the test suite's checkers: takes over whatever the payload, and goes on with its own.
WITH left_behind AS (
    SELECT owner, attempts >= $7 AS is_spent
    FROM inbox.message
    WHERE consumer = $1 AND scope = $2 AND key = $3
      AND state = 'in_progress' AND (lease_until IS NULL OR lease_until <= clock_timestamp())
    FOR UPDATE
)
UPDATE inbox.message m
SET fingerprint = $4, generation = CASE WHEN l.is_spent THEN m.generation ELSE m.generation + 1 END,
    state = CASE WHEN l.is_spent THEN 'dead' ELSE 'in_progress' END,
    owner = CASE WHEN l.is_spent THEN m.owner ELSE $5 END,
    lease_until = CASE WHEN NOT l.is_spent THEN clock_timestamp() + make_interval(secs => $6::double precision / 1000) END,
    finished_at = CASE WHEN l.is_spent THEN clock_timestamp() END,
    cause = CASE WHEN l.is_spent THEN 'exhausted' END,
    error = CASE WHEN l.is_spent THEN format('%s attempts are spent; whether the last one, by %s, took effect is not known', m.attempts, l.owner) END
FROM left_behind l
WHERE m.consumer = $1 AND m.scope = $2 AND m.key = $3
RETURNING m.state, m.cause, m.error, m.generation, m.attempts

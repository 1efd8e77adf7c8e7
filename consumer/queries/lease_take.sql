-- Takes over what another lease has left behind, under the next generation, or buries it where $7 attempts are spent. Only after
-- message_claim.sql has found it so and compared its payload; the payload is named here once more, as the expiry is. It is no
-- attempt yet: that is counted when something is about to run (lease_renew.sql).
-- No row: somebody else was faster. $4 fingerprint, $5 owner, $6 milliseconds.
WITH left_behind AS (
    SELECT owner, attempts >= $7 AS is_spent
    FROM inbox.message
    WHERE consumer = $1 AND scope = $2 AND key = $3 AND fingerprint = $4
      AND state = 'in_progress' AND (lease_until IS NULL OR lease_until <= clock_timestamp())
    FOR UPDATE
)
UPDATE inbox.message m
SET generation = CASE WHEN l.is_spent THEN m.generation ELSE m.generation + 1 END,
    state = CASE WHEN l.is_spent THEN 'dead' ELSE 'in_progress' END,
    owner = CASE WHEN l.is_spent THEN m.owner ELSE $5 END,
    lease_until = CASE WHEN NOT l.is_spent THEN clock_timestamp() + make_interval(secs => $6::double precision / 1000) END,
    finished_at = CASE WHEN l.is_spent THEN clock_timestamp() END,
    cause = CASE WHEN l.is_spent THEN 'exhausted' END,
    error = CASE WHEN l.is_spent THEN format('%s attempts are spent; whether the last one, by %s, took effect is not known', m.attempts, l.owner) END
FROM left_behind l
WHERE m.consumer = $1 AND m.scope = $2 AND m.key = $3
RETURNING m.state, m.cause, m.error, m.generation, m.attempts

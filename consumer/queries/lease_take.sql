-- Takes over what another lease has left behind, under the next generation, or buries it where $7 attempts are spent. Only after
-- message_claim.sql has found it so and compared its payload; the payload is named here once more, as the expiry is.
-- An owner that still stands there did not say that nothing took effect: somebody has to be asked before it is run again.
-- No row: somebody else was faster. $4 fingerprint, $5 owner, $6 milliseconds.
WITH left_behind AS (
    SELECT owner, attempts >= $7 AS is_spent
    FROM inbox.message
    WHERE consumer = $1 AND scope = $2 AND key = $3 AND fingerprint = $4
      AND state = 'in_progress' AND (lease_until IS NULL OR lease_until <= clock_timestamp())
    FOR UPDATE
)
UPDATE inbox.message m
SET generation = m.generation + 1,
    state = CASE WHEN l.is_spent THEN 'dead' ELSE 'in_progress' END,
    attempts = CASE WHEN l.is_spent THEN m.attempts ELSE m.attempts + 1 END,
    owner = CASE WHEN l.is_spent THEN m.owner ELSE $5 END,
    lease_until = CASE WHEN NOT l.is_spent THEN clock_timestamp() + make_interval(secs => $6::double precision / 1000) END,
    finished_at = CASE WHEN l.is_spent THEN clock_timestamp() END,
    cause = CASE WHEN l.is_spent THEN 'exhausted' END,
    error = CASE WHEN l.is_spent THEN format('%s attempts are spent', m.attempts)
                 || CASE WHEN l.owner IS NULL THEN '' ELSE '; whether the last one, by ' || l.owner || ', took effect is not known' END END
FROM left_behind l
WHERE m.consumer = $1 AND m.scope = $2 AND m.key = $3
RETURNING m.state, m.cause, m.error, m.generation, m.attempts, l.owner IS NOT NULL AS in_doubt

-- Done or dead, by whoever holds it. $2 owner, $3 generation, $4 state, $5 attempts spent in all, $6 cause, $7 error.
UPDATE inbox.parked
SET state = $4, owner = NULL, lease_until = NULL, next_attempt_at = NULL, attempts = $5,
    settled_at = CASE WHEN $4 = 'done' THEN clock_timestamp() END, cause = $6, error = coalesce($7, error), last_failed_at = CASE WHEN $6 IS NULL THEN last_failed_at ELSE clock_timestamp() END
WHERE sequence = $1 AND state = 'retrying' AND owner = $2 AND generation = $3 AND lease_until > clock_timestamp()

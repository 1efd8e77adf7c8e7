-- Another try, later, by whoever has taken it last: also when its lease is over, as long as nobody has taken it since. $2 owner, $3 generation, $4 attempts spent in all, $5 error, or null where there was no
-- attempt worth the name, $6 milliseconds.
UPDATE inbox.parked
SET owner = NULL, lease_until = NULL, attempts = $4, error = coalesce($5, error),
    last_failed_at = CASE WHEN $5 IS NULL THEN last_failed_at ELSE clock_timestamp() END,
    next_attempt_at = clock_timestamp() + make_interval(secs => $6::double precision / 1000)
WHERE sequence = $1 AND state = 'retrying' AND owner = $2 AND generation = $3

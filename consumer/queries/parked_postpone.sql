-- Another try, later, by whoever holds it. $2 owner, $3 generation, $4 attempts spent in all, $5 error, $6 milliseconds.
UPDATE inbox.parked
SET owner = NULL, lease_until = NULL, attempts = $4, error = $5, last_failed_at = clock_timestamp(),
    next_attempt_at = clock_timestamp() + make_interval(secs => $6::double precision / 1000)
WHERE sequence = $1 AND state = 'retrying' AND owner = $2 AND generation = $3 AND lease_until > clock_timestamp()

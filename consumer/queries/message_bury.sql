-- Marks work as dead once its dead letter is acknowledged, also what a lease has left behind.
-- No row: somebody else has settled it meanwhile, or is at it.
INSERT INTO inbox.message AS m
    (consumer, scope, key, fingerprint, state, attempts, record_time, topic, "partition", "offset", cause, error, finished_at)
VALUES ($1, $2, $3, $4, 'dead', $5, to_timestamp($6::bigint / 1000.0), $7, $8, $9, $10, $11, clock_timestamp())
ON CONFLICT (consumer, scope, key) DO UPDATE
SET state = 'dead', attempts = greatest(m.attempts, excluded.attempts), cause = excluded.cause, error = excluded.error,
    finished_at = clock_timestamp(), lease_until = NULL
WHERE m.state = 'in_progress' AND m.fingerprint = excluded.fingerprint AND (m.lease_until IS NULL OR m.lease_until <= clock_timestamp())

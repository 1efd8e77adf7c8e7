-- Marks work as dead once its dead letter is acknowledged. No row: somebody else has settled it meanwhile.
INSERT INTO inbox.message (consumer, scope, key, fingerprint, state, attempts, record_time, topic, "partition", "offset", cause, error, finished_at)
VALUES ($1, $2, $3, $4, 'dead', $5, to_timestamp($6::bigint / 1000.0), $7, $8, $9, $10, $11, clock_timestamp())
ON CONFLICT (consumer, scope, key) DO NOTHING

-- Takes a piece of work if nobody has, else says what became of it. The only place that compares fingerprints.
-- No row at all: another transaction settled it, or it was purged, after this statement's snapshot. Ask again.
WITH claimed AS (
    INSERT INTO inbox.message (consumer, scope, key, fingerprint, state, attempts, record_time, topic, "partition", "offset")
    VALUES ($1, $2, $3, $4, 'in_progress', $5, to_timestamp($6::bigint / 1000.0), $7, $8, $9)
    ON CONFLICT (consumer, scope, key) DO NOTHING
    RETURNING true
)
SELECT 'claimed' AS state, true AS same_payload, NULL AS outcome, NULL AS cause, NULL AS error
FROM claimed
UNION ALL
SELECT state, fingerprint = $4, outcome::text, cause, error
FROM inbox.message
WHERE consumer = $1 AND scope = $2 AND key = $3 AND NOT EXISTS (SELECT FROM claimed)

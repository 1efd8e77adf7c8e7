-- The record that was set aside as dead has been applied by its replay: as if it had been requeued and done. After parked_lock.sql.
-- $2 topic, $3 key, $4 scope, $5 idempotency key. By the index of dead ones, whether or not the record has a key.
UPDATE inbox.parked
SET state = 'done', settled_at = clock_timestamp(), next_attempt_at = NULL
WHERE sequence IN (
    SELECT sequence FROM inbox.parked
    WHERE consumer = $1 AND topic = $2 AND sha256(key) = sha256($3) AND key = $3 AND state = 'dead' AND scope = $4 AND idempotency_key = $5
    UNION ALL
    SELECT sequence FROM inbox.parked
    WHERE $3 IS NULL AND consumer = $1 AND topic = $2 AND sha256(key) IS NULL AND state = 'dead' AND scope = $4 AND idempotency_key = $5
)

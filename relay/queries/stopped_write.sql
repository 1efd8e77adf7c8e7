-- Writes down which message a shard stands still at, and why. $1 owner, $2 token, $3 shard, $4 generation, $5 position, $6 cause,
-- $7 error, $8 milliseconds until the next attempt. No row: fenced. Null: the message is not there any more.
-- The lease row is locked, so that whoever claims it meanwhile waits, or has been waited for and is seen.
WITH lease AS (
    SELECT s.shard, s.generation
    FROM outbox.shard s, outbox.token t
    WHERE s.shard = $3 AND s.owner = $1 AND s.generation = $4 AND s.lease_until > clock_timestamp() AND t.token = $2
    FOR NO KEY UPDATE OF s
),
written AS (
    INSERT INTO outbox.stopped AS earlier
        (shard, "position", xid, id, topic, key, cause, error, attempts, generation, first_failed_at, last_failed_at, next_attempt_at)
    SELECT m.shard, m."position", m.xid, m.id, m.topic, m.key, $6, $7, 1, lease.generation, now.at, now.at,
           now.at + make_interval(secs => $8::double precision / 1000)
    FROM lease
    CROSS JOIN (SELECT clock_timestamp() AS at) now
    JOIN outbox.message m ON m.shard = lease.shard AND m."position" = $5
    LIMIT 1
    ON CONFLICT (shard) DO UPDATE
    SET "position" = excluded."position", xid = excluded.xid, id = excluded.id, topic = excluded.topic, key = excluded.key,
        cause = excluded.cause, error = excluded.error, generation = excluded.generation,
        last_failed_at = excluded.last_failed_at, next_attempt_at = excluded.next_attempt_at,
        -- The same message goes on counting, whoever tried it.
        attempts = CASE WHEN (earlier."position", earlier.xid) = (excluded."position", excluded.xid)
                        THEN earlier.attempts + 1 ELSE 1 END,
        first_failed_at = CASE WHEN (earlier."position", earlier.xid) = (excluded."position", excluded.xid)
                               THEN earlier.first_failed_at ELSE excluded.first_failed_at END
    RETURNING attempts
)
SELECT written.attempts FROM lease LEFT JOIN written ON true

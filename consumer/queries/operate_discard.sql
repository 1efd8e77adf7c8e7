-- Gives records up for good. After parked_lock.sql for each of their keys, and before parked_unblock.sql. $1 sequences, $2 the states
-- from which that may be. One that somebody is trying stays as it is, and so does whatever is in another state by now: it is not
-- returned. Where an operator had requeued its work before, which nobody has taken since, that is dead again.
WITH chosen AS MATERIALIZED (
    SELECT p.sequence, p.consumer, p.scope, p.idempotency_key, p.state
    FROM inbox.parked p
    WHERE p.sequence = ANY ($1) AND p.state = ANY ($2) AND (p.lease_until IS NULL OR p.lease_until <= clock_timestamp())
    FOR UPDATE OF p
), buried AS (
    UPDATE inbox.message m
    SET state = 'dead', cause = 'permanent', error = 'discarded by an operator after it had been requeued', finished_at = clock_timestamp()
    FROM chosen c
    WHERE m.consumer = c.consumer AND m.scope = c.scope AND m.key = c.idempotency_key
      AND m.state = 'in_progress' AND m.owner IS NULL AND m.lease_until IS NULL AND m.attempts = 0
    RETURNING 1
)
UPDATE inbox.parked p
SET state = 'discarded', settled_at = clock_timestamp(), owner = NULL, lease_until = NULL, next_attempt_at = NULL
FROM chosen c
WHERE p.sequence = c.sequence
RETURNING p.sequence, c.state AS was, p.state AS is, (SELECT count(*) FROM buried) AS touched

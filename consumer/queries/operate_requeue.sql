-- Lets records be tried again, now and in order. After parked_lock.sql for each of their keys. $1 sequences, $2 the states from which
-- that may be. One that somebody is trying stays as it is, and so does whatever is in another state by now: it is not returned.
-- A dead one has its whole budget again, and waits (`blocked`) behind an earlier one of its key that is not settled: where dead ones
-- hold nothing up, the consumers' sweep lets it go. Its work must be allowed to run: the row of the inbox that is dead with it, by
-- now perhaps for another cause (a replay that died too), becomes nobody's and of no attempt (message_retake.sql), under the next generation. That of a conflict belongs to
-- another payload, and stays.
WITH chosen AS MATERIALIZED (
    SELECT p.sequence, p.consumer, p.scope, p.idempotency_key, p.state, p.cause,
           p.state = 'dead' AND EXISTS (SELECT FROM inbox.parked e
                   WHERE e.consumer = p.consumer AND e.topic = p.topic AND sha256(e.key) = sha256(p.key) AND e.key = p.key
                     AND e.sequence < p.sequence AND e.state IN ('retrying', 'blocked', 'dead')) AS is_behind
    FROM inbox.parked p
    WHERE p.sequence = ANY ($1) AND p.state = ANY ($2) AND (p.lease_until IS NULL OR p.lease_until <= clock_timestamp())
    FOR UPDATE OF p
), revived AS (
    UPDATE inbox.message m
    SET state = 'in_progress', generation = m.generation + 1, attempts = 0, owner = NULL, lease_until = NULL,
        cause = NULL, error = NULL, finished_at = NULL
    FROM chosen c
    WHERE c.state = 'dead' AND c.cause <> 'conflict' AND m.consumer = c.consumer AND m.scope = c.scope AND m.key = c.idempotency_key
      AND m.state = 'dead'
    RETURNING 1
)
UPDATE inbox.parked p
SET state = CASE WHEN c.is_behind THEN 'blocked' ELSE 'retrying' END, cause = NULL, owner = NULL, lease_until = NULL,
    attempts = CASE WHEN c.state = 'dead' THEN 0 ELSE p.attempts END,
    next_attempt_at = CASE WHEN NOT c.is_behind THEN clock_timestamp() END
FROM chosen c
WHERE p.sequence = c.sequence
RETURNING p.sequence, c.state AS was, p.state AS is, (SELECT count(*) FROM revived) AS touched

-- Resumes a topic: those that waited for it are tried now, in order of their keys and without an attempt spent. Writes it to the audit
-- table. $1 topic. Whether it was paused, and how many waited, those behind them included.
WITH resumed AS (
    DELETE FROM outbox.paused WHERE topic = $1 RETURNING topic
),
picked AS MATERIALIZED (
    SELECT p."position" FROM outbox.parked p
    WHERE p.topic = $1 AND p.state IN ('paused', 'blocked') AND p.cause = 'paused'
    ORDER BY p."position"
    FOR UPDATE
),
freed AS (
    UPDATE outbox.parked p
    SET state = CASE WHEN p.state = 'paused' THEN 'retrying' ELSE p.state END,
        next_attempt_at = CASE WHEN p.state = 'paused' THEN clock_timestamp() END,
        cause = NULL
    FROM picked
    WHERE p."position" = picked."position" AND p.topic = $1 AND p.state IN ('paused', 'blocked') AND p.cause = 'paused'
    RETURNING p."position"
),
audited AS (
    INSERT INTO outbox.audit (command, arguments, affected)
    SELECT 'resume', jsonb_build_object('topic', $1::text), (SELECT count(*) FROM freed)
    RETURNING affected
)
SELECT EXISTS (SELECT FROM resumed), affected FROM audited

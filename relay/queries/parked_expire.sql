-- Discards what has been dead for longer than $1 milliseconds, $2 rows at most, and writes it to the audit table, unless there is none.
-- The owner of its shard lets what waits behind it be tried.
WITH expired AS (
    UPDATE outbox.parked p
    SET state = 'discarded', settled_at = clock_timestamp()
    WHERE p.state = 'dead' AND p."position" IN (
        SELECT d."position" FROM outbox.parked d
        WHERE d.state = 'dead' AND d.last_failed_at < clock_timestamp() - make_interval(secs => $1::double precision / 1000)
        ORDER BY d.last_failed_at LIMIT $2
        FOR UPDATE SKIP LOCKED
    )
    RETURNING p."position"
), counted AS (SELECT count(*) AS many FROM expired)
INSERT INTO outbox.audit (command, arguments, affected)
SELECT 'parked expire', jsonb_build_object('dead_for_seconds', $1::double precision / 1000), many FROM counted WHERE many > 0
RETURNING affected

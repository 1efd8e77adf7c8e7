-- Deletes what was published or discarded from among what was set aside longer than $1 milliseconds ago; $2 rows at most.
DELETE FROM outbox.parked p
WHERE p."position" IN (
    SELECT s."position" FROM outbox.parked s
    WHERE s.settled_at IS NOT NULL AND s.settled_at < clock_timestamp() - make_interval(secs => $1::double precision / 1000)
    ORDER BY s.settled_at LIMIT $2
    FOR UPDATE SKIP LOCKED
) AND p.settled_at IS NOT NULL

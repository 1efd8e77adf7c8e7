-- What the consumers, or one of them, know of an idempotency key. $1 key, $2 consumer or null.
-- There is no index by key alone: one probe for each consumer and scope, which are hopped from one to the next.
WITH RECURSIVE place AS (
    (SELECT consumer, scope FROM inbox.message WHERE consumer >= coalesce($2, '') ORDER BY consumer, scope LIMIT 1)
    UNION ALL
    SELECT n.consumer, n.scope
    FROM place p
    CROSS JOIN LATERAL (SELECT consumer, scope FROM inbox.message
                        WHERE (consumer, scope) > (p.consumer, p.scope) AND ($2 IS NULL OR p.consumer = $2)
                        ORDER BY consumer, scope LIMIT 1) n
)
SELECT m.consumer, m.scope, m.key, m.state, m.owner, m.generation,
       extract(epoch FROM m.lease_until - clock_timestamp())::double precision AS lease_left_seconds,
       m.attempts, m.outcome::text AS outcome, m.cause, m.error, m.topic, m."partition", m."offset",
       to_char(m.record_time AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"') AS record_time,
       to_char(m.created_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"') AS created_at,
       to_char(m.finished_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"') AS finished_at
FROM place
CROSS JOIN LATERAL (SELECT * FROM inbox.message m WHERE m.consumer = place.consumer AND m.scope = place.scope AND m.key = $1) m
WHERE $2 IS NULL OR m.consumer = $2
ORDER BY m.consumer, m.scope

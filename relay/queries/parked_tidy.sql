-- Lets those be tried that wait for nothing any more: the first of a key where it is blocked (an operator discarded what was
-- before it, or the queue became empty at the moment it joined), and what is paused of a topic that is paused no longer.
-- $1 owner, $2 token, $3 shard, $4 generation. No row: fenced. Looks topic by topic, past what is paused, however much that is.
WITH RECURSIVE topics AS (
    (SELECT p.topic FROM outbox.parked p
     WHERE p.shard = $3 AND p.state IN ('retrying', 'blocked', 'paused', 'dead') ORDER BY p.topic LIMIT 1)
    UNION ALL
    SELECT (SELECT p.topic FROM outbox.parked p
            WHERE p.shard = $3 AND p.state IN ('retrying', 'blocked', 'paused', 'dead') AND p.topic > t.topic ORDER BY p.topic LIMIT 1)
    FROM topics t WHERE t.topic IS NOT NULL
),
free AS MATERIALIZED (
    SELECT first."position"
    FROM topics t
    CROSS JOIN LATERAL (
        SELECT DISTINCT ON (p.key, CASE WHEN p.key IS NULL THEN p.place END) p."position", p.state
        FROM outbox.parked p
        WHERE p.shard = $3 AND p.state IN ('retrying', 'blocked', 'paused', 'dead') AND p.topic = t.topic
        ORDER BY p.key, CASE WHEN p.key IS NULL THEN p.place END, p.place
    ) first
    WHERE t.topic IS NOT NULL AND NOT EXISTS (SELECT FROM outbox.paused q WHERE q.topic = t.topic)
      AND first.state IN ('blocked', 'paused')
),
-- What an operator is changing is left to the next time.
locked AS MATERIALIZED (
    SELECT p."position" FROM outbox.parked p
    WHERE p."position" IN (SELECT free."position" FROM free) AND p.state IN ('blocked', 'paused')
    ORDER BY p."position"
    FOR UPDATE SKIP LOCKED
),
fence AS MATERIALIZED (
    SELECT f.shard, f.generation, s.lease_until
    FROM (SELECT count(*) FROM locked) locked
    CROSS JOIN outbox.fence f
    JOIN outbox.token t ON t.only_row AND t.token = $2
    CROSS JOIN LATERAL (
        SELECT s.lease_until FROM outbox.shard s
        WHERE s.shard + 0 = f.shard AND s.lease_until > (SELECT clock_timestamp()) AND s.owner = $1 AND s.generation = f.generation
        ORDER BY s.lease_until DESC LIMIT 1
    ) s
    WHERE f.shard = $3 AND f.generation = $4
    FOR UPDATE OF f
),
held AS MATERIALIZED (
    SELECT fence.shard, fence.generation FROM fence WHERE fence.lease_until > clock_timestamp()
),
freed AS (
    UPDATE outbox.parked p
    SET state = 'retrying', next_attempt_at = clock_timestamp(), generation = h.generation,
        cause = nullif(p.cause, 'paused')
    FROM locked l, held h
    WHERE p."position" = l."position" AND p.state IN ('blocked', 'paused')
    RETURNING p."position"
)
SELECT (SELECT count(*) FROM freed) FROM held

-- The topics of what waits, parked messages among it, and of what was published last, as far as $1 rows of each shard show them,
-- and how many of them wait.
SELECT seen.topic, count(*) FILTER (WHERE seen.waits)
FROM outbox.cursor c
CROSS JOIN LATERAL (
    (SELECT m.topic, true AS waits FROM outbox.message m WHERE m.shard = c.shard AND m."position" > c."position"
     ORDER BY m."position" LIMIT $1)
    UNION ALL
    (SELECT m.topic, false FROM outbox.message m WHERE m.shard = c.shard AND m."position" <= c."position"
     ORDER BY m."position" DESC LIMIT $1)
    UNION ALL
    (SELECT p.topic, true FROM outbox.parked p
     WHERE p.shard = c.shard AND p.state IN ('retrying', 'blocked', 'paused', 'dead') LIMIT $1)
) seen
GROUP BY seen.topic ORDER BY seen.topic

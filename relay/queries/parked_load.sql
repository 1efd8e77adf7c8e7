-- What a shard has set aside, for its new owner: one row a key whose messages wait, with the cause that its first one has, then one
-- row without a topic that says how many there are and how many of them count. $1 shard. A statement of its own after the claim:
-- nothing can be set aside under an earlier generation any more.
(SELECT DISTINCT ON (p.topic, p.key) p.topic, p.key, p.cause, NULL::bigint AS waiting, NULL::bigint AS counted
 FROM outbox.parked p
 WHERE p.shard = $1 AND p.state IN ('retrying', 'blocked', 'paused', 'dead') AND p.key IS NOT NULL
 ORDER BY p.topic, p.key, p.place)
UNION ALL
SELECT NULL, NULL, NULL, count(*), count(*) FILTER (WHERE p.cause IS DISTINCT FROM 'paused')
FROM outbox.parked p
WHERE p.shard = $1 AND p.state IN ('retrying', 'blocked', 'paused', 'dead')

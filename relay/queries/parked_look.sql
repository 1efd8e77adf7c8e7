-- What of a shard waits to be tried: how many wait at all (one is enough to know), how many count, in how many milliseconds the
-- next one is due. $1 shard.
SELECT EXISTS (SELECT FROM outbox.parked p WHERE p.shard = $1 AND p.state IN ('retrying', 'blocked', 'paused', 'dead')),
       (SELECT count(*) FROM outbox.parked p
        WHERE p.shard = $1 AND p.state IN ('retrying', 'blocked', 'paused', 'dead') AND p.cause IS DISTINCT FROM 'paused'),
       (SELECT ceil(extract(epoch FROM p.next_attempt_at - clock_timestamp()) * 1000)::bigint
        FROM outbox.parked p
        WHERE p.shard = $1 AND p.state = 'retrying' AND NOT EXISTS (SELECT FROM outbox.paused q WHERE q.topic = p.topic)
        ORDER BY p.next_attempt_at LIMIT 1)

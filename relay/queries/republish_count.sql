-- One row a leaf that has rows: when its oldest was written, in microseconds since 1970, and how many of the range's messages are
-- published, wait, are parked, were discarded. $1 topic, $2 key or null, $3 from, $4 to. It reads the whole table once: nothing is
-- found by its time.
SELECT m.slot, (extract(epoch FROM min(m.created_at) FILTER (WHERE isfinite(m.created_at))) * 1000000)::bigint AS oldest,
       count(*) FILTER (WHERE r.is_meant AND r.is_consumed AND (p.state IS NULL OR p.state = 'published')) AS published,
       count(*) FILTER (WHERE r.is_meant AND r.is_consumed IS NOT TRUE) AS waiting,
       count(*) FILTER (WHERE r.is_meant AND r.is_consumed AND p.state IN ('retrying', 'blocked', 'paused', 'dead')) AS parked,
       count(*) FILTER (WHERE r.is_meant AND r.is_consumed AND p.state = 'discarded') AS discarded
FROM outbox.message m
LEFT JOIN outbox.cursor c ON c.shard = m.shard
LEFT JOIN outbox.parked p ON p."position" = m."position" AND p.id = m.id
CROSS JOIN LATERAL (
    SELECT m.topic = $1 AND ($2::text IS NULL OR m.key = $2) AND m.created_at >= $3 AND m.created_at < $4 AS is_meant,
           {consumed} AS is_consumed
) r
GROUP BY m.slot

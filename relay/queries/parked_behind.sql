-- Those that wait behind one of a key, in order, up to the first that is not blocked: a page as of page_read.sql. $1 shard, $2 topic,
-- $3 key, $4 the place of that one, $5 rows, $6 bytes; one that is larger still comes, alone.
SELECT $1::smallint AS shard,
       string_agg(record_send(ROW(page."position", page.id, page.created_at, page.topic, page.key, page.idempotency_key, page.type,
                                  page.payload, page.headers::text)), '' ORDER BY page.place) AS records
FROM (
    SELECT sized.*, sum(sized.size) OVER (ORDER BY sized.place) - sized.size AS before,
           bool_and(sized.state = 'blocked') OVER (ORDER BY sized.place) AS is_next
    FROM (
        SELECT p.*, 1000 + coalesce(octet_length(p.payload), 0) + coalesce(octet_length(p.key), 0)
                         + coalesce(octet_length(p.headers::text), 0) AS size
        FROM outbox.parked p
        WHERE p.shard = $1 AND p.topic = $2 AND hashtextextended(p.key, 0) = hashtextextended($3::text COLLATE "C", 0) AND p.key = $3
          AND p.place > $4 AND p.state IN ('retrying', 'blocked', 'paused', 'dead')
        ORDER BY p.place LIMIT $5
    ) sized
) page
WHERE page.before < $6 AND page.is_next

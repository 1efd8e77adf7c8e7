-- A shard's next messages of a range, in order of position: a page as of page_read.sql. Only what the cursor covers and Kafka took:
-- nothing that is parked, nor what was discarded, which was never published. $1 shard, $2 after this position, $3 topic, $4 key or
-- null, $5 from, $6 to, $7 rows, $8 bytes; one that is larger still comes, alone.
SELECT $1::smallint AS shard,
       string_agg(record_send(ROW(page."position", page.id, page.created_at, page.topic, page.key, page.idempotency_key, page.type,
                                  page.payload, page.headers::text)), '' ORDER BY page."position") AS records
FROM (
    SELECT sized.*, sum(sized.size) OVER (ORDER BY sized."position") - sized.size AS before
    FROM (
        SELECT chosen.*, 1000 + coalesce(octet_length(chosen.payload), 0) + coalesce(octet_length(chosen.key), 0)
                       + coalesce(octet_length(chosen.headers::text), 0) AS size
        FROM outbox.cursor c
        CROSS JOIN LATERAL (
            SELECT m.* FROM outbox.message m
            WHERE m.shard = c.shard AND m."position" > $2 AND m."position" <= c."position"
              AND m.topic = $3 AND ($4::text IS NULL OR m.key = $4) AND m.created_at >= $5 AND m.created_at < $6
              AND {consumed}
              -- Not an anti-join, which could cost the order of the index.
              AND coalesce((SELECT p.state FROM outbox.parked p WHERE p."position" = m."position" AND p.id = m.id), 'published') = 'published'
            ORDER BY m."position" LIMIT $7
        ) chosen
        WHERE c.shard = $1
    ) sized
) page
WHERE page.before < $8

-- Those of a shard that are due, the longest due first, one of each key: a page as of page_read.sql, and of each the attempts that it
-- has, and where its budget began. $1 shard, $2 rows, $3 bytes; one that is larger still comes, alone. $4 topics that are left out.
SELECT $1::smallint AS shard,
       string_agg(record_send(ROW(page."position", page.id, page.created_at, page.topic, page.key, page.idempotency_key, page.type,
                                  page.payload, page.headers::text)), '' ORDER BY page.n) AS records,
       array_agg(page.place ORDER BY page.n) AS places,
       array_agg(page.attempts ORDER BY page.n) AS attempts, array_agg(page.budget_from ORDER BY page.n) AS budgets
FROM (
    SELECT sized.*, sum(sized.size) OVER (ORDER BY sized.n) - sized.size AS before
    FROM (
        SELECT due.*, row_number() OVER (ORDER BY due.next_attempt_at, due.place) AS n,
               1000 + coalesce(octet_length(due.payload), 0) + coalesce(octet_length(due.key), 0)
                    + coalesce(octet_length(due.headers::text), 0) AS size
        FROM (
            SELECT p.* FROM outbox.parked p
            WHERE p.shard = $1 AND p.state = 'retrying' AND p.next_attempt_at <= clock_timestamp()
              AND p.topic <> ALL ($4::text[])
              AND NOT EXISTS (SELECT FROM outbox.paused q WHERE q.topic = p.topic)
              AND NOT EXISTS (
                  SELECT FROM outbox.parked e
                  WHERE e.shard = p.shard AND e.topic = p.topic AND hashtextextended(e.key, 0) = hashtextextended(p.key, 0)
                    AND e.place < p.place AND e.state IN ('retrying', 'blocked', 'paused', 'dead') AND e.key = p.key)
            ORDER BY p.next_attempt_at, p.place LIMIT $2
        ) due
    ) sized
) page
WHERE page.before < $3

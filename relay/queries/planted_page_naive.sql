-- Planted, in test builds only: a page by position alone. What commits below the cursor later is never read.
-- Parameters and columns as in page_read.sql.
WITH now AS MATERIALIZED (
    SELECT s.snapshot,
           (pg_snapshot_xmax(s.snapshot)::text::bigint + age(pg_snapshot_xmax(s.snapshot)::xid))::text::xid8 AS ceiling,
           pg_current_wal_insert_lsn() AS written
    FROM (SELECT pg_current_snapshot() AS snapshot) s
)
SELECT NULL::smallint AS shard, NULL::bytea AS records, now.snapshot::text AS snapshot, now.ceiling::text AS ceiling,
       now.written::text AS written, pg_current_wal_flush_lsn() >= now.written AS flushed, clock_timestamp() AS clock
FROM now
UNION ALL
SELECT c.shard, page.records, NULL, NULL, NULL, NULL, NULL
FROM unnest($1::smallint[], $2::bigint[], $3::text[], $4::text[], $5::text[], $6::bigint[], $7::boolean[], $8::bigint[], $9::bigint[])
         AS c(shard, "position", snapshot, ceiling, late_snapshot, late_position, caught_up, row_limit, payload_limit)
CROSS JOIN LATERAL (
    SELECT string_agg(record_send(ROW(
               m."position", m.id, m.created_at, m.topic, m.key, m.idempotency_key, m.type, m.payload, m.headers::text
           )), '') AS records
    FROM (
        SELECT * FROM outbox.message m
        WHERE m.shard = c.shard AND m."position" > c."position"
        ORDER BY m."position" LIMIT c.row_limit
    ) m
) page

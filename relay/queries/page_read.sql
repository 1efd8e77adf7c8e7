-- One page for each shard asked for: what became visible late at or below its cursor, then what is fresh above it, in
-- order of position. First column null = the one row that says at what snapshot all of it was read.
-- $1 shards, $2 positions, $3 snapshots, $4 ceilings, $5 late snapshots or null, $6 late positions or null,
-- $7 true where the page before was empty (an unchanged snapshot then means: nothing to look for), $8 rows, $9 bytes.
WITH now AS MATERIALIZED (
    SELECT s.snapshot,
           -- The next transaction id. age() counts from it; whatever lies at or below a row this snapshot shows took an
           -- id before the snapshot was taken, so nothing at or above this can turn up late.
           (pg_snapshot_xmax(s.snapshot)::text::bigint + age(pg_snapshot_xmax(s.snapshot)::xid))::text::xid8 AS ceiling,
           pg_current_wal_insert_lsn() AS written
    FROM (SELECT pg_current_snapshot() AS snapshot) s
),
cursor AS MATERIALIZED (
    SELECT c.*, coalesce(c.late_snapshot, now.snapshot) AS shown, pg_snapshot_xmax(c.snapshot) AS first_unseen,
           ARRAY(SELECT x FROM pg_snapshot_xip(c.snapshot) x
                 WHERE pg_visible_in_snapshot(x, coalesce(c.late_snapshot, now.snapshot))) AS finished
    FROM now,
         unnest($1::smallint[], $2::bigint[], $3::text[]::pg_snapshot[], $4::text[]::xid8[], $5::text[]::pg_snapshot[], $6::bigint[],
                $7::boolean[], $8::bigint[], $9::bigint[])
             AS c(shard, "position", snapshot, ceiling, late_snapshot, late_position, caught_up, row_limit, byte_limit)
    WHERE NOT (c.caught_up AND c.snapshot::text = now.snapshot::text)
)
SELECT NULL::smallint AS shard, NULL::bigint AS "position", NULL::uuid AS id, NULL::text AS idempotency_key, NULL::text AS topic,
       NULL::text AS key, NULL::text AS type, NULL::bytea AS payload, NULL::text AS headers, NULL::bigint AS created_ms,
       now.snapshot::text AS snapshot, now.ceiling::text AS ceiling, now.written::text AS written,
       pg_current_wal_flush_lsn() >= now.written AS flushed
FROM now
UNION ALL
SELECT c.shard, m."position", m.id, m.idempotency_key, m.topic, m.key, m.type, m.payload, m.headers::text,
       CASE WHEN isfinite(m.created_at) THEN greatest((extract(epoch FROM m.created_at) * 1000)::bigint, 1) ELSE 1 END, NULL, NULL, NULL, NULL
FROM cursor c
CROSS JOIN LATERAL (
    SELECT u.*,
           sum(200 + coalesce(octet_length(u.payload), 0) + coalesce(octet_length(u.key), 0) + coalesce(pg_column_size(u.headers), 0))
               OVER (ORDER BY u."position" ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS bytes_before
    FROM (
        (SELECT * FROM (
            -- `+ 0` and OFFSET 0 keep the planner off (shard, position), which would walk every consumed row.
            (SELECT * FROM outbox.message m
             WHERE m.shard = c.shard AND m.xid = ANY (c.finished) AND c.finished <> '{}'
               AND m."position" + 0 <= c."position" AND m."position" + 0 > coalesce(c.late_position, -1)
             OFFSET 0)
            UNION ALL
            (SELECT * FROM outbox.message m
             WHERE m.shard = c.shard AND m.xid >= c.first_unseen AND m.xid < c.ceiling AND c.first_unseen < c.ceiling
               AND m."position" + 0 <= c."position" AND m."position" + 0 > coalesce(c.late_position, -1)
               AND pg_visible_in_snapshot(m.xid, c.shown)
             OFFSET 0)
        ) late ORDER BY "position" LIMIT c.row_limit)
        UNION ALL
        (SELECT * FROM outbox.message m
         WHERE m.shard = c.shard AND m."position" > c."position" AND c.late_snapshot IS NULL
         ORDER BY m."position" LIMIT c.row_limit)
        ORDER BY "position" LIMIT c.row_limit
    ) u
) m
WHERE m.bytes_before IS NULL OR m.bytes_before < c.byte_limit

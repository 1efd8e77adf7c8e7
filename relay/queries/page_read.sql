-- One page for each shard asked for: what became visible late at or below its cursor, then what is fresh above it, in
-- order of position. The rows of a page are one value, a record each (record.rs): sent one by one they cost as much again as
-- reading them. First column null = the one row that says at what snapshot all of it was read; it comes last, so that a flush
-- that comes while the pages are read is seen.
-- $1 shards, $2 positions, $3 snapshots, $4 ceilings, $5 late snapshots or null, $6 late positions or null,
-- $7 true where the page before was empty (an unchanged snapshot then means: nothing to look for), $8 rows,
-- $9 bytes of a payload, and a number of times those of a key and of headers: of a larger one only that it is there is told
-- (headers of no characters). A running sum of bytes would cost as much as the rest of the row.
WITH RECURSIVE now AS MATERIALIZED (
    SELECT s.snapshot,
           -- The next transaction id. age() counts from it; whatever lies at or below a row this snapshot shows took an
           -- id before the snapshot was taken, so nothing at or above this can turn up late.
           (pg_snapshot_xmax(s.snapshot)::text::bigint + age(pg_snapshot_xmax(s.snapshot)::xid))::text::xid8 AS ceiling,
           pg_current_wal_insert_lsn() AS written
    FROM (SELECT pg_current_snapshot() AS snapshot) s
),
cursor AS MATERIALIZED (
    SELECT c.shard, c."position", coalesce(c.late_position, -1) AS late_after, c.late_snapshot IS NULL AS takes_fresh,
           c.row_limit, c.payload_limit, c.payload_limit / 8 AS other_limit, s.shown,
           pg_snapshot_xmax(c.snapshot)::text::bigint AS first_unseen, c.ceiling::text::bigint AS ceiling,
           -- Whether any id from there to the ceiling has finished: if all are running there is nothing to look for.
           (SELECT count(*) FROM pg_snapshot_xip(s.shown) x WHERE x >= pg_snapshot_xmax(c.snapshot) AND x < c.ceiling)
               < least(c.ceiling, pg_snapshot_xmax(s.shown))::text::bigint - pg_snapshot_xmax(c.snapshot)::text::bigint AS unseen_finished,
           -- Those that the cursor saw running and that have finished. An aborted one has rows in the index too, none of them
           -- visible: it is left out, or each page would walk them.
           ARRAY(SELECT x FROM pg_snapshot_xip(c.snapshot) x
                 WHERE CASE WHEN pg_visible_in_snapshot(x, s.shown)
                            THEN coalesce(pg_xact_status(x), 'committed') = 'committed' ELSE false END) AS finished
    FROM now,
         unnest($1::smallint[], $2::bigint[], $3::text[]::pg_snapshot[], $4::text[]::xid8[], $5::text[]::pg_snapshot[], $6::bigint[],
                $7::boolean[], $8::bigint[], $9::bigint[])
             AS c(shard, "position", snapshot, ceiling, late_snapshot, late_position, caught_up, row_limit, payload_limit),
         LATERAL (SELECT coalesce(c.late_snapshot, now.snapshot) AS shown) s
    WHERE NOT (c.caught_up AND c.snapshot::text = now.snapshot::text)
),
-- Those from the snapshot's xmax to the ceiling that own a row here: found by jumping in the index from one to the next, so
-- that it costs as much as there were transactions running, not as they have rows. The index knows an id's low bits only:
-- where the ids pass a multiple of 2^31 they are two ranges of bits.
unseen AS (
    SELECT c.shard, c."position", c.late_after, c.first_unseen, c.ceiling, part.below, next.xid, next.bits
    FROM cursor c
    CROSS JOIN LATERAL (
        SELECT c.first_unseen % 2147483648 AS least,
               CASE WHEN c.first_unseen / 2147483648 = c.ceiling / 2147483648 THEN c.ceiling % 2147483648 ELSE 2147483648 END AS below
        WHERE c.unseen_finished
        UNION ALL
        SELECT 0, c.ceiling % 2147483648 WHERE c.unseen_finished AND c.first_unseen / 2147483648 < c.ceiling / 2147483648
    ) part
    CROSS JOIN LATERAL (
        SELECT m.xid, outbox.xid_bits(m.xid) AS bits
        FROM outbox.message m
        WHERE m.shard = c.shard AND outbox.xid_bits(m.xid) >= part.least AND outbox.xid_bits(m.xid) < part.below
          AND m."position" <= c."position" AND m."position" > c.late_after
          AND m.xid::text::bigint >= c.first_unseen AND m.xid::text::bigint < c.ceiling
        ORDER BY m.shard, outbox.xid_bits(m.xid) LIMIT 1
    ) next
    UNION ALL
    SELECT u.shard, u."position", u.late_after, u.first_unseen, u.ceiling, u.below, next.xid, next.bits
    FROM unseen u
    CROSS JOIN LATERAL (
        SELECT m.xid, outbox.xid_bits(m.xid) AS bits
        FROM outbox.message m
        WHERE m.shard = u.shard AND outbox.xid_bits(m.xid) > u.bits AND outbox.xid_bits(m.xid) < u.below
          AND m."position" <= u."position" AND m."position" > u.late_after
          AND m.xid::text::bigint >= u.first_unseen AND m.xid::text::bigint < u.ceiling
        ORDER BY m.shard, outbox.xid_bits(m.xid) LIMIT 1
    ) next
)
SELECT c.shard, page.records, NULL AS snapshot, NULL AS ceiling, NULL AS written, NULL::boolean AS flushed, NULL::timestamptz AS clock
FROM cursor c
CROSS JOIN LATERAL (
    SELECT string_agg(record_send(ROW(
               m."position", m.id, m.created_at, m.topic, m.key, m.idempotency_key, m.type,
               CASE WHEN octet_length(m.payload) > c.payload_limit THEN NULL ELSE m.payload END,
               CASE WHEN octet_length(m.payload) > c.payload_limit OR octet_length(m.headers::text) > c.other_limit
                         OR octet_length(m.key) > c.other_limit THEN '' ELSE m.headers::text END)), '') AS records
    FROM (
        (SELECT late.*
         FROM (
            SELECT f.xid, outbox.xid_bits(f.xid) AS bits FROM unnest(c.finished) AS f(xid)
            UNION ALL
            SELECT u.xid, u.bits FROM unseen u WHERE u.shard = c.shard AND pg_visible_in_snapshot(u.xid, c.shown)
         ) x
         CROSS JOIN LATERAL (
            -- BETWEEN and this order keep the planner off (shard, position), which would walk every consumed row.
            SELECT * FROM outbox.message m
            WHERE m.shard = c.shard AND outbox.xid_bits(m.xid) BETWEEN x.bits AND x.bits AND m.xid = x.xid
              AND m."position" <= c."position" AND m."position" > c.late_after
            ORDER BY m.shard, outbox.xid_bits(m.xid), m."position" LIMIT c.row_limit
         ) late
         ORDER BY late."position" LIMIT c.row_limit)
        UNION ALL
        (SELECT * FROM outbox.message m
         WHERE m.shard = c.shard AND m."position" > c."position" AND c.takes_fresh
         ORDER BY m."position" LIMIT c.row_limit)
        ORDER BY "position" LIMIT c.row_limit
    ) m
) page
UNION ALL
SELECT NULL, NULL, now.snapshot::text, now.ceiling::text, now.written::text, pg_current_wal_flush_lsn() >= now.written, clock_timestamp()
FROM now

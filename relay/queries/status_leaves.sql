-- One row a leaf: its size with indexes and TOAST, the oldest consumed row in it (by the first row of each shard), when it is in
-- turn to be truncated, and what stands against it: what is not consumed, until when its rows are kept, and who has had it
-- locked for longest, a second at least.
SELECT leaf.slot, leaf.back, leaf.bytes, leaf.kept_bytes > 0 AS has_rows,
       to_char(leaf.turn_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"') AS turn_at,
       to_char(oldest.at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"') AS oldest_consumed_at,
       waits.shard AS waiting_shard, waits."position" AS waiting_position,
       to_char(kept.until AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"') AS kept_until,
       holder.pid AS holder_pid, holder.name AS holder_name, holder.gid AS holder_gid, holder.age AS holder_age
FROM (
    SELECT moment.at, moment.slot_period, l.slot, ((now.slot - l.slot + 4) % 4)::smallint AS back,
           pg_total_relation_size('outbox.message_' || l.slot) AS bytes,
           pg_relation_size('outbox.message_' || l.slot) AS kept_bytes,
           -- The beginning of the slot to which this leaf is two back: this one or one of the next three.
           to_timestamp((floor(extract(epoch FROM moment.at) / moment.seconds) + (l.slot + 2 - now.slot + 4) % 4)
                        * moment.seconds) AS turn_at
    FROM (SELECT clock_timestamp() AS at, slot_period, extract(epoch FROM slot_period) AS seconds FROM outbox.settings OFFSET 0) moment
    CROSS JOIN LATERAL (SELECT outbox.slot_at(moment.at) AS slot OFFSET 0) now
    CROSS JOIN (VALUES (0::smallint), (1::smallint), (2::smallint), (3::smallint)) l(slot)
    OFFSET 0
) leaf
LEFT JOIN LATERAL (
    SELECT min(first.created_at) AS at
    FROM outbox.cursor c
    CROSS JOIN LATERAL (
        SELECT m.created_at, m.xid FROM outbox.message m
        WHERE m.slot = leaf.slot AND m.shard = c.shard AND m."position" <= c."position" AND leaf.kept_bytes > 0
        ORDER BY m."position" LIMIT 1
    ) first
    WHERE pg_visible_in_snapshot(first.xid, c.snapshot) AND isfinite(first.created_at)
) oldest ON true
LEFT JOIN LATERAL (
    SELECT u.shard, u."position" FROM outbox.unconsumed(leaf.slot) u WHERE leaf.kept_bytes > 0 AND leaf.back > 1 LIMIT 1
) waits ON true
LEFT JOIN LATERAL (
    SELECT coalesce(outbox.consumed_since(leaf.slot), leaf.at) + leaf.slot_period AS until
    WHERE leaf.kept_bytes > 0 AND leaf.back = 2 AND waits.shard IS NULL
) kept ON kept.until > leaf.at
LEFT JOIN LATERAL (
    SELECT h.pid, h.name, h.gid, extract(epoch FROM leaf.at - h.since)::double precision AS age
    FROM (
        SELECT l.pid, coalesce(nullif(a.application_name, ''), a.usename::text) AS name, p.gid::text AS gid,
               coalesce(p.prepared, a.xact_start) AS since
        FROM pg_locks l
        LEFT JOIN pg_stat_activity a ON a.pid = l.pid
        -- A prepared transaction has no process; it is known by the lock on its own id.
        LEFT JOIN pg_locks own ON l.pid IS NULL AND own.pid IS NULL AND own.locktype = 'transactionid'
                              AND own.virtualtransaction = l.virtualtransaction
        LEFT JOIN pg_prepared_xacts p ON p.transaction = own.transactionid
        WHERE l.locktype = 'relation' AND l.granted AND l.relation = ('outbox.message_' || leaf.slot)::regclass
          AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
          AND l.pid IS DISTINCT FROM pg_backend_pid() AND leaf.kept_bytes > 0 AND leaf.back > 1
    ) h
    WHERE h.since IS NULL OR h.since <= leaf.at - interval '1 second'
    ORDER BY h.since NULLS LAST LIMIT 1
) holder ON true
ORDER BY leaf.slot

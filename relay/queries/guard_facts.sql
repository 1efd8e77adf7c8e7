-- What the guards judge by, in one row. Everything is found by a few steps down an index: what a healthy outbox does not have
-- (a position that the sequence has not given out, a transaction that is still to come) is looked for where it would stand.
-- The sequence is read after the snapshot was taken, so it is never behind what the snapshot shows.
WITH rebased AS MATERIALIZED (
    SELECT coalesce(max(a.id), 0) AS id FROM outbox.audit a WHERE a.command = 'rebase'
),
now AS MATERIALIZED (
    SELECT pg_snapshot_xmax(s.snapshot)::text::bigint + age(pg_snapshot_xmax(s.snapshot)::xid) AS next_xid,
           q.seqcache AS cache, q.seqincrement AS increment, q.seqcycle AS cycle,
           v.last_value + CASE WHEN v.is_called THEN q.seqincrement ELSE 0 END AS next_position
    FROM (SELECT pg_current_snapshot() AS snapshot) s, outbox.message_position_seq v, pg_sequence q
    WHERE q.seqrelid = 'outbox.message_position_seq'::regclass
)
SELECT now.cache, now.increment, now.cycle, now.next_position, now.next_xid,
       (SELECT max(ahead."position") FROM outbox.shard s CROSS JOIN LATERAL (
            SELECT m."position" FROM outbox.message m WHERE m.shard = s.shard AND m."position" >= now.next_position
            ORDER BY m."position" DESC LIMIT 1) ahead) AS message_position,
       (SELECT max(c."position") FROM outbox.cursor c) AS cursor_position,
       greatest(
            (SELECT max(ahead.xid::text::bigint) FROM outbox.shard s CROSS JOIN LATERAL (
                SELECT m.xid FROM outbox.message m
                WHERE m.shard = s.shard AND outbox.xid_bits(m.xid) >= (now.next_xid % 2147483648)::integer
                -- This order keeps the planner on the late index.
                ORDER BY m.shard DESC, outbox.xid_bits(m.xid) DESC LIMIT 1) ahead),
            -- Of a cluster that had passed 2^31 transactions, the low bits say nothing: the first that waits stands for the rest.
            (SELECT max(first.xid::text::bigint) FROM outbox.cursor c CROSS JOIN LATERAL (
                SELECT m.xid FROM outbox.message m WHERE m.shard = c.shard AND m."position" > c."position"
                ORDER BY m."position" LIMIT 1) first)) AS message_xid,
       -- Transactions below xmax and below the ceiling have begun, so these two are at most the next one.
       (SELECT max(greatest(c.ceiling::text::bigint, pg_snapshot_xmax(c.snapshot)::text::bigint,
                            pg_snapshot_xmax(c.late_snapshot)::text::bigint)) FROM outbox.cursor c) AS cursor_xid,
       -- A row that breaks its cursor's promise: no transaction from the ceiling on owns a row at or below the position. Looked for
       -- where a sequence that was set back, or that sessions had numbers of in reserve, puts them: shortly below the position,
       -- and among the first transactions from the ceiling on.
       (SELECT max(passed."position") FROM outbox.cursor c CROSS JOIN LATERAL (
            SELECT below."position" FROM (
                SELECT m."position", m.xid FROM outbox.message m WHERE m.shard = c.shard AND m."position" <= c."position"
                ORDER BY m."position" DESC LIMIT 16) below
            WHERE below.xid >= c.ceiling
            UNION ALL
            SELECT since."position" FROM (
                SELECT m."position", m.xid FROM outbox.message m
                WHERE m.shard = c.shard AND outbox.xid_bits(m.xid) >= (c.ceiling::text::bigint % 2147483648)::integer
                ORDER BY m.shard, outbox.xid_bits(m.xid) LIMIT 16) since
            WHERE since.xid >= c.ceiling AND since."position" <= c."position") passed) AS passed_position,
       -- What a relay found, and nobody has rebased since.
       (SELECT a.arguments ->> 'found' FROM outbox.audit a
        WHERE a.command = 'guard' AND a.id > rebased.id
        ORDER BY a.id DESC LIMIT 1) AS noticed,
       rebased.id AS rebased
FROM now, rebased

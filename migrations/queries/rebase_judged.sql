-- The beginning of two statements, `rebase_plan.sql` and `rebase_move.sql`: each message, and what a rebase makes of it. From the
-- old cursors, which are plain data and can be judged in any cluster. Published is what the shard's cursor covers. But a cursor of
-- another cluster covers nothing that was written here: where the sequence was not carried over, what producers wrote here lies
-- at positions that it has passed. Reads every message once.
--
-- Written here is a row whose own transaction (xmin) is the one it names, or a savepoint of it: then xid <= xmin, and xid is
-- later than what brought the cursors in. A row that was brought in names a transaction of the other cluster.
--
-- Out of turn is a waiting row whose position the sequence gave out before, or before that of an earlier one of its key; the page of
-- `rebase.rs` has the rule. Looked for only where something says that the sequence did so.
--
-- {snapshot}: that of the new cursors. {next}: the next transaction id, as of before this transaction had one. {disturbed}: whether
-- to look for what is out of turn.
WITH now AS MATERIALIZED (
    SELECT {next}::bigint AS next
),
-- The bookkeeping is written once, so nothing of this outbox was written here before it.
arrived AS MATERIALIZED (
    SELECT now.next - max(age(b.xmin)) AS xid FROM now, outbox._migrations b GROUP BY now.next
),
cursor AS MATERIALIZED (
    SELECT s.shard::smallint AS shard, a."position", a.snapshot, a.ceiling, a.late_snapshot, a.late_position, a.written,
           a.ceiling::text::bigint BETWEEN arrived.xid AND a.written AS from_here
    FROM now, arrived, outbox.settings o
    CROSS JOIN LATERAL generate_series(0, o.shards - 1) AS s(shard)
    LEFT JOIN LATERAL (
        SELECT n.*, now.next - age(n.xmin) AS written FROM outbox.advance n
        WHERE n.shard = s.shard ORDER BY n.number DESC LIMIT 1) a ON true
),
origin AS MATERIALIZED (
    -- After pg_upgrade the cluster is another one and the cursors are from here all the same.
    SELECT o.system_identifier <> control.system_identifier AND NOT coalesce(cursors.from_here, false) AS is_other,
           coalesce(cursors.written, arrived.xid) AS carried
    FROM arrived, outbox.settings o, pg_control_system() control,
         (SELECT bool_and(from_here) AS from_here, max(written) AS written FROM cursor) cursors
),
judged AS MATERIALIZED (
    SELECT m.tableoid AS leaf, m.ctid AS place, m.shard, m."position", m.xid, m.created_at,
           -- Two keys of one hash count as one here: then more is moved than must be.
           hashtextextended(m.key, 0) AS key, c."position" IS NULL AS is_unknown,
           coalesce(m."position" <= c."position" AND m.xid < c.ceiling
                    AND (pg_visible_in_snapshot(m.xid, c.snapshot)
                         OR m."position" <= c.late_position AND pg_visible_in_snapshot(m.xid, c.late_snapshot)), false) AS is_covered,
           origin.is_other AND x.xid > origin.carried AND x.xid <= x.written AS is_here,
           -- Named like one of here, but older than the cursors' coming: chance, or written before all was brought in.
           origin.is_other AND x.xid <= origin.carried AND x.xid = x.written AS is_perhaps_here,
           -- Its transaction began after the cursor that lies above it was written.
           NOT origin.is_other AND coalesce(m."position" <= c."position" AND m.xid >= c.ceiling, false) AS is_passed,
           NOT pg_visible_in_snapshot(m.xid, '{snapshot}'::pg_snapshot) AS is_future
    FROM now, origin, outbox.message m
    CROSS JOIN LATERAL (SELECT m.xid::text::bigint AS xid, now.next - age(m.xmin) AS written) x
    JOIN cursor c ON c.shard = m.shard
),
used AS MATERIALIZED (
    SELECT greatest((SELECT max("position") FROM judged WHERE NOT is_here), (SELECT max("position") FROM cursor), 0) AS "position"
),
placed AS MATERIALIZED (
    SELECT j.*, NOT j.is_covered OR j.is_here OR j.is_perhaps_here AS is_waiting, j.is_here AND j."position" <= used."position" AS is_below
    FROM judged j, used
),
-- Nothing below the first that waits goes again.
disturbed AS MATERIALIZED (
    SELECT CASE WHEN {disturbed} THEN min(p."position") FILTER (WHERE p.is_waiting) END AS first FROM placed p
),
turn AS MATERIALIZED (
    -- And all of its key that were enqueued after it, or they would come first.
    SELECT o.leaf, o.place, o.shard, o."position", o.created_at, o.is_unknown, o.is_covered, o.is_here, o.is_future, o.is_waiting, o.is_below,
           o.is_second,
           o.is_waiting AND CASE WHEN o.key IS NULL THEN o.is_out ELSE bool_or(o.is_waiting AND o.is_out) OVER (
               PARTITION BY o.shard, o.key ORDER BY o.is_here, o.created_at, o."position") END AS is_out_of_turn
    FROM (
        SELECT s.*, s.is_second OR s.is_passed AND NOT s.is_future OR coalesce(s."position" <= s.reached, false) AS is_out
        FROM (
            SELECT p.*,
                   row_number() OVER (PARTITION BY p."position" ORDER BY p.is_here, p.created_at, p.xid) > 1 AS is_second,
                   max(p."position") FILTER (WHERE p.is_waiting AND p.key IS NOT NULL) OVER (
                       PARTITION BY p.shard, p.key ORDER BY p.is_here, p.created_at, p."position"
                       ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS reached
            FROM disturbed d, placed p WHERE p."position" >= d.first
        ) s
    ) o
    UNION ALL
    SELECT p.leaf, p.place, p.shard, p."position", p.created_at, p.is_unknown, p.is_covered, p.is_here, p.is_future, p.is_waiting, p.is_below,
           false, false
    FROM disturbed d, placed p WHERE d.first IS NULL OR p."position" < d.first
),
target AS MATERIALIZED (
    SELECT c.shard, c."position" AS before,
           coalesce(least(c."position",
                          min(t."position") FILTER (WHERE t.is_waiting AND NOT t.is_below AND NOT t.is_out_of_turn) - 1), 0) AS after
    FROM cursor c LEFT JOIN turn t ON t.shard = c.shard
    GROUP BY c.shard, c."position"
),
-- What was published goes again where the cursor goes back; two at one position would hide one another from a page that ends there.
fate AS MATERIALIZED (
    SELECT t.*, t.is_out_of_turn OR t.is_second AND t."position" > target.after AS is_moved
    FROM turn t JOIN target ON target.shard = t.shard
)

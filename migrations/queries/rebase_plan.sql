-- What a rebase makes of each shard, from the old cursors, which are plain data and can be judged in any cluster. Published is
-- what the shard's cursor covers. But a cursor of another cluster covers nothing that was written here: where the sequence
-- was not carried over, what producers wrote here lies at positions that it has passed. Reads every message once.
--
-- Written here is a row whose own transaction (xmin) is the one it names, or a savepoint of it: then xid <= xmin, and xid is
-- later than what brought the cursors in. A row that was brought in names a transaction of the other cluster.
-- $1 the snapshot of the new cursors.
WITH now AS MATERIALIZED (
    SELECT pg_snapshot_xmax(s.snapshot)::text::bigint + age(pg_snapshot_xmax(s.snapshot)::xid) AS next
    FROM (SELECT pg_current_snapshot() AS snapshot) s
),
-- The bookkeeping is written once, so nothing of this outbox was written here before it.
arrived AS MATERIALIZED (
    SELECT now.next - max(age(b.xmin)) AS xid FROM now, outbox._migrations b GROUP BY now.next
),
cursor AS MATERIALIZED (
    SELECT s.shard::smallint AS shard, a."position", a.snapshot, a.late_snapshot, a.late_position, a.written,
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
    SELECT m.shard, m."position", c."position" IS NULL AS is_unknown,
           coalesce(m."position" <= c."position"
                    AND (pg_visible_in_snapshot(m.xid, c.snapshot)
                         OR m."position" <= c.late_position AND pg_visible_in_snapshot(m.xid, c.late_snapshot)), false) AS is_covered,
           origin.is_other AND x.xid > origin.carried AND x.xid <= x.written AS is_here,
           -- Named like one of here, but older than the cursors' coming: chance, or written before all was brought in.
           origin.is_other AND x.xid <= origin.carried AND x.xid = x.written AS is_perhaps_here,
           NOT pg_visible_in_snapshot(m.xid, $1::pg_snapshot) AS is_future
    FROM now, origin, outbox.message m
    CROSS JOIN LATERAL (SELECT m.xid::text::bigint AS xid, now.next - age(m.xmin) AS written) x
    JOIN cursor c ON c.shard = m.shard
),
used AS MATERIALIZED (
    SELECT greatest((SELECT max("position") FROM judged WHERE NOT is_here), (SELECT max("position") FROM cursor), 0) AS "position"
),
target AS MATERIALIZED (
    SELECT c.shard, c."position" AS before,
           coalesce(least(c."position", min(j."position") FILTER (
               WHERE (NOT j.is_covered OR j.is_here OR j.is_perhaps_here)
                 AND NOT (j.is_here AND j."position" <= used."position")) - 1), 0) AS after
    FROM used, cursor c LEFT JOIN judged j ON j.shard = c.shard
    GROUP BY c.shard, c."position"
)
SELECT t.shard, t.before, t.after,
       count(*) FILTER (WHERE NOT j.is_covered OR j.is_here OR j.is_perhaps_here) AS waiting,
       count(*) FILTER (WHERE j."position" > t.after AND (j.is_covered OR j.is_unknown) AND NOT j.is_here) AS repeats,
       count(*) FILTER (WHERE j.is_here AND j."position" <= used."position") AS moved,
       count(*) FILTER (WHERE j.is_future) AS future,
       used."position" AS used, origin.carried
FROM used, origin, target t LEFT JOIN judged j ON j.shard = t.shard
GROUP BY t.shard, t.before, t.after, used."position", origin.carried
ORDER BY t.shard

-- What says whether an outbox was restored, in one row; none: outbox.settings is empty. The snapshot is the one that new
-- cursors start from. Reads every message once.
WITH now AS MATERIALIZED (
    -- The next transaction id: age() counts from it, once a transaction (docs/decisions/0001).
    SELECT s.snapshot, pg_snapshot_xmax(s.snapshot)::text::bigint + age(pg_snapshot_xmax(s.snapshot)::xid) AS next
    FROM (SELECT pg_current_snapshot() AS snapshot) s
)
SELECT o.system_identifier AS stored_cluster, control.system_identifier AS this_cluster, now.snapshot::text, now.next,
       v.last_value + CASE WHEN v.is_called THEN 1 ELSE 0 END AS next_position,
       -- No row may get a position that a row, a cursor or a message set aside has or had.
       greatest((SELECT max(last."position") FROM outbox.shard s
                 CROSS JOIN LATERAL (SELECT m."position" FROM outbox.message m WHERE m.shard = s.shard
                                     ORDER BY m."position" DESC LIMIT 1) last),
                (SELECT max("position") FROM outbox.cursor),
                (SELECT max("position") FROM outbox.parked), 0) AS highest_position,
       q.seqcache <> 1 OR q.seqincrement <> 1 OR q.seqcycle AS altered_sequence,
       EXISTS (SELECT FROM outbox.message m WHERE m.xid::text::bigint >= now.next) AS future_messages,
       EXISTS (SELECT FROM outbox.cursor c
               WHERE greatest(pg_snapshot_xmax(c.snapshot), pg_snapshot_xmax(c.late_snapshot), c.ceiling)::text::bigint > now.next)
           AS future_cursors,
       -- A message at a position that a cursor has passed, in a transaction that began after that cursor was written.
       EXISTS (SELECT FROM outbox.message m JOIN outbox.cursor c ON c.shard = m.shard
               WHERE m."position" <= c."position" AND m.xid >= c.ceiling) AS passed_messages,
       -- A position that another message had been given before, beyond the cursor of its shard.
       EXISTS (SELECT FROM (
                   SELECT m.shard, m."position", row_number() OVER (PARTITION BY m."position" ORDER BY m.created_at, m.xid) AS nth
                   FROM outbox.message m WHERE m."position" > (SELECT coalesce(min("position"), 0) FROM outbox.cursor)) n
               LEFT JOIN outbox.cursor c ON c.shard = n.shard
               WHERE n.nth > 1 AND n."position" > coalesce(c."position", 0)) AS given_out_twice,
       o.shards - (SELECT count(*)::integer FROM outbox.cursor WHERE shard < o.shards) AS without_cursor,
       -- What a relay found, though it be mended by hand since (the relay's guard_facts.sql).
       (SELECT a.arguments ->> 'found' FROM outbox.audit a
        WHERE a.command = 'guard' AND a.id > coalesce((SELECT max(r.id) FROM outbox.audit r WHERE r.command = 'rebase'), 0)
        ORDER BY a.id DESC LIMIT 1) AS noticed
FROM now, outbox.settings o, outbox.message_position_seq v, pg_control_system() control,
     pg_sequence q WHERE q.seqrelid = 'outbox.message_position_seq'::regclass

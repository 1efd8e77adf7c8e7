-- What --until-empty has to see published: everything visible now, that is, shown by this snapshot and at or below this position.
SELECT pg_current_snapshot()::text,
       coalesce((SELECT max(last."position") FROM outbox.shard s
                 CROSS JOIN LATERAL (SELECT m."position" FROM outbox.message m WHERE m.shard = s.shard
                                     ORDER BY m."position" DESC LIMIT 1) last), 0)

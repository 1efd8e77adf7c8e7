-- Transactions that are older than $1 seconds and hold something back: of this database an id of their own or a snapshot, which
-- vacuum waits for here; of the others an id, which every snapshot of the cluster names. This database's first, then the oldest.
SELECT a.pid, coalesce(a.usename, '')::text AS role, coalesce(a.datname, '')::text AS database, a.application_name AS application,
       coalesce(a.state, '') AS state, extract(epoch FROM clock_timestamp() - a.xact_start)::double precision AS age,
       here.is_here
FROM pg_stat_activity a
-- Who is in no database is waited for in all of them.
CROSS JOIN LATERAL (SELECT coalesce(a.datname = current_database(), true) AS is_here) here
WHERE a.xact_start < clock_timestamp() - make_interval(secs => $1) AND a.pid <> pg_backend_pid()
  AND (a.backend_xid IS NOT NULL OR a.backend_xmin IS NOT NULL AND here.is_here) AND a.backend_type <> 'walsender'
ORDER BY here.is_here DESC, a.xact_start LIMIT 20

-- Transactions of any database of this cluster that are older than $1 seconds and hold something back: an id of their own or a
-- snapshot. The oldest first.
SELECT a.pid, coalesce(a.usename, '')::text AS role, coalesce(a.datname, '')::text AS database, a.application_name AS application,
       coalesce(a.state, '') AS state, extract(epoch FROM clock_timestamp() - a.xact_start)::double precision AS age
FROM pg_stat_activity a
WHERE a.xact_start < clock_timestamp() - make_interval(secs => $1) AND a.pid <> pg_backend_pid()
  AND (a.backend_xid IS NOT NULL OR a.backend_xmin IS NOT NULL) AND a.backend_type <> 'walsender'
ORDER BY a.xact_start LIMIT 20

-- Prepared transactions of any database of this cluster that are older than $1 seconds. This database's first, then the oldest.
SELECT p.gid, p.owner::text AS role, p.database::text AS database,
       extract(epoch FROM clock_timestamp() - p.prepared)::double precision AS age,
       p.database = current_database() AS is_here
FROM pg_prepared_xacts p
WHERE p.prepared < clock_timestamp() - make_interval(secs => $1)
ORDER BY is_here DESC, p.prepared LIMIT 20

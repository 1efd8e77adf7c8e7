-- Prepared transactions of any database of this cluster that are older than $1 seconds. The oldest first.
SELECT p.gid, p.owner::text AS role, p.database::text AS database,
       extract(epoch FROM clock_timestamp() - p.prepared)::double precision AS age
FROM pg_prepared_xacts p
WHERE p.prepared < clock_timestamp() - make_interval(secs => $1)
ORDER BY p.prepared LIMIT 20

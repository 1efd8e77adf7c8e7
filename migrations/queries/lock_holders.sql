-- Who has held a lock on the tables of a schema for so long that a wait may have been for it, the oldest first: process, what it
-- calls itself, prepared transaction, seconds. $1 schema, $2 milliseconds. What this role may not see is null.
SELECT DISTINCT a.pid, nullif(a.application_name, '') AS application_name, p.gid,
       extract(epoch FROM statement_timestamp() - coalesce(a.xact_start, p.prepared))::double precision AS seconds
FROM pg_locks l
JOIN pg_class c ON c.oid = l.relation
JOIN pg_namespace n ON n.oid = c.relnamespace AND n.nspname = $1
LEFT JOIN pg_stat_activity a ON a.pid = l.pid
-- A prepared transaction has no process; what it shares with its other locks is a number made of its id.
LEFT JOIN pg_locks own ON l.pid IS NULL AND own.pid IS NULL AND own.locktype = 'transactionid' AND own.granted
    AND own.virtualtransaction = l.virtualtransaction
LEFT JOIN pg_prepared_xacts p ON p.transaction = own.transactionid
WHERE l.granted AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
  AND l.pid IS DISTINCT FROM pg_backend_pid()
  AND coalesce(statement_timestamp() - coalesce(a.xact_start, p.prepared) >= $2 * interval '1 millisecond', true)
ORDER BY seconds DESC NULLS LAST
LIMIT 5

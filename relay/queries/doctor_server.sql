-- The settings of the server that matter to an outbox, and how many connections are left for this role. `reset_val` is what sessions
-- get that do not set it themselves, as this one does.
SELECT current_setting('server_version_num')::integer AS version,
       current_setting('fsync')::boolean AS fsync,
       current_setting('full_page_writes')::boolean AS full_page_writes,
       current_setting('autovacuum')::boolean AS autovacuum,
       (SELECT s.reset_val FROM pg_settings s WHERE s.name = 'synchronous_commit') AS synchronous_commit,
       least(current_setting('max_connections')::bigint - current_setting('superuser_reserved_connections')::bigint
                 - (SELECT sum(d.numbackends)::bigint FROM pg_stat_database d),
             (SELECT r.rolconnlimit - (SELECT count(*) FROM pg_stat_activity a WHERE a.usename = r.rolname)
              FROM pg_roles r WHERE r.rolname = current_user AND r.rolconnlimit >= 0),
             (SELECT d.datconnlimit - (SELECT count(*) FROM pg_stat_activity a WHERE a.datname = d.datname)
              FROM pg_database d WHERE d.datname = current_database() AND d.datconnlimit >= 0)) AS connections_left,
       pg_has_role('pg_read_all_stats', 'USAGE') AS sees_all, quote_ident(current_user) AS role

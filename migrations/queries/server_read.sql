-- What this server and database are, as far as a migration depends on it.
SELECT current_setting('server_version_num')::integer AS version, current_setting('server_encoding') AS encoding,
       pg_is_in_recovery() AS in_recovery

-- What must be so before a consumer starts.
SELECT to_regclass('inbox.message') IS NOT NULL AS migrated,
       pg_is_in_recovery() AS in_recovery,
       CASE WHEN to_regclass('inbox.message') IS NOT NULL
            THEN has_table_privilege('inbox.message', 'SELECT') AND has_table_privilege('inbox.message', 'INSERT')
                 AND has_table_privilege('inbox.message', 'UPDATE') AND has_table_privilege('inbox.horizon', 'SELECT')
            ELSE false END AS allowed

-- What must be so before a consumer starts.
SELECT to_regclass('inbox.message') IS NOT NULL AS migrated, pg_is_in_recovery() AS in_recovery

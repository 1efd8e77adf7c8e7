-- Which outbox this is, of which cluster, and whether this role may ask which cluster answers. No row: the settings are gone.
SELECT current_database()::text, pg_is_in_recovery(), shards, system_identifier,
       has_function_privilege('pg_control_system()', 'EXECUTE')
FROM outbox.settings

-- Which outbox this is. No row: migrated only half.
SELECT current_database()::text, pg_is_in_recovery(), shards FROM outbox.settings

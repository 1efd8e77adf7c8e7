-- Logical replication brings rows and leaves sequences behind: the next number is one that no row has.
SELECT setval(pg_get_serial_sequence('outbox.audit', 'id'), max(id)) FROM outbox.audit
HAVING max(id) > coalesce(pg_sequence_last_value(pg_get_serial_sequence('outbox.audit', 'id')::regclass), 0)

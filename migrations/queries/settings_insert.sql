-- The choices of a new outbox, and which cluster it was made in. $1 shards, $2 slot period in microseconds.
INSERT INTO outbox.settings (system_identifier, shards, slot_period)
SELECT system_identifier, $1, $2 * interval '1 microsecond' FROM pg_control_system()

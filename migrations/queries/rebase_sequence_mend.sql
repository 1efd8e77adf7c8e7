-- The sequence as the migration made it: one number after the other.
ALTER SEQUENCE outbox.message_position_seq INCREMENT BY 1 NO CYCLE CACHE 1

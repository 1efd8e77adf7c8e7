-- The next row gets this position. Not by setval(), which no rollback would take back. {position}.
ALTER SEQUENCE outbox.message_position_seq RESTART WITH {position}

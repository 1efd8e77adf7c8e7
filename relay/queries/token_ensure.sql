-- The token that crash recovery and promotion take away.
INSERT INTO outbox.token DEFAULT VALUES ON CONFLICT DO NOTHING

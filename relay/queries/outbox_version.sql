-- The newest migration that is recorded of the outbox.
SELECT max(version) FROM outbox._migrations

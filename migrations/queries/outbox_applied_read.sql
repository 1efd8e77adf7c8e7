-- Which migrations of the outbox are recorded.
SELECT version, success, checksum FROM outbox._migrations ORDER BY version

-- Which migrations of the inbox are recorded.
SELECT version, success, checksum FROM inbox._migrations ORDER BY version

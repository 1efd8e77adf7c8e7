-- A synchronous commit, which puts everything before it on disk.
SELECT pg_logical_emit_message(true, 'baton', '')::text

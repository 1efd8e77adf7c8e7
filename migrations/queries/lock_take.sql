-- One migration of a database at a time. Held to the end of the transaction, so a pooler or a dropped connection
-- cannot leave it behind. The key is 'baton' in ASCII.
SELECT pg_advisory_xact_lock(422541815662)

-- One purge of a consumer at a time, without waiting for the other. The first key is 'purg' in ASCII, apart from a migration's lock.
SELECT pg_try_advisory_xact_lock(1886745191, hashtext($1))

-- One run at a time of a consumer's plans claims: two plans over the same records see one another's claims. $1 consumer.
SELECT pg_advisory_xact_lock(hashtextextended('baton replay ' || $1, 0))

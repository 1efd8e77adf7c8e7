-- The last write of the transaction that claimed: mark and outcome together. `xmin` is this transaction only while the
-- claim stands as it wrote it: an action that committed or rolled back by itself changes no row here.
-- True: roll back, it is too old. This statement's snapshot is later than the claim's insert, and that is later than the commit of
-- any purge that made room for it, which raised the watermark too: so it is seen here even where the claim could not see it.
-- A later generation than the first was there all the time, dead, until an operator requeued it: no purge made room for it.
UPDATE inbox.message
SET state = 'done', outcome = $4::text::json, finished_at = clock_timestamp()
WHERE consumer = $1 AND scope = $2 AND key = $3 AND state = 'in_progress' AND xmin = pg_current_xact_id()::xid
RETURNING generation = 1 AND coalesce(record_time <= (SELECT purged_record_time FROM inbox.horizon WHERE consumer = $1), false)

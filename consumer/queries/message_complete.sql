-- The last write of the transaction that claimed: mark and outcome together. `xmin` is this transaction only while the
-- claim stands as it wrote it: an action that committed or rolled back by itself changes no row here.
UPDATE inbox.message
SET state = 'done', outcome = $4::text::json, finished_at = clock_timestamp()
WHERE consumer = $1 AND scope = $2 AND key = $3 AND state = 'in_progress' AND xmin = pg_current_xact_id()::xid

-- A replayed record was given up once more: its row is dead still, where the attempt was rolled back, and tells of this death from
-- now on. After message_bury.sql has found nothing to mark. $5 attempts, $6 cause, $7 error.
UPDATE inbox.message
SET attempts = $5, cause = $6, error = $7, finished_at = clock_timestamp()
WHERE consumer = $1 AND scope = $2 AND key = $3 AND fingerprint = $4 AND state = 'dead'

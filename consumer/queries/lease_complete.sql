-- Mark and outcome together, the last write, by whoever holds the lease. The owner stays: it says whose outcome this is.
-- $4 owner, $5 generation, $6 fingerprint, $7 outcome.
UPDATE inbox.message
SET state = 'done', outcome = $7::text::json, finished_at = clock_timestamp(), lease_until = NULL
WHERE consumer = $1 AND scope = $2 AND key = $3 AND state = 'in_progress'
  AND owner = $4 AND generation = $5 AND fingerprint = $6 AND lease_until > clock_timestamp()

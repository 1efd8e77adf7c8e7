-- A bug for the test suite's checkers: anybody who ever had it completes it.
UPDATE inbox.message
SET state = 'done', outcome = $7::text::json, finished_at = clock_timestamp(), lease_until = NULL
WHERE consumer = $1 AND scope = $2 AND key = $3 AND state = 'in_progress'
  AND $4::text IS NOT NULL AND $5::bigint IS NOT NULL AND fingerprint = $6

-- Gives the work back at once. $4 owner, $5 generation, $6 fingerprint, $7 attempts that are not to count here.
UPDATE inbox.message
SET lease_until = clock_timestamp(), attempts = greatest(attempts - $7, 0)
WHERE consumer = $1 AND scope = $2 AND key = $3 AND state = 'in_progress'
  AND owner = $4 AND generation = $5 AND fingerprint = $6 AND lease_until > clock_timestamp()

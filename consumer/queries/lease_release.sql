-- Gives the work back at once. $4 owner, $5 generation, $6 whether something may have taken effect: then the owner stays, and
-- whoever takes it over asks first. $7 attempts that were not made.
UPDATE inbox.message
SET owner = CASE WHEN $6 THEN owner END,
    lease_until = CASE WHEN $6 THEN clock_timestamp() END,
    attempts = attempts - $7
WHERE consumer = $1 AND scope = $2 AND key = $3 AND state = 'in_progress'
  AND owner = $4 AND generation = $5 AND lease_until > clock_timestamp()

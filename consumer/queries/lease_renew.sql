-- The holder still progresses. No row: it is not the holder's any more; at exactly `lease_until` it is nobody's.
-- $4 owner, $5 generation, $6 milliseconds.
UPDATE inbox.message
SET lease_until = clock_timestamp() + make_interval(secs => $6::double precision / 1000)
WHERE consumer = $1 AND scope = $2 AND key = $3 AND state = 'in_progress'
  AND owner = $4 AND generation = $5 AND lease_until > clock_timestamp()

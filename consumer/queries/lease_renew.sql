-- The holder still progresses, or is about to run it once more ($8 is 1 then, else 0). No row: it is not the holder's any more;
-- at exactly `lease_until` it is nobody's. $4 owner, $5 generation, $6 fingerprint, $7 milliseconds.
UPDATE inbox.message
SET lease_until = clock_timestamp() + make_interval(secs => $7::double precision / 1000), attempts = attempts + $8
WHERE consumer = $1 AND scope = $2 AND key = $3 AND state = 'in_progress'
  AND owner = $4 AND generation = $5 AND fingerprint = $6 AND lease_until > clock_timestamp()

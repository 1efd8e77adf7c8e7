-- Whoever sets records of one key aside, or ends the first of them, does it one after the other, until its transaction ends.
SELECT pg_advisory_xact_lock(hashtextextended(format('%L %L %s', $1::text, $2::text, encode($3::bytea, 'hex')), 0))

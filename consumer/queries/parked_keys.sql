-- The keys of a topic whose next record may not be handled before those that wait. $3: dead ones count too.
SELECT DISTINCT key FROM inbox.parked
WHERE consumer = $1 AND topic = $2 AND key IS NOT NULL AND (state IN ('retrying', 'blocked') OR state = 'dead' AND $3)

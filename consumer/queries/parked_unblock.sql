-- The next of a key, once nothing before it is unsettled. After parked_lock.sql. $4: dead ones hold their key up.
UPDATE inbox.parked p
SET state = 'retrying', next_attempt_at = clock_timestamp()
WHERE p.sequence = (
    SELECT min(n.sequence) FROM inbox.parked n
    WHERE n.consumer = $1 AND n.topic = $2 AND sha256(n.key) = sha256($3) AND n.key = $3 AND n.state = 'blocked'
) AND NOT EXISTS (
    SELECT FROM inbox.parked e
    WHERE e.consumer = $1 AND e.topic = $2 AND sha256(e.key) = sha256($3) AND e.key = $3 AND e.sequence < p.sequence
      AND (e.state = 'retrying' OR e.state = 'dead' AND $4)
)

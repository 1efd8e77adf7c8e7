-- What is blocked behind nothing: its head was dead when dead ones held keys up and does not any more, or somebody changed it by
-- hand. Usually none. $3: dead ones hold their key up.
UPDATE inbox.parked p
SET state = 'retrying', next_attempt_at = clock_timestamp()
WHERE p.consumer = $1 AND p.topic = ANY ($2) AND p.state = 'blocked'
  AND NOT EXISTS (SELECT FROM inbox.parked e
                  WHERE e.consumer = p.consumer AND e.topic = p.topic AND sha256(e.key) = sha256(p.key) AND e.key = p.key
                    AND e.sequence < p.sequence AND e.state IN ('retrying', 'blocked'))
  AND NOT ($3 AND EXISTS (SELECT FROM inbox.parked e
                  WHERE e.consumer = p.consumer AND e.topic = p.topic AND sha256(e.key) = sha256(p.key) AND e.key = p.key
                    AND e.sequence < p.sequence AND e.state = 'dead'))

-- What is set aside, by cause; of those that have one.
SELECT cause, count(*) FROM outbox.parked
WHERE state IN ('retrying', 'blocked', 'dead', 'paused') AND cause IS NOT NULL
GROUP BY cause ORDER BY cause

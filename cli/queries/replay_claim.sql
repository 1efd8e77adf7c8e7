-- Items to send, each under a lease by the database's clock and the next generation: those that nobody has, and those of a run
-- that is gone. One that another run is taking is passed over. $2 owner, $3 seconds, $4 how many, $5 items that cannot be sent.
WITH due AS (
    SELECT item FROM inbox.replay_item
    WHERE plan = $1 AND state IN ('waiting', 'sending') AND (state = 'waiting' OR lease_until <= clock_timestamp())
      AND item <> ALL ($5)
    ORDER BY item
    LIMIT $4
    FOR UPDATE SKIP LOCKED
)
UPDATE inbox.replay_item i
SET state = 'sending', owner = $2, generation = i.generation + 1, lease_until = clock_timestamp() + make_interval(secs => $3::double precision)
FROM due
WHERE i.plan = $1 AND i.item = due.item
RETURNING i.item, i."partition", i."offset", i.round, i.idempotency_key, i.original_time_ms, i.generation

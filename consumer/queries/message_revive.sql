-- Takes dead work up again because an operator replays it: only for an item of a plan that stands here, of this consumer and this
-- key, once. Only after message_claim.sql has found it dead and compared its payload; the payload is named here once more.
-- The next generation, so that leased work is asked after before it runs; the attempts begin anew, and so does the record's time:
-- the row stands for the replayed record from now on, also when it is purged. Two copies of one replay meet on these two rows.
-- One that waits and was claimed before may be on its topic all the same: a run that is gone sent it, and the next one gave it back.
-- No row: the item is used up, or is no such item, or the row is not dead any more. $5 plan, $6 item, $7 owner or null,
-- $8 milliseconds of its lease or null, $9 attempts, $10 the record's time in milliseconds, $11 topic, $12 partition, $13 offset.
WITH dead AS MATERIALIZED (
    SELECT key FROM inbox.message
    WHERE consumer = $1 AND scope = $2 AND key = $3 AND fingerprint = $4 AND state = 'dead'
    FOR UPDATE
), token AS (
    UPDATE inbox.replay_item
    SET revived_at = clock_timestamp()
    WHERE plan = $5 AND item = $6 AND consumer = $1 AND idempotency_key = (SELECT key FROM dead)
      AND (state IN ('sending', 'sent') OR state = 'waiting' AND generation > 0) AND revived_at IS NULL
    RETURNING item
)
UPDATE inbox.message m
SET state = 'in_progress', generation = m.generation + 1, owner = $7,
    lease_until = clock_timestamp() + make_interval(secs => $8::double precision / 1000), attempts = $9, cause = NULL, error = NULL,
    finished_at = NULL, record_time = to_timestamp($10::bigint / 1000.0), topic = $11, "partition" = $12, "offset" = $13
FROM token
WHERE m.consumer = $1 AND m.scope = $2 AND m.key = $3 AND m.fingerprint = $4 AND m.state = 'dead'
RETURNING m.generation

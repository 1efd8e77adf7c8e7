-- Gives messages up for good; the first of those that waited behind them is tried next. Writes it to the audit table. $1 to $6 as in
-- parked_list.sql, $7 what the operator asked for, as JSON. One that is settled meanwhile stays as it is.
WITH picked AS MATERIALIZED (
    SELECT p."position", p.shard, p.topic, p.key
    FROM outbox.parked p
    WHERE p.state IN ('retrying', 'blocked', 'paused', 'dead')
      AND ($1::uuid[] IS NULL OR p.id = ANY ($1)) AND ($2::text IS NULL OR p.topic = $2) AND ($3::text IS NULL OR p.key = $3)
      AND ($4::text IS NULL OR p.cause = $4) AND ($5::text IS NULL OR p.state = $5)
      AND ($6::double precision IS NULL OR p.first_failed_at <= clock_timestamp() - make_interval(secs => $6))
    ORDER BY p."position"
    FOR UPDATE
),
discarded AS (
    UPDATE outbox.parked p
    SET state = 'discarded', next_attempt_at = NULL, settled_at = clock_timestamp()
    FROM picked
    WHERE p."position" = picked."position" AND p.state IN ('retrying', 'blocked', 'paused', 'dead')
    RETURNING p."position"
),
first AS MATERIALIZED (
    SELECT head."position", head.state
    FROM (SELECT DISTINCT shard, topic, key FROM picked WHERE key IS NOT NULL) k
    CROSS JOIN LATERAL (
        SELECT p."position", p.state FROM outbox.parked p
        WHERE p.shard = k.shard AND p.topic = k.topic AND hashtextextended(p.key, 0) = hashtextextended(k.key, 0) AND p.key = k.key
          AND p.state IN ('retrying', 'blocked', 'paused', 'dead')
          AND NOT EXISTS (SELECT FROM picked WHERE picked."position" = p."position")
        ORDER BY p.place LIMIT 1
    ) head
),
unblocked AS (
    UPDATE outbox.parked p
    SET state = 'retrying', next_attempt_at = clock_timestamp(), cause = nullif(p.cause, 'paused')
    FROM first
    WHERE p."position" = first."position" AND first.state = 'blocked' AND p.state = 'blocked'
)
INSERT INTO outbox.audit (command, arguments, affected)
SELECT 'parked discard', $7::jsonb, (SELECT count(*) FROM discarded)
RETURNING affected

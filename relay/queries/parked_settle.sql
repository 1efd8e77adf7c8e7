-- Writes down what became of those that were tried. $1 owner, $2 token, $3 shard, $4 generation; and of each $5 position, $6 state,
-- $7 cause or null, $8 error or null, $9 milliseconds until the next attempt or null, $10 the attempts it had or null where it does not
-- matter, $11 where its budget began. One that an operator has changed meanwhile is left as it is. The next of a key that was published
-- may be tried at once. A row for each key of which something was published: one of the positions given, and whether anything
-- of it still waits; and one row without a position. No row at all: fenced. The messages are locked before the fence, in order of
-- position as operators' commands lock them: whoever waits for an operator holds up no cursor.
--
-- For an operator's lock on a message it waits for a moment only, and gives way; for the fence, which an advance has for as long as a commit
-- takes, much longer.
WITH hasty AS MATERIALIZED (
    SELECT set_config('lock_timeout', '50ms', true)
),
locked AS MATERIALIZED (
    SELECT p."position" FROM hasty CROSS JOIN outbox.parked p
    WHERE p."position" = ANY ($5) AND p.shard = $3
    ORDER BY p."position"
    FOR UPDATE OF p
),
patient AS MATERIALIZED (
    SELECT set_config('lock_timeout', '10s', true), count(*) FROM locked
),
fence AS MATERIALIZED (
    SELECT f.shard, f.generation, s.lease_until
    FROM patient
    CROSS JOIN outbox.fence f
    JOIN outbox.token t ON t.only_row AND t.token = $2
    CROSS JOIN LATERAL (
        SELECT s.lease_until FROM outbox.shard s
        WHERE s.shard + 0 = f.shard AND s.lease_until > (SELECT clock_timestamp()) AND s.owner = $1 AND s.generation = f.generation
        ORDER BY s.lease_until DESC LIMIT 1
    ) s
    WHERE f.shard = $3 AND f.generation = $4
    FOR UPDATE OF f
),
held AS MATERIALIZED (
    SELECT fence.shard, fence.generation FROM fence WHERE fence.lease_until > clock_timestamp()
),
tried AS MATERIALIZED (
    SELECT w.*, h.shard, h.generation
    FROM held h, unnest($5::bigint[], $6::text[], $7::text[], $8::text[], $9::bigint[], $10::integer[], $11::integer[])
             AS w("position", state, cause, error, delay, attempts, budget_from)
),
settled AS (
    UPDATE outbox.parked p
    SET state = w.state, attempts = p.attempts + 1, generation = w.generation,
        cause = coalesce(w.cause, p.cause), error = coalesce(w.error, p.error),
        first_failed_at = CASE WHEN w.state <> 'published' AND p.last_failed_at IS NULL THEN now.at ELSE p.first_failed_at END,
        last_failed_at = CASE WHEN w.state = 'published' THEN p.last_failed_at ELSE now.at END,
        next_attempt_at = CASE WHEN w.state = 'retrying'
                               THEN now.at + make_interval(secs => coalesce(w.delay, 0)::double precision / 1000) END,
        settled_at = CASE WHEN w.state = 'published' THEN now.at END
    FROM tried w CROSS JOIN (SELECT clock_timestamp() AS at) now
    WHERE p."position" = w."position" AND p.shard = w.shard AND p.state IN ('retrying', 'blocked')
      AND (w.attempts IS NULL OR w.state = 'published' OR (p.attempts, p.budget_from) = (w.attempts, w.budget_from))
    RETURNING p."position", p.shard, p.topic, p.key, p.place, p.state
),
keys AS MATERIALIZED (
    SELECT s.shard, s.topic, s.key, max(s.place) AS place, min(s."position") AS "position"
    FROM settled s WHERE s.state = 'published' AND s.key IS NOT NULL
    GROUP BY s.shard, s.topic, s.key
),
next AS MATERIALIZED (
    SELECT k."position" AS of_position, n."position", n.state
    FROM keys k
    LEFT JOIN LATERAL (
        SELECT p."position", p.state FROM outbox.parked p
        WHERE p.shard = k.shard AND p.topic = k.topic AND hashtextextended(p.key, 0) = hashtextextended(k.key, 0)
          AND p.place > k.place AND p.state IN ('retrying', 'blocked', 'paused', 'dead') AND p.key = k.key
        ORDER BY p.place LIMIT 1
    ) n ON true
),
unblocked AS (
    UPDATE outbox.parked p
    SET state = 'retrying', next_attempt_at = clock_timestamp(), generation = h.generation, cause = nullif(p.cause, 'paused')
    FROM next n, held h
    WHERE p."position" = n."position" AND n.state = 'blocked' AND p.state = 'blocked'
)
SELECT n.of_position, n."position" IS NOT NULL AS is_left FROM next n
UNION ALL
SELECT NULL, NULL FROM held

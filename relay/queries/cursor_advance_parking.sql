-- Moves cursors as cursor_advance.sql does ($1 to $9 as there), and in the same statement sets aside what they pass over: a copy
-- of each message goes to outbox.parked, in the order given. $10 shards, $11 positions, $12 ids, $13 states, $14 causes or null,
-- $15 errors or null, $16 attempts, $17 milliseconds until the next attempt or null, $18 generations: two of one shard may meet in one
-- statement, and the older one sets nothing aside. A shard one of whose messages is not there any
-- more moves no cursor and sets nothing aside: it is not returned either.
WITH held AS MATERIALIZED (
    SELECT a.*, s.lease_until
    FROM unnest($3::smallint[], $4::bigint[], $5::bigint[], $6::text[], $7::text[], $8::text[], $9::bigint[])
             AS a(shard, generation, "position", snapshot, ceiling, late_snapshot, late_position)
    JOIN outbox.fence f ON f.shard = a.shard AND f.generation = a.generation
    JOIN outbox.token t ON t.only_row AND t.token = $2
    CROSS JOIN LATERAL (
        SELECT s.lease_until FROM outbox.shard s
        WHERE s.shard + 0 = a.shard AND s.lease_until > (SELECT clock_timestamp())
          AND s.owner = $1 AND s.generation = a.generation
        ORDER BY s.lease_until DESC LIMIT 1
    ) s
    ORDER BY a.shard
    FOR UPDATE OF f
),
aside AS MATERIALIZED (
    SELECT p.*, m.idempotency_key, m.topic, m.key, m.type, m.payload, m.headers, m.created_at, m."position" IS NOT NULL AS is_there
    FROM unnest($10::smallint[], $11::bigint[], $12::uuid[], $13::text[], $14::text[], $15::text[], $16::integer[], $17::bigint[], $18::bigint[])
             WITH ORDINALITY AS p(shard, "position", id, state, cause, error, attempts, delay, generation, n)
    LEFT JOIN LATERAL (
        SELECT * FROM outbox.message m WHERE m.shard = p.shard AND m."position" = p."position" AND m.id = p.id LIMIT 1
    ) m ON true
),
moving AS MATERIALIZED (
    SELECT h.* FROM held h
    WHERE h.lease_until > clock_timestamp()
      AND NOT EXISTS (SELECT FROM aside a WHERE a.shard = h.shard AND a.generation = h.generation AND NOT a.is_there)
),
parked AS (
    INSERT INTO outbox.parked (id, "position", shard, idempotency_key, topic, key, type, payload, headers, created_at,
                               state, cause, error, attempts, first_failed_at, last_failed_at, next_attempt_at, generation)
    SELECT a.id, a."position", a.shard, a.idempotency_key, a.topic, a.key, a.type, a.payload, a.headers, a.created_at,
           a.state, a.cause, a.error, a.attempts, now.at, CASE WHEN a.attempts > 0 THEN now.at END,
           CASE WHEN a.state = 'retrying' THEN now.at + make_interval(secs => coalesce(a.delay, 0)::double precision / 1000) END,
           h.generation
    FROM aside a
    JOIN moving h ON h.shard = a.shard AND h.generation = a.generation
    CROSS JOIN (SELECT clock_timestamp() AS at) now
    ORDER BY a.n
)
INSERT INTO outbox.advance (shard, number, generation, "position", snapshot, ceiling, late_snapshot, late_position)
SELECT h.shard,
       (SELECT last.number FROM outbox.advance last WHERE last.shard = h.shard ORDER BY last.number DESC LIMIT 1) + 1,
       h.generation, h."position", h.snapshot::pg_snapshot, h.ceiling::xid8, h.late_snapshot::pg_snapshot, h.late_position
FROM moving h
RETURNING shard, number

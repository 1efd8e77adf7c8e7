-- Sets a record aside. After parked_lock.sql, so that nobody ends its key's queue meanwhile.
-- $12 state: 'retrying' becomes 'blocked' behind others of its key; 'blocked' is only written there; 'dead' as it is.
-- $17: dead ones hold their key up. Nothing is written where the inbox has settled the work meanwhile: the claim tells.
-- $18: an operator replays it. Its row is dead until the replay has run, and it is not behind its own dead row nor behind what that holds up.
WITH own AS MATERIALIZED (
    SELECT coalesce(min(sequence), 9223372036854775807) AS sequence FROM inbox.parked
    WHERE $18 AND consumer = $1 AND topic = $2 AND sha256(key) = sha256($5) AND key = $5 AND state = 'dead'
      AND scope = $9 AND idempotency_key = $10
), met AS (
    SELECT EXISTS (SELECT FROM inbox.parked
                   WHERE consumer = $1 AND topic = $2 AND sha256(key) = sha256($5) AND key = $5
                     AND state IN ('retrying', 'blocked') AND sequence < (SELECT sequence FROM own))
           OR $17 AND EXISTS (SELECT FROM inbox.parked
                   WHERE consumer = $1 AND topic = $2 AND sha256(key) = sha256($5) AND key = $5
                     AND state = 'dead' AND sequence < (SELECT sequence FROM own)) AS is_behind,
           $12 <> 'dead' AND EXISTS (SELECT FROM inbox.message
                   WHERE consumer = $1 AND scope = $9 AND key = $10
                     AND (state = 'done' OR state = 'dead' AND NOT $18)) AS is_settled
), written AS (
    INSERT INTO inbox.parked (consumer, topic, "partition", "offset", key, payload, headers, record_time, scope, idempotency_key,
                              attempts, state, cause, error, first_failed_at, last_failed_at, next_attempt_at)
    SELECT $1, $2, $3, $4, $5, $6, $7::text::json, to_timestamp($8::bigint / 1000.0), $9, $10, $11,
           CASE WHEN is_behind AND $12 = 'retrying' THEN 'blocked' ELSE $12 END, $13, $14,
           clock_timestamp() - make_interval(secs => $15::double precision / 1000),
           CASE WHEN $12 <> 'blocked' THEN clock_timestamp() END,
           CASE WHEN $12 = 'retrying' AND NOT is_behind
                THEN clock_timestamp() + make_interval(secs => $16::double precision / 1000) END
    FROM met
    WHERE CASE WHEN $12 = 'blocked' THEN is_behind ELSE NOT is_settled END
    ON CONFLICT (consumer, topic, "partition", "offset", idempotency_key) DO NOTHING
)
SELECT is_behind, is_settled FROM met

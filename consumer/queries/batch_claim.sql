-- Takes what nobody has of a batch, and says what became of the rest; what it took and has nothing to say of is not returned.
-- Fingerprints are compared as in message_claim.sql, and nowhere else. $5 marks an item that is the first of its key in the
-- batch: only that one is inserted, and the others are compared with it. Keys are taken in one order by everyone, or two
-- batches that overlap would wait for each other.
-- A row without a state: another transaction settled it, or it was purged, after this statement's snapshot. Ask again.
-- The look-up of a row names an order and a limit: an index scan, but where statistics say that there are next to no rows.
WITH item AS MATERIALIZED (
    SELECT *
    FROM unnest($2::text[], $3::text[], $4::text[], $5::boolean[], $6::integer[], $7::bigint[], $8::text[], $9::integer[], $10::bigint[])
         WITH ORDINALITY AS item (scope, key, fingerprint, is_first, attempts, record_time, topic, "partition", "offset", nr)
), claimed AS (
    INSERT INTO inbox.message (consumer, scope, key, fingerprint, state, attempts, record_time, topic, "partition", "offset")
    SELECT $1, scope, key, fingerprint, 'in_progress', attempts, to_timestamp(record_time / 1000.0), topic, "partition", "offset"
    FROM item
    WHERE is_first
    ORDER BY scope COLLATE "C", key COLLATE "C"
    ON CONFLICT (consumer, scope, key) DO NOTHING
    RETURNING scope, key, fingerprint
), met AS MATERIALIZED (
    SELECT item.nr, item.scope, item.key, item.fingerprint, claimed.fingerprint AS claimed_fingerprint
    FROM item LEFT JOIN claimed ON claimed.scope = item.scope AND claimed.key = item.key
    WHERE claimed.key IS NULL OR NOT item.is_first
)
SELECT met.nr,
       CASE WHEN met.claimed_fingerprint IS NULL THEN m.state ELSE 'claimed' END AS state,
       coalesce(met.claimed_fingerprint, m.fingerprint) = met.fingerprint AS same_payload,
       m.outcome::text, m.cause, m.error,
       m.state = 'in_progress' AND (m.lease_until IS NULL OR m.lease_until <= clock_timestamp()) AS is_left_behind
FROM met LEFT JOIN LATERAL (
    SELECT *
    FROM inbox.message
    WHERE (consumer, scope, key) >= ($1, met.scope, met.key)
    ORDER BY consumer, scope, key
    LIMIT 1
) m ON m.consumer = $1 AND m.scope = met.scope AND m.key = met.key

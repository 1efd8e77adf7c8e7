-- Many messages, in order: a function scan with ordinality is known to be sorted by it, so ORDER BY costs nothing and
-- positions are drawn row by row above it. $1 ids, $2 idempotency keys, $3 topics, $4 keys, $5 types, $6 payloads,
-- $7 headers as text.
INSERT INTO outbox.message (id, idempotency_key, topic, key, type, payload, headers)
SELECT id, idempotency_key, topic, key, type, payload, headers::jsonb
FROM unnest($1::uuid[], $2::text[], $3::text[], $4::text[], $5::text[], $6::bytea[], $7::text[])
         WITH ORDINALITY AS m(id, idempotency_key, topic, key, type, payload, headers, place)
ORDER BY place

-- One message. $1 id, $2 idempotency key, $3 topic, $4 key, $5 type, $6 payload, $7 headers as text.
INSERT INTO outbox.message (id, idempotency_key, topic, key, type, payload, headers)
VALUES ($1, $2, $3, $4, $5, $6, $7::jsonb)

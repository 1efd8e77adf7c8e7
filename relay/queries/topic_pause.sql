-- Pauses a topic, and writes it to the audit table; 0 if it was paused already. $1 topic.
WITH paused AS (
    INSERT INTO outbox.paused (topic) VALUES ($1) ON CONFLICT (topic) DO NOTHING RETURNING topic
)
INSERT INTO outbox.audit (command, arguments, affected)
SELECT 'pause', jsonb_build_object('topic', $1::text), (SELECT count(*) FROM paused)
RETURNING affected

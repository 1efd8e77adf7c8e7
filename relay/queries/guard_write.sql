-- Writes down what a guard found, $1, unless something stands already, or a rebase was made since the look, which saw $2 as the
-- last one. The audit table is where it stands until a rebase.
INSERT INTO outbox.audit (command, arguments, affected)
SELECT 'guard', jsonb_build_object('found', $1::text), 0
WHERE coalesce((SELECT max(a.id) FROM outbox.audit a WHERE a.command = 'rebase'), 0) = $2
  AND NOT EXISTS (SELECT FROM outbox.audit a WHERE a.command = 'guard' AND a.id > $2)

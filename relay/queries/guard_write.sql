-- Writes down what a guard found, $1, unless that stands already. The audit table is where it stands until a rebase.
INSERT INTO outbox.audit (command, arguments, affected)
SELECT 'guard', jsonb_build_object('found', $1::text), 0
WHERE NOT coalesce((SELECT a.command = 'guard' FROM outbox.audit a WHERE a.command IN ('guard', 'rebase') ORDER BY a.id DESC LIMIT 1), false)

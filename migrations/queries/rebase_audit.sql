-- Leaves a trace of a rebase. $1 the arguments as JSON, $2 the messages that were written anew.
INSERT INTO outbox.audit (command, arguments, affected) VALUES ('rebase', $1::text::jsonb, $2)

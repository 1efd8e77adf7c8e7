-- Who did what to the inbox. $1 command, $2 arguments as JSON text, $3 how many.
INSERT INTO inbox.audit (command, arguments, affected) VALUES ($1, $2::text::jsonb, $3)

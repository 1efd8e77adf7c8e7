-- Who changed what by which command, and how many: in the transaction that changes it. $1 command, $2 arguments, $3 how many.
INSERT INTO inbox.audit (command, arguments, affected) VALUES ($1, $2::text::jsonb, $3)

-- What a republishing was asked for and how it went on. $1 arguments, $2 how many it has published.
INSERT INTO outbox.audit (command, arguments, affected) VALUES ('republish', $1::text::jsonb, $2)

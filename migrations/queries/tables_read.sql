-- The tables and views of one schema, from the catalogue, so that it works without any privilege on them. $1 schema.
SELECT c.relname::text
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = $1 AND c.relkind IN ('r', 'p', 'v')
ORDER BY c.relname

-- What a relay needs of the outbox and this role lacks: who it is, whether it may look into the schema, tables that are not there,
-- privileges. From the catalogue, so that it works without any privilege.
SELECT current_user::text,
       coalesce(bool_and(has_schema_privilege(n.oid, 'USAGE')), false),
       coalesce(array_agg(DISTINCT needed.name) FILTER (WHERE c.oid IS NULL), '{}'),
       coalesce(array_agg(needed.privilege || ' ON outbox.' || needed.name ORDER BY needed.name, needed.privilege)
                FILTER (WHERE c.oid IS NOT NULL AND NOT has_table_privilege(c.oid, needed.privilege)), '{}')
FROM (VALUES ('settings', 'SELECT'), ('message', 'SELECT'), ('message_position_seq', 'SELECT'),
             ('shard', 'SELECT'), ('shard', 'UPDATE'), ('fence', 'SELECT'), ('fence', 'UPDATE'),
             ('cursor', 'SELECT'), ('advance', 'SELECT'), ('advance', 'INSERT'), ('advance', 'DELETE'),
             ('token', 'SELECT'), ('token', 'INSERT'), ('stopped', 'SELECT'), ('stopped', 'INSERT'), ('stopped', 'UPDATE'),
             ('parked', 'SELECT'), ('parked', 'INSERT'), ('parked', 'UPDATE'), ('parked', 'DELETE'), ('paused', 'SELECT'),
             ('milestone', 'SELECT'), ('milestone', 'INSERT'), ('milestone', 'DELETE'), ('message_0', 'TRUNCATE'),
             ('message_1', 'TRUNCATE'), ('message_2', 'TRUNCATE'), ('message_3', 'TRUNCATE'),
             ('relay', 'SELECT'), ('relay', 'INSERT'), ('relay', 'UPDATE'), ('relay', 'DELETE'),
             ('audit', 'SELECT'), ('audit', 'INSERT')) needed(name, privilege)
LEFT JOIN pg_namespace n ON n.nspname = 'outbox'
LEFT JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = needed.name

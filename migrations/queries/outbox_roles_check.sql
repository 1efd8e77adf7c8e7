-- The roles that are missing, or lack a privilege that makes them what they are; of a relay's, all that it starts by
-- (relay/queries/outbox_needs.sql).
SELECT wanted.role
FROM (VALUES ('baton_producer'), ('baton_relay'), ('baton_operator'), ('baton_readonly')) wanted(role)
LEFT JOIN pg_roles r ON r.rolname = wanted.role
WHERE r.oid IS NULL
   OR NOT has_schema_privilege(r.oid, 'outbox', 'USAGE')
   OR NOT CASE wanted.role
          WHEN 'baton_producer' THEN has_column_privilege(r.oid, 'outbox.message', 'payload', 'INSERT')
          WHEN 'baton_relay' THEN (
              SELECT bool_and(has_table_privilege(r.oid, 'outbox.' || needed.name, needed.privilege))
              FROM (VALUES ('settings', 'SELECT'), ('message', 'SELECT'), ('message_position_seq', 'SELECT'), ('shard', 'SELECT'), ('shard', 'UPDATE'),
                           ('fence', 'SELECT'), ('fence', 'UPDATE'), ('cursor', 'SELECT'), ('advance', 'SELECT'),
                           ('advance', 'INSERT'), ('advance', 'DELETE'), ('token', 'SELECT'), ('token', 'INSERT'),
                           ('milestone', 'SELECT'), ('milestone', 'INSERT'), ('milestone', 'DELETE'), ('message_0', 'TRUNCATE'),
                           ('message_1', 'TRUNCATE'), ('message_2', 'TRUNCATE'), ('message_3', 'TRUNCATE'),
                           ('stopped', 'SELECT'), ('stopped', 'INSERT'), ('stopped', 'UPDATE'), ('parked', 'SELECT'),
                           ('parked', 'INSERT'), ('parked', 'UPDATE'), ('parked', 'DELETE'), ('paused', 'SELECT'), ('relay', 'SELECT'),
                           ('relay', 'INSERT'), ('relay', 'UPDATE'), ('relay', 'DELETE'), ('audit', 'SELECT'), ('audit', 'INSERT')) needed(name, privilege))
          WHEN 'baton_operator' THEN has_table_privilege(r.oid, 'outbox.audit', 'INSERT')
              AND has_table_privilege(r.oid, 'outbox.paused', 'INSERT')
          ELSE has_table_privilege(r.oid, 'outbox.message', 'SELECT') END

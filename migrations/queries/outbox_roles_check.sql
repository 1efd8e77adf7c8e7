-- The roles that are missing, or lack the privilege that makes them what they are.
SELECT wanted.role
FROM (VALUES ('baton_producer'), ('baton_relay'), ('baton_operator'), ('baton_readonly')) wanted(role)
LEFT JOIN pg_roles r ON r.rolname = wanted.role
WHERE r.oid IS NULL
   OR NOT has_schema_privilege(r.oid, 'outbox', 'USAGE')
   OR NOT CASE wanted.role
          WHEN 'baton_producer' THEN has_column_privilege(r.oid, 'outbox.message', 'payload', 'INSERT')
          WHEN 'baton_relay' THEN has_table_privilege(r.oid, 'outbox.cursor', 'UPDATE')
          WHEN 'baton_operator' THEN has_table_privilege(r.oid, 'outbox.audit', 'INSERT')
          ELSE has_table_privilege(r.oid, 'outbox.message', 'SELECT') END

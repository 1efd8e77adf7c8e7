-- The roles that are missing, or lack the privilege that makes them what they are.
SELECT wanted.role
FROM (VALUES ('baton_consumer'), ('baton_operator'), ('baton_readonly')) wanted(role)
LEFT JOIN pg_roles r ON r.rolname = wanted.role
WHERE r.oid IS NULL
   OR NOT has_schema_privilege(r.oid, 'inbox', 'USAGE')
   OR NOT CASE wanted.role
          WHEN 'baton_consumer' THEN has_table_privilege(r.oid, 'inbox.message', 'INSERT') AND has_table_privilege(r.oid, 'inbox.replay_item', 'UPDATE')
          WHEN 'baton_operator' THEN has_table_privilege(r.oid, 'inbox.audit', 'INSERT') AND has_table_privilege(r.oid, 'inbox.horizon', 'INSERT')
              AND has_table_privilege(r.oid, 'inbox.replay_item', 'INSERT')
          ELSE has_table_privilege(r.oid, 'inbox.message', 'SELECT') END

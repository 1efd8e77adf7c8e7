-- What must be so before a consumer starts. The youngest thing of the last migration stands for all of them.
SELECT to_regclass('inbox.replay_item') IS NOT NULL AS migrated,
       pg_is_in_recovery() AS in_recovery,
       CASE WHEN to_regclass('inbox.message') IS NOT NULL AND to_regclass('inbox.replay_item') IS NOT NULL
            THEN (SELECT bool_and(has_table_privilege(wanted.relation, wanted.privilege))
                  FROM (VALUES ('inbox.message', 'SELECT'), ('inbox.message', 'INSERT'), ('inbox.message', 'UPDATE'),
                               ('inbox.message', 'DELETE'), ('inbox.parked', 'SELECT'), ('inbox.parked', 'INSERT'),
                               ('inbox.parked', 'UPDATE'), ('inbox.parked', 'DELETE'), ('inbox.horizon', 'SELECT'),
                               ('inbox.horizon', 'INSERT'), ('inbox.horizon', 'UPDATE'), ('inbox.replay_item', 'SELECT'),
                               ('inbox.replay_item', 'UPDATE')) AS wanted (relation, privilege))
            ELSE false END AS allowed

-- Leaves a trace of a migration. $1 versions applied, $2 roles mended, $3 shards and $4 slot period in seconds as they now are.
INSERT INTO outbox.audit (command, arguments, affected)
VALUES ('migrate outbox',
        jsonb_strip_nulls(jsonb_build_object('versions', $1::bigint[], 'roles', $2::text[], 'shards', $3::integer,
                                             'slot_period_seconds', $4::double precision)),
        cardinality($1::bigint[]))

-- Whether this role is one of those that are made for looking at the outbox, by the roles that `baton migrate` makes.
SELECT EXISTS (
    SELECT FROM pg_roles r WHERE r.rolname IN ('baton_operator', 'baton_readonly') AND pg_has_role(r.oid, 'USAGE'))

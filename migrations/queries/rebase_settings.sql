-- The outbox belongs to this cluster, under a name of its own: what it was copied from may live on.
UPDATE outbox.settings SET system_identifier = (SELECT system_identifier FROM pg_control_system()), outbox_id = gen_random_uuid()
RETURNING outbox_id
